"""Sentences, one a line of a text file."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path

from mmattn.data.splits import check_split, split_of
from mmattn.data.text_files import TextFileError, is_blank, read_lines, refusal


class SentenceSource:
    """Random access to the lines of a file, records `{"id": "train.en:17", "text": sentence}`.

    A sentence is kept as it is written, but for white space at its two ends. Blank lines are passed over.

    Args:
        path: UTF-8, plain or compressed, read by the rules of `mmattn.data.text_files`.
        split: "train", "valid" or "test", by the rule of `mmattn.data.splits.split_of`, so that equal sentences never
            lie in two splits. None takes all lines.
        shares: how much of the different sentences goes to train, valid and test.
        seed: another seed makes other splits.
        problems: what happens to a line that is not UTF-8: "error" refuses the file, "skip" leaves it out.

    Attributes:
        skipped: "file:line: reason" for each line left out; empty with problems="error".

    Raises:
        TextFileError: a file breaks a rule, or no sentence is left.
        ValueError: an argument out of range.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("A dog runs.\\n\\nTwo dogs run.\\n")
    ...     SentenceSource(f"{folder}/a.txt")[1]
    {'id': 'a.txt:3', 'text': 'Two dogs run.'}
    """

    def __init__(
        self,
        path: str | Path,
        split: str | None = None,
        shares: Sequence[float] = (0.9, 0.05, 0.05),
        seed: int = 0,
        problems: str = "error",
    ):
        check_split(split)
        split_of("", shares, seed)  # refuses impossible shares
        if problems not in ("error", "skip"):
            raise ValueError(f"problems={problems!r} is unknown. It is one of 'error', 'skip'.")
        file = Path(path)
        self.skipped: list[str] = []
        self._records: list[tuple[int, str]] = []
        for line in read_lines(file):
            if line.fault:
                self.skipped.append(f"{file}:{line.number}: {line.fault}")
            elif not is_blank(line.text) and (split is None or split_of(line.text, shares, seed) == split):
                self._records.append((line.number, line.text.strip()))
        if self.skipped and problems == "error":
            raise refusal(str(file), "problems='skip' leaves such lines out.", self.skipped)
        if not self._records:
            raise TextFileError(f"{file}: no sentence{f' in split {split!r}' if split else ''}.")
        self._name = file.name

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, str]:
        index, size = operator.index(index), len(self)
        if not -size <= index < size:
            raise IndexError(f"There is no record {index}: there are {size}, numbered 0 to {size - 1}.")
        number, text = self._records[index]
        return {"id": f"{self._name}:{number}", "text": text}
