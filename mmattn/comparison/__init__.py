"""Models that were trained on the same data, side by side: what each has reached, what it costs, and how that grows."""

from mmattn.comparison.members import Member, read_member
from mmattn.comparison.report import write_report

__all__ = ["Member", "read_member", "write_report"]
