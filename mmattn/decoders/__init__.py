"""Decoders, one file a family, on one contract: `call` for training, `start` and `step` for generation."""

from mmattn.decoders.convolutional import ConvolutionalDecoder
from mmattn.decoders.recurrent import RecurrentDecoder
from mmattn.decoders.transformer import TransformerDecoder
from mmattn.decoders.transformer_xl import TransformerXLDecoder

__all__ = ["ConvolutionalDecoder", "RecurrentDecoder", "TransformerDecoder", "TransformerXLDecoder"]
