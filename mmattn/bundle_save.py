"""A bundle, written to its folder once a model made anew from it has proved to give the same outputs."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from mmattn import safe_config, weights
from mmattn.bundle_files import (
    FORMAT,
    SOURCE_TOKENIZER,
    SPECIAL_IDS,
    TOKENIZER,
    WEIGHTS,
    BundleError,
    as_bytes,
    own_version,
    plain,
    read_folder,
    replaceable,
    write_folder,
)
from mmattn.bundle_kinds import KINDS, check_generation
from mmattn.bundle_load import Bundle
from mmattn.bundle_model import (
    assign,
    build_model,
    copy_weights,
    generation_of,
    kind_of,
    log_probs_of_probe,
    probe_inputs,
    settings_of,
)
from mmattn.preprocess.image import ImageReader
from mmattn.preprocess.text import Tokenizer

_TOLERANCE = 0.02  # of a log-probability; TF32 and bfloat16 hardware stay below it, a wrong weight doesn't
_MIXED_TOLERANCE = 1.0  # the same, between a model in mixed precision and its copy in float32


def save_bundle(
    folder: str | os.PathLike[str],
    model: Any,
    tokenizer: Tokenizer | None,
    reader: ImageReader | None = None,
    generation: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
    weights_dtype: str = "float16",
    extra_files: Mapping[str, str | bytes] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    source_tokenizer: Tokenizer | None = None,
    classes: Sequence[str] = (),
) -> Bundle:
    """Writes a bundle, atomically, once a model made anew from its content has proved to give the same outputs.

    The model runs in float32 wherever the bundle is loaded, also when it was trained in mixed precision.

    Args:
        folder: where. An existing bundle there is replaced as a whole; any other folder that isn't empty is refused,
            also a bundle to which other files were added.
        model: built: an `mmattn.model.EncoderDecoder` whose encoder reads "pixels" (with a `reader`: a captioner) or
            "source_ids" (a translator), an `mmattn.model.LanguageModel`, or an `EncoderClassifier` or
            `MaskedLanguageModel` of `mmattn.heads`.
        tokenizer: of the texts that the model makes; None for a classifier.
        reader: reads a photo as a captioner or classifier was trained on; None for text.
        generation: defaults for decoding; what is left out is taken from `mmattn.bundle_kinds.KINDS`.
            "low_confidence" is the confidence below which a caption is marked.
        card: plain data for the model card: title, summary, source_language, target_language, data, terms, scores (a
            dict), command, limits (a list).
        weights_dtype: "float16", "float32" or "int8". What it costs is measured and noted in bundle.json ("weights").
        extra_files: further files by name, such as LICENSE and NOTICE: their text or bytes.
        custom_objects: classes of the model that are not registered with Keras; loading needs them again.
        source_tokenizer: of a translator's source language. None: one vocabulary for both sides.
        classes: of a classifier: their names, in the order of its outputs.

    Returns:
        the bundle as `load_bundle` would give it: its weights are those that were stored.

    Raises:
        BundleError: the parts don't fit each other, or the model can't be stored safely; nothing was written.
    """
    target = replaceable(folder)
    extra = as_bytes(extra_files)
    weights.check_dtype(weights_dtype)
    kind, source = kind_of(model, reader), _source_of(tokenizer, source_tokenizer)
    _check_parts(kind, tokenizer=tokenizer, reader=reader, classes=classes or None)
    if source is not None and kind != "translator":
        raise BundleError(f"A source tokenizer belongs to a translator, and these parts make {KINDS[kind].name}")
    with settings_of():
        settings = generation_of(model, generation, kind)
    config = safe_config.clean(keras.saving.serialize_keras_object(model))
    info: dict[str, Any] = {
        "format": FORMAT,
        "format_version": KINDS[kind].format_version,
        "kind": kind,
        "mmattn_version": own_version(),
        "keras_version": keras.__version__,
        "model": plain(safe_config.in_float32(config)),
        **({} if reader is None else {"reader": reader.get_config()}),
        **({} if tokenizer is None else {"tokenizer": _entry(tokenizer, kind)}),
        **({"classes": [str(name) for name in classes]} if classes else {}),
        **({} if source is None else {"source_tokenizer": _entry(source, kind)}),
        "special_ids": SPECIAL_IDS,
        "generation": settings,
        "card": plain(dict(card or {})),
    }
    fresh = build_model(info, custom_objects)
    named = copy_weights(model, fresh)
    packed = weights.pack(named, weights_dtype)
    probe = probe_inputs(info)
    exact = log_probs_of_probe(fresh, probe)
    difference = float(np.abs(exact - log_probs_of_probe(model, probe)).max())
    if not difference <= (_TOLERANCE if info["model"] == config else _MIXED_TOLERANCE):
        raise BundleError(
            f"The model made anew from its configuration gives log-probabilities that differ by {difference:.3g}: "
            "its get_config or its order of weights leaves something out"
        )
    assign(fresh, weights.unpack(packed.arrays))
    stored = log_probs_of_probe(fresh, probe)
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
    files = {WEIGHTS: buffer.getvalue()}
    files |= {} if tokenizer is None else {TOKENIZER: tokenizer.model_bytes}
    files |= {} if source is None else {SOURCE_TOKENIZER: source.model_bytes}
    write_folder(target, info, files | extra)
    info, _ = read_folder(target)
    return Bundle(fresh, tokenizer, reader, dict(info["generation"]), info, target, source)


def _check_parts(kind: str, **given: Any) -> None:
    """The kind has a use for each part that is given, and gets each that it needs."""
    needed = KINDS[kind].parts
    for part, value in given.items():
        if (value is None) == (part in needed):
            wrong = "is missing" if value is None else "does not belong to it"
            raise BundleError(f"The bundle of {KINDS[kind].name} holds {' and '.join(needed)}: {part} {wrong}")


def _source_of(tokenizer: Tokenizer | None, source_tokenizer: Tokenizer | None) -> Tokenizer | None:
    """The source's own tokenizer, None where it is the same."""
    same = (
        tokenizer is not None and source_tokenizer is not None and source_tokenizer.model_bytes == tokenizer.model_bytes
    )
    return None if same else source_tokenizer


def _entry(tokenizer: Tokenizer, kind: str) -> dict[str, Any]:
    """What bundle.json says of a tokenizer; format 1 only its size."""
    said = {"vocabulary_size": tokenizer.vocabulary_size}
    more = () if kind == "captioner" else ("normalization", "model_type")
    return said | {name: getattr(tokenizer, name) for name in more if isinstance(getattr(tokenizer, name, None), str)}


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
    with settings_of():
        info["generation"] = check_generation({**info["generation"], **(generation or {})}, info["kind"])
    info["card"] = {**info["card"], **plain(dict(card or {}))}
    write_folder(replaceable(folder), info, files | as_bytes(extra_files))
