"""Whether the decoder looked at the thing it named: the attention of each word against where its object lies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Roles = Callable[[Any, str], list[tuple[str, str, int | None]]]


def attention_on_objects(
    attention: Callable[[Any, Any], Any],
    described: Iterable[tuple[Mapping[str, Any], Any]],
    word_roles: Roles,
    patch_coverage: Callable[[Any, tuple[int, int]], np.ndarray],
) -> dict[str, dict[str, float]]:
    """The share of a word's attention that lies on the patches of the object it speaks of.

    Only captions that are true count: a wrong word has no object. A patch is an object's if the object covers any of
    it. A word of the relation speaks of both objects.

    Args:
        attention: (image, caption) -> an object with `words` and `weights` (W, rows, columns), each word's summing to
            1, such as `mmattn.Captioner.attention`.
        described: records with "image" and "captions", each with its caption (`text`).
        word_roles: (record, text) -> for each word (word, role, index of the object or None for both).
        patch_coverage: (record, (rows, columns)) -> (objects, rows * columns), the share of a patch that is covered.

    Returns:
        for each role: `on_object`, the mean share; `chance`, the share of the area that is the object's, what evenly
        spread attention would give; `words`, how many were counted.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record, caption in described:
        if caption.text not in record["captions"]:
            continue
        looked = attention(record["image"], caption)
        rows, columns = looked.weights.shape[1:]
        covered = patch_coverage(record, (rows, columns)) > 0  # (objects, P)
        roles = word_roles(record, caption.text)
        if [word for word, _, _ in roles] != list(looked.words):
            raise ValueError(f"The roles are of the words {[w for w, _, _ in roles]}, the attention of {looked.words}.")
        for weights, (_, role, index) in zip(looked.weights.reshape(len(roles), -1), roles, strict=True):
            place = covered.any(axis=0) if index is None else covered[index]
            found[role].append((float(weights[place].sum()), float(place.mean())))
    return {
        role: {"on_object": _mean(v[0] for v in values), "chance": _mean(v[1] for v in values), "words": len(values)}
        for role, values in sorted(found.items())
    }


def _mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)
