"""The laws of attention, asked of any layer: which hold, and what was measured.

A layer that breaks one of them trains, and is wrong: it looks at padding, at the future, at what stands under a mask.

Shapes: B batch, T target (query) length, S memory (key) length, D width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mmattn.testing_laws import LAWS, TOLERANCES, CannotAsk, Law, Subject, words_of


@dataclass(frozen=True)
class Finding:
    """What came of one law.

    Attributes:
        law: the law, in words.
        holds: True or False; None: the layer cannot be asked.
        measured: what was measured, or why the layer cannot be asked.
    """

    law: str
    holds: bool | None
    measured: str


class Report(dict[str, Finding]):
    """The findings by the laws' names, in the order of the laws.

    Attributes:
        layer: what the layer is called.
        problem: why nothing can be asked, or None.
        failed: the names of the laws that do not hold; none where nothing could be asked.
    """

    def __init__(self, layer: str, findings: Iterable[tuple[str, Finding]] = (), problem: str | None = None) -> None:
        super().__init__(findings)
        self.layer = layer
        self.problem = problem

    @property
    def failed(self) -> list[str]:
        """The names of the laws that do not hold."""
        return [name for name, finding in self.items() if finding.holds is False]

    def __str__(self) -> str:
        if self.problem is not None:
            return f"{self.layer}: {_counted(self)}\n  ({self.problem})"
        width = max(map(len, self), default=0)
        lines = [f"{self.layer}: {_counted(self)}"]
        for name, finding in self.items():
            lines.append(f"  {_word(finding):4}{name:{width}}  {finding.law}")
            lines.append(f"  {'':{width + 4}}  ({finding.measured})")
        return "\n".join(lines)

    def markdown(self, *others: Report) -> str:
        """A table of the laws, with a column for this layer and each of `others`; under it, why it does not say yes."""
        reports = [self, *others]
        lines = [f"| | {' | '.join(report.layer for report in reports)} |", f"| --- |{' --- |' * len(reports)}"]
        for name, finding in self.items():
            words = [_word(report[name]) if name in report else "" for report in reports]
            lines.append(f"| **{name}**: {finding.law} | {' | '.join(words)} |")
        lines.append(f"| | {' | '.join(map(_counted, reports))} |")
        for report in reports:
            rest = [(name, finding) for name, finding in report.items() if not finding.holds]
            lines += ["", f"{report.layer}:", ""] if rest else []
            lines += [f"- {name} {_word(finding)}: {finding.measured}" for name, finding in rest]
        return "\n".join(lines)


def check_attention(
    layer: Any,
    width: int = 8,
    length: int = 5,
    seed: int = 0,
    say: Callable[[str], Any] | None = print,
    laws: Iterable[str] | None = None,
    dtype: str = "float32",
) -> Report:
    """Asks an attention layer whether it keeps the laws of attention.

    The layer is called as Keras' own are: `layer(query, value, attention_mask=..., use_causal_mask=...,
    return_attention_scores=..., training=...)`. What its `call` does not take is not asked; one whose second argument
    may be left out attends to its own input, unless it takes a list of two, as `keras.layers.Attention` does. Copies of
    the layer are asked, made from its config, in `dtype`, without dropout and sliding window, with weights drawn anew;
    where no copy can be made, the layer itself. What a config may forget is asked of the layer itself, which is built
    for that; nothing else about it changes. Of a layer that relates no places to each other, such as a Dense, nothing
    can be asked.

    Args:
        layer: a `keras.layers.Layer`, built or not, or a function that makes one: width -> layer.
        width: D of the inputs.
        length: T, at least 3.
        seed: of inputs and weights.
        say: gets the report as text; None: nobody does.
        laws: the names of those to ask; None: all.
        dtype: "float32"; or "bfloat16" or "float16", in which equal is what differs by rounding alone: to see that the
            laws hold on a device that computes so.

    Returns:
        The report. A law that fails, by an error of the layer too, is found there and never raised.

    Raises:
        ValueError: for what is no layer, a length below 3, or a dtype or law that does not exist.

    Example:
        >>> from mmattn.layers import MultiHeadAttention
        >>> report = check_attention(MultiHeadAttention(num_heads=2, key_dim=4), laws=["blind query", "mask stays"])
        mmattn.MultiHeadAttention: 2 of 2 hold
          yes blind query  a query that may see nothing gives zeros
                           (largest output 0.0e+00)
          yes mask stays   the implicit masks are still on the caller's tensors after the call
                           (their means by the mask differ by 0.0e+00)
        >>> report.failed
        []

    Source:
        Faults that users of attention layers reported; for the computation Vaswani et al., "Attention Is All You Need",
        2017, section 3.2.
    """
    names = list(LAWS) if laws is None else list(laws)
    if unknown := [name for name in names if name not in LAWS]:
        raise ValueError(f"There is no law {', '.join(map(repr, unknown))}. There are: {', '.join(LAWS)}.")
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype is one of {', '.join(TOLERANCES)}. Received dtype={dtype!r}.")
    if not callable(layer):
        raise ValueError(f"layer is a Keras layer, or a function that makes one. Received {layer!r}.")
    if length < 3:
        raise ValueError(f"length is at least 3, so that something comes before and after. Received length={length}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a mask gets lost, say: a law asks for that
        subject = Subject(layer, width, length, seed, dtype)
        report = Report(subject.name, [(name, _find(LAWS[name], subject)) for name in names], subject.problem)
    if say is not None:
        say(str(report))
    return report


def _find(law: Law, subject: Subject) -> Finding:
    words = str(law.__doc__)
    if subject.problem is not None:
        return Finding(words, None, subject.problem)
    try:
        return Finding(words, *law(subject))
    except CannotAsk as why:
        return Finding(words, None, str(why))
    except Exception as error:
        return Finding(words, False, f"raises {words_of(error)}")


def _word(finding: Finding) -> str:
    return "-" if finding.holds is None else "yes" if finding.holds else "NO"


def _counted(report: Report) -> str:
    asked = [finding for finding in report.values() if finding.holds is not None]
    unasked = len(report) - len(asked)
    rest = f", {unasked} can't be asked" if unasked else ""
    return f"{sum(bool(finding.holds) for finding in asked)} of {len(asked)} hold{rest}"
