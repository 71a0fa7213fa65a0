"""Multi-head attention (Vaswani et al. 2017, section 3.2), in training and step by step.

    Z_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)                        (2.1)
    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V                 (2.2)
    MultiHeadAttention(Q, K, V) = Concat(Z_1 .. Z_h) W^O              (2.3)

Shapes: B batch, T target (query) length, S memory (key) length, L cache length, D width (d_model), H heads (h),
G key and value heads, K head width (d_k, d_v). Variables have the names, shapes and order of
`keras.layers.MultiHeadAttention`, so that weights move both ways.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from mmattn.layers.axes import Axes
from mmattn.layers.checks import check_grouped, check_positive, check_shares
from mmattn.layers.chunked import chunked
from mmattn.layers.dot_product import Attended, Scoring, explicit, finite_rows, fused
from mmattn.layers.masks import check_boolean, check_mask, check_padding, combine_masks
from mmattn.layers.paths import Path, choose_path, flash_setting
from mmattn.layers.sight import Sight


@keras.saving.register_keras_serializable(package="mmattn")
class MultiHeadAttention(keras.layers.Layer):
    """Multi-head attention: equations (2.1) to (2.3) of the module's head.

    It takes the arguments of `keras.layers.MultiHeadAttention`, in their order, and differs from it in this: a query
    that may see nothing gives zeros (output, weights and gradient), on every path; masks that arrive with the tensors
    are honoured and left where they are; a mask is boolean, or whole numbers; whatever stands under a mask reaches
    nothing; causal masks and windows are aligned to the bottom right and go by `attention_axes`; long sequences take
    little memory on every backend (see `explain_path`).

    Args:
        num_heads: h.
        key_dim: d_k, the width of a head for queries and keys.
        value_dim: d_v, the width of a head for values; `key_dim` when not given.
        dropout: share of the attention weights dropped in training.
        use_bias: whether the projections have a bias.
        output_shape: width of the output, or several axes; the width of the query when not given.
        attention_axes: the axes of the inputs that attention runs over, all between batch and width when not given.
        sliding_window: a query sees the keys that are less than so many places away.
        flash_attention: True: never all weights at once; False: always all; None: as it pays, or as
            `keras.config.enable_flash_attention` and `disable_flash_attention` have set it for all layers. Memory,
            speed and rounding change, the result doesn't. Slopes of slopes that XLA compiles for TensorFlow need False
            for long sequences.
        kernel_initializer, bias_initializer, kernel_regularizer, bias_regularizer, activity_regularizer,
            kernel_constraint, bias_constraint: of the projections.
        use_gate: multiplies each head's output by sigmoid of a projection of the query (Qiu et al. 2025).
        seed: of the dropout.
        num_key_value_heads: G, a divisor of h: so many heads of keys and values, each for h / G query heads; 1 is
            multi-query attention (Ainslie et al. 2023). Default: h.
        qk_norm: queries and keys go through a root mean square norm with a scale for each channel (Henry et al. 2020).
        soft_cap: scores become cap * tanh(score / cap) (Gemma 2, 2024).

    Call arguments:
        query: `(B, T, D)`, or `(B, d1 .. dn, D)`; the axes that attention does not run over are like the batch.
        value: `(B, S, D')`.
        key: `(B, S, D'')`; `value` when not given.
        query_mask: `(B, T)` boolean; a False position asks nothing and gets zeros. Taken from the tensor's own mask
            when not given, like the next two.
        value_mask: `(B, S)` boolean; True = real.
        key_mask: `(B, S)` boolean; True = real.
        attention_mask: boolean `(T, S)`, `(B, T, S)` or `(B, H, T, S)`; True = may look.
        return_attention_scores: also return the weights `(B, H, T, S)`.
        training: whether dropout is on.
        use_causal_mask: let position t see the positions up to t only.

    Returns:
        `(B, T, D)`, or this and the weights.

    Raises:
        ValueError: for sizes that are not positive, or a mask that does not fit.

    Example:
        >>> import numpy as np
        >>> layer = MultiHeadAttention(num_heads=2, key_dim=4)
        >>> words, patches = np.ones((1, 3, 8), "float32"), np.ones((1, 5, 6), "float32")
        >>> output, weights = layer(words, patches, return_attention_scores=True)
        >>> tuple(output.shape), tuple(weights.shape)
        ((1, 3, 8), (1, 2, 3, 5))

        Padding is told by `(B, S)`, True = real:

        >>> _, weights = layer(words, patches, key_mask=np.array([[1, 1, 1, 0, 0]], bool), return_attention_scores=True)
        >>> bool(np.any(np.asarray(weights)[..., 3:]))
        False

        Any other rule by `(B, T, S)` or `(B, H, T, S)`, True = may look. A word that may see nothing gets zeros:

        >>> rule = np.array([[[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]], bool)
        >>> bool(np.any(np.asarray(layer(words, patches, attention_mask=rule))[0, 2]))
        False

    Source:
        Vaswani et al., "Attention Is All You Need", 2017, section 3.2.
    """

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dropout: float = 0.0,
        use_bias: bool = True,
        output_shape: int | Sequence[int] | None = None,
        attention_axes: int | Sequence[int] | None = None,
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
        num_key_value_heads: int | None = None,
        qk_norm: bool = False,
        soft_cap: float | None = None,
        projections: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(
            num_heads=num_heads, key_dim=key_dim, value_dim=value_dim, sliding_window=sliding_window,
            num_key_value_heads=num_key_value_heads,
        )  # fmt: skip
        check_shares(dropout=dropout)
        check_grouped(num_heads, num_key_value_heads)
        if soft_cap is not None and (isinstance(soft_cap, (bool, str)) or not soft_cap > 0):
            raise ValueError(f"soft_cap is a positive number. Received soft_cap={soft_cap!r}.")
        if not isinstance(attention_axes, (int, list, tuple, type(None))):
            raise ValueError(f"attention_axes is a whole number, or several. Received {attention_axes!r}.")
        self.supports_masking = True
        self.num_heads = num_heads
        self.key_dim = key_dim
        self.value_dim = value_dim or key_dim
        self.dropout = dropout
        self.use_bias = use_bias
        self._output_shape = _sizes(output_shape)
        self.attention_axes = (attention_axes,) if isinstance(attention_axes, int) else attention_axes
        self._sliding_window = sliding_window
        self.flash_attention = flash_attention
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.projections_regularizer = keras.regularizers.get(activity_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.use_gate = use_gate
        self.seed = seed
        self.num_key_value_heads = num_key_value_heads or num_heads
        self.qk_norm = qk_norm
        self.soft_cap = soft_cap
        self._projections = projections or {}
        self.scoring = Scoring(1.0 / math.sqrt(key_dim), soft_cap)

    def build(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> None:
        key_shape = value_shape if key_shape is None else key_shape
        self._check_shapes(query_shape, value_shape, key_shape)
        self._widths = tuple(shape[-1] for shape in (query_shape, key_shape, value_shape))
        self.axes = Axes(len(query_shape), self.attention_axes)
        self.axes.check_kept(query_shape, key_shape)
        groups = self.num_key_value_heads
        self._query_dense = self._split("query", query_shape, self.num_heads, self.key_dim)
        self._key_dense = self._split("key", key_shape, groups, self.key_dim)
        if self.use_gate:
            self._gate_dense = self._split("gate", query_shape, self.num_heads, self.value_dim, activation="sigmoid")
        self._value_dense = self._split("value", value_shape, groups, self.value_dim)
        letters, sizes = _letters(query_shape), self._output_shape or (query_shape[-1],)
        out = "uvwxyz"[: len(sizes)]
        self._output_dense = self._dense(
            "attention_output", f"{letters}hk,hk{out}->{letters}{out}", (*[None] * (len(letters) - 1), *sizes), out
        )
        self._output_dense.build((*query_shape[:-1], self.num_heads, self.value_dim))
        if self.qk_norm:
            for name in ("query", "key"):
                norm = keras.layers.RMSNormalization(dtype=self.dtype_policy, name=f"{name}_norm")
                norm.build((None, None, None, self.key_dim))
                setattr(self, f"_{name}_norm", norm)
        self._dropout_layer = keras.layers.Dropout(self.dropout, seed=self.seed, dtype=self.dtype_policy)

    def _check_shapes(self, query_shape: Any, value_shape: Any, key_shape: Any) -> None:
        for name, shape in {"query": query_shape, "value": value_shape, "key": key_shape}.items():
            if len(shape) < 3 or len(shape) != len(query_shape):
                raise ValueError(
                    "query, value and key have the shape (batch, length, width) or more axes, and their numbers must "
                    f"be equal. Received {name} {tuple(shape)} beside query {tuple(query_shape)}."
                )
        if tuple(value_shape[1:-1]) != tuple(key_shape[1:-1]):
            raise ValueError(
                "All axes of key and value but the width must be equal. Received value "
                f"{tuple(value_shape)}, key {tuple(key_shape)}."
            )

    def check_call_shapes(self, query_shape: Any, value_shape: Any) -> None:
        """Refuses shapes that a built layer cannot be called with, the key being the value."""
        self._check_shapes(query_shape, value_shape, value_shape)
        if len(query_shape) != self.axes.rank:
            raise ValueError(
                f"{self.name} was built for arrays of {self.axes.rank} axes. Received {tuple(query_shape)}."
            )
        for name, shape, width in zip(("query", "value"), (query_shape, value_shape), self._widths[::2], strict=True):
            if shape[-1] not in (None, width):
                raise ValueError(f"{self.name} was built for a {name} of width {width}. Received {tuple(shape)}.")

    def _check_widths(self, **inputs: Any) -> None:
        """Refuses another width than the kernels', which some backends would fold into the batch."""
        wanted = dict(zip(("query", "key", "value"), self._widths, strict=True))
        for name, array in inputs.items():
            if array.shape[-1] not in (None, wanted[name]):
                raise ValueError(
                    f"{self.name} was built for a {name} of width {wanted[name]}. Received {tuple(array.shape)}."
                )

    def _split(self, name: str, shape: Any, heads: int, width: int, activation: Any = None) -> Any:
        letters = _letters(shape)
        dense = self._dense(
            name, f"{letters}x,xhk->{letters}hk", (*[None] * (len(letters) - 1), heads, width), "hk", activation
        )
        dense.build(shape)
        return dense

    def _dense(
        self, name: str, equation: str, output_shape: tuple[int | None, ...], bias_axes: str, activation: Any = None
    ) -> Any:
        dense = keras.layers.EinsumDense(
            equation,
            output_shape=output_shape,
            activation=activation,
            bias_axes=bias_axes if self.use_bias else None,
            kernel_initializer=_copy(self.kernel_initializer),
            bias_initializer=_copy(self.bias_initializer),
            kernel_regularizer=self.kernel_regularizer,
            bias_regularizer=self.bias_regularizer,
            activity_regularizer=self.projections_regularizer,
            kernel_constraint=self.kernel_constraint,
            bias_constraint=self.bias_constraint,
            name=name,
            **{"dtype": self.dtype_policy, **_read(self._projections.get(name, {}))},
        )
        dense.supports_masking = True  # a mask on the inputs is read by `call`; it is no reason for a warning here
        return dense

    def call(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        key = value if key is None else key
        self._check_inputs(query, value, key)
        sight = self._sight(query, key, query_mask, value_mask, key_mask, attention_mask, use_causal_mask)
        query, heads, keys, values = self._project(query, key, value, sight)
        if type(self)._compute_attention is MultiHeadAttention._compute_attention:
            found = self._attend(heads, keys, values, sight, bool(training), return_attention_scores)
        else:
            found = self._attend_by_subclass(heads, keys, values, sight, training, return_attention_scores)
        output = self._project_output(found, query)
        return (output, self.axes.scores(found.weights, query, key)) if return_attention_scores else output

    def _sight(
        self, query: Any, key: Any, query_mask: Any, value_mask: Any, key_mask: Any, attention_mask: Any, causal: bool
    ) -> Sight:
        """The rules of a call."""
        if (causal or self.sliding_window) and not self.axes.has_order:
            raise ValueError(
                "use_causal_mask and sliding_window need one axis that attention runs over, since several have no "
                f"order. Received attention_axes={self.axes.attended}."
            )
        targets = self.axes.length(query)
        sources = targets if key is query else self.axes.length(key)
        mask = attention_mask
        if mask is not None:
            if self.axes.is_plain:
                mask = check_mask(mask, query.shape[0], self.num_heads, query.shape[1], key.shape[1])
            else:
                mask = self.axes.mask(check_boolean(mask), query, key, self.num_heads)
        real = [self._real(value_mask, key, "value_mask"), self._real(key_mask, key, "key_mask")]
        return Sight(
            targets, sources, mask, combine_masks(*real), self._real(query_mask, query, "query_mask"), causal,
            self.sliding_window,
        )  # fmt: skip

    def _check_inputs(self, query: Any, value: Any, key: Any) -> None:
        """Refuses what the backend would say in its own words, or read as something else."""
        if query is value and value is key:
            return
        batches = {array.shape[0] for array in (query, value, key)} - {None}
        lengths = zip(value.shape[1:-1], key.shape[1:-1], strict=True)
        if len(batches) > 1 or any(None not in pair and pair[0] != pair[1] for pair in lengths):
            raise ValueError(
                "query, value and key have one batch B, and value and key one length S. Received query "
                f"{tuple(query.shape)}, value {tuple(value.shape)}, key {tuple(key.shape)}."
            )

    def _real(self, mask: Any, of: Any, name: str) -> Any:
        if mask is None:
            return None
        mask = check_padding(mask, tuple(of.shape[:-1]), name)
        if not self.axes.is_plain and mask.shape[0] == 1:
            mask = ops.broadcast_to(mask, ops.shape(of)[:-1])
        return self.axes.positions(mask)

    def path_of(
        self, batch: Any, targets: Any, sources: Any, training: bool = False, scores: bool = False, masked: str = "no"
    ) -> Path:
        """Which way a call goes: see `mmattn.layers.explain_path`."""
        return choose_path(
            batch, self.num_heads, targets, sources, self.compute_dtype, flash_setting(self.flash_attention),
            scores=scores, dropped=training and self.dropout > 0.0, biased=self._is_biased,
            capped=self.soft_cap is not None, sloped=self.scoring.slopes is not None, masked=masked,
            widths=(self.key_dim, self.value_dim),
        )  # fmt: skip

    _is_biased = False

    def _attend(
        self, query: Any, keys: Any, values: Any, sight: Sight, training: bool = False, scores: bool = False
    ) -> Attended:
        """From heads to heads, by the path that pays."""
        masked = "no" if sight.is_open or sight.is_plainly_causal else "plane" if sight.fills_a_plane else "keys"
        path = self.path_of(query.shape[0], sight.targets, sight.sources, training, scores, masked).name
        dropped = training and self.dropout > 0.0
        if path == "fused":
            return fused(query, keys, values, sight, self.scoring)
        if path == "chunked":
            seed = self._dropout_layer.seed_generator.next() if dropped else None
            return chunked(query, keys, values, sight, self.scoring, self.dropout if dropped else 0.0, seed)
        drop = (lambda weights: self._dropout_layer(weights, training=True)) if dropped else None
        return explicit(self._asked(query), keys, values, sight, self.scoring, self._bias(query, sight), drop)

    def _compute_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        training: bool | None = None,
        return_attention_scores: bool = False,
        use_causal_mask: bool = False,
    ) -> tuple[Any, Any]:
        """The place where subclasses of Keras' layer change attention: heads `(B, T, H, K)`, a mask as in a call.

        A subclass that overrides it is served, with all rules of the call in the mask, and with keys and values
        repeated for the query heads that share them. Axes that attention does not run over are part of the batch.

        Returns:
            `(B, T, H, V)` and the weights `(B, H, T, S)` or None.
        """
        heads, keys, values = (ops.transpose(array, (0, 2, 1, 3)) for array in (query, key, value))
        targets, sources = (ops.shape(array)[2] for array in (heads, keys))
        if attention_mask is not None:
            attention_mask = check_mask(attention_mask, query.shape[0], self.num_heads, query.shape[1], key.shape[1])
        sight = Sight(targets, sources, attention_mask, causal=use_causal_mask)
        found = self._attend(heads, keys, values, sight, bool(training), return_attention_scores)
        return ops.transpose(found.heads, (0, 2, 1, 3)), found.weights

    def _attend_by_subclass(
        self, query: Any, keys: Any, values: Any, sight: Sight, training: bool | None, scores: bool
    ) -> Attended:
        shared = self.num_heads // self.num_key_value_heads
        keys, values = (array if shared == 1 else ops.repeat(array, shared, axis=1) for array in (keys, values))
        query, keys, values = (ops.transpose(array, (0, 2, 1, 3)) for array in (query, keys, values))
        mask, sees = sight.dense(), None
        if mask is not None:
            sees = ops.any(mask, axis=(1, 3)) if sight.may_blind else None
            mask = mask[:, 0] if mask.shape[1] == 1 else mask
        asked: dict[str, Any] = {"return_attention_scores": True} if scores else {}  # an override need not know it
        output, weights = self._compute_attention(query, keys, values, mask, training, **asked)
        return Attended(ops.transpose(output, (0, 2, 1, 3)), weights, sees)

    def _bias(self, query: Any, sight: Sight) -> Any:
        """What is added to the scores."""
        return None

    def _asked(self, query: Any) -> Any:
        """The query as it meets the keys."""
        return query

    def _project_output(self, found: Attended, query: Any) -> Any:
        output = self.axes.back(found.heads, query)
        if self.use_gate:
            output = output * self._gate_dense(query)
        output = self._output_dense(output)
        if found.sees is None or not self.use_bias:
            return output
        sees = ops.cast(self.axes.apart(found.sees, query), output.dtype)  # else the bias would answer for the blind
        return output * ops.reshape(sees, (*ops.shape(sees), *[1] * (len(output.shape) - len(sees.shape))))

    @property
    def sliding_window(self) -> int | None:
        """How many places a query sees to either side, its own included."""
        return self._sliding_window

    # Keras' layer has these four, and its weights files call the projections by them.
    @property
    def query_dense(self) -> Any:
        """W^Q."""
        return self._query_dense

    @property
    def key_dense(self) -> Any:
        """W^K."""
        return self._key_dense

    @property
    def value_dense(self) -> Any:
        """W^V."""
        return self._value_dense

    @property
    def output_dense(self) -> Any:
        """W^O."""
        return self._output_dense

    def _project(self, query: Any, key: Any, value: Any, sight: Sight) -> tuple[Any, Any, Any, Any]:
        """The query as it may be projected, and the heads of query, key and value.

        A row that is not finite becomes NaN in the heads of query and key, but the kernels are spared it: where it is
        hidden, its slope is 0, and 0 times NaN would be NaN in their gradients.
        """
        if not sight.may_hide:
            return query, self._project_query(query, sight.first_place), *self.project_memory(key, value)
        unasked = self._unasked(query, key, value, sight)
        fine = {id(a): finite_rows(a) for a in (query, key, value)}  # in self-attention, of one array
        spared = {id(a): ops.where(fine[id(a)], a, ops.zeros((), a.dtype)) for a in (query, key, value)}

        def marked(heads: Any, rows: Any, spared: Any = None) -> Any:
            rows = self.axes.positions(rows[..., 0])
            rows = rows if spared is None else ops.logical_or(rows, ops.logical_not(spared))
            return ops.where(rows[:, None, :, None], heads, ops.full((), float("nan"), heads.dtype))

        asks, tells = fine[id(query)], ops.logical_and(fine[id(key)], fine[id(value)])
        query, key, value = (spared[id(array)] for array in (query, key, value))
        keys, values = self.project_memory(key, value)
        return query, marked(self._project_query(query, sight.first_place), asks, unasked), marked(keys, tells), values

    def _unasked(self, query: Any, key: Any, value: Any, sight: Sight) -> Any:
        """Which queries are real `(B, T)`, where that is known of them: padding asks too, and nobody wants to know."""
        return sight.keys if query is key and query is value else None

    def project_memory(self, key: Any, value: Any) -> tuple[Any, Any]:
        """The keys and values of their heads, `(B, G, S, K)` each: equation (2.1) but for the query."""
        self._check_widths(key=key, value=value)
        keys, values = self.axes.heads(self._key_dense(key)), self.axes.heads(self._value_dense(value))
        return (self._key_norm(keys) if self.qk_norm else keys), values

    def _project_query(self, query: Any, first: Any = 0) -> Any:
        """The queries of their heads `(B, H, T, K)`; `first` is the place of the first among the keys."""
        self._check_widths(query=query)
        heads = self.axes.heads(self._query_dense(query))
        return self._query_norm(heads) if self.qk_norm else heads

    def compute_mask(self, query: Any, previous_mask: Any = None) -> Any:
        return previous_mask[0] if isinstance(previous_mask, (list, tuple)) else previous_mask

    def compute_output_shape(self, query_shape: Any, value_shape: Any, key_shape: Any = None) -> tuple[Any, ...]:
        self._check_shapes(query_shape, value_shape, value_shape if key_shape is None else key_shape)
        return (*query_shape[:-1], *(self._output_shape or (query_shape[-1],)))

    def compute_output_spec(
        self,
        query: Any,
        value: Any,
        key: Any = None,
        query_mask: Any = None,
        value_mask: Any = None,
        key_mask: Any = None,
        attention_mask: Any = None,
        return_attention_scores: bool = False,
        training: bool | None = None,
        use_causal_mask: bool = False,
    ) -> Any:
        return self._output_spec(query, value, return_attention_scores, key)

    def _output_spec(self, query: Any, value: Any, scores: bool, key: Any = None) -> Any:
        key_shape = value.shape if key is None else key.shape
        shape = MultiHeadAttention.compute_output_shape(self, query.shape, value.shape, key_shape)
        output = keras.KerasTensor(shape, dtype=self.compute_dtype)
        if not scores:
            return output
        axes = Axes(len(query.shape), self.attention_axes)
        weights = axes.scores_shape(query.shape, value.shape, self.num_heads)
        return output, keras.KerasTensor(weights, dtype=self.compute_dtype)

    @classmethod
    def from_keras(cls, layer: Any) -> MultiHeadAttention:
        """The same layer with the same weights, of a `keras.layers.MultiHeadAttention` or `GroupQueryAttention`.

        Quantized projections stay so; LoRA's share is added to the kernels.

        Raises:
            ValueError: for another layer, or a subclass, which may compute something else; on a class of ours that is
                called otherwise, such as `SelfAttention`.

        >>> import numpy as np
        >>> theirs = keras.layers.MultiHeadAttention(num_heads=2, key_dim=4)
        >>> x = np.random.default_rng(0).normal(size=(1, 3, 8)).astype("float32")
        >>> expected = theirs(x, x)
        >>> bool(np.allclose(MultiHeadAttention.from_keras(theirs)(x, x), expected, atol=1e-6))
        True
        """
        if "query" not in inspect.signature(cls.call).parameters:
            raise ValueError(
                f"Keras' layer is called as layer(query, value, key), and {cls.__name__} otherwise. Use "
                f"MultiHeadAttention.from_keras, or {cls.__name__}(...).set_weights(layer.get_weights())."
            )
        if type(layer) not in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention):
            raise ValueError(
                "from_keras takes a keras.layers.MultiHeadAttention or GroupQueryAttention. Received "
                f"{type(layer).__name__}."
            )
        config = layer.get_config()
        if "num_query_heads" in config:
            config["num_heads"], config["key_dim"] = config.pop("num_query_heads"), config.pop("head_dim")
        config["flash_attention"] = getattr(layer, "_flash_attention", None) or None
        config = {name: value for name, value in config.items() if name not in ("build_config", "registered_name")}
        ours = cls._of_keras(config)
        if layer.built:
            ours.build(**layer.get_build_config()["shapes_dict"])
            _copy_projections(layer, ours)
        return ours

    @classmethod
    def _of_keras(cls, config: dict[str, Any]) -> MultiHeadAttention:
        return MultiHeadAttention.from_config(config)

    def to_keras(self) -> Any:
        """The same layer with the same weights as Keras' own: `GroupQueryAttention` where keys share heads.

        Quantized projections stay so; LoRA's share is added to the kernels.

        Raises:
            ValueError: for what Keras' layer cannot do.
        """
        extras = [name for name in ("qk_norm", "soft_cap", "positions") if getattr(self, name, None)]
        grouped = self.num_key_value_heads != self.num_heads
        if grouped:
            extras += [name for name, differs in (
                ("attention_axes", self.attention_axes is not None), ("output_shape", self._output_shape is not None),
                ("value_dim", self.value_dim != self.key_dim),
            ) if differs]  # fmt: skip
        if extras:
            raise ValueError(f"Keras' layer has no {', '.join(extras)}.")
        config = MultiHeadAttention.get_config(self)
        for name in ("num_key_value_heads", "qk_norm", "soft_cap", "projections"):
            config.pop(name, None)
        config["flash_attention"] = None  # True makes Keras' layer refuse most calls
        if grouped:
            for name in ("value_dim", "output_shape", "attention_axes"):
                config.pop(name)
            config.update(
                num_query_heads=config.pop("num_heads"), head_dim=config.pop("key_dim"),
                num_key_value_heads=self.num_key_value_heads,
            )  # fmt: skip
        theirs = (keras.layers.GroupQueryAttention if grouped else keras.layers.MultiHeadAttention)(**config)
        if self.built:
            build = self.get_build_config()
            shapes = list(build.get("shapes_dict", build).values())
            theirs.build(*(shapes if len(shapes) > 1 else shapes * 2))
            _copy_projections(self, theirs)
        return theirs

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        config = {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "output_shape": self._output_shape,
            "attention_axes": self.attention_axes,
            "sliding_window": self.sliding_window,
            "flash_attention": self.flash_attention,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.projections_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "use_gate": self.use_gate,
            "seed": self.seed,
            "num_key_value_heads": self.num_key_value_heads,
            "qk_norm": self.qk_norm,
            "soft_cap": self.soft_cap,
        }
        quantized = {
            dense.name: {
                "dtype": serialize(dense.dtype_policy),
                "quantization_config": given.get("quantization_config"),
            }
            for dense in _projections(self).values()
            if dense.quantization_mode is not None
            for given in [dense.get_config()]
        }
        return {**config, "projections": quantized} if quantized else config


def _sizes(output_shape: Any) -> tuple[int, ...] | None:
    if output_shape is None or output_shape == ():
        return None
    sizes = (output_shape,) if not isinstance(output_shape, (list, tuple)) else tuple(output_shape)
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            f"Invalid `output_shape`: it is a positive whole number, or several. Received {output_shape!r}."
        )
    return sizes


def _projections(layer: Any) -> dict[str, Any]:
    """The projections of a built layer, ours or Keras', by their names."""
    parts = layer._flatten_layers(include_self=False, recursive=False)
    return {part.name: part for part in parts if isinstance(part, keras.layers.EinsumDense)}


def _copy_projections(source: Any, target: Any) -> None:
    """Gives the projections of a built layer what those of another hold."""
    targets = _projections(target)
    for name, dense in _projections(source).items():
        if dense.quantization_mode != targets[name].quantization_mode:
            targets[name].quantize(dense.quantization_mode, config=dense.quantization_config)
        store: dict[str, Any] = {}
        dense.save_own_variables(store)
        targets[name].load_own_variables(store)


def _letters(shape: Any) -> str:
    """A letter for each axis of an input but the width."""
    return "abcdefgij"[: len(shape) - 1]


def _read(config: dict[str, Any]) -> dict[str, Any]:
    return {name: keras.saving.deserialize_keras_object(value) for name, value in config.items() if value is not None}


def _copy(initializer: Any) -> Any:
    """A fresh initializer of the same kind: one object used twice would give equal kernels."""
    return initializer.__class__.from_config(initializer.get_config())
