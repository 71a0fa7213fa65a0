"""Loss and metrics over padded token sequences. Shape letters: B batch, T target length, V vocabulary."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from mmattn import backend

PACKAGE = "mmattn"


def token_losses(labels: Any, logits: Any, label_smoothing: float = 0.0) -> Any:
    """Cross-entropy of each token, in float32 whatever the dtype of `logits`.

    With smoothing e the target distribution is 1 - e on the label plus e / V on every word (Szegedy et al. 2016,
    section 7; Vaswani et al. 2017, section 5.4). It is worked out from two numbers a token, the label's logit and the
    mean logit, so no one-hot array is built.

    Args:
        labels: int (B, T), values in [0, V).
        logits: float (B, T, V), before the softmax.
        label_smoothing: e, in [0, 1).

    Returns:
        float32 (B, T), in nats.

    >>> import numpy as np
    >>> round(float(token_losses(np.array([[1]]), np.zeros((1, 1, 4)))[0, 0]), 4)   # log 4
    1.3863
    """
    logits = ops.cast(logits, "float32")
    labels = ops.cast(labels, "int32")
    flat = ops.reshape(labels, (-1,)), ops.reshape(logits, (-1, logits.shape[-1]))
    return ops.reshape(backend.cross_entropy(*flat, label_smoothing), ops.shape(labels))


@keras.saving.register_keras_serializable(package=PACKAGE)
class MaskedCrossEntropy(keras.losses.Loss):
    """Label-smoothed cross-entropy from logits with whole-number labels; the mean is over the real tokens.

    Padding a batch further does not change it: the sum is divided by the sum of the weights, not by B * T. All of it is
    float32, also when the model computes in float16 or bfloat16.

    Call arguments:
        y_true: int (B, T).
        y_pred: float (B, T, V) logits.
        sample_weight: (B, T), 1 at real tokens and 0 at padding. Without it every position counts.

    Args:
        label_smoothing: in [0, 1).

    >>> import numpy as np
    >>> loss = MaskedCrossEntropy()
    >>> logits = np.zeros((1, 3, 4), "float32")
    >>> round(float(loss(np.array([[1, 2, 0]]), logits, sample_weight=np.array([[1.0, 1.0, 0.0]]))), 4)
    1.3863
    """

    def __init__(self, label_smoothing: float = 0.0, name: str = "masked_cross_entropy", **kwargs: Any) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(
                f"label_smoothing={label_smoothing} is not in [0, 1). The usual value is 0.1; 0 turns it off."
            )
        kwargs.setdefault("reduction", "mean_with_sample_weight")
        kwargs.setdefault("dtype", "float32")
        super().__init__(name=name, **kwargs)
        self.label_smoothing = label_smoothing

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return token_losses(y_true, y_pred, self.label_smoothing)

    def get_config(self) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config()
        return {**config, "label_smoothing": self.label_smoothing}


@keras.saving.register_keras_serializable(package=PACKAGE)
class RDropCrossEntropy(MaskedCrossEntropy):
    """Cross-entropy of two passes with different dropout, and how far their predictions are apart.

    Both passes are in one batch, whose second half repeats the first (`PairBatches(twins=True)`). Added to each token's
    cross-entropy is `alpha` / 2 times the symmetric Kullback-Leibler divergence of its two predictions.

    Call arguments:
        y_true: int (2M,), the second half like the first.
        y_pred: float (2M, V) logits.
        sample_weight: (2M,), 1 at real tokens and 0 at padding.

    Args:
        label_smoothing: in [0, 1).
        alpha: weight of the divergence, 0 or more; 5 in the paper's translation models.

    Source:
        Liang et al., "R-Drop: Regularized Dropout for Neural Networks", 2021, equation 4.

    >>> import numpy as np
    >>> loss, logits = RDropCrossEntropy(alpha=1.0), np.log([[0.25, 0.75], [0.75, 0.25]])
    >>> round(float(loss(np.array([0, 0]), logits)), 4)  # (log 4 + log 4/3) / 2 + (0.5 log 3) / 2
    1.1116
    """

    twins = True  # what it wants of the batches

    def __init__(
        self, label_smoothing: float = 0.0, alpha: float = 5.0, name: str = "r_drop_cross_entropy", **kwargs: Any
    ) -> None:
        if not alpha >= 0.0:
            raise ValueError(f"alpha={alpha} must be 0 or more. The usual values are 1 to 5.")
        super().__init__(label_smoothing, name=name, **kwargs)
        self.alpha = alpha

    def call(self, y_true: Any, y_pred: Any) -> Any:
        labels, logits = ops.cast(y_true, "int32"), ops.cast(y_pred, "float32")
        return backend.cross_entropy(labels, logits, self.label_smoothing, self.alpha)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "alpha": self.alpha}


class _TokenMean(keras.metrics.Metric):
    """The mean of a number a token, each real token counted once.

    keras.metrics.Mean first averages over a row, padding included, so that its result depends on how far a batch is
    padded.
    """

    def __init__(self, name: str, dtype: Any = "float32") -> None:
        super().__init__(name=name, dtype=dtype)
        self.total = self.add_variable((), initializer="zeros", name="total")
        self.count = self.add_variable((), initializer="zeros", name="count")

    def add(self, values: Any, sample_weight: Any) -> None:
        """Adds values (B, T) with their weights (B, T); None counts each position."""
        weights = ops.ones_like(values) if sample_weight is None else ops.cast(sample_weight, values.dtype)
        self.total.assign_add(ops.cast(ops.sum(values * weights), self.total.dtype))
        self.count.assign_add(ops.cast(ops.sum(weights), self.count.dtype))

    def mean(self) -> Any:
        return ops.divide_no_nan(self.total, self.count)


@keras.saving.register_keras_serializable(package=PACKAGE)
class TokenAccuracy(_TokenMean):
    """Share of the real tokens whose label no other word beats, with the true previous words given. In [0, 1].

    >>> import numpy as np
    >>> metric = TokenAccuracy()
    >>> logits = np.eye(3)[None, [0, 1, 2]]                                       # says words 0, 1, 2
    >>> float(metric(np.array([[0, 1, 1]]), logits, sample_weight=np.array([[1.0, 1.0, 0.0]])))
    1.0
    """

    def __init__(self, name: str = "accuracy", dtype: Any = "float32") -> None:
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        labels = ops.expand_dims(ops.cast(y_true, "int32"), -1)
        of_label = ops.squeeze(ops.take_along_axis(y_pred, labels, axis=-1), axis=-1)
        hits = ops.greater_equal(of_label, ops.max(y_pred, axis=-1))  # argmax costs several times as much
        self.add(ops.cast(hits, "float32"), sample_weight)

    def result(self) -> Any:
        return self.mean()


@keras.saving.register_keras_serializable(package=PACKAGE)
class Perplexity(_TokenMean):
    """exp of the mean cross-entropy over the real tokens, without label smoothing. 1 is perfect, V is a guess.

    >>> import numpy as np
    >>> round(float(Perplexity()(np.array([[1, 2]]), np.zeros((1, 2, 4)))), 4)
    4.0
    """

    def __init__(self, name: str = "perplexity", dtype: Any = "float32") -> None:
        super().__init__(name=name, dtype=dtype)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.add(token_losses(y_true, y_pred), sample_weight)

    def result(self) -> Any:
        return ops.exp(self.mean())
