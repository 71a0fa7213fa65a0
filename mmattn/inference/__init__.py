"""Trained models in use: `Captioner`, `Translator` and `Writer`, each a bundle and its decoding behind one object."""

from mmattn.inference.captioner import Attention, Caption, Captioner
from mmattn.inference.translation import SourceError, Translation
from mmattn.inference.translator import Alignment, Translator
from mmattn.inference.writer import Writer

__all__ = [
    "Alignment",
    "Attention",
    "Caption",
    "Captioner",
    "SourceError",
    "Translation",
    "Translator",
    "Writer",
]
