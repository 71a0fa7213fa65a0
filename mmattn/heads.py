"""Models of an encoder alone: which class its input is of, and which tokens stood where masks stand."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn.layers.checks import check_dict, check_positive, check_shares
from mmattn.layers.masks import mean_of_real
from mmattn.layers.quantized import KeepsQuantization
from mmattn.layers.seeds import part_seed

POOLINGS = ("mean", "max", "first")


@keras.saving.register_keras_serializable(package="mmattn")
class EncoderClassifier(KeepsQuantization, keras.Model):
    """One vector of all that an encoder gives, and from it the scores of the classes.

    Args:
        encoder: a Keras layer, encoder(inputs dict) -> memory (B, S, D), mask (B, S).
        num_classes: C.
        pooling: "mean" or "max" of the real positions; "first" takes the first alone, which for an input that begins
            with a token of its own is BERT's way.
        dropout: share dropped of the vector in training.
        seed: of the dropout.

    Call arguments:
        inputs: a dict of arrays: what the encoder reads.

    Returns:
        logits `(B, C)`, in at least float32. For an input without a real position those of a vector of zeros.

    Raises:
        ValueError: for an unknown pooling, or a share out of range.

    Example:
        >>> import numpy as np
        >>> from mmattn.encoders.image import VisionTransformer
        >>> encoder = VisionTransformer((32, 32), patch_size=16, hidden_dim=8, num_layers=1, num_heads=2)
        >>> model = EncoderClassifier(encoder, num_classes=5)
        >>> tuple(model({"pixels": np.zeros((2, 32, 32, 3), "uint8")}).shape)
        (2, 5)

    Source:
        Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, appendix D.3, for the mean.
    """

    def __init__(
        self,
        encoder: Any,
        num_classes: int,
        pooling: str = "mean",
        dropout: float = 0.0,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(num_classes=num_classes)
        check_shares(dropout=dropout)
        if pooling not in POOLINGS:
            raise ValueError(f"pooling is one of {', '.join(POOLINGS)}. Received {pooling!r}.")
        self.encoder = encoder
        self.num_classes = num_classes
        self.pooling = pooling
        self.dropout = dropout
        self.seed = seed
        dtype = self.dtype_policy
        self.vector_dropout = keras.layers.Dropout(dropout, seed=part_seed(seed, "classifier"), dtype=dtype)
        self.scores = keras.layers.Dense(num_classes, dtype=dtype, name="scores")

    def build(self, input_shape: Any) -> None:
        """Makes all variables. `input_shape`: a dict of shapes, named as the arrays that the encoder reads."""
        check_dict(self.name, input_shape)
        memory, _ = self.encoder(_symbolic(input_shape))
        self.scores.build((None, memory.shape[-1]))

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        check_dict(self.name, inputs)
        memory, mask = self.encoder(inputs, training=training)
        logits = self.scores(self.vector_dropout(self._pooled(memory, mask), training=training))
        return ops.cast(logits, keras.backend.result_type(logits.dtype, "float32"))

    def _pooled(self, memory: Any, mask: Any) -> Any:
        real = mask[..., None]  # (B, S, 1)
        if self.pooling == "first":
            return ops.where(real[:, 0], memory[:, 0], 0.0)
        if self.pooling == "max":
            found = ops.max(ops.where(real, memory, -3e4), axis=1)  # below what any norm gives, and in float16's range
            return ops.where(ops.any(real, axis=1), found, 0.0)
        return mean_of_real(memory, mask)

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        """Written out, because Keras on torch would call the model with inputs of its own."""
        memory, _ = self.encoder.compute_output_spec(inputs)
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        return keras.KerasTensor((memory.shape[0], self.num_classes), dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "encoder": keras.saving.serialize_keras_object(self.encoder),
            "num_classes": self.num_classes,
            "pooling": self.pooling,
            "dropout": self.dropout,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> EncoderClassifier:
        encoder = keras.saving.deserialize_keras_object(config["encoder"], custom_objects=custom_objects)
        return cls(**{**config, "encoder": encoder})


@keras.saving.register_keras_serializable(package="mmattn")
class MaskedLanguageModel(KeepsQuantization, keras.Model):
    """An encoder of tokens that says which token stood at each place, from both its sides.

    What the encoder gives goes through a dense layer and a norm, and is compared with the encoder's own table of
    tokens, which so serves on both ends.

    Args:
        encoder: a Keras layer of tokens with a `token_embedding`, such as `mmattn.encoders.TextEncoder`.
        activation: of the dense layer.

    Call arguments:
        inputs: a dict with "source_ids" `(B, S)`. "label_places" `(M,)`, if it is there, says at which flat places
            b * S + s logits are wanted: those of the masked tokens.

    Returns:
        logits `(B, S, V)`, or `(M, V)` for M places, in at least float32.

    Raises:
        ValueError: for an encoder without a table of tokens.

    Example:
        >>> import numpy as np
        >>> from mmattn.encoders.text import TextEncoder
        >>> model = MaskedLanguageModel(TextEncoder(vocabulary_size=20, hidden_dim=8, num_layers=1, num_heads=2))
        >>> ids = np.array([[5, 19, 3], [19, 7, 3]])
        >>> tuple(model({"source_ids": ids, "label_places": np.array([1, 3])}).shape)
        (2, 20)

    Source:
        Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2019, section 3.1; the table on both
        ends: Press and Wolf 2017.
    """

    def __init__(self, encoder: Any, activation: Any = "gelu", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not hasattr(encoder, "token_embedding"):
            raise ValueError(f"a masked language model needs an encoder of tokens; {encoder.name} has no table.")
        self.encoder = encoder
        self.activation = keras.activations.get(activation)
        dtype = self.dtype_policy
        self.transform = keras.layers.Dense(
            encoder.hidden_dim, activation=self.activation, dtype=dtype, name="transform"
        )
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5, dtype=dtype, name="norm")

    def build(self, input_shape: Any) -> None:
        """Makes all variables. `input_shape`: a dict with the shape of "source_ids"."""
        check_dict(self.name, input_shape, "source_ids")
        self.encoder(_symbolic({"source_ids": input_shape["source_ids"]}))
        width = (None, self.encoder.hidden_dim)
        self.transform.build(width)
        self.norm.build(width)
        self.output_bias = self.add_weight(
            name="output_bias", shape=(self.encoder.vocabulary_size,), initializer="zeros"
        )

    def call(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        check_dict(self.name, inputs, "source_ids")
        memory, _ = self.encoder({"source_ids": inputs["source_ids"]}, training=training)
        if "label_places" in inputs:
            memory = ops.take(ops.reshape(memory, (-1, memory.shape[-1])), inputs["label_places"], axis=0)  # (M, D)
        logits = self.encoder.token_embedding(self.norm(self.transform(memory)), reverse=True)
        return logits + ops.cast(self.output_bias, logits.dtype)

    def compute_output_spec(self, inputs: dict[str, Any], training: bool | None = None) -> Any:
        """Written out, because Keras on torch would call the model with places of its own."""
        places = inputs.get("label_places", inputs["source_ids"])
        dtype = keras.backend.result_type(self.compute_dtype, "float32")
        return keras.KerasTensor((*places.shape, self.encoder.vocabulary_size), dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "encoder": keras.saving.serialize_keras_object(self.encoder),
            "activation": keras.activations.serialize(self.activation),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> MaskedLanguageModel:
        encoder = keras.saving.deserialize_keras_object(config["encoder"], custom_objects=custom_objects)
        return cls(**{**config, "encoder": encoder})


def _symbolic(shapes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: keras.KerasTensor(shape, dtype="int32" if name.endswith("_ids") else "float32")
        for name, shape in shapes.items()
    }
