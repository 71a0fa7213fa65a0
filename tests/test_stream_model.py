"""Training on streams: what is remembered goes from batch to batch, into checkpoints, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from arrays import assert_close, assert_equal, numbers
from keras import ops
from tiny_text import ENGLISH, JOINT, sharpened

from mmattn.bundle import load_bundle, save_bundle
from mmattn.bundle_kinds import KINDS, check_generation
from mmattn.data.streams import StreamBatches
from mmattn.decoders import TransformerDecoder, TransformerXLDecoder
from mmattn.inference import Writer
from mmattn.model import LanguageModel
from mmattn.stream_model import StreamModel
from mmattn.tasks.streams import STREAMS, StreamModelling, by_memory, evaluate, stream_measurer
from mmattn.training.callbacks import StopSignals
from mmattn.training.checkpoint import CheckpointFolder, read
from mmattn.training.fit import FitOptions, TrainingLoop
from mmattn.training.folder import JsonLines
from mmattn.training.losses import MaskedCrossEntropy, token_losses
from mmattn.training.snapshots import Snapshots

ROWS, LENGTH, MEMORY, STEPS = 2, 5, 6, 3
TEXT = " ".join(ENGLISH[:2])


def encode(text: str) -> list[int]:
    return [4 + ord(char) % 16 for char in text]


BATCHES = StreamBatches([{"id": "a", "text": TEXT}], encode, ROWS, LENGTH)


def language_model(**options: Any) -> LanguageModel:
    options = {"memory_length": MEMORY, "cross_attention": False, **options}
    model = LanguageModel(TransformerXLDecoder(20, 8, num_layers=2, num_heads=2, **options))
    model.build({"target_ids": (None, None)})
    return model


def stream_model(**options: Any) -> StreamModel:
    keras.utils.set_random_seed(5)
    model = StreamModel(language_model(**options), ROWS)
    model.build({"target_ids": (None, None)})
    return model


def assert_states_equal(one: Any, two: Any, atol: float = 1e-5) -> None:
    keras.tree.assert_same_structure(one, two)
    for a, b in zip(keras.tree.flatten(one), keras.tree.flatten(two), strict=True):
        assert_close(a, b, atol=atol)


def test_a_call_in_training_goes_on_where_the_last_one_ended() -> None:
    model = stream_model()
    assert_states_equal(model.state(), model.model.decoder.empty_state(ROWS))
    state = None
    for inputs, _, _ in BATCHES.one_pass():
        expected, new = model.model.read(inputs["target_ids"], state, reset=inputs["reset"])
        still = numbers(model(inputs, training=False))
        assert_close(still, expected, atol=1e-5)
        assert_close(model(inputs, training=True), expected, atol=1e-5)
        state = new
        assert_states_equal(model.state(), state)
    assert_equal(state["lengths"], [MEMORY] * ROWS)
    first, *_ = next(BATCHES.iterate())
    assert_close(model(first), model.model.read(first["target_ids"])[0], atol=1e-5)  # reset, with whatever is held


def test_one_row_begins_anew_after_a_full_memory() -> None:
    model = stream_model()
    batches = [inputs for inputs, _, _ in BATCHES.one_pass()]
    for inputs in batches:
        model(inputs, training=True)
    full = keras.tree.map_structure(ops.copy, model.state())
    assert_equal(full["lengths"], [MEMORY] * ROWS)
    ids = batches[1]["target_ids"]
    goes_on, begins = model.model.read(ids, full)[0], model.model.read(ids)[0]
    found = numbers(model({"target_ids": ids, "reset": np.array([False, True])}, training=True))
    assert_close(found[0], numbers(goes_on)[0], atol=1e-5)
    assert_close(found[1], numbers(begins)[1], atol=1e-5)
    assert_equal(model.state()["lengths"], [MEMORY, LENGTH])


def test_a_row_that_overflows_is_forgotten_and_the_others_are_not() -> None:
    model = stream_model()
    ids = np.array([[2, 5, 6, 7, 8], [2, 9, 6, 7, 8]])
    goes_on = {"target_ids": ids[:, 1:], "reset": np.array([False, False])}
    table = model.model.decoder.token_embedding.embeddings
    kept = numbers(table)
    table.assign(np.where(np.arange(len(kept))[:, None] == 9, np.inf, kept))
    model({"target_ids": ids, "reset": np.array([True, True])}, training=True)
    table.assign(kept)
    assert_equal(model.state()["lengths"], [LENGTH, 0])
    assert all(np.isfinite(numbers(array)).all() for array in keras.tree.flatten(model.state()))
    found = numbers(model(goes_on, training=True))
    after = model.model.read(ids)[1]
    assert_close(found[0], numbers(model.model.read(ids[:, 1:], after)[0])[0], atol=1e-5)
    assert_close(found[1], numbers(model.model.read(ids[:, 1:])[0])[1], atol=1e-5)


def test_what_is_remembered_is_not_trained_and_not_in_the_language_model() -> None:
    model = stream_model()
    held = [v.path for v in model.non_trainable_variables if v.path.rpartition("/")[2].startswith("state_")]
    assert len(held) == 3 and not {id(v) for v in model.model.variables} & {id(v) for v in model._held}
    assert len(model.trainable_variables) == len(model.model.trainable_variables)
    with pytest.raises(ValueError, match="remembers nothing from batch to batch"):
        StreamModel(LanguageModel(TransformerDecoder(20, 8, 1, 2, cross_attention=False)), ROWS)


def test_what_is_remembered_counts_as_no_weight_and_lies_in_no_snapshot(tmp_path: Any) -> None:
    model = stream_model()
    inputs, *_ = next(BATCHES.iterate())
    model(inputs, training=True)
    assert [v.path for v in model.weights] == [v.path for v in model.model.weights]
    assert model.count_params() == model.model.count_params()
    Snapshots(tmp_path, 2).add(1, 0.5, model)
    arrays, _ = read(tmp_path / "step-00000001.npz")
    assert len(arrays) == len(model.model.weights) and not [name for name in arrays if "state" in name]


def test_saved_and_loaded_it_goes_on_remembering(tmp_path: Any) -> None:
    model = stream_model()
    inputs, *_ = next(BATCHES.iterate())
    model(inputs, training=True)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_states_equal(loaded.state(), model.state(), atol=0)
    following = {**inputs, "reset": np.array([False, True])}
    assert_close(loaded(following), model(following), atol=1e-6)


class Run:
    """A process' life on a run folder, as in test_training_resume: `run(kill_at=n)` dies after update n."""

    def __init__(self, folder: Any, graph: bool = False) -> None:
        self.model = stream_model(dropout=0.1, seed=3)
        optimizer = keras.optimizers.AdamW(0.02, use_ema=True, ema_momentum=0.7)
        compiled = keras.config.backend() == "jax"
        self.model.compile(optimizer, loss=MaskedCrossEntropy(), jit_compile=compiled, run_eagerly=not graph)
        self.model.optimizer.build(self.model.trainable_variables)
        self.measure = stream_measurer(self.model.model)
        folder.mkdir(exist_ok=True)
        options = FitOptions(2, monitor="log_likelihood", checkpoint_minutes=0.0)
        self.loop = TrainingLoop(
            self.model, BATCHES, STEPS, options, folder, self.validate, StopSignals(), lambda text: None
        )

    def validate(self, step: int) -> dict[str, float]:
        before = [numbers(array) for array in keras.tree.flatten(self.model.state())]
        scores = self.measure(BATCHES.one_pass(), MEMORY)
        for one, two in zip(before, keras.tree.flatten(self.model.state()), strict=True):
            assert_equal(one, two)
        return scores

    def run(self, kill_at: int | None = None) -> Any:
        done = self.loop._batch_done

        def batch_done(logs: Any) -> None:
            done(logs)
            if self.loop.state.step == kill_at:
                raise MemoryError("killed")

        self.loop._batch_done = batch_done  # type: ignore[method-assign]
        try:
            return self.loop.run()
        except MemoryError:
            return None


def newest(folder: Any) -> Any:
    return read(CheckpointFolder(folder / "checkpoints").files()[-1])


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Any, monkeypatch: Any, graph: bool) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    graph = graph or keras.config.backend() == "jax"
    whole = Run(tmp_path / "whole", graph)
    assert whole.run() is not None
    for kill in (2, 5):
        Run(tmp_path / "killed", graph).run(kill_at=kill)
    held = {
        name: array for name, array in newest(tmp_path / "killed")[0].items() if name.endswith("stream_model/state")
    }
    assert len(held) == 3 and all(array.any() for array in held.values())
    assert Run(tmp_path / "killed", graph).run() is not None
    (arrays, info), (others, other_info) = newest(tmp_path / "whole"), newest(tmp_path / "killed")
    assert info == other_info and arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert array.tobytes() == others[name].tobytes(), name
    scores = [JsonLines(tmp_path / name / "metrics.jsonl").read() for name in ("whole", "killed")]
    assert scores[0] == scores[1] and len(scores[0]) == 2


def test_the_loss_of_a_stream_is_that_of_one_call_where_the_memory_holds_all() -> None:
    model = stream_model().model
    count = BATCHES.num_tokens
    read_ids, labels = np.array([[2, *encode(TEXT)[:-1]]]), np.array([encode(TEXT)])
    expected = float(numbers(ops.mean(token_losses(labels, model({"target_ids": read_ids})))))
    found = by_memory(model, BATCHES, [0, 3, count], batch_size=1)
    assert found[count]["loss"] == pytest.approx(expected, abs=1e-5)
    segments = [model.read(read_ids[:, i : i + LENGTH])[0] for i in range(0, count, LENGTH)]
    apart = float(numbers(ops.mean(token_losses(labels, ops.concatenate(segments, axis=1)))))
    assert found[0]["loss"] == pytest.approx(apart, abs=1e-5)
    assert len({round(scores["loss"], 6) for scores in found.values()}) == 3


def test_scores_do_not_depend_on_the_number_of_streams_where_these_are_warm() -> None:
    window = 3  # two layers see 4 positions back: what is read in a stream's first segment alone depends on its begin
    model = stream_model(sliding_window=window).model
    cold = {1: (0, 6), 2: (0,)}  # of 12 segments, those that begin a stream with 1 or 2 of them

    def scores(streams: int) -> dict[str, float]:
        batches = BATCHES.one_pass(streams)
        warm = ((i, told, real * (step not in cold[streams])) for step, (i, told, real) in enumerate(batches))
        return stream_measurer(model)(warm, window - 1)

    assert len(list(BATCHES.one_pass(1))) == 12
    assert scores(1)["loss"] == pytest.approx(scores(2)["loss"], abs=1e-5)
    assert by_memory(model, BATCHES, [2], 1)[2]["loss"] != pytest.approx(by_memory(model, BATCHES, [2])[2]["loss"])


def test_texts_that_were_documents_in_training_are_scored_as_documents() -> None:
    source = [{"id": str(number), "text": text} for number, text in enumerate(ENGLISH[:3])]
    model = stream_model().model
    bundle: Any = SimpleNamespace(model=model, tokenizer=SimpleNamespace(encode=encode))
    told = [[*encode(text), 3] for text in ENGLISH[:3]]
    losses = [token_losses(np.array([row]), model({"target_ids": np.array([[2, *row[:-1]]])})) for row in told]
    task = object.__new__(StreamModelling)
    task.batches = {"train": StreamBatches(source, encode, ROWS, LENGTH, documents=True)}
    settings = {"memory_length": 99, **task._generation()}
    assert settings == {"context_length": LENGTH, "memory_length": 99, "documents": True}
    found = evaluate(bundle, source, settings, batch_size=1)
    assert found.keys() == {99}
    expected = np.concatenate([numbers(row)[0] for row in losses]).mean()
    assert found[99]["loss"] == pytest.approx(expected, abs=1e-5)
    older = {name: value for name, value in KINDS["language_model"].generation.items() if name != "documents"}
    assert check_generation(older, "language_model")["documents"] is False
    joined = evaluate(bundle, source, {**settings, "documents": False}, batch_size=1)
    assert joined[99]["loss"] != pytest.approx(expected, abs=1e-3)


def test_a_text_is_scored_in_few_streams() -> None:
    text, model = " ".join(ENGLISH), stream_model().model
    many, few = (StreamBatches([{"id": "a", "text": text}], encode, size, LENGTH) for size in (20, STREAMS))
    assert by_memory(model, many, [MEMORY]) == by_memory(model, few, [MEMORY])
    assert StreamModelling.measurer(model)(many) == by_memory(model, few, [MEMORY])[MEMORY]


# Generation


def make_writer(end: float) -> Writer:
    """Of short segments and a shorter memory; `end` is the bias of the end token."""
    keras.utils.set_random_seed(3)
    decoder = TransformerXLDecoder(JOINT.vocabulary_size, 16, 1, 2, memory_length=3, cross_attention=False)
    model = LanguageModel(decoder)
    model.build({"target_ids": (None, None)})
    sharpened(model)
    decoder.token_embedding.bias.assign(end * np.eye(1, JOINT.vocabulary_size, 3, dtype="float32")[0])
    return Writer(model, JOINT, {"context_length": 4})


@pytest.fixture(scope="module")
def writer() -> Writer:
    return make_writer(1.0)


@pytest.fixture(scope="module")
def endless() -> Writer:
    return make_writer(-9.0)


def plain(model: Any, most: int, prompt: list[int], window: int, memory_length: int) -> list[int]:
    """Greedy: for each token the whole text again, in segments of `window`, the memory between them."""
    ids = list(prompt)
    while len(ids) < most:
        read, state = [2, *ids], None
        for first in range(0, len(read), window):
            segment = np.array([read[first : first + window]])
            logits, state = model.read(segment, state, memory_length=memory_length)
        row = numbers(logits)[0, -1]
        row[:3] = -np.inf
        if row.argmax() == 3:
            break
        ids.append(int(row.argmax()))
    return ids


@pytest.mark.parametrize("memory_length", [0, 9])
@pytest.mark.parametrize("prompt", ["a red", ENGLISH[0]])
def test_a_text_goes_on_from_what_the_model_remembers(endless: Writer, prompt: str, memory_length: int) -> None:
    ids = JOINT.encode(prompt)
    most = len(ids) + 11
    expected = plain(endless.model, most, ids, 4, memory_length or 3)
    given: dict[str, Any] = {"method": "greedy", "max_length": most, "memory_length": memory_length}
    assert endless.write(prompt, compiled=False, **given) == [JOINT.decode(expected)]
    assert len(expected) == most


def test_a_seed_gives_the_same_texts_whatever_their_number(writer: Writer) -> None:
    settings: dict[str, Any] = {"max_length": 12, "temperature": 2.0, "compiled": False}
    three = writer.write("a", count=3, seed=4, **settings)
    assert writer.write("a", count=1, seed=4, **settings) == three[:1]
    assert len(set(three)) > 1


def test_its_bundle_remembers_nothing_at_first_and_writes_the_same(writer: Writer, tmp_path: Any) -> None:
    save_bundle(tmp_path / "b", writer.model, JOINT, generation=writer.generation, weights_dtype="float32")
    keras.utils.clear_session()
    bundle = load_bundle(tmp_path / "b", check=True)
    assert [v.path for v in bundle.model.non_trainable_variables] == []
    assert "a memory of 3 positions" in bundle.card()
    settings: dict[str, Any] = {"max_length": 14, "seed": 1, "compiled": False}
    assert Writer(bundle.model, JOINT, bundle.generation).write("a", **settings) == writer.write("a", **settings)


def test_a_memory_is_not_asked_of_a_model_without_one() -> None:
    model = LanguageModel(TransformerDecoder(JOINT.vocabulary_size, 8, 1, 2, cross_attention=False))
    with pytest.raises(ValueError, match="memory_length=4 goes with a model that remembers"):
        Writer(model, JOINT).write(memory_length=4)
    with pytest.raises(ValueError, match="documents=True goes with a model that remembers"):
        Writer(model, JOINT).write(documents=True)


@pytest.mark.skipif(keras.config.backend() == "torch", reason="torch compiles nothing here")
def test_compiled_generation_with_a_memory_equals_uncompiled(writer: Writer) -> None:
    settings: dict[str, Any] = {"max_length": 13, "method": "greedy"}
    expected = writer.write("a red", compiled=False, **settings)
    for compiled in ("step", True):
        assert writer.write("a red", compiled=compiled, **settings) == expected
