"""Keras' Muon optimizer, with attention's kernels among the matrices that it orthogonalises."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from mmattn.training.losses import PACKAGE


@keras.saving.register_keras_serializable(package=PACKAGE)
class Muon(keras.optimizers.Muon):
    """Momentum whose matrices are orthogonalised; AdamW for embeddings, norms and what else has one axis.

    Keras' own leaves every kernel to AdamW that is not two-dimensional, and those of multi-head attention are (D, h, K)
    and (h, K, D). They are the matrices W^Q, W^K, W^V (D, h K) and W^O (h K, D) of the paper; here they are treated as
    such, and Transformer-XL's projection of distances like them. Whatever else has two axes counts as a matrix, as with
    Keras, an attention's (h, K) biases and the tables of relative positions included; other biases do not.

    Args: those of `keras.optimizers.Muon`.

    >>> attention = keras.layers.MultiHeadAttention(num_heads=2, key_dim=2)
    >>> attention.build((None, None, 4), (None, None, 4))
    >>> kernels = [variable for variable in attention.trainable_variables if "kernel" in variable.path]
    >>> optimizer = Muon(learning_rate=0.1, weight_decay=None, adam_weight_decay=None)
    >>> optimizer.apply([ops.ones(kernel.shape) for kernel in kernels], kernels)
    >>> len(optimizer.variables)  # steps, rate and a momentum each: no second moment, as Adam would need
    6

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
    Scalable for LLM Training", 2025, for the scale of the update.
    """

    def build(self, var_list: Any) -> None:
        if not self.built:  # an update sees the backend's own variable, without its path
            self._matrices = [_matrix(tuple(variable.shape), variable.path) for variable in var_list]
        super().build(var_list)

    def _should_use_adamw(self, variable: Any) -> bool:
        if _matrix(tuple(variable.shape), variable.path) is None:
            return True
        return len(variable.shape) == 2 and super()._should_use_adamw(variable)

    def _muon_update_step(self, gradient: Any, variable: Any, lr: Any, m: Any) -> None:
        self.assign_add(m, ops.add(gradient, m * (self.momentum - 1)))
        update = ops.add(gradient, self.momentum * m) if self.nesterov else ops.convert_to_tensor(m)
        rows, columns = self._matrices[self._get_variable_index(variable)]
        update = self.zeropower_via_newtonschulz5(ops.reshape(update, (rows, columns)), self.ns_steps)
        if self.rms_rate is not None:
            update = update * (math.sqrt(max(rows, columns)) * self.rms_rate)
        self.assign_sub(variable, ops.reshape(ops.cast(lr, update.dtype) * update, tuple(variable.shape)))


def _matrix(shape: tuple[int, ...], path: str) -> tuple[int, int] | None:
    """The matrix that a kernel is, or None for what is none.

    >>> _matrix((8, 2, 4), "self_attention/query/kernel"), _matrix((2, 4, 8), "attention_output/kernel")
    ((8, 8), (8, 8))
    >>> _matrix((8, 2, 4), "self_attention/positions/kernel"), _matrix((2, 24), "gru_cell/bias")
    ((8, 8), None)
    """
    layer, name = ["", *path.split("/")][-2:]
    projects = layer in ("query", "key", "value", "gate", "attention_output")
    if len(shape) == 2:
        return shape if projects or not name.endswith("bias") else None
    if len(shape) == 3 and name.startswith("kernel") and (projects or layer == "positions"):
        merged = math.prod(shape[:2]) if layer == "attention_output" else shape[0]
        return merged, math.prod(shape) // merged
    return None
