"""Models from parts: an encoder-decoder, whose decoder looks at what was encoded, and a decoder alone."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_dict, check_ids, check_rows
from mmattn.layers.quantized import KeepsQuantization

TARGETS = ("target_ids", "label_places")  # of a batch's arrays, what is the decoder's


@keras.saving.register_keras_serializable(package="mmattn")
class EncoderDecoder(KeepsQuantization, keras.Model):
    """Joins an encoder and a decoder that keep the two contracts.

    encoder(inputs dict) -> memory (B, S, D), mask (B, S).
    decoder(ids, memory, mask) -> logits, state; decoder.start and decoder.step for generation.

    Args:
        encoder: a Keras layer.
        decoder: a Keras layer.
        share_embeddings: the encoder embeds its tokens by the decoder's table: one vocabulary for both sides. The
            encoder needs a method `share_embedding`, as `mmattn.encoders.TextEncoder` has.

    Call arguments:
        inputs: a dict of arrays: what the encoder reads, and "target_ids" `(B, T)`, the start token first; or
            `(B, n, T)` for n targets of each source, which is encoded once for all of them. "label_places" `(M,)`, if
            it is there, says at which flat places b * T + t logits are wanted; for one target of each source.

    Returns:
        logits `(B, T, V)` or `(B, n, T, V)`: at each place the scores of the next token. `(M, V)` for M places.

    Raises:
        ValueError: when "target_ids" is missing or has other rows than the memory, or the parts cannot share.

    Example:
        >>> import numpy as np
        >>> from mmattn.decoders import TransformerDecoder
        >>> from mmattn.encoders.image import VisionTransformer
        >>> encoder = VisionTransformer((32, 32), patch_size=16, hidden_dim=8, num_layers=1, num_heads=2)
        >>> decoder = TransformerDecoder(vocabulary_size=20, hidden_dim=8, num_layers=1, num_heads=2)
        >>> model = EncoderDecoder(encoder, decoder)
        >>> inputs = {"pixels": np.zeros((2, 32, 32, 3), "uint8"), "target_ids": np.array([[2, 5], [2, 6]])}
        >>> tuple(model(inputs).shape)
        (2, 2, 20)

    Source:
        Sutskever et al., "Sequence to Sequence Learning with Neural Networks", 2014; Vaswani et al. 2017, section 3.
    """

    def __init__(self, encoder: Any, decoder: Any, share_embeddings: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder
        self.share_embeddings = share_embeddings
        if share_embeddings:
            if not hasattr(encoder, "share_embedding"):
                raise ValueError(f"share_embeddings=True needs an encoder of tokens; {encoder.name} has no table.")
            encoder.share_embedding(decoder.token_embedding)

    def build(self, input_shape: Any) -> None:
        """Makes all variables. `input_shape`: a dict of shapes, named as the arrays that `call` takes."""
        check_dict(self.name, input_shape, "target_ids")
        inputs = {
            name: keras.KerasTensor(shape, dtype="int32" if name.endswith("_ids") else "float32")
            for name, shape in input_shape.items()
            if name != "label_places"
        }
        memory, mask = self.encode(inputs)
        self.decoder(keras.KerasTensor((memory.shape[0], None), dtype="int32"), memory, memory_mask=mask)

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        ids = self._targets(inputs)
        memory, mask = self.encode(inputs, training=training)
        check_rows(self.name, target_ids=ids, memory=memory)
        if len(ids.shape) == 2:
            return self.decoder(ids, memory, memory_mask=mask, training=training, **_places(inputs))[0]
        several, length = ops.shape(ids)[1], ops.shape(ids)[2]
        memory, mask = ops.repeat(memory, several, axis=0), ops.repeat(mask, several, axis=0)  # (B n, S, D), (B n, S)
        logits, _ = self.decoder(ops.reshape(ids, (-1, length)), memory, memory_mask=mask, training=training)
        return ops.reshape(logits, (-1, several, length, logits.shape[-1]))

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        """Written out, because Keras on torch would call the model, with 83 targets of 83 tokens of 83 sources."""
        ids = self._targets(inputs)
        rows = ids if len(ids.shape) == 2 else keras.KerasTensor((None, ids.shape[-1]), dtype="int32")
        memory, mask = self.encoder.compute_output_spec({k: v for k, v in inputs.items() if k not in TARGETS})
        logits = self.decoder.compute_output_spec(rows, memory, memory_mask=mask, **_places(inputs))[0]
        return logits if rows is ids else keras.KerasTensor((*ids.shape, logits.shape[-1]), dtype=logits.dtype)

    def _targets(self, inputs: dict[str, Any]) -> Any:
        check_dict(self.name, inputs, "target_ids")
        check_ids(self.name, inputs["target_ids"], "target_ids", ranks=(2, 3))
        if len(inputs["target_ids"].shape) > 2 and "label_places" in inputs:
            raise ValueError('"label_places" goes with one target of each source: target_ids (B, T).')
        return inputs["target_ids"]

    def encode(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        """The memory `(B, S, D)` and its mask `(B, S)`."""
        made = self.encoder({k: v for k, v in inputs.items() if k not in TARGETS}, training=training)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            raise ValueError(
                f"An encoder gives two arrays, the memory (B, S, D) and its mask (B, S). {self.encoder.name} gave "
                f"{type(made).__name__}."
            )
        return made[0], made[1]

    def start(self, inputs: dict[str, Any], max_length: int) -> tuple[Any, Any]:
        """Encodes the inputs and gives what generation of up to `max_length` tokens starts from: context, state."""
        memory, mask = self.encode(inputs)
        return self.decoder.start(memory, mask, max_length)

    def step(self, token_ids: Any, index: Any, context: Any, state: Any) -> tuple[Any, Any]:
        """The decoder's step: logits `(B, V)` of the token after position `index`, and the new state."""
        return self.decoder.step(token_ids, index, context, state)

    def attention(self, inputs: dict[str, Any]) -> Any:
        """The cross-attention weights `(B, layers, H, T, S)` over given target tokens."""
        memory, mask = self.encode(inputs)
        return self.decoder(inputs["target_ids"], memory, memory_mask=mask, return_attention_scores=True)[2]

    def get_config(self) -> dict[str, Any]:
        parts = {
            name: keras.saving.serialize_keras_object(part)
            for name, part in (("encoder", self.encoder), ("decoder", self.decoder))
        }
        if self.share_embeddings:  # a part that Keras builds by itself would have a table of its own
            for part in parts.values():
                part.pop("build_config", None)
        return {**super().get_config(), **parts, "share_embeddings": self.share_embeddings}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> EncoderDecoder:
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("encoder", "decoder")
        }
        return cls(**{**config, **parts})


@keras.saving.register_keras_serializable(package="mmattn")
class LanguageModel(KeepsQuantization, keras.Model):
    """A decoder alone: each token is predicted from those before it.

    Args:
        decoder: a Keras layer without cross-attention, such as `TransformerDecoder(cross_attention=False)`.

    Call arguments:
        inputs: a dict with "target_ids" `(B, T)`, the start token first.

    Returns:
        logits `(B, T, V)`.

    Raises:
        ValueError: when "target_ids" is missing.

    Example:
        >>> import numpy as np
        >>> from mmattn.decoders import TransformerDecoder
        >>> decoder = TransformerDecoder(20, hidden_dim=8, num_layers=1, num_heads=2, cross_attention=False)
        >>> model = LanguageModel(decoder)
        >>> tuple(model({"target_ids": np.array([[2, 5, 7]])}).shape)
        (1, 3, 20)

    Source:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, decoder: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.decoder = decoder

    def build(self, input_shape: Any) -> None:
        """Makes all variables. `input_shape`: a dict with the shape of "target_ids"."""
        check_dict(self.name, input_shape, "target_ids")
        self.decoder(keras.KerasTensor(input_shape["target_ids"], dtype="int32"))

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        check_dict(self.name, inputs, "target_ids")
        return self.decoder(inputs["target_ids"], training=training, **_places(inputs))[0]

    def read(self, token_ids: Any, state: Any = None, **options: Any) -> tuple[Any, Any]:
        """The logits `(B, T, V)` of a segment after what a state remembers, and the state after it.

        Args:
            token_ids: `(B, T)`.
            state: what the last `read` has returned, or the decoder's `empty_state`; None: nothing came before.
            options: of the decoder's call, such as `memory_length` and `reset`.
        """
        return self.decoder(token_ids, state=state, training=False, **options)

    def start(self, inputs: dict[str, Any], max_length: int) -> tuple[Any, Any]:
        """What generation of up to `max_length` tokens starts from.

        Of "target_ids" in `inputs` only the number of rows counts; "state", where it is there, is remembered.
        """
        remembered = {"state": inputs["state"]} if "state" in inputs else {}
        rows = ops.shape(inputs["target_ids"])[0]
        return self.decoder.start(None, None, max_length, batch_size=rows, **remembered)

    def step(self, token_ids: Any, index: Any, context: Any, state: Any) -> tuple[Any, Any]:
        """The decoder's step: logits `(B, V)` of the token after position `index`, and the new state."""
        return self.decoder.step(token_ids, index, context, state)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "decoder": keras.saving.serialize_keras_object(self.decoder)}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> LanguageModel:
        decoder = keras.saving.deserialize_keras_object(config["decoder"], custom_objects=custom_objects)
        return cls(**{**config, "decoder": decoder})


def _places(inputs: dict[str, Any]) -> dict[str, Any]:
    """Where logits are wanted, as a decoder takes it; a batch that does not say so wants them everywhere."""
    return {"places": inputs["label_places"]} if "label_places" in inputs else {}
