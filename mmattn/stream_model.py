"""A language model in training on streams of text: what it remembers of each row goes from batch to batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_dict
from mmattn.layers.quantized import KeepsQuantization
from mmattn.model import LanguageModel


@keras.saving.register_keras_serializable(package="mmattn")
class StreamModel(KeepsQuantization, keras.Model):
    """Trains a language model whose decoder remembers, on batches such as those of `mmattn.data.streams`.

    Between the batches the decoder's state lies in variables that are not trained. So a checkpoint of this model has
    it, and a run that goes on from there remembers what it would have. It is no weight: a bundle holds `model` alone.

    Only a call in training moves the state on. To score a text meanwhile, hand `model.read` a state of its own. A row
    with a number that is not finite, as an overflow in float16 leaves, is forgotten: it would spoil all that follows.

    Args:
        model: a `LanguageModel` whose decoder has `empty_state` and takes `state` and `reset`, as
            `mmattn.decoders.TransformerXLDecoder` does.
        batch_size: B, the rows of each batch.

    Call arguments:
        inputs: a dict with "target_ids" int `(B, T)`, and "reset" boolean `(B,)`: True = the row begins anew.

    Returns:
        logits `(B, T, V)`.

    Raises:
        ValueError: for a decoder that remembers nothing.

    Example:
        >>> import numpy as np
        >>> from mmattn.decoders import TransformerXLDecoder
        >>> decoder = TransformerXLDecoder(20, 8, num_layers=1, num_heads=2, memory_length=4, cross_attention=False)
        >>> model = StreamModel(LanguageModel(decoder), batch_size=2)
        >>> inputs = {"target_ids": np.array([[2, 5, 7], [2, 6, 9]]), "reset": np.array([True, True])}
        >>> tuple(model(inputs, training=True).shape), np.asarray(model.state()["lengths"]).tolist()
        ((2, 3, 20), [3, 3])

    Source:
        Dai et al. 2019, section 3.2.
    """

    def __init__(self, model: LanguageModel, batch_size: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not hasattr(model.decoder, "empty_state"):
            raise ValueError(
                f"{model.decoder.name} remembers nothing from batch to batch: decoder=transformer_xl does."
            )
        self.model = model
        self.batch_size = batch_size

    def build(self, input_shape: Any) -> None:
        """Makes all variables. `input_shape`: a dict with the shape of "target_ids"."""
        check_dict(self.name, input_shape, "target_ids")
        if not self.model.built:
            self.model.build({"target_ids": input_shape["target_ids"]})
        form = self.model.decoder.empty_state(self.batch_size)
        plain = keras.tree.map_structure(lambda array: None, form)
        self._pack = partial(keras.tree.pack_sequence_as, plain)  # as an attribute, Keras would make the dict its own
        self._held = [
            self.add_weight(
                array.shape,
                initializer="zeros",
                dtype=keras.backend.standardize_dtype(array.dtype),
                trainable=False,
                autocast=False,
                name=f"state_{i}",
            )
            for i, array in enumerate(keras.tree.flatten(form))
        ]

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        check_dict(self.name, inputs, "target_ids", "reset")
        logits, state = self.model.decoder(
            inputs["target_ids"], state=self.state(), reset=inputs["reset"], training=training
        )
        if training:
            arrays = keras.tree.flatten(state)
            finite = _finite_rows(arrays)
            for variable, array in zip(self._held, arrays, strict=True):
                kept = ops.where(ops.reshape(finite, (-1, *[1] * (len(array.shape) - 1))), array, ops.zeros_like(array))
                variable.assign(ops.stop_gradient(kept))
        return logits

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        return self.model.decoder.compute_output_spec(inputs["target_ids"])[0]

    @property
    def weights(self) -> list[Any]:
        """The language model's; what is remembered is none, though it is among `variables`."""
        return self.model.weights

    def state(self) -> Any:
        """What is remembered now, as the decoder takes it."""
        return self._pack([variable.value for variable in self._held])

    def get_config(self) -> dict[str, Any]:
        model = keras.saving.serialize_keras_object(self.model)
        return {**super().get_config(), "model": model, "batch_size": self.batch_size}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> StreamModel:
        model = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        return cls(**{**config, "model": model})


def _finite_rows(arrays: list[Any]) -> Any:
    """`(B,)`, True where all that is remembered of a row is finite."""
    floats = [array for array in arrays if keras.backend.is_float_dtype(keras.backend.standardize_dtype(array.dtype))]
    return ops.all(ops.stack([ops.all(ops.isfinite(a), axis=tuple(range(1, len(a.shape)))) for a in floats]), axis=0)
