"""Attention and the Transformer's parts as Keras layers, on any Keras backend."""

from mmattn.layers.attention import MultiHeadAttention, attend
from mmattn.layers.blocks import FeedForward, TransformerDecoderBlock, TransformerEncoderBlock
from mmattn.layers.cross_attention import CrossAttention
from mmattn.layers.embeddings import PatchEmbedding, TokenEmbedding
from mmattn.layers.masks import causal_mask, combine_masks, length_mask, padding_mask
from mmattn.layers.positions import GridSinusoids, LearnedPositions, SinusoidalPositions
from mmattn.layers.rotary import rotate
from mmattn.layers.self_attention import SelfAttention

__all__ = [
    "CrossAttention",
    "FeedForward",
    "GridSinusoids",
    "LearnedPositions",
    "MultiHeadAttention",
    "PatchEmbedding",
    "SelfAttention",
    "SinusoidalPositions",
    "TokenEmbedding",
    "TransformerDecoderBlock",
    "TransformerEncoderBlock",
    "attend",
    "causal_mask",
    "combine_masks",
    "length_mask",
    "padding_mask",
    "rotate",
]
