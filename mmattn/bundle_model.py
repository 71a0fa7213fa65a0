"""The model of a bundle: made from its checked configuration, given its weights, tried on a fixed probe."""

from __future__ import annotations

import contextlib
import importlib
import math
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from mmattn import safe_config, weights
from mmattn.bundle_files import INFO, SPECIAL_IDS, BundleError, outputs
from mmattn.bundle_kinds import KINDS, check_generation
from mmattn.generation import longest, longest_source
from mmattn.preprocess.image import ImageReader


def kind_of(model: Any, reader: ImageReader | None) -> str:
    """What kind of bundle these parts make: see `mmattn.bundle_kinds.KINDS`.

    Raises:
        BundleError: the encoder sees pictures and there is no reader for them.
    """
    if reader is not None:
        return "classifier" if hasattr(model, "num_classes") else "captioner"
    if not hasattr(model, "encoder"):
        return "language_model"
    if hasattr(model.encoder, "grid"):
        raise BundleError(f"{model.encoder.name} sees pictures: give the reader that it was trained with")
    if hasattr(model, "num_classes"):
        raise BundleError("a bundle's classifier sees pictures: this one has no reader for them")
    return "translator" if hasattr(model, "decoder") else "masked_language_model"


def build_model(info: Mapping[str, Any], custom_objects: Mapping[str, Any] | None, most: int | None = None) -> Any:
    """The model with its variables, made the same way at saving and loading, so that their paths are the same."""
    _register_own_classes()
    try:
        model = safe_config.build(info["model"], input_shapes(info), custom_objects, most)
    except safe_config.ConfigError as error:
        raise BundleError(f"{INFO}: {error}") from error
    _check_vocabularies(info, model)
    paths = [v.path for v in model.weights]
    if len(set(paths)) != len(paths):
        twice = sorted({p for p in paths if paths.count(p) > 1})
        raise BundleError(
            f"{INFO}: two variables share a path: {', '.join(twice[:5])}. Give the model's layers names of their own"
        )
    return model


def input_shapes(info: Mapping[str, Any]) -> dict[str, tuple[int | None, ...]]:
    """The shapes of the model's inputs by name, None for what varies."""
    targets: dict[str, tuple[int | None, ...]] = {"target_ids": (None, None)}
    sources: dict[str, tuple[int | None, ...]] = {"source_ids": (None, None)}
    if "reader" in KINDS[info["kind"]].parts:
        sources = {"pixels": (None, *make_reader(info).size, 3)}
    if info["kind"] == "language_model":
        return targets
    return sources | (targets if info["kind"] in ("captioner", "translator") else {})


def _check_vocabularies(info: Mapping[str, Any], model: Any) -> None:
    """The tokenizer of each side has as many tokens as the model's part, where that says, and so with the classes."""
    if info["kind"] == "classifier":
        if model.num_classes != len(info["classes"]):
            raise BundleError(f"{INFO}: there are {len(info['classes'])} classes, the model has {model.num_classes}")
        return
    if info["kind"] == "masked_language_model":
        if model.encoder.vocabulary_size != outputs(info):
            raise BundleError(
                f"{INFO}: the tokenizer and the mask have {outputs(info)} tokens, the model's encoder "
                f"{model.encoder.vocabulary_size}"
            )
        return
    sides = [("the tokenizer", "tokenizer", "decoder")]
    if info["kind"] == "translator":
        own = "source_tokenizer" in info
        sides.append(
            ("the source tokenizer" if own else "the tokenizer", "source_tokenizer" if own else "tokenizer", "encoder")
        )
    for said, entry, part in sides:
        wanted = info[entry]["vocabulary_size"]
        found = getattr(getattr(model, part, None), "vocabulary_size", wanted)
        if found != wanted:
            raise BundleError(f"{INFO}: {said} has {wanted} tokens, the model's {part} {found}")


def generation_of(model: Any, changes: Mapping[str, Any] | None, kind: str = "captioner") -> dict[str, Any]:
    """The defaults for generating text with a model: those of its kind, with changes.

    Raises:
        ValueError: names the setting and what would fit.
    """
    defaults = dict(KINDS[kind].generation)
    target = "context_length" if kind == "language_model" else "max_length"  # a language model's window moves on
    limits = {target: longest(model) or math.inf, "max_source_length": longest_source(model)}
    limits = {name: most for name, most in limits.items() if name in defaults}
    defaults |= {name: int(min(defaults[name], most)) for name, most in limits.items()}
    settings = check_generation({**defaults, **(changes or {})}, kind)
    for name, most in limits.items():
        if settings[name] > most:
            what = "source" if name == "max_source_length" else "sequence"
            raise ValueError(f"generation.{name}={settings[name]} exceeds the model's longest {what}, {most}")
    return settings


@contextlib.contextmanager
def settings_of(file: str = "") -> Iterator[None]:
    """Makes settings that don't fit a `BundleError` about them."""
    try:
        yield
    except ValueError as error:
        raise BundleError(f"{file}{error}") from error


def _register_own_classes() -> None:
    """Imports every module of mmattn that defines layers, so that their registered names are known to Keras."""
    for package in ("mmattn.layers", "mmattn.encoders", "mmattn.decoders"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            importlib.import_module(module.name)
    for name in ("mmattn.model", "mmattn.heads"):
        importlib.import_module(name)


def assign(model: Any, arrays: Mapping[str, np.ndarray]) -> None:
    variables = {v.path: v for v in model.weights}
    problems = [f"{n} is missing" for n in variables.keys() - arrays.keys()]
    problems += [f"{n} is not in the model" for n in arrays.keys() - variables.keys()]
    problems += [
        f"{n} is {arrays[n].shape}, the model's {tuple(variables[n].shape)}"
        for n in variables.keys() & arrays.keys()
        if tuple(variables[n].shape) != arrays[n].shape
    ]
    if problems:
        raise weights.WeightsError(
            f"it does not fit the model: {'; '.join(sorted(problems)[:5])} ({len(problems)} in all)"
        )
    for name, variable in variables.items():
        variable.assign(arrays[name])


def copy_weights(source: Any, target: Any) -> dict[str, np.ndarray]:
    """Gives `target` the weights of `source`, in their order, and returns them by the paths of `target`."""
    shapes, wanted = ([tuple(v.shape) for v in model.weights] for model in (source, target))
    if shapes != wanted:
        raise BundleError(
            f"The model made anew from its configuration has {len(wanted)} weights, {len(shapes)} are given, or their "
            "shapes differ: its get_config leaves something out"
        )
    named = {new.path: old.numpy() for new, old in zip(target.weights, source.weights, strict=True)}
    assign(target, named)
    return named


def probe_inputs(info: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A batch of one, always the same: what of a fixed picture or source text and a fixed target the model reads."""
    wanted, inputs = input_shapes(info), {}
    if "target_ids" in wanted:
        inputs["target_ids"] = _probe_ids(info["tokenizer"], 5, 37, start=[SPECIAL_IDS["bos"]])
    if "pixels" in wanted:
        height, width = make_reader(info).size
        rows, columns, colors = np.ogrid[:height, :width, :3]
        inputs["pixels"] = ((rows * 5 + columns * 3 + colors * 85) % 256).astype("uint8")[None]
    elif info["kind"] == "masked_language_model":
        mask, ends = info["tokenizer"]["vocabulary_size"], [SPECIAL_IDS["eos"], SPECIAL_IDS["pad"]]
        inputs["source_ids"] = _probe_ids(info["tokenizer"], 5, 41, start=[mask], end=ends)
    elif "source_ids" in wanted:
        source = info.get("source_tokenizer", info["tokenizer"])
        inputs["source_ids"] = _probe_ids(source, 7, 41, end=[SPECIAL_IDS["eos"], SPECIAL_IDS["pad"]])
    return inputs


def _probe_ids(
    tokenizer: Mapping[str, Any], count: int, stride: int, start: Sequence[int] = (), end: Sequence[int] = ()
) -> np.ndarray:
    ordinary = max(1, tokenizer["vocabulary_size"] - 4)
    return np.array([[*start, *(4 + (stride * i) % ordinary for i in range(count)), *end]], "int32")


def log_probs_of_probe(model: Any, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The model's log-probabilities (T, V) of the probe, of a classifier (1, C)."""
    logits = keras.ops.convert_to_numpy(keras.ops.cast(model(dict(inputs), training=False), "float32"))
    logits = logits.reshape(-1, logits.shape[-1]).astype("float64")
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def make_reader(info: Mapping[str, Any]) -> ImageReader:
    try:
        reader = ImageReader.from_config(info["reader"])
    except (TypeError, ValueError) as error:
        raise BundleError(f"{INFO}: reader: {error}") from error
    if max(reader.size) > 4096:
        raise BundleError(f"{INFO}: reader.size={reader.size} is above 4096")
    return reader
