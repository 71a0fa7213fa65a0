"""Trained models in use, each a bundle and what its input goes through behind one object, such as `Translator`."""

from mmattn.inference.captioner import Attention, Caption, Captioner
from mmattn.inference.classifier import Classification, Classifier
from mmattn.inference.filler import Filling, MaskFiller
from mmattn.inference.translation import SourceError, Translation
from mmattn.inference.translator import Alignment, Translator
from mmattn.inference.writer import Writer

__all__ = [
    "Alignment",
    "Attention",
    "Caption",
    "Captioner",
    "Classification",
    "Classifier",
    "Filling",
    "MaskFiller",
    "SourceError",
    "Translation",
    "Translator",
    "Writer",
]
