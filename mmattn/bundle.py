"""A trained model as one folder: weights, tokenizer, preprocessing, generation defaults, model card, fingerprints.

    bundle.json       everything that is not a big array: configuration, settings, scores, the SHA-256 of each other
        file
    weights.npz       the weights, plain arrays named by the variables' paths
    tokenizer.model   the SentencePiece model
    README.md         the model card, written from bundle.json
    LICENSE, ...      whatever the maker adds

Loading treats a bundle as data from a stranger. Every file is compared with its fingerprint before it is used, the
model's configuration is checked before anything is made of it (`safe_config`), nothing is unpickled, no other file is
read and nothing is downloaded. The fingerprints find damage and mix-ups; they don't prove who made a bundle.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from mmattn import safe_config, weights
from mmattn.bundle_files import (
    FORMAT,
    FORMAT_VERSION,
    INFO,
    KIND,
    SPECIAL_IDS,
    TOKENIZER,
    WEIGHTS,
    BundleError,
    as_bytes,
    check_generation,
    own_version,
    plain,
    read_folder,
    replaceable,
    write_folder,
)
from mmattn.bundle_model import assign, build_model, copy_weights, generation_of, log_probs_of_probe, make_reader
from mmattn.card import card_text, description
from mmattn.preprocess.image import ImageReader
from mmattn.preprocess.text import Tokenizer

SHIPPED = Path(__file__).parent / "bundles"
_TOLERANCE = 0.02  # of a log-probability; TF32 and bfloat16 hardware stay below it, a wrong weight doesn't
_MIXED_TOLERANCE = 1.0  # the same, between a model in mixed precision and its copy in float32


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle. `info` is the content of bundle.json; `generation` its defaults for decoding."""

    model: Any
    tokenizer: Tokenizer
    reader: ImageReader
    generation: dict[str, Any]
    info: dict[str, Any]
    folder: Path

    def card(self) -> str:
        """The model card, as Markdown."""
        return card_text(self.info)

    def check(self) -> float:
        """Runs the model on the bundle's probe and compares with what it gave when it was saved.

        Returns:
            the largest difference of a log-probability.

        Raises:
            BundleError: it is above the bundle's tolerance: this machine computes something else than the maker's.
        """
        probe = self.info["check"]
        found = log_probs_of_probe(self.model, self.reader.size, self.tokenizer.vocabulary_size)
        columns = np.asarray(probe["ids"])  # (T, k)
        difference = float(np.abs(np.take_along_axis(found, columns, axis=1) - np.asarray(probe["log_probs"])).max())
        if not difference <= probe["tolerance"]:
            raise BundleError(
                f"{INFO}: the model's log-probabilities differ by {difference:.3g} from those at its saving; up to "
                f"{probe['tolerance']} is rounding. It was written by mmattn {self.info['mmattn_version']}, "
                f"Keras {self.info['keras_version']}"
            )
        return difference


def save_bundle(
    folder: str | os.PathLike[str],
    model: Any,
    tokenizer: Tokenizer,
    reader: ImageReader,
    generation: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
    weights_dtype: str = "float16",
    extra_files: Mapping[str, str | bytes] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
) -> Bundle:
    """Writes a bundle, atomically, once a model made anew from its content has proved to give the same outputs.

    The model runs in float32 wherever the bundle is loaded, also when it was trained in mixed precision.

    Args:
        folder: where. An existing bundle there is replaced as a whole; any other folder that isn't empty is refused,
            also a bundle to which other files were added.
        model: a built `mmattn.model.EncoderDecoder` whose encoder reads "pixels".
        generation: defaults for decoding; what is left out is taken from `mmattn.bundle_files.GENERATION`.
            "low_confidence" is the confidence below which a caption is marked.
        card: plain data for the model card: title, summary, data, terms, scores (a dict), command, limits (a list).
        weights_dtype: "float16", "float32" or "int8". What it costs is measured and noted in bundle.json ("weights").
        extra_files: further files by name, such as LICENSE and NOTICE: their text or bytes.
        custom_objects: classes of the model that are not registered with Keras; loading needs them again.

    Returns:
        the bundle as `load_bundle` would give it: its weights are those that were stored.

    Raises:
        BundleError: the parts don't fit each other, or the model can't be stored safely; nothing was written.
    """
    target = replaceable(folder)
    extra = as_bytes(extra_files)
    weights.check_dtype(weights_dtype)
    with _said_of():
        settings = generation_of(model, generation)
    config = safe_config.clean(keras.saving.serialize_keras_object(model))
    info: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "mmattn_version": own_version(),
        "keras_version": keras.__version__,
        "model": plain(safe_config.in_float32(config)),
        "reader": reader.get_config(),
        "tokenizer": {"vocabulary_size": tokenizer.vocabulary_size},
        "special_ids": SPECIAL_IDS,
        "generation": settings,
        "card": plain(dict(card or {})),
    }
    fresh = build_model(info, custom_objects)
    named = copy_weights(model, fresh)
    packed = weights.pack(named, weights_dtype)
    exact = log_probs_of_probe(fresh, reader.size, tokenizer.vocabulary_size)
    difference = float(np.abs(exact - log_probs_of_probe(model, reader.size, tokenizer.vocabulary_size)).max())
    if not difference <= (_TOLERANCE if info["model"] == config else _MIXED_TOLERANCE):
        raise BundleError(
            f"The model made anew from its configuration gives log-probabilities that differ by {difference:.3g}: "
            "its get_config or its order of weights leaves something out"
        )
    assign(fresh, weights.unpack(packed.arrays))
    stored = log_probs_of_probe(fresh, reader.size, tokenizer.vocabulary_size)
    columns = np.argsort(-stored, axis=1, kind="stable")[:, :8]
    info["weights"] = {
        "dtype": weights_dtype,
        "parameters": sum(int(array.size) for array in named.values()),
        "relative_error": packed.error,
        "log_prob_error": float(np.abs(stored - exact).max()),
        "arrays": weights.table(packed.arrays),
    }
    info["check"] = {
        "ids": columns.tolist(),
        "log_probs": np.take_along_axis(stored, columns, axis=1).round(6).tolist(),
        "tolerance": _TOLERANCE,
    }
    buffer = io.BytesIO()
    weights.write_npz(buffer, packed.arrays)
    write_folder(target, info, {WEIGHTS: buffer.getvalue(), TOKENIZER: tokenizer.model_bytes, **extra})
    info, _ = read_folder(target)
    return Bundle(fresh, tokenizer, reader, dict(info["generation"]), info, target)


def update_bundle(
    folder: str | os.PathLike[str],
    generation: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, str | bytes] | None = None,
) -> None:
    """Changes generation defaults, card entries or extra files of a bundle; weights and tokenizer stay byte for byte.

    Raises:
        BundleError: as `load_bundle`.
    """
    info, files = read_folder(Path(folder))
    with _said_of():
        info["generation"] = check_generation({**info["generation"], **(generation or {})})
    info["card"] = {**info["card"], **plain(dict(card or {}))}
    write_folder(replaceable(folder), info, files | as_bytes(extra_files))


def load_bundle(
    folder: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None, check: bool = False
) -> Bundle:
    """Loads a bundle; the weights as float32.

    Args:
        folder: the bundle's folder.
        custom_objects: classes by name, for a model that uses classes of yours that are not registered with Keras.
        check: also run the model on its probe (`Bundle.check`).

    Raises:
        BundleError: a file is missing, changed or damaged; the configuration names something that it may not; the
            format is newer than this version; the parts don't fit each other. The message names the file and the
            place.
    """
    info, files = read_folder(Path(folder))
    try:
        tokenizer = Tokenizer(files[TOKENIZER])
    except ValueError as error:
        raise BundleError(f"{TOKENIZER}: {error}") from error
    if tokenizer.vocabulary_size != info["tokenizer"]["vocabulary_size"]:
        raise BundleError(
            f"{TOKENIZER}: it has {tokenizer.vocabulary_size} tokens, not the "
            f"{info['tokenizer']['vocabulary_size']} of {INFO}"
        )
    try:
        arrays = weights.unpack(weights.read_npz(files[WEIGHTS], info["weights"]["arrays"]))
        model = build_model(info, custom_objects, most=sum(array.size for array in arrays.values()))
        assign(model, arrays)
    except weights.WeightsError as error:
        raise BundleError(f"{WEIGHTS}: {error}") from error
    with _said_of(f"{INFO}: "):
        generation = generation_of(model, info["generation"])
    bundle = Bundle(model, tokenizer, make_reader(info), generation, info, Path(folder))
    if check:
        bundle.check()
    return bundle


def describe(folder: str | os.PathLike[str]) -> str:
    """What a bundle is, in a few lines of text, after comparing every file with its fingerprint. Makes no model.

    Raises:
        BundleError: a file is missing, changed or damaged, or the format is newer than this version.
    """
    info, files = read_folder(Path(folder))
    make_reader(info)
    return description(
        info, {INFO: (Path(folder) / INFO).stat().st_size} | {name: len(data) for name, data in files.items()}
    )


def find_bundle(name_or_folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a bundle: a path, or the name of a shipped one; None or "default" is the shipped default.

    Raises:
        BundleError: there is none; the message lists those that are shipped.
    """
    shipped = {path.name: path for path in sorted(SHIPPED.glob("*")) if (path / INFO).is_file()}
    if name_or_folder in (None, "default"):
        if shipped:
            return shipped.get("default", next(iter(shipped.values())))
        raise BundleError("No bundle is shipped with this installation: give the folder of one")
    path = Path(name_or_folder)
    if os.path.isdir(path):  # not Path.is_dir, which raises for a name that is too long
        return path
    if str(name_or_folder) in shipped:
        return shipped[str(name_or_folder)]
    raise BundleError(
        f"{os.fspath(name_or_folder)!r} is neither a folder nor a shipped bundle. "
        f"Shipped: {', '.join(shipped) or 'none'}"
    )


@contextlib.contextmanager
def _said_of(file: str = "") -> Iterator[None]:
    """Makes settings that do not fit a `BundleError`."""
    try:
        yield
    except ValueError as error:
        raise BundleError(f"{file}{error}") from error
