"""The encoder-decoder: one sequence (words, patches) is encoded, another is generated from it."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="mmattn")
class EncoderDecoder(keras.Model):
    """Joins an encoder and a decoder that keep the two contracts.

    encoder(inputs dict) -> memory (B, S, D), mask (B, S).
    decoder(ids, memory, mask) -> logits, state; decoder.start and decoder.step for generation.

    Args:
        encoder: a Keras layer.
        decoder: a Keras layer.

    Call arguments:
        inputs: a dict of arrays: what the encoder reads, and "target_ids" `(B, T)`, the start token first; or
            `(B, n, T)` for n targets of each source, which is encoded once for all of them.

    Returns:
        logits `(B, T, V)` or `(B, n, T, V)`: at each place the scores of the next token.

    Raises:
        ValueError: when "target_ids" is missing.

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

    def __init__(self, encoder: Any, decoder: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = encoder
        self.decoder = decoder

    def build(self, input_shape: Any) -> None:
        """Makes all variables. `input_shape`: a dict of shapes, named as the arrays that `call` takes."""
        inputs = {
            name: keras.KerasTensor(shape, dtype="int32" if name.endswith("_ids") else "float32")
            for name, shape in input_shape.items()
        }
        memory, mask = self.encode(inputs)
        self.decoder(keras.KerasTensor((memory.shape[0], None), dtype="int32"), memory, memory_mask=mask)

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        if "target_ids" not in inputs:
            raise ValueError(f'inputs holds "target_ids" beside what the encoder reads. Received {sorted(inputs)}.')
        ids = inputs["target_ids"]
        memory, mask = self.encode(inputs, training=training)
        if len(ids.shape) == 2:
            return self.decoder(ids, memory, memory_mask=mask, training=training)[0]
        several, length = ops.shape(ids)[1], ops.shape(ids)[2]
        memory, mask = ops.repeat(memory, several, axis=0), ops.repeat(mask, several, axis=0)  # (B n, S, D), (B n, S)
        logits, _ = self.decoder(ops.reshape(ids, (-1, length)), memory, memory_mask=mask, training=training)
        return ops.reshape(logits, (-1, several, length, logits.shape[-1]))

    def encode(self, inputs: dict[str, Any], training: bool | None = None) -> tuple[Any, Any]:
        """The memory `(B, S, D)` and its mask `(B, S)`."""
        return self.encoder({k: v for k, v in inputs.items() if k != "target_ids"}, training=training)

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
        return {
            **super().get_config(),
            "encoder": keras.saving.serialize_keras_object(self.encoder),
            "decoder": keras.saving.serialize_keras_object(self.decoder),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> EncoderDecoder:
        parts = {
            name: keras.saving.deserialize_keras_object(config[name], custom_objects=custom_objects)
            for name in ("encoder", "decoder")
        }
        return cls(**{**config, **parts})
