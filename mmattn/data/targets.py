"""Training targets: every caption encoded once, and rows of token ids padded to one of a few lengths."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

PAD, BOS, EOS = 0, 2, 3
FLIPS = ("never", "unsided", "swap")
_SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)


def fingerprint_of(settings: Sequence[Any], arrays: Iterable[np.ndarray]) -> str:
    """The SHA-256 of settings and arrays, their lengths included.

    >>> rows = [np.array([1, 2]), np.array([3])]
    >>> fingerprint_of([7], rows) == fingerprint_of([7], [np.array([1]), np.array([2, 3])])
    False
    """
    found = hashlib.sha256(repr(list(settings)).encode())
    for array in arrays:
        found.update(f";{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


class CaptionTable(NamedTuple):
    """All training captions of a source: number i belongs to image `images[i]` and its labels are `label(i)`.

    `mirrored` holds the captions that name a side: their labels with left and right exchanged, or None where their
    image must not be flipped. `over_long` and `without_tokens` count captions that were cut and left out.
    """

    images: np.ndarray  # int32 (N,)
    ids: np.ndarray  # int32, the labels of all captions one after the other
    ends: np.ndarray  # int64 (N,), where each one's labels end
    mirrored: dict[int, np.ndarray | None]
    over_long: int
    without_tokens: int

    def __bool__(self) -> bool:
        return len(self.images) > 0

    def label(self, number: int) -> np.ndarray:
        """Labels of caption `number`, t1 .. tn and eos: int32 (T,)."""
        return self.ids[self.ends[number - 1] if number else 0 : self.ends[number]]


def caption_table(
    source: Any, encode_text: Callable[[str], Sequence[int]], max_length: int, flip: str = "never"
) -> CaptionTable:
    """Encode all captions of a source that are to be trained on.

    A caption with more than max_length - 1 tokens is cut to its first max_length tokens and gets no eos, so that
    nothing false is taught: the model sees a true beginning and no end. A caption without any token is left out.

    Args:
        source: `len(source)` records; the captions of image i are `source.training_captions(i)` where it has that
            method, else `source[i]["captions"]`.
        encode_text: Text to ids, without bos and eos.
        max_length: Most labels of a caption, eos included.
        flip: "never", "unsided" or "swap"; says what `mirrored` holds.

    Raises:
        ValueError: encode_text returns a pad, bos or eos id.
    """
    captions_of = getattr(source, "training_captions", None) or (lambda index: source[index]["captions"])
    images: list[int] = []
    labels: list[np.ndarray] = []
    mirrored: dict[int, np.ndarray | None] = {}
    over_long = without_tokens = 0
    for index in range(len(source)):
        for text in captions_of(index):
            row = token_row(text, encode_text)
            if len(row) == 1:
                without_tokens += 1
                continue
            over_long += len(row) > max_length
            if flip != "never" and _SIDES.search(text):
                swapped = token_row(swap_sides(text), encode_text)[:max_length] if flip == "swap" else None
                mirrored[len(images)] = swapped
            images.append(index)
            labels.append(row[:max_length])
    ids = np.concatenate(labels) if labels else np.zeros(0, "int32")
    ends = np.cumsum([len(row) for row in labels], dtype="int64")
    return CaptionTable(np.array(images, "int32"), ids, ends, mirrored, over_long, without_tokens)


def pad_targets(labels: Sequence[np.ndarray], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pad rows of labels to the smallest of `lengths` that fits them all.

    Args:
        labels: Each int32 (T,), t1 .. tn and eos, or without eos where the caption was cut.
        lengths: Ascending; the last one fits every row.

    Returns:
        target_ids int32 (B, T) = bos, t1 .. tn, pad; labels int32 (B, T) = t1 .. tn, eos, pad; weights float32 (B, T),
        1.0 at labels and 0.0 at padding.

    >>> [array.tolist() for array in pad_targets([np.array([7, 8, 3]), np.array([9, 3])], (3, 6))]
    [[[2, 7, 8], [2, 9, 0]], [[7, 8, 3], [9, 3, 0]], [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]]
    """
    longest = max(len(row) for row in labels)
    width = next(length for length in lengths if length >= longest)
    padded = np.full((len(labels), width), PAD, "int32")
    target_ids = padded.copy()
    weights = np.zeros((len(labels), width), "float32")
    for number, row in enumerate(labels):
        padded[number, : len(row)] = row
        target_ids[number, 0] = BOS
        target_ids[number, 1 : len(row)] = row[:-1]
        weights[number, : len(row)] = 1.0
    return target_ids, padded, weights


def swap_sides(text: str) -> str:
    """Exchange the words left and right, as the mirror image of a picture needs.

    >>> swap_sides("Left of a lefty's right hand")
    "Right of a lefty's left hand"
    """

    def other(match: re.Match[str]) -> str:
        word = match.group()
        swapped = "right" if word.lower() == "left" else "left"
        return swapped.upper() if word.isupper() else swapped.capitalize() if word[0].isupper() else swapped

    return _SIDES.sub(other, text)


def token_row(text: str, encode_text: Callable[[str], Sequence[int]]) -> np.ndarray:
    """The ids of a text and eos: int32 (T,).

    Raises:
        ValueError: encode_text returns a pad, bos or eos id.
    """
    ids = encode_text(text)
    if special := {PAD, BOS, EOS}.intersection(ids):
        raise ValueError(
            f"encode_text returned the special id {min(special)} for {text!r}: {list(ids)}. Ids of words alone are "
            f"wanted; pad {PAD}, bos {BOS} and eos {EOS} are added here."
        )
    return np.array([*ids, EOS], "int32")
