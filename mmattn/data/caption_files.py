"""Reading caption files into entries, one an image, each with the place in the file that it came from."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_SYNONYMS = (("train", "training"), ("valid", "val", "dev", "validation"), ("test", "testing"))


class CaptionFileError(ValueError):
    """A caption file breaks a rule; the message names the file, the line or entry, the rule and what came."""


class Entry(NamedTuple):
    """What a caption file says of one image: where it says so, the image's name, its raw captions and its split."""

    place: str
    image: str
    captions: list[str]
    split: str | None = None
    fault: str | None = None  # why this entry can be of no use, in words


def read_text(file: Path) -> str:
    """Read a UTF-8 file; an undecodable byte is an error with its line."""
    if not file.is_file():
        raise CaptionFileError(f"{file}: no such file.")
    raw = file.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise CaptionFileError(f"{file}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}).") from error


def csv_rows(file: Path, delimiter: str, quotes: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a CSV file as dicts; every row must have as many fields as the header."""
    reader = csv.reader(
        io.StringIO(read_text(file), newline=""),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        strict=True,
    )
    header: list[str] | None = None
    try:
        for row in reader:
            if header is None:
                header = row
            elif row:
                place = f"{file}, line {reader.line_num}"
                if len(row) != len(header):
                    raise CaptionFileError(
                        f"{place}: {len(row)} fields where the header has {len(header)} ({', '.join(header)}). "
                        f"A field with {delimiter!r} in it needs double quotes."
                    )
                if delimiter == "\t" and any("\n" in field for field in row):
                    raise CaptionFileError(
                        f"{place}: a quoted field that ends here goes over several lines, which TSV does not allow. "
                        "quotes=False reads the quotes as ordinary characters."
                    )
                yield place, dict(zip(header, row, strict=True))
    except csv.Error as error:
        hint = "quotes=False reads quotes as ordinary characters."
        raise CaptionFileError(f"{file}, line {reader.line_num}: not CSV ({error}). {hint}") from error


def row_entries(
    rows: Sequence[tuple[str, Any]], captions_field: str, image_field: str, split_field: str
) -> list[Entry]:
    """Turn rows into one entry an image: rows with one caption text are joined, rows with a list stand alone."""
    entries: dict[str, Entry] = {}
    alone: set[str] = set()
    for place, row in rows:
        if not isinstance(row, dict):
            raise CaptionFileError(
                f"{place}: an object with {image_field!r} and {captions_field!r} is needed, got {str(row)[:60]!r}."
            )
        for field in (image_field, captions_field):
            if field not in row:
                raise CaptionFileError(f"{place}: no field {field!r}. Fields here: {', '.join(map(str, row))}.")
        name, given, split = row[image_field], row[captions_field], row.get(split_field)
        texts = [given] if isinstance(given, str) else given
        _check_name(place, name)
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise CaptionFileError(
                f"{place}: the captions of {name} must be a text or a list of texts, got {str(given)[:60]!r}."
            )
        before = entries.get(name)
        if before is not None and (isinstance(given, list) or name in alone):
            raise CaptionFileError(f"{place}: {name} again, which has its captions at {before.place}.")
        if before is not None and before.split != split:
            raise CaptionFileError(
                f"{place}: {name} is in split {split!r} here and in {before.split!r} at {before.place}."
            )
        if isinstance(given, list):
            alone.add(name)
        if before is None:
            entries[name] = Entry(place, name, list(texts), split)
        else:
            before.captions.extend(texts)
    return list(entries.values())


def _check_name(place: str, name: Any) -> None:
    if not isinstance(name, str) or not name.strip() or "\n" in name:
        raise CaptionFileError(f"{place}: the image's name must be a text in one line, got {name!r}.")


def coco_entries(file: Path, data: Any) -> list[Entry]:
    """Join the official COCO layout's images and annotations."""
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in ("images", "annotations")):
        raise CaptionFileError(
            f"{file}: COCO's layout is an object with the lists 'images' and 'annotations', or a list of images."
        )
    entries: dict[Any, Entry] = {}
    names: dict[str, str] = {}
    for number, image in enumerate(data["images"]):
        place = f"{file}, images[{number}]"
        key, name = (_field(place, image, field) for field in ("id", "file_name"))
        _check_name(place, name)
        for taken, what in ((key in entries, f"id {key}"), (name in names, f"file_name {name}")):
            if taken:
                before = entries[key].place if key in entries else names[name]
                raise CaptionFileError(f"{place}: {what} again, which is {before} already.")
        names[name] = place
        entries[key] = Entry(place, name, [], image.get("split"))
    lost = []
    for number, annotation in enumerate(data["annotations"]):
        place = f"{file}, annotations[{number}]"
        key, text = (_field(place, annotation, field) for field in ("image_id", "caption"))
        if not isinstance(text, str):
            raise CaptionFileError(f"{place}: the caption must be a text, got {text!r}.")
        if key in entries:
            entries[key].captions.append(text)
        else:
            lost.append(Entry(place, "", [], fault=f"caption of image_id {key}, which 'images' does not list"))
    return [*entries.values(), *lost]


def flickr_tokens(file: Path) -> dict[str, tuple[int, list[str]]]:
    """Read lines `name#k<TAB>caption` into name -> (line of the first, captions)."""
    captions: dict[str, tuple[int, list[str]]] = {}
    seen: dict[str, int] = {}
    for number, raw in enumerate(read_text(file).split("\n"), 1):
        line = raw.rstrip("\r")
        if not line.strip():
            continue
        token, tab, text = line.partition("\t")
        name, hash_sign, _ = token.rpartition("#")
        if not tab or not hash_sign or not name:
            raise CaptionFileError(f"{file}, line {number}: 'name#k<TAB>caption' is needed, got {line[:60]!r}.")
        if token in seen:
            raise CaptionFileError(f"{file}, line {number}: {token} again, which is line {seen[token]} already.")
        seen[token] = number
        captions.setdefault(name, (number, []))[1].append(text)
    return captions


def flickr_list(folder: Path, split: str) -> list[tuple[str, str]]:
    """Read a split's list of image names as (place, name)."""
    words = {"train": "train", "valid": "dev", "test": "test"}
    word = next((words[names[0]] for names in _SYNONYMS if split in names), split)
    lists = sorted(folder.glob("*.[tdv]*Images.txt"))
    file = next((path for path in lists if path.name.endswith(f".{word}Images.txt")), None)
    if file is None:
        have = ", ".join(path.name for path in lists) or "none"
        raise CaptionFileError(f"{folder}: no list *.{word}Images.txt for split {split!r}. Lists here: {have}.")
    names: dict[str, str] = {}
    for number, line in enumerate(read_text(file).split("\n"), 1):
        name, place = line.strip(), f"{file}, line {number}"
        if name in names:
            raise CaptionFileError(f"{place}: {name} again, which is {names[name]} already.")
        if name:
            names[name] = place
    return [(place, name) for name, place in names.items()]


def of_split(file: Path, entries: list[Entry], split: str | None) -> list[Entry]:
    """Keep the entries of a split, by its name or a synonym of it."""
    if split is None:
        return entries
    names = next((names for names in _SYNONYMS if split in names), (split,))
    chosen = [entry for entry in entries if entry.split in names]
    if not chosen:
        have = ", ".join(f"{name} ({count})" for name, count in Counter(str(entry.split) for entry in entries).items())
        raise CaptionFileError(
            f"{file}: no entry has split {split!r}. Splits in it, with their entries: {have or 'no entries'}."
        )
    return chosen


def _field(place: str, row: Any, field: str) -> Any:
    if not isinstance(row, dict) or field not in row:
        raise CaptionFileError(f"{place}: no field {field!r}, got {str(row)[:60]!r}.")
    return row[field]
