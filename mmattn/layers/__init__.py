"""Attention and the Transformer's parts as Keras layers, on any Keras backend."""

from mmattn.layers.attention import MultiHeadAttention
from mmattn.layers.attentive_stack import AttentiveStack
from mmattn.layers.blocks import FeedForward, TransformerDecoderBlock, TransformerEncoderBlock
from mmattn.layers.convolution import ConvolutionalBlock, WeightNormConvolution
from mmattn.layers.cross_attention import CrossAttention
from mmattn.layers.dot_product import attend
from mmattn.layers.embeddings import PatchEmbedding, TokenEmbedding
from mmattn.layers.grouped_query_attention import GroupedQueryAttention
from mmattn.layers.masks import (
    causal_mask,
    combine_masks,
    length_mask,
    padding_mask,
    prefix_mask,
    segment_mask,
    window_mask,
)
from mmattn.layers.multi_step_attention import MultiStepAttention
from mmattn.layers.paths import Path, explain_path
from mmattn.layers.positions import GridSinusoids, LearnedPositions, SinusoidalPositions
from mmattn.layers.recurrent_stack import RecurrentStack
from mmattn.layers.relative import BucketedBias, ClippedDistances, ProjectedDistances, alibi_slopes
from mmattn.layers.rotary import rotate
from mmattn.layers.self_attention import SelfAttention
from mmattn.layers.single_head import AdditiveAttention, MultiplicativeAttention

__all__ = [
    "AdditiveAttention",
    "AttentiveStack",
    "BucketedBias",
    "ClippedDistances",
    "ConvolutionalBlock",
    "CrossAttention",
    "FeedForward",
    "GridSinusoids",
    "GroupedQueryAttention",
    "LearnedPositions",
    "MultiHeadAttention",
    "MultiStepAttention",
    "MultiplicativeAttention",
    "PatchEmbedding",
    "Path",
    "ProjectedDistances",
    "RecurrentStack",
    "SelfAttention",
    "SinusoidalPositions",
    "TokenEmbedding",
    "TransformerDecoderBlock",
    "TransformerEncoderBlock",
    "WeightNormConvolution",
    "alibi_slopes",
    "attend",
    "causal_mask",
    "combine_masks",
    "explain_path",
    "length_mask",
    "padding_mask",
    "prefix_mask",
    "rotate",
    "segment_mask",
    "window_mask",
]
