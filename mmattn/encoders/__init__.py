"""Encoders: a dict of arrays in, memory (B, S, D) and its mask (B, S) out. One file a modality."""

from mmattn.encoders.backbone import BackboneEncoder
from mmattn.encoders.convolutional import ConvolutionalEncoder
from mmattn.encoders.efficientnet_lite import EfficientNetLite
from mmattn.encoders.features import FeatureCache
from mmattn.encoders.image import VisionTransformer
from mmattn.encoders.keras_application import KerasApplication
from mmattn.encoders.recurrent import RecurrentEncoder
from mmattn.encoders.text import TextEncoder

__all__ = [
    "BackboneEncoder",
    "ConvolutionalEncoder",
    "EfficientNetLite",
    "FeatureCache",
    "KerasApplication",
    "RecurrentEncoder",
    "TextEncoder",
    "VisionTransformer",
]
