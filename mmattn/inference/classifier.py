"""Classes of photos: a bundle and the image reader behind one object.

Shapes: B photos, C classes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from keras import ops

from mmattn import backend
from mmattn.bundle import find_bundle, load_bundle
from mmattn.inference.photos import each_batch
from mmattn.preprocess.image import ImageReader


@dataclass(frozen=True)
class Classification:
    """The class of one photo.

    Attributes:
        label: the likeliest class.
        probability: its probability.
        alternatives: the next likeliest classes, (label, probability), likeliest first.
    """

    label: str
    probability: float
    alternatives: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return self.label


class Classifier:
    """Says which class a photo is of.

    Args:
        model: an `mmattn.heads.EncoderClassifier` (or what maps {"pixels": (B, height, width, 3)} to logits (B, C)).
        reader: reads a photo as the model was trained on.
        classes: their names, in the order of the model's outputs.

    >>> from mmattn.encoders.image import VisionTransformer
    >>> from mmattn.heads import EncoderClassifier
    >>> encoder = VisionTransformer((32, 32), patch_size=16, hidden_dim=8, num_layers=1, num_heads=2)
    >>> classifier = Classifier(EncoderClassifier(encoder, 3), ImageReader((32, 32)), ["cat", "dog", "bird"])
    >>> photo = np.zeros((60, 80, 3), "uint8")  # or a path, the bytes of a file, a PIL image; or a list of these
    >>> [found] = classifier.classify(photo, nbest=3)
    >>> found.probability >= found.alternatives[0][1], len(found.alternatives)
    (True, 2)
    """

    def __init__(self, model: Any, reader: ImageReader, classes: Sequence[str]) -> None:
        self.model = model
        self.reader = reader
        self.classes = tuple(classes)
        if not getattr(model, "built", True):
            model.build({"pixels": (None, *reader.size, 3)})
        self._probabilities = class_probabilities(model)

    @classmethod
    def load(
        cls, name_or_folder: str | os.PathLike[str] | None = None, custom_objects: Mapping[str, Any] | None = None
    ) -> Classifier:
        """A classifier from a bundle's folder, or from the name of a shipped one (None: the default one).

        Raises:
            mmattn.bundle.BundleError: no such bundle, it is no classifier's, or it is damaged, unsafe or too new.
        """
        bundle = load_bundle(find_bundle(name_or_folder, "classifier"), custom_objects, kind="classifier")
        return cls(bundle.model, bundle.reader, bundle.classes)

    def classify(
        self,
        images: Any,
        *,
        nbest: int = 1,
        batch_size: int = 16,
        on_error: str = "raise",
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Any]:
        """The classes of photos, in their order. A photo's class doesn't depend on its batch.

        Args:
            images: one photo or many: paths, bytes of image files, PIL images, uint8 arrays (H, W, 3) or one (B, H,
                W, 3).
            nbest: also give the next likeliest classes as `alternatives`; as many as there are at most.
            batch_size: photos in memory at once.
            on_error: "raise" stops at the first photo that can't be read; "return" puts its ImageReadError there.
            progress: called as progress(done, total) after each batch.

        Returns:
            a list of `Classification`, also for one photo.

        Raises:
            ImageReadError: with on_error="raise".
            ValueError: a setting that isn't known or doesn't fit.
            FloatingPointError: where the model's scores are no numbers.
        """
        if nbest < 1:
            raise ValueError(f"nbest={nbest} must be at least 1")

        def make(inputs: dict[str, np.ndarray], left: int) -> list[Classification]:
            return [self._ranked(row, nbest) for row in self._probabilities(inputs)]

        return each_batch(images, self.reader, make, batch_size, on_error, progress)

    def _ranked(self, probabilities: np.ndarray, nbest: int) -> Classification:
        order = np.argsort(-probabilities, kind="stable")[:nbest]
        (label, probability), *others = [(self.classes[place], float(probabilities[place])) for place in order]
        return Classification(label, probability, tuple(others))


def class_probabilities(model: Any) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]:
    """A function from a batch of inputs to the probabilities of the classes, float32 (B, C).

    Later changes of the weights count. It raises FloatingPointError for scores that are no numbers.
    """

    def probabilities(inputs: Any) -> Any:
        return ops.softmax(ops.cast(model(inputs, training=False), "float32"), axis=-1)

    compiled = backend.compile(probabilities, jit=False, variables_of=model)

    def found(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        with backend.no_gradient():
            arrays = {name: ops.convert_to_tensor(array) for name, array in inputs.items()}
            numbers = np.asarray(ops.convert_to_numpy(compiled(arrays)))
        if not np.isfinite(numbers).all():
            raise FloatingPointError("the model's scores are NaN: its weights are of no use")
        return numbers

    return found
