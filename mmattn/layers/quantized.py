"""Layers whose dense parts are still quantized when they come back from a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

_QUANTIZED = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Embedding)


class KeepsQuantization:
    """For a Keras layer or model that makes its parts itself: notes, when saved, which of them are quantized.

    Keras makes the parts anew when it loads the layer, in full precision, and then finds weights of other shapes in
    the file. Here they are quantized again before the weights come.
    """

    def get_build_config(self) -> Any:
        config = super().get_build_config()  # type: ignore[misc]
        parts = {
            path: {
                "mode": part.quantization_mode,
                "config": keras.saving.serialize_keras_object(getattr(part, "quantization_config", None)),
            }
            for path, part in _parts(self)
            if part.quantization_mode is not None
        }
        return {**config, "quantized": parts} if config and parts else config

    def build_from_config(self, config: Any) -> None:
        parts = (config or {}).get("quantized", {})
        super().build_from_config({k: v for k, v in (config or {}).items() if k != "quantized"})  # type: ignore[misc]
        for path, part in _parts(self):
            if path in parts and part.quantization_mode is None:
                part.quantize(parts[path]["mode"], config=keras.saving.deserialize_keras_object(parts[path]["config"]))


def _parts(layer: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The dense layers and tables inside a layer, by the names on the way to them."""
    for part in layer._flatten_layers(include_self=False, recursive=False):
        here = f"{path}/{part.name}" if path else part.name
        if isinstance(part, _QUANTIZED):
            yield here, part
        yield from _parts(part, here)
