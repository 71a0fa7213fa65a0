"""Normalisations of text, as tables that SentencePiece stores in its model.

Because the table lies in the model's bytes, every program that runs the model normalises alike, whatever Unicode
version its own libraries know. What each does to a text:

| name         | Unicode form | letters                       | blanks                                               |
|--------------|--------------|-------------------------------|------------------------------------------------------|
| "none"       | as it is     | as they are                   | as they are                                          |
| "nfc"        | NFC          | as they are                   | as they are                                          |
| "nfkc"       | NFKC         | as they are                   | each run of blanks is one blank, none at either end  |
| "nfkc_lower" | NFKC         | lower case                    | as "nfkc"                                            |
| "caption"    | NFKC         | lower case, words alone       | as "nfkc"; punctuation and signs are blanks too      |

Blanks are what `str.isspace` says (tabs, line ends, no-break and ideographic blanks) and U+2581, SentencePiece's sign
for one. So "nfkc" is `" ".join(unicodedata.normalize("NFKC", text).split())`. Zero-width characters stay. In every
model U+2581 reads as a blank and NUL is unknown.

A table knows single characters and the spellings of composed ones, not sequences of any length. So these differ from
`unicodedata`: marks that compose with nothing keep the order in which they stand; a mark after a compatibility
character composes only if that is a wide or narrow form (a half-width katakana); lower case looks at one character,
so a capital sigma gives U+03C3 at the end of a word too.

A caption is lower-case words with one blank between them. The rule, character by character: NFKC, lower case,
typographic apostrophe to "'"; letters, digits, marks and apostrophes stay; joiners, direction marks, enclosing marks
and variation selectors vanish; all else is a blank. English comes out as words of [a-z0-9']; other scripts keep
theirs.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

BLANK = "\u2581"  # how SentencePiece writes a blank inside a piece
COLLAPSING = ("nfkc", "nfkc_lower", "caption")  # each run of blanks becomes one
NORMALIZATIONS = ("none", "nfc", *COLLAPSING)


@lru_cache
def normalization_rules(normalization: str) -> list[tuple[str, str]]:
    """The table of a normalisation other than "none", as `caption_rules`.

    >>> dict(normalization_rules("nfkc"))["\uff76\uff9e"]  # half-width ka and voicing mark
    '\u30ac'
    """
    if normalization == "caption":
        return caption_rules()
    form: Literal["NFC", "NFKC"] = "NFC" if normalization == "nfc" else "NFKC"

    def normal(text: str) -> str:
        text = unicodedata.normalize(form, text)
        return unicodedata.normalize(form, text.lower()) if normalization == "nfkc_lower" else text

    characters = list(_assigned())
    parts = [unicodedata.decomposition(character).split() for character in characters]
    bases = {chr(int(part[0], 16)) for part in parts if part and part[0][0] != "<"}  # letters that take marks
    rules: dict[str, str] = {}
    singles: defaultdict[str, set[str]] = defaultdict(set)  # normal character: the characters that may spell it
    for character, part in zip(characters, parts, strict=True):
        target = rules[character] = normal(character)
        wide = part and part[0] in ("<wide>", "<narrow>") and not _korean(character)
        if wide or not part or part[0][0] != "<" or character in bases:
            singles[target].add(character)
    for target in [*singles]:
        if len(target) == 1:
            rules.update(dict.fromkeys(_spellings(target, singles), target))
    if normalization in COLLAPSING:
        rules.update((c, " ") for c in rules if c.isspace() or c == BLANK)
    return sorted((spelling, target) for spelling, target in rules.items() if spelling != target)


def _spellings(target: str, singles: dict[str, set[str]]) -> set[str]:
    """Every spelling of a composed character: whole, in parts, its marks in any order that means the same."""
    found = {target, *singles.get(target, ())}
    parts = unicodedata.normalize("NFD", target)
    for i in range(1, len(parts)):
        rest = unicodedata.normalize("NFC", parts[:i] + parts[i + 1 :])
        if unicodedata.normalize("NFC", rest + parts[i]) == target:
            marks = {parts[i], *singles.get(parts[i], ())}
            found |= {begin + mark for begin in _spellings(rest, singles) for mark in marks}
    return found


def _korean(character: str) -> bool:
    """A half-width Korean letter: all their pairs would fill the table."""
    return "\uffa0" <= character <= "\uffdc"


def _assigned() -> Iterator[str]:
    """Every character but the unassigned, private and surrogate ones, which have no rule, and NUL, which cannot."""
    return (c for c in map(chr, range(1, 0x110000)) if unicodedata.category(c) not in ("Cn", "Co", "Cs"))


@lru_cache(maxsize=1)
def caption_rules() -> list[tuple[str, str]]:
    """The table: (spelling, what it becomes), sorted; a spelling that stays as it is has no row.

    A character that has a canonical decomposition is listed composed, decomposed and with its last mark apart, so
    that "e" + "\u0301" becomes "\u00e9".

    >>> dict(caption_rules())["E\\u0301"]
    '\u00e9'
    """
    rules: dict[str, str] = {}
    for character in _assigned():
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
