"""Pairs of sentences for translation: two parallel text files, or the columns of a TSV file.

A source is random access over records `{"id": "train.en:17", "source": str, "targets": [str, ...]}`; the id is the
file that the source sentence comes from and its line. Files are read by the rules of `mmattn.data.text_files`.

Rules for both formats:

- A sentence is kept as it is written, but for white space at its two ends.
- An empty sentence, a line that is not UTF-8 and a line with too few columns are faults. `problems="error"` counts
  them all and refuses with the count and the first few; `problems="skip"` leaves them out and keeps a sentence
  "file:line: reason" about each in `source.skipped`.
- Two sentences are the same if they are equal in Unicode's NFC form with any white space as one blank.
- `exclude_seen_in` leaves out records with a sentence that occurs there, for a test on sentences that training has not
  seen; `source.excluded` lists their ids.
"""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmattn.data.splits import check_split, split_of
from mmattn.data.text_files import Line, TextFileError, is_blank, read_lines, refusal

__all__ = ["PairSource", "ParallelSource", "TextFileError", "TsvSource"]

SIDES = ("either", "source", "target")


class Pair(NamedTuple):
    """What a file says in one line (`id`), or why the line is of no use."""

    id: str
    source: str = ""
    target: str = ""
    fault: str | None = None


class PairSource:
    """Random access to checked records; the formats below read their files and hand their pairs to it.

    Args:
        where: The file or files, for messages.
        pairs: The pairs in the order of the file.
        problems: "error" or "skip": what happens to faulty lines.
        group: Make one record of the pairs with the same source sentence; its targets are its different translations.
        exclude_seen_in: A text file of sentences, or another source of pairs. None excludes nothing.
        exclude_side: "source" leaves out records whose source sentence is among the sentences of the file or the
            sources of the other source, "target" those with a target among its sentences or targets, "either" both:
            with a file in one language that does the right thing in both directions of translation.

    Attributes:
        skipped: "file:line: reason" for each line left out; empty with problems="error".
        excluded: Ids of the records left out because of `exclude_seen_in`.

    Raises:
        TextFileError: a file breaks a rule, or no pair is left.
        ValueError: an argument out of range.
    """

    _hint = ""  # what may help where no pair is left

    def __init__(
        self,
        where: str,
        pairs: Iterable[Pair],
        problems: str = "error",
        group: bool = False,
        exclude_seen_in: str | Path | PairSource | None = None,
        exclude_side: str = "either",
    ):
        for name, value, known in (("problems", problems, ("error", "skip")), ("exclude_side", exclude_side, SIDES)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is unknown. It is one of {', '.join(map(repr, known))}.")
        records: dict[Any, tuple[Pair, dict[str, str]]] = {}  # the first pair and the different translations
        faults: list[str] = []
        for pair in pairs:
            if pair.fault:
                faults.append(pair.fault)
                continue
            key = _same(pair.source) if group else len(records)
            records.setdefault(key, (pair, {}))[1].setdefault(_same(pair.target), pair.target)
        if faults and problems == "error":
            raise refusal(where, f"{_count(faults, 'problem')}. problems=skip leaves these lines out.", faults)
        self.skipped = faults
        self.excluded: list[str] = []
        self._records: list[dict[str, Any]] = []
        seen = _seen(exclude_seen_in)
        for pair, targets in records.values():
            if _is_seen(_same(pair.source), targets, seen, exclude_side):
                self.excluded.append(pair.id)
            else:
                self._records.append({"id": pair.id, "source": pair.source, "targets": list(targets.values())})
        if not self._records:
            left = f"{_count(faults, 'line')} left out and {_count(self.excluded, 'record')} excluded"
            raise refusal(where, f"no pair of sentences is left: {left}.{self._hint}", faults)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index, size = operator.index(index), len(self)
        if not -size <= index < size:
            raise IndexError(f"There is no record {index}: there are {size}, numbered 0 to {size - 1}.")
        record = self._records[index]
        return {**record, "targets": list(record["targets"])}


class ParallelSource(PairSource):
    """Two text files of which line n of one is the translation of line n of the other; one record a line.

    Args:
        source: The file with the source sentences, plain or compressed.
        target: The file with their translations; must have the same number of lines.
        problems: "error" or "skip", see `PairSource`.
        reverse: Translate the other way: swap the two files.
        exclude_seen_in, exclude_side: See `PairSource`.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     for name, text in (("a.en", "one\\ntwo\\n"), ("a.de", "eins\\nzwei\\n")):
    ...         _ = Path(folder, name).write_text(text)
    ...     ParallelSource(f"{folder}/a.en", f"{folder}/a.de")[-1]
    {'id': 'a.en:2', 'source': 'two', 'targets': ['zwei']}
    """

    def __init__(
        self,
        source: str | Path,
        target: str | Path,
        problems: str = "error",
        reverse: bool = False,
        exclude_seen_in: str | Path | PairSource | None = None,
        exclude_side: str = "either",
    ):
        files = [Path(target), Path(source)] if reverse else [Path(source), Path(target)]
        left, right = (list(read_lines(file)) for file in files)
        if len(left) != len(right):
            raise TextFileError(
                f"Parallel files must have the same number of lines, line n of one being the translation of line n of "
                f"the other: {files[0]} has {len(left)} lines and {files[1]} has {len(right)}."
            )
        pairs = [
            _pair(files[0].name, (f"{files[0]}:{one.number}", one), (f"{files[1]}:{two.number}", two))
            for one, two in zip(left, right, strict=True)
        ]
        super().__init__(f"{files[0]} and {files[1]}", pairs, problems, False, exclude_seen_in, exclude_side)


class TsvSource(PairSource):
    """A file with a pair a line in columns separated by tabs; other columns are ignored, a quote is a character.

    The split of a line is decided by its source sentence, by the rule of `mmattn.data.splits.split_of`, so that a
    sentence with several translations never lies in two splits. With `reverse` the source is the other column, and so
    the splits are others. A faulty line whose source sentence can be read is a fault of its split, any other of all.

    Args:
        path: The file, plain or compressed.
        source_column: Number of the column with the source sentence, from 0, or its name in the first line (which is
            a header then).
        target_column: The same for the translation.
        split: "train", "valid" or "test". None takes all lines.
        shares: How much of the different source sentences goes to train, valid and test.
        seed: Another seed makes other splits.
        group: Make one record of the lines with the same source sentence, with its different translations as targets.
        problems: "error" or "skip", see `PairSource`.
        reverse: Translate the other way: swap the two columns.
        exclude_seen_in, exclude_side: See `PairSource`.
    """

    _hint = " A small file needs larger shares for this split (shares: train, valid, test)."

    def __init__(
        self,
        path: str | Path,
        source_column: int | str = 0,
        target_column: int | str = 1,
        split: str | None = None,
        shares: tuple[float, float, float] = (0.9, 0.05, 0.05),
        seed: int = 0,
        group: bool = True,
        problems: str = "error",
        reverse: bool = False,
        exclude_seen_in: str | Path | PairSource | None = None,
        exclude_side: str = "either",
    ):
        check_split(split)
        split_of("", shares, seed)  # refuses impossible shares
        file = Path(path)
        lines = read_lines(file)
        first, second = (target_column, source_column) if reverse else (source_column, target_column)
        columns = _columns(file, lines, first, second)
        pairs = []
        for line in lines:
            place = f"{file}:{line.number}"
            fields = line.text.split("\t")
            if line.fault or len(fields) <= max(columns):
                needed = max(columns) + 1
                why = line.fault or f"{_count(fields, 'column')} where {needed} are needed (tabs separate columns)"
                pairs.append(Pair("", fault=f"{place}: {why}"))
                continue
            one, two = (line._replace(text=fields[column]) for column in columns)
            if split is None or is_blank(one.text) or split_of(one.text, shares, seed) == split:
                pairs.append(_pair(file.name, (place, one), (place, two)))
        where = f"{file}{f' (split {split})' if split else ''}"
        super().__init__(where, pairs, problems, group, exclude_seen_in, exclude_side)


def _columns(file: Path, lines: Iterator[Line], *wanted: int | str) -> list[int]:
    """The numbers of the columns; takes the header off the lines where one is given by its name."""
    names: list[str] = []
    if any(isinstance(column, str) for column in wanted):
        header = next(lines, Line(1, ""))
        if header.fault:
            raise TextFileError(f"{file}:1: {header.fault}.")
        names = [name.strip() for name in header.text.split("\t")]
    for column in wanted:
        if isinstance(column, str) and names.count(column) != 1:
            raise TextFileError(f"{file}:1: {names.count(column)} columns are called {column!r}. Here are: {names}.")
        if not isinstance(column, str) and column < 0:
            raise ValueError(f"Column {column}: columns are numbered from 0.")
    found = [names.index(column) if isinstance(column, str) else column for column in wanted]
    if found[0] == found[1]:
        raise ValueError(f"Source and target must be two columns, both are {wanted[0]!r}.")
    return found


def _pair(name: str, one: tuple[str, Line], two: tuple[str, Line]) -> Pair:
    for side, (place, line) in (("source", one), ("target", two)):
        if line.fault or is_blank(line.text):
            return Pair("", fault=f"{place}: {line.fault or f'empty {side} sentence'}")
    return Pair(f"{name}:{one[1].number}", one[1].text.strip(), two[1].text.strip())


def _same(sentence: str) -> str:
    """Equal for two sentences that count as the same."""
    return " ".join(unicodedata.normalize("NFC", sentence).split())


def _seen(given: str | Path | PairSource | None) -> tuple[set[str], set[str]]:
    """The sentences that a record's source, and that its targets, are compared with."""
    if given is None:
        return set(), set()
    if isinstance(given, str | Path):
        lines = list(read_lines(given))
        faults = [f"{given}:{line.number}: {line.fault}" for line in lines if line.fault]
        if faults:
            raise refusal(str(given), f"{_count(faults, 'problem')}.", faults)
        sentences = {_same(line.text) for line in lines if not is_blank(line.text)}
        return sentences, sentences
    records = [given[index] for index in range(len(given))]
    return {_same(record["source"]) for record in records}, {_same(text) for r in records for text in r["targets"]}


def _is_seen(source: str, targets: Iterable[str], seen: tuple[set[str], set[str]], side: str) -> bool:
    return (side != "target" and source in seen[0]) or (side != "source" and not seen[1].isdisjoint(targets))


def _count(things: Sequence[Any], what: str) -> str:
    return f"{len(things)} {what}{'s' if len(things) != 1 else ''}"
