"""Pieces of text merged into words, for pictures that show a word rather than a piece of one."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# Scripts written without blanks between words: Thai, Lao, Burmese, Khmer, Chinese, Japanese (with their punctuation).
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u31f0-\u31ff\u3400-\u9fff"
    "\uf900-\ufaff\uff01-\uff9f\U00020000-\U0003ffff]"
)


def group_words(pieces: Iterable[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Merges (text, positions) of pieces into (word, positions) of words.

    A word begins at a blank; a piece that is only blanks counts with the word it precedes. Chinese, Japanese, Thai,
    Lao, Khmer and Burmese are written without blanks, so there each piece is a word of its own.

    >>> group_words([(" play", [0]), ("ing", [1]), (" ", [2]), ("dogs", [3])])
    [('playing', [0, 1]), ('dogs', [2, 3])]
    >>> group_words([(" \u72ac", [0]), ("\u304c", [1]), ("\u8d70\u308b", [2])])
    [('\u72ac', [0]), ('\u304c', [1]), ('\u8d70\u308b', [2])]
    """
    words: list[tuple[str, list[int]]] = []
    blank = True  # a blank lies before the next piece
    waiting: list[int] = []
    for text, positions in pieces:
        bare = text.strip()
        if not bare:
            blank, waiting = True, waiting + positions
            continue
        if blank or text[0].isspace() or _ends(words[-1][0][-1], bare[0]):
            words.append((bare, waiting + positions))
        else:
            last, places = words[-1]
            words[-1] = (last + bare, places + positions)
        blank, waiting = text[-1].isspace(), []
    return words


def join_tokens(tokens: Iterable[tuple[str, list[int]]], joiner: str | None) -> list[tuple[str, list[int]]]:
    """Merges (text, positions) of tokens that blanks separate into words: one that ends in `joiner` goes on.

    >>> join_tokens([(" brea@@", [0]), (" king", [1]), (" news", [2])], "@@")
    [('breaking', [0, 1]), ('news', [2])]
    """
    words: list[tuple[str, list[int]]] = []
    goes_on = False
    for text, positions in tokens:
        bare = text.strip(" ")
        begins, goes_on = not goes_on, bool(joiner) and bare.endswith(joiner or "")
        bare = bare.removesuffix(joiner or "")
        if begins:
            words.append((bare, positions))
        else:
            words[-1] = (words[-1][0] + bare, words[-1][1] + positions)
    return [(word, positions) for word, positions in words if word]


def _ends(before: str, after: str) -> bool:
    """True if a word ends between two neighbouring characters that have no blank between them."""
    if unicodedata.category(after).startswith("M"):
        return False  # a mark belongs to the character before it
    return bool(_UNSPACED.match(before) or _UNSPACED.match(after))
