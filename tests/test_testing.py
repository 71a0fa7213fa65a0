"""The laws of attention hold for the layers here, and each kind of broken layer is caught by the laws it breaks."""

from __future__ import annotations

import dataclasses

import keras
import pytest
from keras import ops

from mmattn import backend
from mmattn.layers import CrossAttention, GroupedQueryAttention, MultiHeadAttention, SelfAttention
from mmattn.layers.dot_product import Attended, explicit
from mmattn.testing import check_attention
from mmattn.testing_laws import LAWS

SLOW = {"compiled", "quantized"}  # seconds each: for the layers themselves
QUICK = [name for name in LAWS if name not in SLOW]


def failed(layer, laws=None, **options):
    report = check_attention(layer, laws=laws, say=None, **options)
    return {name: report[name].measured for name in report.failed}


@pytest.mark.parametrize("make", [lambda: MultiHeadAttention(2, 4), lambda: GroupedQueryAttention(4, 4, 2)])
def test_every_law_holds_and_is_asked(make):
    report = check_attention(make(), say=None)
    assert not report.failed, str(report)
    cannot = {name for name, finding in report.items() if finding.holds is None}
    assert cannot == ({"compiled"} if backend.name() == "torch" else set())


def test_every_law_that_can_be_asked_holds_for_self_and_cross_attention():
    for layer in (SelfAttention(2, 4, positions="shaw"), CrossAttention(2, 4)):
        report = check_attention(layer, laws=QUICK, say=None)
        assert not report.failed, str(report)
    assert report["causal"].measured == "its call has no use_causal_mask"


@pytest.mark.parametrize(
    "layer",
    [
        MultiHeadAttention(2, 4, flash_attention=True),
        MultiHeadAttention(2, 4, use_gate=True, qk_norm=True, soft_cap=5.0),
        MultiHeadAttention(2, 4, sliding_window=3),
        *(SelfAttention(2, 4, positions=positions) for positions in ("rotary", "alibi", "t5", "transformer_xl")),
    ],
    ids=lambda layer: layer.name,
)
def test_what_is_hidden_stays_hidden_on_other_paths(layer):
    laws = [name for name in LAWS if name.startswith(("hidden", "blind"))]
    assert failed(layer, laws) == {}


class LeaksTheFuture(MultiHeadAttention):
    def _sight(self, *arguments):
        return dataclasses.replace(super()._sight(*arguments), causal=False)


class LeaksWithDropout(MultiHeadAttention):
    def _sight(self, *arguments):
        sight = super()._sight(*arguments)
        return dataclasses.replace(sight, causal=False) if self.dropout else sight


class IgnoresMasks(MultiHeadAttention):
    def _sight(self, *arguments):
        return dataclasses.replace(super()._sight(*arguments), mask=None, keys=None, queries=None)


class LosesTheMaskWithScores(MultiHeadAttention):
    def _attend(self, query, keys, values, sight, training=False, scores=False):
        sight = dataclasses.replace(sight, mask=None, keys=None, queries=None) if scores else sight
        return super()._attend(query, keys, values, sight, training, scores)


class GivesTheBlindTheMean(MultiHeadAttention):
    def _attend(self, query, keys, values, sight, training=False, scores=False):
        found = super()._attend(query, keys, values, sight, training, scores)
        if found.sees is None:
            return found
        mean = ops.mean(values, axis=2, keepdims=True)
        return Attended(ops.where(found.sees[:, None, :, None], found.heads, mean), found.weights)


class LetsNanThrough(MultiHeadAttention):
    def _project(self, query, key, value, sight):
        return query, self._project_query(query), *self.project_memory(key, value)

    def _attend(self, query, keys, values, sight, training=False, scores=False):
        return explicit(query, keys, values, sight, self.scoring, guard=False)


class AlignsTopLeft(MultiHeadAttention):
    def _sight(self, *arguments):
        return dataclasses.replace(super()._sight(*arguments), place=0)


class TakesFloats(MultiHeadAttention):
    def _sight(self, query, key, query_mask, value_mask, key_mask, attention_mask, causal):
        mask = None if attention_mask is None else ops.cast(attention_mask, "bool")
        return super()._sight(query, key, query_mask, value_mask, key_mask, mask, causal)


class ForgetsItsScale(MultiHeadAttention):
    def __init__(self, *arguments, times=3.0, **options):
        super().__init__(*arguments, **options)
        self.scoring = dataclasses.replace(self.scoring, scale=self.scoring.scale * times)


HIDDEN = {"hidden nan", "hidden nan gradient"}
BROKEN = [
    (LeaksTheFuture(2, 4), {"causal", "causal with dropout", "causal of rank 4"}),
    (LeaksWithDropout(2, 4), {"causal with dropout"}),
    (GivesTheBlindTheMean(2, 4), {"blind query", "blind query gradient"}),
    (LosesTheMaskWithScores(2, 4), {"blind query with scores", "same with scores", "scores"}),
    (LetsNanThrough(2, 4), HIDDEN),
    (
        IgnoresMasks(2, 4),
        {"padding", "implicit mask", "stack", "blind query", "blind query gradient", "scores", *HIDDEN},
    ),
    (AlignsTopLeft(2, 4), {"causal alignment"}),
    (TakesFloats(2, 4), {"float mask"}),
    (ForgetsItsScale(2, 4, times=5.0), {"config", "saved"}),
]


@pytest.mark.parametrize("layer, laws", BROKEN, ids=lambda value: getattr(value, "name", ""))
def test_a_broken_layer_is_caught_by_the_laws_that_it_breaks_and_by_no_other(layer, laws):
    assert set(failed(layer, QUICK)) == laws


class TakesMasksAway(MultiHeadAttention):
    def __call__(self, query, value, **options):
        found = super().__call__(query, value, **options)
        for tensor in (query, value):
            if hasattr(tensor, "_keras_mask"):
                tensor._keras_mask = None
        return found


@pytest.mark.skipif(backend.name() == "jax", reason="Keras keeps the masks of JAX's arrays elsewhere")
def test_a_layer_that_takes_implicit_masks_away_is_caught():
    assert set(failed(TakesMasksAway(2, 4), QUICK)) == {"mask stays", "stack"}


class Plain(keras.layers.Layer):
    """Without a config, scores or masks."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def call(self, query, value):
        weights = ops.softmax(ops.matmul(query, ops.transpose(value, (0, 2, 1))))
        return self.dense(ops.matmul(weights, value))


def test_a_layer_of_few_arguments_is_asked_what_it_can_be_asked():
    report = check_attention(lambda width: Plain(keras.layers.Dense(width)), say=None, laws=QUICK)
    assert set(report.failed) == {"implicit mask", "stack", "config", "saved"}
    assert "NotImplementedError" in report["config"].measured
    assert report["padding"].measured == "its call has no attention_mask"
    assert report["float16"].measured.startswith("it cannot be made from its config: NotImplementedError")


class Raises(MultiHeadAttention):
    def _attend(self, *arguments):
        raise RuntimeError("no luck")


def test_an_error_of_the_layer_is_a_finding_and_no_error():
    report = check_attention(Raises(2, 4), laws=QUICK, say=None)
    assert set(report.failed) == set(QUICK), str(report)
    assert report["scores"].measured.startswith("raises RuntimeError: no luck")


def test_a_layer_that_is_built_keeps_its_weights():
    layer = MultiHeadAttention(2, 4, dropout=0.1)
    layer.build((None, None, 6), (None, None, 4))
    before = layer.get_weights()
    report = check_attention(layer, laws=["padding", "causal with dropout", "config"], say=None)
    assert [finding.holds for finding in report.values()] == [True, True, None]
    assert report["config"].measured.startswith("it is built for other inputs: ")
    assert all((a == b).all() for a, b in zip(before, layer.get_weights(), strict=True))


def test_reports_can_be_read_and_set_side_by_side():
    said = []
    laws = ["causal", "blind query"]
    first = check_attention(LeaksTheFuture(2, 4), laws=laws, say=said.append)
    second = check_attention(CrossAttention(2, 4), laws=laws, say=said.append)
    assert said == [str(first), str(second)]
    assert "1 of 2 hold" in said[0] and "NO" in said[0] and "1 of 1 hold, 1 can't be asked" in said[1]
    lines = first.markdown(second).splitlines()
    assert [line.split("|")[-3:-1] for line in lines[2:5]] == [
        [" NO ", " - "],
        [" yes ", " yes "],
        [" 1 of 2 hold ", " 1 of 1 hold, 1 can't be asked "],
    ]
    assert f"- causal NO: {first['causal'].measured}" in lines


def test_an_unknown_law_or_too_short_a_length_is_refused():
    with pytest.raises(ValueError, match=r"a function that makes one\. Received 3"):
        check_attention(3)
    with pytest.raises(ValueError, match=r"no law 'casual'.*causal"):
        check_attention(MultiHeadAttention(2, 4), laws=["casual"])
    with pytest.raises(ValueError, match=r"at least 3.*Received length=2"):
        check_attention(MultiHeadAttention(2, 4), length=2)


def test_a_layer_that_takes_a_list_of_query_and_value_is_asked():
    report = check_attention(keras.layers.AdditiveAttention(), say=None)
    assert report.failed == ["causal alignment"], str(report)
    assert report["implicit mask"].holds and report["saved"].holds and report["causal with dropout"].holds
    assert report["padding"].measured == "its call has no attention_mask"


def test_of_a_layer_that_is_no_attention_nothing_can_be_asked():
    report = check_attention(keras.layers.Dense(8), say=None, laws=["implicit mask", "config"])
    assert report.failed == [] and {finding.holds for finding in report.values()} == {None}
    reason = "it is no attention: what stands at one place changes nothing at any other"
    assert str(report) == f"keras.Dense: 0 of 0 hold, 2 can't be asked\n  ({reason})"
    alone = check_attention(CrossAttention(2, 4), say=None, laws=["causal"])
    assert "causal" in str(alone) and alone.problem is None


class Begins(keras.layers.Layer):
    """Attention that counts for nothing at first, and no config."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def build(self, shape):
        self.attention.build(shape, shape)
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.gate * self.attention(x, x)


def test_a_layer_whose_weights_hide_its_attention_is_asked():
    report = check_attention(Begins(MultiHeadAttention(2, 4)), say=None, laws=["stack", "config"])
    assert report.problem is None and report["stack"].holds and report.failed == ["config"]
