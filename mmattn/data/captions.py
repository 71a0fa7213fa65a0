"""Photos in a folder with their captions in a file: Flickr8k's own layout, COCO's JSON, JSONL, CSV and TSV.

A source is random access over records `{"image": path, "captions": [str, ...], "id": name in the file, "split": str or
None}`, one record an image, in the order of the file. The photos themselves are not opened here.

Rules for all formats:

- A file that cannot be read as its format says (bad JSON, a missing field, a caption that is no text, the same image
  twice where the format has one entry an image) is refused with one `CaptionFileError` that names the file and the
  line or the entry.
- Three faults are common in big collections: an image file that is missing, an empty caption, an image without any
  caption (or a caption without an image). `problems="error"` counts them all and refuses with the count and the first
  few; `problems="skip"` leaves them out and keeps one sentence about each in `source.skipped`.
- Blanks in and around a caption become single blanks. Equal captions of one image are kept: they are the annotators'
  words.
- An image name is a path relative to the folder of the caption file, to `images` inside or beside it, or to `images=`
  where that is given.
- Splits may be called by a synonym: train/training, valid/val/dev/validation, test/testing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmattn.data.caption_files import (
    CaptionFileError,
    Entry,
    coco_entries,
    csv_rows,
    flickr_list,
    flickr_tokens,
    of_split,
    read_text,
    row_entries,
)

__all__ = ["CaptionFileError", "CaptionSource", "CocoSource", "CsvSource", "Flickr8kSource", "JsonlSource"]

_SHOWN = 5  # how many faults an error lists


class CaptionSource:
    """Random access to checked records; the formats below read their file and hand their entries to it.

    Args:
        path: The caption file, for messages and as the place that image names are relative to.
        entries: One entry an image.
        split: Keep only the images of this split. None keeps all.
        images: Folder that image names are relative to.
        problems: "error" or "skip": what happens to missing files, empty captions and images without captions.

    Attributes:
        skipped: One sentence for each thing left out; empty with problems="error".
    """

    def __init__(
        self,
        path: Path,
        entries: Iterable[Entry],
        split: str | None = None,
        images: str | Path | None = None,
        problems: str = "error",
    ):
        if problems not in ("error", "skip"):
            raise ValueError(f"problems={problems!r} is unknown. It is 'error' or 'skip'.")
        chosen = of_split(path, list(entries), split)
        folders = _image_folders(path, images)
        self.skipped: list[str] = []
        self._records: list[dict[str, Any]] = []
        for entry in chosen:
            texts = [" ".join(text.split()) for text in entry.captions]
            kept = [text for text in texts if text]
            self.skipped += [f"{entry.place}: empty caption of {entry.image}"] * (len(texts) - len(kept))
            found = next((candidate for folder in folders if (candidate := folder / entry.image).is_file()), None)
            if entry.fault:
                self.skipped.append(f"{entry.place}: {entry.fault}")
            elif found is None:
                self.skipped.append(f"{entry.place}: no image file {entry.image}")
            elif not kept:
                self.skipped.append(f"{entry.place}: {entry.image} has no caption")
            else:
                self._records.append({"image": str(found), "captions": kept, "id": entry.image, "split": entry.split})
        where = f"{path}{f' (split {split})' if split else ''}"
        looked = f"Image names are looked up in: {', '.join(map(str, folders))}."
        if self.skipped and problems == "error":
            rule = f"{len(self.skipped)} problems. problems='skip' leaves these out."
        elif not self._records:
            rule = f"no usable image with a caption among {len(chosen)} entries."
        else:
            return
        shown = "".join(f"\n  {line}" for line in self.skipped[:_SHOWN])
        more = f"\n  and {len(self.skipped) - _SHOWN} more" if len(self.skipped) > _SHOWN else ""
        raise CaptionFileError(f"{where}: {rule} {looked}{shown}{more}")

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._records[index]
        return {**record, "captions": list(record["captions"])}


class JsonlSource(CaptionSource):
    """JSON lines, one image or one caption a line: `{"image": name, "captions": [..]}`, or a text instead of the list.

    With one caption a line (a text, not a list) the lines of an image are joined; a second list for the same image is
    an error.

    Args:
        path: The file, UTF-8.
        split: Keep the lines whose `split_field` says this split. None keeps all.
        captions_field: The field with the captions, for example "en" where a file has several languages.
        image_field: The field with the image's name.
        split_field: The field with the split's name.
        images, problems: As in `CaptionSource`.
    """

    def __init__(
        self,
        path: str | Path,
        split: str | None = None,
        captions_field: str = "captions",
        image_field: str = "image",
        split_field: str = "split",
        images: str | Path | None = None,
        problems: str = "error",
    ):
        file = Path(path)
        rows = []
        for number, line in enumerate(read_text(file).split("\n"), 1):
            if line.strip():
                place = f"{file}, line {number}"
                try:
                    rows.append((place, json.loads(line)))
                except json.JSONDecodeError as error:
                    raise CaptionFileError(f"{place}: not JSON ({error.msg} at column {error.colno}).") from error
        entries = row_entries(rows, captions_field, image_field, split_field)
        super().__init__(file, entries, split, images, problems)


class CsvSource(CaptionSource):
    """A CSV or TSV file with a header and one caption a row; the rows of an image are joined.

    Args:
        path: The file, UTF-8 with or without a byte order mark.
        split: Keep the rows whose `split_field` column says this split. None keeps all.
        captions_field: The column with the caption.
        image_field: The column with the image's name.
        split_field: The column with the split's name.
        images, problems: As in `CaptionSource`.
        delimiter: Default: a tab where the file's name ends in .tsv or .tab, else a comma.
        quotes: A field may stand in double quotes. False: a double quote is an ordinary character.
    """

    def __init__(
        self,
        path: str | Path,
        split: str | None = None,
        captions_field: str = "caption",
        image_field: str = "image",
        split_field: str = "split",
        images: str | Path | None = None,
        problems: str = "error",
        delimiter: str | None = None,
        quotes: bool = True,
    ):
        file = Path(path)
        tabs = file.suffix.lower() in (".tsv", ".tab")
        rows = list(csv_rows(file, delimiter or ("\t" if tabs else ","), quotes))
        super().__init__(file, row_entries(rows, captions_field, image_field, split_field), split, images, problems)


class CocoSource(CaptionSource):
    """COCO's captions: the official `{"images": [..], "annotations": [..]}`, or a list of `{"image": name, "captions":
    [..]}`.

    The official files hold one split each, so `split` only applies to entries that have a `split` (or `coco_split`)
    field.

    Args:
        path: The JSON file, for example annotations/captions_train2017.json.
        split: Keep the entries of this split. None keeps all.
        images, problems: As in `CaptionSource`; give `images` for the official layout (train2017, val2017).
    """

    def __init__(
        self, path: str | Path, split: str | None = None, images: str | Path | None = None, problems: str = "error"
    ):
        file = Path(path)
        try:
            data = json.loads(read_text(file))
        except json.JSONDecodeError as error:
            raise CaptionFileError(
                f"{file}, line {error.lineno}: not JSON ({error.msg} at column {error.colno})."
            ) from error
        if isinstance(data, list):
            split_field = "coco_split" if data and isinstance(data[0], dict) and "coco_split" in data[0] else "split"
            rows = [(f"{file}, entry {number}", row) for number, row in enumerate(data)]
            entries = row_entries(rows, "captions", "image", split_field)
        else:
            entries = coco_entries(file, data)
        super().__init__(file, entries, split, images, problems)


class Flickr8kSource(CaptionSource):
    """Flickr8k (and Flickr30k) as published: a token file `name.jpg#k<TAB>caption` and one list of image names a split.

    Args:
        folder: Holds the token file and the lists, itself or in `text` or `Flickr8k_text`.
        split: "train", "valid" (Flickr8k calls it dev) or "test". None takes all images of the token file.
        images: Folder of the photos. Default: `images`, `Images`, `Flicker8k_Dataset` or `Flickr8k_Dataset` in or
            beside `folder`.
        tokens: Name of the token file, for example Flickr8k.arabic.full.txt.
        problems: As in `CaptionSource`; a listed image without captions counts as an image without captions.
    """

    def __init__(
        self,
        folder: str | Path,
        split: str | None = None,
        images: str | Path | None = None,
        tokens: str = "Flickr8k.token.txt",
        problems: str = "error",
    ):
        root = Path(folder)
        places = [root, root / "text", root / "Flickr8k_text"]
        file = next((place / tokens for place in places if (place / tokens).is_file()), None)
        if file is None:
            raise CaptionFileError(f"{root}: no {tokens} in {', '.join(map(str, places))}.")
        captions = flickr_tokens(file)
        if split is None:
            entries = [Entry(f"{file}, line {line}", name, texts) for name, (line, texts) in captions.items()]
        else:
            entries = [
                Entry(place, name, captions.get(name, (0, []))[1], split)
                for place, name in flickr_list(file.parent, split)
            ]
        super().__init__(file, entries, split, images, problems)


def _image_folders(file: Path, images: str | Path | None) -> list[Path]:
    """The folders in which an image name may lie, in the order in which they are tried."""
    if images is not None:
        if not Path(images).is_dir():
            raise CaptionFileError(f"images={str(images)!r}: no such folder.")
        return [Path(images)]
    names = ("images", "Images", "Flicker8k_Dataset", "Flickr8k_Dataset")
    found = [base / name for base in (file.parent, file.parent.parent) for name in names if (base / name).is_dir()]
    return [file.parent, *found]
