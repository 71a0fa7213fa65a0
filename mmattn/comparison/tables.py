"""What the tables of a report share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mmattn.comparison.members import Member
from mmattn.comparison.page import Page


def same_tokens(page: Page, members: Sequence[Member], what: str) -> bool:
    """Whether the members write with the same tokens; where they do not, the page says what cannot be compared."""
    if len({member.tokenizer for member in members}) == 1:
        return True
    page.text(f"Not shown: {what}. It is counted by token, and these models have other tokens for the same text.")
    return False


def size(member: Member) -> tuple[str, str]:
    """Its parameters and minutes, the last columns of every table of scores."""
    return number(member.parameters, ",d"), f"{member.minutes:.0f}"


def percent(share: float | None, form: str = ".2f") -> str:
    return "-" if share is None else format(100 * share, form)


def number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def three_digits(value: float) -> str:
    """
    >>> three_digits(0.40312), three_digits(9.996), three_digits(12345.6), three_digits(0.0)
    ('0.403', '10.0', '12,346', '0')
    """
    if not value:
        return "0"
    value = float(f"{value:.3g}") if abs(value) < 1000 else value
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
