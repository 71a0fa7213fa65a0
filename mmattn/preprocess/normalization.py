"""The "caption" normalisation of text, as a table that SentencePiece stores in its model.

A caption is lower-case words with one blank between them. The rule, character by character: NFKC, lower case,
typographic apostrophe to "'"; letters, digits, marks and apostrophes stay; joiners, direction marks, enclosing marks
and variation selectors vanish; all else is a blank. English comes out as words of [a-z0-9']; other scripts keep
theirs. Because the table lies in the model's bytes, every program that runs the model normalises alike, whatever
Unicode version its own libraries know.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache


@lru_cache(maxsize=1)
def caption_rules() -> list[tuple[str, str]]:
    """The table: (spelling, what it becomes), sorted; a spelling that stays as it is has no row.

    A character that has a canonical decomposition is listed composed, decomposed and with its last mark apart, so
    that "e" + "\u0301" becomes "\u00e9".

    >>> dict(caption_rules())["E\\u0301"]
    '\u00e9'
    """
    rules: dict[str, str] = {}
    for code in range(1, 0x110000):  # SentencePiece cannot map NUL
        character = chr(code)
        if unicodedata.category(character) in ("Cn", "Co", "Cs"):
            continue  # unassigned, private and surrogate: no rule
        decomposed = unicodedata.normalize("NFD", character)
        spellings = {character, decomposed, unicodedata.normalize("NFC", decomposed[:-1]) + decomposed[-1]}
        target = normalize_character(character)
        rules.update({spelling: target for spelling in spellings if spelling != target})
    return sorted(rules.items())


def normalize_character(character: str) -> str:
    """What one character becomes.

    >>> [normalize_character(c) for c in ("A", "\ufb01", "!", "\u2019", "\u0130")]
    ['a', 'fi', ' ', "'", 'i\u0307']
    """
    lower = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", character).lower())
    return "".join(map(_kept, lower.replace("\u2019", "'")))


def _kept(c: str) -> str:
    category = unicodedata.category(c)
    if category == "Me" or "VARIATION SELECTOR" in unicodedata.name(c, "") or (category == "Cf" and c != "\u200b"):
        return ""  # how the character before it looks, or how text runs: no part of a word
    return c if category[0] in "LMN" or c == "'" else " "
