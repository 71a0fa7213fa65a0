"""Seeds for the parts of a layer that was given one."""

from __future__ import annotations

import hashlib


def part_seed(seed: int | None, *names: str) -> int | None:
    """The seed of one part, by its place: dropouts that shared the whole's would drop the same places in every layer.

    Args:
        seed: of the whole; None leaves the part's to chance too.
        names: the part's place in the whole, such as "decoder", "block_0".

    >>> part_seed(1, "block_0") == part_seed(1, "block_0"), part_seed(1, "block_0") == part_seed(1, "block_1")
    (True, False)
    """
    if seed is None:
        return None
    digest = hashlib.blake2s("/".join((str(seed), *names)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1  # below 2^31: Keras keeps seeds as int32 on some backends
