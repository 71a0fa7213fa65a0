"""Attention whose query heads share heads of keys and values, under Keras' names for it."""

from __future__ import annotations

from typing import Any

import keras

from mmattn.layers.attention import MultiHeadAttention


@keras.saving.register_keras_serializable(package="mmattn")
class GroupedQueryAttention(MultiHeadAttention):
    """`MultiHeadAttention` with the arguments of `keras.layers.GroupQueryAttention`, in their order.

    Args:
        head_dim: width of a head, `key_dim` of `MultiHeadAttention`.
        num_query_heads: h, its `num_heads`.
        num_key_value_heads: G, a divisor of h.
        dropout, use_bias, sliding_window, flash_attention, kernel_initializer, bias_initializer, kernel_regularizer,
            bias_regularizer, activity_regularizer, kernel_constraint, bias_constraint, use_gate, seed: as there.
        options: what `MultiHeadAttention` has besides, by name, such as value_dim and qk_norm.

    Call arguments, returns, errors: as in `MultiHeadAttention`.

    Example:
        >>> import numpy as np
        >>> layer = GroupedQueryAttention(head_dim=4, num_query_heads=4, num_key_value_heads=2)
        >>> tuple(layer(np.ones((1, 3, 8), "float32"), np.ones((1, 5, 8), "float32")).shape)
        (1, 3, 8)
        >>> tuple(layer.key_dense.kernel.shape)
        (8, 2, 4)

    Source:
        Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023.
    """

    def __init__(
        self,
        head_dim: int,
        num_query_heads: int,
        num_key_value_heads: int,
        dropout: float = 0.0,
        use_bias: bool = True,
        sliding_window: int | None = None,
        flash_attention: bool | None = None,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        use_gate: bool = False,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_query_heads, head_dim, num_key_value_heads=num_key_value_heads, dropout=dropout, use_bias=use_bias,
            sliding_window=sliding_window, flash_attention=flash_attention, kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer, kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer, activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint, bias_constraint=bias_constraint, use_gate=use_gate, seed=seed,
            **options,
        )  # fmt: skip
        self.head_dim = head_dim
        self.num_query_heads = num_query_heads

    @classmethod
    def _of_keras(cls, config: dict[str, Any]) -> MultiHeadAttention:
        return cls.from_config(_in_its_words({"num_key_value_heads": config["num_heads"], **config}))

    def __dir__(self) -> list[str]:
        """All names but those by which weights files would call the projections otherwise than Keras' layer does."""
        public = {"query_dense", "key_dense", "value_dense", "output_dense"}
        return [name for name in super().__dir__() if name not in public]

    def get_config(self) -> dict[str, Any]:
        return _in_its_words(super().get_config())


def _in_its_words(config: dict[str, Any]) -> dict[str, Any]:
    config["head_dim"], config["num_query_heads"] = config.pop("key_dim"), config.pop("num_heads")
    return config
