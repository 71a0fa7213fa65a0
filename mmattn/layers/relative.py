"""Relative positions: what is added to the score of a query and a key by how far apart they are.

Shapes: B batch, H heads, T target (query) length, S memory (key) length, K head width, D width, E = T + S - 1
distances. A distance is the query's place minus the key's: 0 is the same place, 1 the key before.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from mmattn.layers.checks import check_positive
from mmattn.layers.dot_product import wide_of
from mmattn.layers.sight import Sight


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi: 2^(-8/h), 2^(-16/h), ...; a score loses slope times distance.

    For a number of heads that is no power of two, those of the next lower power come first, then every other one of the
    next higher.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)

    Source:
        Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation", 2022.
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (i + 1) / lower) for i in range(lower)]
    more = [2.0 ** (-8.0 * (i + 1) / (2 * lower)) for i in range(0, 2 * (num_heads - lower), 2)]
    return tuple(first + more)


@keras.saving.register_keras_serializable(package="mmattn")
class BucketedBias(keras.layers.Layer):
    """T5's: a learned number for each head and bucket of distances; far distances share a bucket.

    Args:
        num_heads: h.
        num_buckets: half of them (a quarter if `bidirectional`) for single distances, the others wider and wider.
        max_distance: from here on all is one bucket.
        bidirectional: keys after the query have buckets of their own; False: they count as distance 0.

    Source:
        Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020,
        section 2.1.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        check_positive(num_heads=num_heads, num_buckets=num_buckets, max_distance=max_distance)
        least = 4 if bidirectional else 2
        if num_buckets < least or num_buckets % 2:
            raise ValueError(f"num_buckets is even, {least} or more. Received num_buckets={num_buckets}.")
        if max_distance <= num_buckets // least:
            raise ValueError(
                f"max_distance is more than the {num_buckets // least} distances with a bucket of their own. "
                f"Received max_distance={max_distance}."
            )
        self.num_heads, self.num_buckets = num_heads, num_buckets
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def build(self, query_shape: Any) -> None:
        self.table = self.add_weight(
            (self.num_buckets, self.num_heads), initializer=keras.initializers.RandomNormal(stddev=0.02), name="table"
        )

    def call(self, query: Any, sight: Sight) -> Any:
        """What is added to the scores, `(1, H, T, S)`."""
        rows = ops.arange(sight.targets, dtype="int32")
        found = ops.take(self.table, self.buckets(sight.distances(rows)), axis=0)  # (T, S, H)
        return ops.transpose(found, (2, 0, 1))[None]

    def buckets(self, distances: Any) -> Any:
        """The bucket of each distance, int32."""
        count, first = self.num_buckets, 0
        if self.bidirectional:
            count //= 2
            first = count * ops.cast(distances < 0, "int32")
            distances = ops.abs(distances)
        else:
            distances = ops.maximum(distances, 0)
        exact = count // 2
        share = ops.log(ops.cast(ops.maximum(distances, exact), "float32") / exact) / math.log(
            self.max_distance / exact
        )
        wide = exact + ops.cast(share * (count - exact), "int32")
        return first + ops.where(distances < exact, distances, ops.minimum(wide, count - 1))

    def get_config(self) -> dict[str, Any]:
        names = ("num_heads", "num_buckets", "max_distance", "bidirectional")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable(package="mmattn")
class ClippedDistances(keras.layers.Layer):
    """Shaw's: a learned vector for each distance, which the query meets as it meets the key.

    The vectors are shared by the heads, and are added to the keys alone: to add others to the values did not help
    (table 3 of the paper).

    Args:
        scale: of the product of query and vector.
        max_distance: farther keys count as this far.

    Source:
        Shaw et al., "Self-Attention with Relative Position Representations", 2018, equation 4.
    """

    def __init__(self, scale: float, max_distance: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(max_distance=max_distance)
        self.scale, self.max_distance = scale, max_distance

    def build(self, query_shape: Any) -> None:
        self.table = self.add_weight(
            (2 * self.max_distance + 1, query_shape[-1]), initializer="glorot_uniform", name="table"
        )

    def call(self, query: Any, sight: Sight) -> Any:
        """What is added to the scores, `(B, H, T, S)`, for queries `(B, H, T, K)`."""
        products = ops.matmul(
            query * self.scale, ops.transpose(ops.cast(self.table, query.dtype))
        )  # (B, H, T, 2 c + 1)
        clipped = ops.clip(_distances(sight), -self.max_distance, self.max_distance) + self.max_distance
        return _shifted(ops.take(products, clipped, axis=-1), sight)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "scale": self.scale, "max_distance": self.max_distance}


@keras.saving.register_keras_serializable(package="mmattn")
class ProjectedDistances(keras.layers.Layer):
    """Transformer-XL's: sinusoids of the distance, projected, and a bias for what is near or alike whatever the query.

        score = q.k + u.k + (q + v).(W^R R_distance)

    The first two terms are products with the key: `content` adds u to the query for them.

    Args:
        scale: of the products.
        width: of the sinusoids, even; D.
        max_distance: farther keys count as this far, so that a longer memory than in training brings no distance that
            was never trained. None: no limit.

    Source:
        Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", 2019, section 3.3; for
        keys after the query Yang et al., "XLNet", 2019.
    """

    def __init__(self, scale: float, width: int, max_distance: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(width=width, max_distance=max_distance)
        if width % 2:
            raise ValueError(f"width is even: a sine and a cosine each. Received width={width}.")
        self.scale, self.width, self.max_distance = scale, width, max_distance

    def build(self, query_shape: Any) -> None:
        _, heads, _, size = query_shape
        self.kernel = self.add_weight((self.width, heads, size), initializer="glorot_uniform", name="kernel")
        self.content_bias = self.add_weight((heads, size), initializer="zeros", name="content_bias")
        self.place_bias = self.add_weight((heads, size), initializer="zeros", name="place_bias")

    def content(self, query: Any) -> Any:
        """The query as the keys meet it."""
        return query + ops.cast(self.content_bias, query.dtype)[:, None, :]

    def call(self, query: Any, sight: Sight) -> Any:
        """What is added to the scores, `(B, H, T, S)`, for queries `(B, H, T, K)`."""
        rates = np.exp(np.arange(0, self.width, 2) * (-math.log(10000.0) / self.width))
        wide = wide_of(query.dtype)
        distances = _distances(sight)
        if self.max_distance is not None:
            distances = ops.clip(distances, -self.max_distance, self.max_distance)
        angles = ops.cast(distances, wide)[:, None] * ops.convert_to_tensor(rates, dtype=wide)
        sinusoids = ops.cast(ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1), query.dtype)  # (E, D)
        vectors = ops.einsum("ed,dhk->hke", sinusoids, ops.cast(self.kernel, query.dtype))
        asked = (query + ops.cast(self.place_bias, query.dtype)[:, None, :]) * self.scale
        return _shifted(ops.matmul(asked, vectors), sight)

    def get_config(self) -> dict[str, Any]:
        names = ("scale", "width", "max_distance")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


def _distances(sight: Sight) -> Any:
    """All distances between a query and a key that it may see, the largest first: int32 (E,)."""
    last = sight.first_place + sight.targets - 1
    count = sight.sources if sight.causal else sight.sources + sight.targets - 1
    count = max(0, count) if isinstance(count, int) else ops.maximum(0, count)  # of nothing there are none
    return last - ops.arange(count, dtype="int32")


def _shifted(products: Any, sight: Sight) -> Any:
    """Of each query with each of `_distances` to each query with each key: `(B, H, T, E)` -> `(B, H, T, S)`.

    Query t wants the column of key s at s + (T - 1 - t), so each row starts one column further left than the last: that
    is what rows of one number more give, cut anew (appendix B of the Transformer-XL paper). Under a causal mask E is S;
    what then stands at the hidden keys belongs to the next row.
    """
    batch, heads, targets, distances = ops.shape(products)
    if isinstance(targets, int) and targets == 1:
        return products
    if isinstance(targets, int) and targets == 0:
        return ops.zeros((batch, heads, 0, sight.sources), products.dtype) + ops.sum(products)  # which has slopes
    flat = ops.pad(products, [(0, 0), (0, 0), (0, 0), (0, 1)])
    flat = ops.reshape(flat, (batch, heads, targets * (distances + 1)))
    cut = flat[:, :, targets - 1 : targets - 1 + targets * distances]
    return ops.reshape(cut, (batch, heads, targets, distances))[..., : sight.sources]
