"""Generation: functions over a `step` that stands for the model, and `Generator`, which compiles and batches them.

`step(ids (B,), index, context, state) -> logits (B, V), state` gives the scores of the token after position `index`.
The context never changes; the state is a nest of arrays, batch first, of fixed shapes and dtypes.
"""

from mmattn.decoding.beams import beam
from mmattn.decoding.generator import Generator
from mmattn.decoding.loop import Generated, penalty
from mmattn.decoding.sampling import sample
from mmattn.decoding.search import greedy

__all__ = ["Generated", "Generator", "beam", "greedy", "penalty", "sample"]
