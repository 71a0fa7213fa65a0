"""Decoders, one file a family, on one contract: `call` for training, `start` and `step` for generation."""

from mmattn.decoders.recurrent import RecurrentDecoder
from mmattn.decoders.transformer import TransformerDecoder

__all__ = ["RecurrentDecoder", "TransformerDecoder"]
