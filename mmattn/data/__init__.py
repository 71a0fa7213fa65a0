"""Sources of pictures with captions, and the endless stream of training batches made from them."""
