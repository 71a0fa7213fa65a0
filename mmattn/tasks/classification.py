"""Classification: pictures in, the class of each out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np

from mmattn.bundle import Bundle, save_bundle, update_bundle
from mmattn.data.classes import ClassBatches
from mmattn.inference.attention import save_picture
from mmattn.inference.classifier import class_probabilities
from mmattn.metrics.classes import CLASS_SCORES, class_scores, confusion, per_class
from mmattn.pictures import alignment_sheet
from mmattn.tasks.parts import Report, blame, check_part, features_of, how_to_read
from mmattn.training.folder import JsonLines, write_json


class Classifying:
    """The classifier's side of a run.

    Args:
        parts: the objects of the configuration: reader, batches, encoder, model, features or None, validation, final.
        sources: train, valid and test, records with `image`, `label` and `id`, see `mmattn.data.classes`.
        folder: the run folder.
        seed: of the batches.
        say: takes each line for the user.
        reject: called with the id of a picture that cannot be read and the reason.
    """

    command: ClassVar = "classify PHOTO"  # of mmattn, to try the bundle
    nodes: ClassVar = ("reader", "features")
    fields: ClassVar = ("image", "label")  # of a record
    scores: ClassVar = CLASS_SCORES

    def __init__(
        self,
        parts: dict[str, Any],
        sources: dict[str, Any],
        folder: Path,
        seed: int,
        say: Callable[[str], None],
        reject: Report,
    ) -> None:
        self.parts, self.sources, self.seed, self.say, self.reject = parts, sources, seed, say, reject
        self.classes = sources["train"].classes
        with blame("features"):
            self.features = features_of(parts, sources, say)
        counts = ", ".join(f"{len(source)} {split}" for split, source in sources.items())
        say(f"Pictures: {counts}, of {len(self.classes)} classes.")
        self.batches = {}
        for split in sources:
            fixed: dict[str, Any] = {} if split == "train" else {"shuffle": False, "flip": False, "augment": None}
            with blame(f"data.{split}"):
                self.batches[split] = self._batches(split, **fixed)
        with blame("model"):
            self.model = parts["model"](encoder=parts["encoder"], num_classes=len(self.classes))
            self.model.build({"pixels": (None, *parts["reader"].size, 3)})
        self._probabilities = class_probabilities(self.model)

    @staticmethod
    def trials(parts: dict[str, Any], vocabulary_size: int) -> dict[str, Callable[[], Any]]:
        """What to try before data are read, by place in the configuration; a setting that cannot work raises."""
        return {
            "encoder": lambda: check_part(parts["encoder"], keras.layers.Layer, "an encoder of pictures, such as vit"),
            "decoder": lambda: check_part(parts["decoder"], type(None), "no decoder: decoder=none"),
            "model": lambda: parts["model"](encoder=parts["encoder"], num_classes=2),
            "batches": lambda: parts["batches"](source=_One(), read_image=parts["reader"], classes=["a"]),
        }

    def validate(self, step: int) -> dict[str, float]:
        """The scores of the validation split."""
        return class_scores(*self._told(self._probabilities, self.batches["valid"])[:2])

    def finish(self, folder: Path, card: dict[str, Any], monitor: str) -> dict[str, Any]:
        """Writes the bundle and scores it on the test split."""
        bundle = save_bundle(
            folder / "bundle", self.model, None, self.parts["reader"], card=card,
            weights_dtype=self.parts["final"].weights_dtype, classes=self.classes,
        )  # fmt: skip
        self.say("Test split, by the bundle.")
        batches = self._batches("test", pixels=True, shuffle=False, flip=False, augment=None)
        probabilities, labels, ids = self._told(class_probabilities(bundle.model), batches)
        tested, matrix = class_scores(probabilities, labels), confusion(probabilities, labels)
        usual = np.bincount(self.batches["train"].labels).argmax()
        results = {
            "valid": self.validate(0),
            "test": tested,
            "test_examples": len(labels),
            "test_of_most_frequent_class": float((labels == usual).mean()),
            "test_per_class": per_class(matrix, self.classes),
        }
        rows = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        save_picture(alignment_sheet(self.classes, self.classes, rows), folder / "confusion.png")
        write_json(
            folder / "confusion.json", {"classes": list(self.classes), "rows_true_columns_said": matrix.tolist()}
        )
        JsonLines(folder / "predictions.jsonl").write(_lines(ids, probabilities, labels, self.classes))
        update_bundle(bundle.folder, card={"scores": {"test": {n: round(v, 4) for n, v in tested.items()}}})
        write_json(folder / "results.json", results)
        return results

    def _batches(self, split: str, pixels: bool = False, **changes: Any) -> ClassBatches:
        """`pixels`: as the bundle reads pictures, whatever the run trains on."""
        reading = how_to_read(self.parts["reader"], None if pixels else self.features, self.reject)
        return self.parts["batches"](
            source=self.sources[split], classes=self.classes, seed=self.seed, **reading, **changes
        )

    def _told(self, probabilities: Any, batches: ClassBatches) -> tuple[np.ndarray, np.ndarray, list[str]]:
        return told(probabilities, batches.examples(), self.classes)


def told(
    probabilities: Callable[[Any], np.ndarray], examples: Iterable[Any], classes: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """The probabilities (N, C) of examples, the numbers of their classes (N,), and their ids."""
    rows, labels, ids = [], [], []
    for inputs, records in examples:
        rows.append(probabilities(inputs))
        labels += [classes.index(record["label"]) for record in records]
        ids += [str(record["id"]) for record in records]
    if not rows:
        raise ValueError("none of the pictures can be read")
    return np.concatenate(rows), np.array(labels), ids


def evaluate(bundle: Bundle, source: Any, batch_size: int, reject: Report) -> tuple[dict[str, float], dict[str, Any]]:
    """A bundle's scores on a source, and how each class fares.

    Raises:
        ValueError: the source has a class that the bundle doesn't know.
    """
    reading = how_to_read(bundle.reader, None, reject)
    batches = ClassBatches(source, classes=bundle.classes, batch_size=batch_size, shuffle=False, **reading)
    probabilities, labels, ids = told(class_probabilities(bundle.model), batches.examples(), bundle.classes)
    matrix = confusion(probabilities, labels)
    more = {
        "examples": len(labels),
        "per_class": per_class(matrix, bundle.classes),
        "confusion": matrix.tolist(),
        "predictions": _lines(ids, probabilities, labels, bundle.classes),
    }
    return class_scores(probabilities, labels), more


def _lines(
    ids: Sequence[str], probabilities: np.ndarray, labels: np.ndarray, classes: Sequence[str]
) -> list[dict[str, Any]]:
    said = probabilities.argmax(axis=1)
    return [
        {"id": name, "label": classes[label], "said": classes[guess], "probability": round(float(row[guess]), 6)}
        for name, label, guess, row in zip(ids, labels, said, probabilities, strict=True)
    ]


class _One:
    """A source of one picture, to try batches on."""

    def __len__(self) -> int:
        return 1

    def label_of(self, index: int) -> str:
        return "a"

    def id_of(self, index: int) -> str:
        return "a"
