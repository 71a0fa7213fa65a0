"""The one check of what every score is given."""

from __future__ import annotations

from collections.abc import Sequence


def check_pairs(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Raises ValueError or TypeError unless these are N strings and N lists of one or more strings.

    >>> check_pairs(["a dog"], ["a dog runs"])
    Traceback (most recent call last):
    TypeError: references[0] must be a list of strings, not the string 'a dog runs'.
    """
    if isinstance(hypotheses, str):
        raise TypeError("hypotheses must be a list of strings; this is one string.")
    if len(hypotheses) != len(references):
        raise ValueError(
            f"Each hypothesis needs its own list of references: there are {len(hypotheses)} hypotheses and "
            f"{len(references)} lists. references[i] are the references of hypotheses[i]."
        )
    if not len(hypotheses):
        raise ValueError("A score needs at least one hypothesis; there is none.")
    for i, (hypothesis, several) in enumerate(zip(hypotheses, references, strict=True)):
        if not isinstance(hypothesis, str):
            raise TypeError(f"hypotheses[{i}] must be a string, not {type(hypothesis).__name__}.")
        if isinstance(several, str):
            raise TypeError(f"references[{i}] must be a list of strings, not the string {several!r}.")
        if not len(several):
            raise ValueError(f"references[{i}] is empty: each hypothesis needs at least one reference.")
        for reference in several:
            if not isinstance(reference, str):
                raise TypeError(f"references[{i}] must hold strings, not {type(reference).__name__}.")
