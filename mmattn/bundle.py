"""A trained model as one folder: weights, tokenizer, preprocessing, generation defaults, model card, fingerprints.

A bundle is of one kind, such as a captioner or a translator, and holds what that kind needs (`mmattn.bundle_kinds`).

    bundle.json       everything that is not a big array: configuration, settings, scores, the SHA-256 of each other
        file
    weights.npz       the weights, plain arrays named by the variables' paths
    tokenizer.model   the SentencePiece model of the texts that it makes or fills in
    source_tokenizer.model   that of the source language, where a translator has two vocabularies
    README.md         the model card, written from bundle.json
    LICENSE, ...      whatever the maker adds

Loading treats a bundle as data from a stranger. Every file is compared with its fingerprint before it is used, the
model's configuration is checked before anything is made of it (`safe_config`), nothing is unpickled, no other file is
read and nothing is downloaded. The fingerprints find damage and mix-ups; they don't prove who made a bundle.
"""

from __future__ import annotations

import os
from pathlib import Path

from mmattn.bundle_files import INFO, BundleError, read_folder, read_info
from mmattn.bundle_kinds import KINDS
from mmattn.bundle_load import Bundle, load_bundle
from mmattn.bundle_model import make_reader
from mmattn.bundle_save import save_bundle, update_bundle
from mmattn.card import description

__all__ = ["Bundle", "BundleError", "describe", "find_bundle", "load_bundle", "save_bundle", "update_bundle"]

SHIPPED = Path(__file__).parent / "bundles"


def describe(folder: str | os.PathLike[str]) -> str:
    """What a bundle is, in a few lines of text, after comparing every file with its fingerprint. Makes no model.

    Raises:
        BundleError: a file is missing, changed or damaged, or the format is newer than this version.
    """
    info, files = read_folder(Path(folder))
    if "reader" in info:
        make_reader(info)
    return description(
        info, {INFO: (Path(folder) / INFO).stat().st_size} | {name: len(data) for name, data in files.items()}
    )


def find_bundle(name_or_folder: str | os.PathLike[str] | None = None, kind: str = "captioner") -> Path:
    """The folder of a bundle: a path, or the name of a shipped one; None or "default" is the shipped one of that kind.

    Raises:
        BundleError: there is none; the message lists those that are shipped.
    """
    shipped = {path.name: path for path in sorted(SHIPPED.glob("*")) if (path / INFO).is_file()}
    if name_or_folder in (None, "default"):
        for path in shipped.values():
            if read_info(path)["kind"] == kind:
                return path
        raise BundleError(
            f"No bundle of {KINDS[kind].name} is shipped with this installation: give the folder of one (--bundle)"
        )
    path = Path(name_or_folder)
    if os.path.isdir(path):  # not Path.is_dir, which raises for a name that is too long
        return path
    if str(name_or_folder) in shipped:
        return shipped[str(name_or_folder)]
    raise BundleError(
        f"{os.fspath(name_or_folder)!r} is neither a folder nor a shipped bundle. "
        f"Shipped: {', '.join(shipped) or 'none'}"
    )
