"""mmattn: multi-head attention for Keras, from single layers to trained captioners and translators.

The attributes below are imported on first use, so that `import mmattn` costs nothing and needs no backend.

>>> import mmattn
>>> mmattn.__version__.count(".")
2
>>> mmattn.layers.MultiHeadAttention.__module__
'mmattn.layers.attention'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_MODULES = frozenset(
    {
        "backend",
        "bundle",
        "data",
        "decoders",
        "decoding",
        "encoders",
        "generation",
        "heads",
        "inference",
        "layers",
        "metrics",
        "model",
        "preprocess",
        "testing",
        "training",
    }
)
_OBJECTS = {
    "Captioner": "inference",
    "Classifier": "inference",
    "EncoderClassifier": "heads",
    "EncoderDecoder": "model",
    "LanguageModel": "model",
    "MaskFiller": "inference",
    "MaskedLanguageModel": "heads",
    "Translator": "inference",
    "Writer": "inference",
}

if TYPE_CHECKING:
    from mmattn.heads import EncoderClassifier as EncoderClassifier
    from mmattn.heads import MaskedLanguageModel as MaskedLanguageModel
    from mmattn.inference import Captioner as Captioner
    from mmattn.inference import Classifier as Classifier
    from mmattn.inference import MaskFiller as MaskFiller
    from mmattn.inference import Translator as Translator
    from mmattn.inference import Writer as Writer
    from mmattn.model import EncoderDecoder as EncoderDecoder
    from mmattn.model import LanguageModel as LanguageModel


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mmattn.{name}")
    if name in _OBJECTS:
        return getattr(importlib.import_module(f"mmattn.{_OBJECTS[name]}"), name)
    raise AttributeError(f"module 'mmattn' has no attribute {name!r}. It has: {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted(_MODULES | _OBJECTS.keys() | {"__version__"})
