"""The model of a bundle: made from its checked configuration, given its weights, tried on a fixed probe."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from mmattn import safe_config, weights
from mmattn.bundle_files import GENERATION, INFO, SPECIAL_IDS, BundleError, check_generation
from mmattn.preprocess.image import ImageReader


def build_model(info: Mapping[str, Any], custom_objects: Mapping[str, Any] | None, most: int | None = None) -> Any:
    """The model with its variables, made the same way at saving and loading, so that their paths are the same."""
    _register_own_classes()
    height, width = make_reader(info).size
    shapes = {"pixels": (None, height, width, 3), "target_ids": (None, None)}
    try:
        model = safe_config.build(info["model"], shapes, custom_objects, most)
    except safe_config.ConfigError as error:
        raise BundleError(f"{INFO}: {error}") from error
    wanted = info["tokenizer"]["vocabulary_size"]
    found = getattr(getattr(model, "decoder", None), "vocabulary_size", wanted)
    if found != wanted:
        raise BundleError(f"{INFO}: the tokenizer has {wanted} tokens, the model {found}")
    paths = [v.path for v in model.weights]
    if len(set(paths)) != len(paths):
        twice = sorted({p for p in paths if paths.count(p) > 1})
        raise BundleError(
            f"{INFO}: two variables share a path: {', '.join(twice[:5])}. Give the model's layers names of their own"
        )
    return model


def longest(model: Any) -> float | None:
    """The most tokens that the model's decoder can make; infinity for one without a limit, None if it doesn't say."""
    decoder: Any = getattr(model, "decoder", None)
    if not hasattr(decoder, "max_length"):
        return None
    return math.inf if decoder.max_length is None else decoder.max_length


def generation_of(model: Any, changes: Mapping[str, Any] | None) -> dict[str, Any]:
    """The defaults for decoding with a model: `GENERATION` with changes.

    Raises:
        ValueError: names the setting and what would fit.
    """
    most = longest(model) or math.inf
    defaults = GENERATION | {"max_length": int(min(GENERATION["max_length"], most))}
    settings = check_generation({**defaults, **(changes or {})})
    if settings["max_length"] > most:
        raise ValueError(f"generation.max_length={settings['max_length']} exceeds the model's longest sequence, {most}")
    return settings


def _register_own_classes() -> None:
    """Imports every module of mmattn that defines layers, so that their registered names are known to Keras."""
    for package in ("mmattn.layers", "mmattn.encoders", "mmattn.decoders"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            importlib.import_module(module.name)
    importlib.import_module("mmattn.model")


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


def log_probs_of_probe(model: Any, size: tuple[int, int], vocabulary_size: int) -> np.ndarray:
    """Log-probabilities (T, V) of a fixed picture and a fixed text."""
    rows, columns, colors = np.ogrid[: size[0], : size[1], :3]
    pixels = ((rows * 5 + columns * 3 + colors * 85) % 256).astype("uint8")
    ids = [SPECIAL_IDS["bos"]] + [4 + (37 * i) % max(1, vocabulary_size - 4) for i in range(5)]
    inputs = {"pixels": pixels[None], "target_ids": np.array([ids], "int32")}
    logits = keras.ops.convert_to_numpy(keras.ops.cast(model(inputs, training=False), "float32"))[0].astype("float64")
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
