"""Exact resume: a run that is stopped anywhere and continued ends with the same bits as one that is not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import zipfile

import keras
import numpy as np
import pytest

from mmattn.training.callbacks import Interrupted, StopSignals, averaged_weights
from mmattn.training.checkpoint import (
    CheckpointError,
    CheckpointFolder,
    DamagedCheckpoint,
    capture,
    read,
    restore,
    value_of,
    write,
)
from mmattn.training.fit import FitOptions, TrainingError, TrainingLoop
from mmattn.training.folder import JsonLines
from mmattn.training.losses import MaskedCrossEntropy, Perplexity, TokenAccuracy

VOCABULARY, LENGTH, STEPS = 9, 5, 4


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """A process that dies needs no fsync, only a machine that does; on a busy disk it takes most of the time here."""
    monkeypatch.setattr("os.fsync", lambda handle: None)


class Nested(keras.layers.Layer):
    """Dropouts kept in a list, in a dict and inside another layer, and a SeedGenerator of its own."""

    def __init__(self):
        super().__init__()
        self.listed = [keras.layers.Dropout(0.3)]
        self.named = {"a": keras.Sequential([keras.layers.Dropout(0.2), keras.layers.Dense(8)])}
        self.noise = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        x = self.named["a"](self.listed[0](x, training=training), training=training)
        return x + keras.random.normal(keras.ops.shape(x), stddev=0.1, seed=self.noise) if training else x


class Batches:
    """Batch k is a pure function of k. Reads one batch ahead, as a source that prefetches does, and counts."""

    def __init__(self):
        self.read = 0

    def iterate(self, start=0):
        ahead = self.batch(start)
        while True:
            start += 1
            batch, ahead = ahead, self.batch(start)
            yield batch

    def batch(self, number):
        rng = np.random.default_rng(number)
        ids = rng.integers(0, VOCABULARY, (4, LENGTH)).astype("int32")
        weights = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (4, 1))).astype("float32")
        self.read = max(self.read, number)
        return {"ids": ids}, (ids + 1) % VOCABULARY, weights


def make_model(dtype="float32"):
    keras.utils.set_random_seed(5)
    ids = keras.Input((LENGTH,), dtype="int32", name="ids")
    x = keras.layers.Embedding(VOCABULARY, 8, dtype=dtype)(ids)
    x = Nested()(x)
    model = keras.Model({"ids": ids}, keras.layers.Dense(VOCABULARY, dtype=dtype)(x))
    optimizer = keras.optimizers.AdamW(0.05, use_ema=True, ema_momentum=0.7, global_clipnorm=1.0)
    model.compile(optimizer, loss=MaskedCrossEntropy(0.1), weighted_metrics=[TokenAccuracy(), Perplexity()])
    model.optimizer.build(model.trainable_variables)
    return model


class Run:
    """A process' life on a run folder: `run(kill_at=n)` dies after update n, as by kill -9."""

    def __init__(self, folder, epochs=3, checkpoint_minutes=0.0, graph=False, **options):
        self.folder = folder
        self.batches = Batches()
        self.model = make_model()
        self.model.run_eagerly = not graph  # a graph takes seconds to trace; one test has it
        self.said = []
        options = FitOptions(epochs, monitor="score", checkpoint_minutes=checkpoint_minutes, **options)
        folder.mkdir(exist_ok=True)
        self.loop = TrainingLoop(
            self.model, self.batches, STEPS, options, folder, self.validate, StopSignals(), self.said.append
        )

    def validate(self, step):
        values = np.concatenate([value_of(v).ravel() for v in self.model.trainable_variables])
        return {"score": float(np.sin(1000 * np.abs(values).sum()))}

    def run(self, kill_at=None):
        done = self.loop._batch_done

        def batch_done(logs):
            done(logs)
            if self.loop.state.step == kill_at:
                raise MemoryError("killed")

        self.loop._batch_done = batch_done
        try:
            return self.loop.run()
        except MemoryError:
            return None


def newest(folder):
    return read(CheckpointFolder(folder / "checkpoints").files()[-1])


def assert_same(first, second):
    (arrays, info), (others, other_info) = newest(first), newest(second)
    assert info == other_info
    assert arrays.keys() == others.keys()
    for name, array in arrays.items():
        assert array.tobytes() == others[name].tobytes(), name
    for name in ("metrics.jsonl",):
        assert JsonLines(first / name).read() == JsonLines(second / name).read()
    best, other_best = read(first / "best.npz"), read(second / "best.npz")
    assert best[1] == other_best[1]
    assert all(best[0][name].tobytes() == other_best[0][name].tobytes() for name in best[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert Run(folder, checkpoint_minutes=1000).run() is not None
    return folder


def test_graph_training_killed_inside_and_between_epochs_ends_with_the_same_bits(tmp_path):
    assert Run(tmp_path / "whole", checkpoint_minutes=1000, graph=True).run() is not None
    for kill in (3, 8, 10):
        Run(tmp_path / "killed", graph=True).run(kill_at=kill)
    assert Run(tmp_path / "killed", graph=True).run() is not None
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("kills", [(1,), (3, 6), (4,), (5, 6, 7, 8), (8, 11), (12,)])
def test_killed_and_resumed_run_ends_with_the_same_bits(whole, tmp_path, kills):
    folder = tmp_path / "run"
    for kill in kills:
        Run(folder).run(kill_at=kill)
    assert Run(folder).run() is not None
    assert_same(whole, folder)


def test_resume_between_checkpoints_repeats_the_lost_batches(whole, tmp_path):
    folder = tmp_path / "run"
    Run(folder, checkpoint_minutes=1000).run(kill_at=7)  # the last checkpoint is the end of epoch 1, step 4
    second = Run(folder, checkpoint_minutes=1000)
    assert second.run() is not None
    assert any("after step 4 of 12" in line for line in second.said)
    assert_same(whole, folder)


def test_position_is_that_of_the_last_batch_trained_on_not_of_the_last_read(tmp_path):
    run = Run(tmp_path / "run")
    run.run(kill_at=2)
    assert run.batches.read >= 2  # batches 0, 1 and 2: one more than it has trained on
    assert newest(tmp_path / "run")[1]["step"] == 2


def test_death_in_validation_repeats_the_validation_alone(whole, tmp_path):
    folder = tmp_path / "run"
    first = Run(folder, checkpoint_minutes=1000)

    def dies(step):
        raise MemoryError("killed")

    first.loop.validate = dies
    assert first.run() is None
    second = Run(folder, checkpoint_minutes=1000)
    trained = []
    second.loop.progress.batch = lambda step, logs: trained.append(step)
    second.run()
    assert trained[0] == STEPS + 1
    assert_same(whole, folder)


@pytest.mark.parametrize("at", ["checkpoint", "best", "metrics"])
def test_death_in_a_write_leaves_the_file_before(whole, tmp_path, monkeypatch, at):
    folder = tmp_path / "run"
    first = Run(folder)
    names = {"checkpoint": "step-00000006.npz", "best": "best.npz", "metrics": "metrics.jsonl"}
    with monkeypatch.context() as patch:

        def half_a_file(file, **arrays):
            real_savez(file, **arrays)
            if file.name.endswith(names[at] + ".tmp"):
                file.truncate(file.tell() // 2)
                raise MemoryError("killed")

        def no_line(log, entry):
            with open(log.path, "a") as file:
                file.write(json.dumps(entry)[:20])
            raise MemoryError("killed")

        real_savez = np.savez
        patch.setattr(np, "savez", half_a_file)
        if at == "metrics":
            patch.setattr(JsonLines, "append", no_line)
        assert first.run() is None
    if at != "metrics":
        assert list(folder.rglob("*.tmp"))
    assert Run(folder).run() is not None
    assert not list(folder.rglob("*.tmp"))
    assert_same(whole, folder)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(whole, tmp_path, damage):
    folder = tmp_path / "run"
    Run(folder).run(kill_at=7)
    path = CheckpointFolder(folder / "checkpoints").files()[-1]
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0xFF
    path.write_bytes({"cut": data[: len(data) // 2], "flip": data, "empty": b""}[damage])
    second = Run(folder)
    second.run()
    assert any(path.name in line and "damaged" in line for line in second.said)
    assert any("after step 6 of" in line for line in second.said)
    assert_same(whole, folder)


def test_run_without_a_readable_checkpoint_is_refused(tmp_path):
    Run(tmp_path / "run").run(kill_at=3)
    for path in CheckpointFolder(tmp_path / "run" / "checkpoints").files():
        path.write_bytes(b"no")
    with pytest.raises(
        CheckpointError, match=r"No checkpoint in .* can be read \(step-.*npz\.damaged\)\. Start a new run"
    ):
        Run(tmp_path / "run").run()


def test_two_checkpoints_are_kept(whole):
    assert [p.name for p in CheckpointFolder(whole / "checkpoints").files()] == [
        "step-00000008.npz",
        "step-00000012.npz",
    ]


def test_checkpoint_holds_every_variable_of_model_optimizer_and_metrics(whole):
    arrays, _ = newest(whole)
    model = make_model()
    model.fit(Batches().iterate(), steps_per_epoch=1, verbose=0, shuffle=False)
    groups = [name.partition("/")[0] for name in arrays]
    assert groups.count("model") == len(model.variables)
    assert groups.count("optimizer") == len(model.optimizer.variables)
    assert groups.count("metrics") == len(model.metrics_variables)
    seeds = [name for name in arrays if "seed_generator" in name]
    assert len(seeds) == 3, seeds  # two dropouts and one of the layer's own
    assert len(model.weights) == len(model.variables) - 3  # what a weights file would leave out


def test_seed_generators_of_nested_layers_come_back():
    model = make_model()
    for batch in range(3):
        model({"ids": np.full((1, LENGTH), batch)}, training=True)
    arrays = capture(model)
    expected = keras.ops.convert_to_numpy(model({"ids": np.ones((1, LENGTH))}, training=True))
    other = make_model()
    assert not np.array_equal(expected, other({"ids": np.ones((1, LENGTH))}, training=True))
    restore(other, arrays, ("model", "optimizer"))
    assert np.array_equal(expected, other({"ids": np.ones((1, LENGTH))}, training=True))


def test_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    model = make_model()
    arrays = capture(model)
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="narrow")])
    with pytest.raises(CheckpointError, match=r"another model or optimizer \(.* differences\)"):
        restore(other, arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "uint32", "bool"])
def test_any_dtype_is_written_and_read_bit_for_bit(tmp_path, dtype):
    import ml_dtypes

    array = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    write(tmp_path / "a.npz", {"x": array, "scalar": array[0, 0]}, {"step": 1})
    arrays, info = read(tmp_path / "a.npz")
    assert info == {"step": 1}
    assert arrays["x"].dtype == array.dtype and arrays["x"].tobytes() == array.tobytes() and arrays["x"].shape == (2, 3)
    assert arrays["scalar"].shape == ()


def test_checkpoint_with_a_pickle_in_it_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", json=np.array([{"format": 1}], dtype=object))
    with pytest.raises(DamagedCheckpoint, match=r"a\.npz is damaged"):
        read(tmp_path / "a.npz")


def test_newer_checkpoint_format_is_refused_and_not_passed_over(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save({"x": np.ones(2)}, 1, {})
    path = folder.save({"x": np.ones(2)}, 2, {})
    with np.load(path) as stored:
        arrays = dict(stored)
    head = json.loads(arrays["json"].tobytes())
    arrays["json"] = np.frombuffer(json.dumps({**head, "format": 99}).encode(), "uint8")
    np.savez(path, **arrays)
    with pytest.raises(CheckpointError, match="format 99; this version reads up to 1"):
        folder.latest()


def test_early_stop_and_its_count_survive_a_kill(tmp_path):
    def falling(step):
        return {"score": -float(step)}

    states = {}
    for name, kills in (("whole", ()), ("killed", (5, 9))):
        for kill in kills:
            run = Run(tmp_path / name, epochs=20, patience=2)
            run.loop.validate = falling
            run.run(kill_at=kill)
        run = Run(tmp_path / name, epochs=20, patience=2)
        run.loop.validate = falling
        states[name] = run.run()
    assert states["whole"] == states["killed"]
    assert states["whole"].stopped and states["whole"].step == 3 * STEPS and states["whole"].best_step == STEPS


def test_of_equal_scores_the_later_weights_win_and_patience_still_counts(tmp_path):
    """A small model may score 0 again and again, and has learned meanwhile."""
    run = Run(tmp_path / "run", epochs=20, patience=2)
    run.loop.validate = lambda step: {"score": 0.0}
    state = run.run()
    assert state.stopped and state.step == state.best_step == 3 * STEPS and state.waited == 2
    assert read(tmp_path / "run" / "best.npz")[1]["step"] == 3 * STEPS


def test_run_that_has_ended_trains_no_further(whole, tmp_path):
    folder = tmp_path / "again"
    shutil.copytree(whole, folder)
    run = Run(folder)
    run.loop.progress.batch = lambda step, logs: pytest.fail("trained a batch")
    assert run.run().step == 3 * STEPS
    assert_same(whole, folder)


def test_stop_signal_saves_the_finished_batch_and_the_run_goes_on_from_it(whole, tmp_path):
    folder = tmp_path / "run"
    first = Run(folder, checkpoint_minutes=1000)
    step_done = first.loop.progress.batch

    def press(step, logs):
        step_done(step, logs)
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    first.loop.progress.batch = press
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM") as stop, first.loop.signals:
        first.run()
    assert stop.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    assert newest(folder)[1]["step"] == 6
    Run(folder, checkpoint_minutes=1000).run()
    assert_same(whole, folder)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs a system with terminals that hang up")
def test_a_closed_terminal_stops_a_run_unless_that_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(Interrupted, match="SIGHUP") as stop, StopSignals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.value.exit_code == 129 and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with StopSignals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_averaged_weights_are_swapped_in_and_the_raw_ones_come_back_bit_for_bit():
    model = make_model()
    raw, averages = [], None
    for batch in range(3):
        model.train_on_batch(*next(Batches().iterate(batch)))
        now = [value_of(v) for v in model.trainable_variables]
        averages = now if averages is None else [0.7 * a + 0.3 * n for a, n in zip(averages, now, strict=True)]
        raw = now
    with averaged_weights(model):
        for variable, average in zip(model.trainable_variables, averages, strict=True):
            np.testing.assert_allclose(value_of(variable), average, rtol=1e-5, atol=1e-7)
    for variable, value in zip(model.trainable_variables, raw, strict=True):
        assert value_of(variable).tobytes() == value.tobytes()


def test_best_weights_are_the_averages_and_are_in_the_model_at_the_end(whole, tmp_path):
    run = Run(tmp_path / "run")
    state = run.run()
    scores = {e["step"]: e["val_score"] for e in run.loop.metrics.read()}
    assert state.best_step == max(scores, key=scores.get)
    assert run.validate(0)["score"] == pytest.approx(state.best_score, abs=0)


def test_loss_that_is_no_number_stops_the_run_and_says_where(tmp_path):
    run = Run(tmp_path / "run")
    done = run.loop._batch_done
    run.loop._batch_done = lambda logs: done({**logs, "loss": float("nan")} if run.loop.state.step == 4 else logs)
    with pytest.raises(TrainingError, match=r"The loss is nan at step 5\. A lower learning rate"):
        run.run()


def test_scores_that_are_no_numbers_stop_the_run_in_words(tmp_path):
    run = Run(tmp_path / "run")

    def validate(step):
        raise FloatingPointError("The model's scores for row 0 are NaN.")

    run.loop.validate = validate
    with pytest.raises(TrainingError, match=rf"Validation at step {STEPS}: The model's scores.* A lower learning rate"):
        run.run()


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    run = Run(tmp_path / "run")
    done, variable = run.loop._batch_done, run.model.trainable_variables[0]

    def breaks(logs):
        if run.loop.state.step == 4:
            variable.assign(np.full(variable.shape, np.nan))
        done(logs)

    run.loop._batch_done = breaks
    with pytest.raises(TrainingError, match=rf"{variable.path} is not finite after step 5\. A lower learning rate"):
        run.run()
    arrays, _ = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    assert all(np.isfinite(array).all() for array in arrays.values() if array.dtype.kind == "f")


def test_other_training_data_are_refused_on_resuming(tmp_path):
    for fingerprint, refused in (("one", False), ("one", False), ("two", True)):
        run = Run(tmp_path / "run", epochs=1)
        run.batches.fingerprint = lambda fingerprint=fingerprint: fingerprint
        if refused:
            with pytest.raises(TrainingError, match=rf"are not those that the run has used up to step {STEPS}"):
                run.run()
        else:
            run.run()


def test_checkpoint_is_an_ordinary_zip_of_arrays(whole):
    path = CheckpointFolder(whole / "checkpoints").files()[-1]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(name.endswith(".npy") for name in archive.namelist())


def test_a_line_after_a_torn_one_is_kept(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    log.append({"n": 1})
    with open(log.path, "a") as file:
        file.write('{"n": 2, "to')  # killed here
    log.append({"n": 3})
    assert log.read() == [{"n": 1}, {"n": 3}]


def test_a_run_ends_with_the_best_of_single_weights_and_means_and_resumes_to_the_same(tmp_path):
    options = {"epochs": 5, "snapshots": 2}
    whole, parts = Run(tmp_path / "whole", **options), Run(tmp_path / "parts", **options)
    state = whole.run()
    assert parts.run(kill_at=11) is None
    again = Run(tmp_path / "parts", **options).run()
    assert_same(tmp_path / "whole", tmp_path / "parts")
    assert (state.best_score, state.best_weights) == (again.best_score, again.best_weights)
    means = [line for line in whole.said if line.startswith("mean of the ")]
    assert len(means) == 2
    arrays, info = read(tmp_path / "whole" / "best.npz")
    tried = [float(line.rpartition(" ")[2]) for line in means]
    single = max(entry["val_score"] for entry in whole.loop.metrics.read())
    assert state.best_score == pytest.approx(max([single, *tried]), rel=1e-3)
    assert whole.validate(0)["score"] == pytest.approx(state.best_score, abs=1e-9)
    assert info["weights"] == state.best_weights
    before = [array.tobytes() for array in arrays.values()]
    assert Run(tmp_path / "whole", **options).run().best_score == state.best_score  # tried once, not once a start
    assert [array.tobytes() for array in read(tmp_path / "whole" / "best.npz")[0].values()] == before


@pytest.mark.parametrize("several_shapes", [False, True])
def test_a_stop_while_the_stream_is_being_read_ahead_is_a_stop(tmp_path, several_shapes):
    """The thread that reads ahead is inside the generator then, which cannot be closed."""
    run = Run(tmp_path / "run")
    make = run.batches.batch

    def slowly(number):
        time.sleep(0.05)
        return make(number)

    run.batches.batch, run.batches.several_shapes = slowly, several_shapes
    done = run.loop._batch_done

    def batch_done(logs):
        if run.loop.state.step == 2:
            run.loop.signals.requested = 2
        done(logs)

    run.loop._batch_done = batch_done
    with pytest.raises(Interrupted):
        run.run()
    assert newest(tmp_path / "run")[1]["step"] == 3


def test_a_run_whose_checkpoints_were_damaged_does_not_begin_again_unasked(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.latest() is None
    path = folder.save({}, 3, {})
    path.write_bytes(b"no")
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"\(step-00000003\.npz\.damaged\)\. Start a new run"):
            CheckpointFolder(tmp_path).latest(said.append)
    assert len(said) == 1 and "the checkpoint before it" not in said[0]
    (tmp_path / "step-00000003.npz.damaged").unlink()
    assert folder.latest() is None
