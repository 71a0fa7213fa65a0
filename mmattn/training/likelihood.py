"""How likely a model finds the labels of given batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import keras
from keras import ops

from mmattn import backend
from mmattn.training.losses import token_losses

SCORES = ("log_likelihood", "loss", "perplexity", "bits_per_token", "accuracy")


def measurer(model: keras.Model) -> Callable[[Iterable[Any]], dict[str, float]]:
    """A function that takes batches (inputs, labels, weights) and gives the scores of their labels, see `scores_of`.

    Later changes of the weights count.
    """

    def total(inputs: Any, labels: Any, weights: Any) -> tuple[Any, Any]:
        return counted(labels, model(inputs, training=False), weights)

    compiled = backend.compile(total, jit=False, variables_of=model)

    def measure(batches: Iterable[Any]) -> dict[str, float]:
        loss = hits = count = 0.0
        with backend.no_gradient():
            for batch in batches:
                found = compiled(*keras.tree.map_structure(ops.convert_to_tensor, batch))
                loss, hits, count = loss + float(found[0]), hits + float(found[1]), count + float(batch[2].sum())
        return scores_of(loss, hits, count)

    return measure


def counted(labels: Any, logits: Any, weights: Any) -> tuple[Any, Any]:
    """Sums over the labels, by their weights: of their losses, and of those that no other label beats."""
    of_label = ops.take_along_axis(logits, ops.expand_dims(labels, -1), axis=-1)[..., 0]
    hits = ops.cast(ops.greater_equal(of_label, ops.max(logits, axis=-1)), "float32")
    return ops.sum(token_losses(labels, logits) * weights), ops.sum(hits * weights)


def scores_of(loss: float, hits: float, count: float) -> dict[str, float]:
    """From sums over `count` labels: the loss (nats a label), its negative, the perplexity, bits a label, and the share
    of the labels that no other beats.

    >>> round(scores_of(math.log(8), 0.0, 1.0)["bits_per_token"], 6)
    3.0
    """
    mean = loss / count
    return {
        "log_likelihood": -mean,
        "loss": mean,
        "perplexity": math.exp(min(mean, 700.0)),
        "bits_per_token": mean / math.log(2),
        "accuracy": hits / count,
    }
