"""How well classes are told apart. Letters: N examples, C classes."""

from __future__ import annotations

from typing import Any

import numpy as np

CLASS_SCORES = ("accuracy", "top5", "log_likelihood", "loss")


def class_scores(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """accuracy; top5, the share whose class is among the five likeliest, of more than five classes; the mean loss in
    nats and its negative.

    Args:
        probabilities: (N, C).
        labels: int (N,).

    >>> class_scores(np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([0, 0]))["accuracy"]
    0.5
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")  # of equals the first
    of_label = probabilities[np.arange(len(labels)), labels].astype("float64")
    loss = float(-np.log(np.maximum(of_label, 1e-30)).mean())
    scores = {"accuracy": float((order[:, 0] == labels).mean())}
    if probabilities.shape[1] > 5:
        scores["top5"] = float((order[:, :5] == labels[:, None]).any(axis=1).mean())
    return scores | {"log_likelihood": -loss, "loss": loss}


def confusion(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How many examples of each class (row) were taken for each class (column): int (C, C).

    >>> confusion(np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]), np.array([0, 1, 1])).tolist()
    [[1, 0], [1, 1]]
    """
    count = probabilities.shape[1]
    found = np.bincount(labels * count + probabilities.argmax(axis=1), minlength=count * count)
    return found.reshape(count, count)


def per_class(matrix: np.ndarray, classes: Any) -> dict[str, dict[str, Any]]:
    """For each class the number of its examples and the share of them that was told; None where there are none.

    >>> per_class(np.array([[1, 0], [0, 0]]), ["a", "b"])
    {'a': {'examples': 1, 'accuracy': 1.0}, 'b': {'examples': 0, 'accuracy': None}}
    """
    totals = matrix.sum(axis=1)
    return {
        name: {"examples": int(total), "accuracy": float(right / total) if total else None}
        for name, total, right in zip(classes, totals, matrix.diagonal(), strict=True)
    }
