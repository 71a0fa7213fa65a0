"""The first records of a source, for quick runs."""

from __future__ import annotations

from typing import Any


class First:
    """Random access to the first `count` records of a source; all of them where it has fewer.

    >>> First("abcdef", 3)[-1], len(First("ab", 3))
    ('c', 2)
    """

    def __init__(self, source: Any, count: int) -> None:
        if count < 1:
            raise ValueError(f"count={count} must be at least 1.")
        self.source = source
        self.count = min(count, len(source))
        # What is known without the pictures, see mmattn.data.
        for name in ("training_captions", "label_of", "id_of", "classes", "mirrors"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not -self.count <= index < self.count:
            raise IndexError(f"There is no record {index}: there are {self.count}.")
        return self.source[index % self.count]
