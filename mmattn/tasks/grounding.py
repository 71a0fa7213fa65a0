"""Where a captioner looks, on pictures whose objects are known (mmattn.data.shapes)."""

from __future__ import annotations

from typing import Any

from mmattn.data.shapes import patch_coverage, word_roles
from mmattn.inference import Captioner
from mmattn.metrics.grounding import attention_on_objects


def attention_on_shapes(captioner: Captioner, source: Any) -> dict[str, dict[str, float]] | None:
    """For the words of each role the share of the attention on their objects, as `mmattn caption --attention` shows it.

    Returns:
        see `attention_on_objects`; None for a source whose records do not say where their objects are.
    """
    if len(source) == 0 or "objects" not in source[0]:
        return None
    records = [source[index] for index in range(len(source))]
    captions = captioner.caption([record["image"] for record in records], batch_size=64)
    described = zip(records, captions, strict=True)
    return attention_on_objects(captioner.attention, described, word_roles, patch_coverage)


def lines(found: dict[str, dict[str, float]]) -> list[str]:
    """One line a role.

    >>> lines({"colour": {"on_object": 0.81, "chance": 0.14, "words": 12}})
    ['attention of 12 colour words on their objects: 81.0 % (chance 14.0 %)']
    """
    return [
        f"attention of {row['words']} {role} words on their objects: {row['on_object']:.1%} "
        f"(chance {row['chance']:.1%})".replace("%", " %")
        for role, row in found.items()
    ]
