"""Which part of a data set is for training, for validation and for the test: by shares."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b

SPLITS = ("train", "valid", "test")


def check_split(split: str | None) -> None:
    """Raises ValueError unless this is the name of a split, or None for the whole."""
    if split is not None and split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown. It is one of {', '.join(SPLITS)}, or None for all.")


def exact_shares(shares: Sequence[float], counts: tuple[int, ...] = (3,)) -> list[Fraction]:
    """The shares as the decimal numbers that they are written as; raises ValueError unless their sum is 1.

    >>> [str(share) for share in exact_shares((0.9, 0.05, 0.05))]
    ['9/10', '1/20', '1/20']
    """
    exact = [Fraction(str(share)) for share in shares]
    if len(exact) not in counts or min(exact) < 0 or abs(sum(exact, Fraction(-1))) > Fraction(1, 10**9):
        many = " or ".join(map(str, counts))
        raise ValueError(f"shares={tuple(shares)}: {many} numbers from 0 are needed, for {', '.join(SPLITS)}, sum 1.")
    return exact


def split_of(sentence: str, shares: Sequence[float] = (0.9, 0.05, 0.05), seed: int = 0) -> str:
    """The split that a sentence belongs to, by a hash of what it says.

    Hashed (BLAKE2b, with the seed) are the sentence's letters and digits alone, in Unicode's NFKC form and without
    case, with one blank for anything between them; a sentence without any is hashed as it is. So "Stop!" and "stop ."
    are always in the same split. Where only the shares of train and valid change, the test share keeps its sentences.

    >>> split_of("Stop!"), split_of("stop ."), split_of("Who knows?"), split_of("Who knows?", seed=1)
    ('valid', 'valid', 'test', 'train')
    """
    test, valid = _bounds(tuple(shares))
    text = unicodedata.normalize("NFKC", sentence).casefold()
    key = " ".join(re.findall(r"[^\W_]+", text)) or " ".join(text.split())
    number = int.from_bytes(blake2b(f"{seed}\n{key}".encode(), digest_size=8).digest())
    return "test" if number < test else "valid" if number < valid else "train"


@lru_cache
def _bounds(shares: tuple[float, ...]) -> tuple[int, int]:
    """Hashes of 64 bits below the first are of the test split, those from there to the second of valid."""
    _, valid, test = exact_shares(shares)
    return int(test * 2**64), int((test + valid) * 2**64)
