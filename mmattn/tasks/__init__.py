"""What a training run is about, one file a task: from data to batches, from texts to scores, from model to bundle."""
