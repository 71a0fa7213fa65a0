"""A bundle, read from its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmattn import weights
from mmattn.bundle_files import INFO, WEIGHTS, BundleError, read_folder, tokenizer_files
from mmattn.bundle_kinds import KINDS, check_generation
from mmattn.bundle_model import (
    assign,
    build_model,
    generation_of,
    log_probs_of_probe,
    make_reader,
    probe_inputs,
    settings_of,
)
from mmattn.card import card_text
from mmattn.preprocess.text import Tokenizer


@dataclass(frozen=True)
class Bundle:
    """A loaded bundle.

    Attributes:
        model: an `mmattn.model.EncoderDecoder` or `LanguageModel`, or one of `mmattn.heads`.
        tokenizer: of the texts that it makes; of the source too, where there is one vocabulary. A classifier's is None.
        reader: a captioner's or classifier's `ImageReader`; None for other kinds.
        generation: defaults for decoding.
        info: the content of bundle.json.
        source_tokenizer: a translator's, if it has one of its own; else None.
    """

    model: Any
    tokenizer: Any
    reader: Any
    generation: dict[str, Any]
    info: dict[str, Any]
    folder: Path
    source_tokenizer: Tokenizer | None = None

    @property
    def kind(self) -> str:
        """One of `mmattn.bundle_kinds.KINDS`."""
        return self.info["kind"]

    @property
    def classes(self) -> tuple[str, ...]:
        """A classifier's, in the order of its outputs; none for other kinds."""
        return tuple(self.info.get("classes", ()))

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
        found = log_probs_of_probe(self.model, probe_inputs(self.info))
        columns = np.asarray(probe["ids"])  # (T, k)
        difference = float(np.abs(np.take_along_axis(found, columns, axis=1) - np.asarray(probe["log_probs"])).max())
        if not difference <= probe["tolerance"]:
            raise BundleError(
                f"{INFO}: the model's log-probabilities differ by {difference:.3g} from those at its saving; up to "
                f"{probe['tolerance']} is rounding. It was written by mmattn {self.info['mmattn_version']}, "
                f"Keras {self.info['keras_version']}"
            )
        return difference


def load_bundle(
    folder: str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    check: bool = False,
    kind: str | None = None,
) -> Bundle:
    """Loads a bundle; the weights as float32.

    Args:
        folder: the bundle's folder.
        custom_objects: classes by name, for a model that uses classes of yours that are not registered with Keras.
        check: also run the model on its probe (`Bundle.check`).
        kind: what it must be; None takes any.

    Raises:
        BundleError: a file is missing, changed or damaged; the configuration names something that it may not; the
            format is newer than this version; the parts don't fit each other; it is of another kind. The message
            names the file and the place.
    """
    info, files = read_folder(Path(folder))
    if kind is not None and kind != info["kind"]:
        found = KINDS[info["kind"]]
        raise BundleError(
            f"{INFO}: this is the bundle of {found.name}, and {KINDS[kind].name} is needed. "
            f"mmattn.{found.opened_by}.load opens it"
        )
    tokenizer, source, *_ = *(_tokenizer(info, file, files[file]) for file in tokenizer_files(info)), None, None
    try:
        arrays = weights.unpack(weights.read_npz(files[WEIGHTS], info["weights"]["arrays"]))
        model = build_model(info, custom_objects, most=sum(array.size for array in arrays.values()))
        assign(model, arrays)
    except weights.WeightsError as error:
        raise BundleError(f"{WEIGHTS}: {error}") from error
    with settings_of(f"{INFO}: "):
        generation = generation_of(model, check_generation(info["generation"], info["kind"]), info["kind"])
    reader = make_reader(info) if "reader" in KINDS[info["kind"]].parts else None
    bundle = Bundle(model, tokenizer, reader, generation, info, Path(folder), source)
    if check:
        bundle.check()
    return bundle


def _tokenizer(info: Mapping[str, Any], file: str, data: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer(data)
    except ValueError as error:
        raise BundleError(f"{file}: {error}") from error
    wanted = info[file.removesuffix(".model")]["vocabulary_size"]
    if tokenizer.vocabulary_size != wanted:
        raise BundleError(f"{file}: it has {tokenizer.vocabulary_size} tokens, not the {wanted} of {INFO}")
    return tokenizer
