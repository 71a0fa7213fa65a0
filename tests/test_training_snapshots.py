"""Laws of the kept weights: which ones stay, what their mean is, which of all a run ends with."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from mmattn.training.checkpoint import DamagedCheckpoint, read, read_info
from mmattn.training.snapshots import Snapshots, mean_of

SCORES = [5.0, 1.0, 9.0, 3.0, 7.0, 2.0, 4.0]


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dropout(0.1)])
    model.compile("sgd", loss="mse")
    return model


def filled(folder, model, count):
    """After validation number n all weights are n."""
    snapshots = Snapshots(folder / "snapshots", count)
    for number, score in enumerate(SCORES, 1):
        for variable in model.trainable_variables:
            variable.assign(np.full(variable.shape, float(number)))
        snapshots.add(10 * number, score, model)
    return snapshots


def steps(folder):
    return [int(path.stem.split("-")[1]) for path in sorted((folder / "snapshots").glob("*.npz"))]


def test_the_last_and_the_best_stay_and_no_other(model, tmp_path):
    filled(tmp_path, model, 2)
    assert steps(tmp_path) == [30, 50, 60, 70]  # the best scores are 9 and 7, the last 2 and 4


def test_means_are_those_of_the_last_and_of_the_best(model, tmp_path):
    means = dict(filled(tmp_path, model, 3).means())
    assert list(means) == [
        "mean of the weights of the last 3 validations",
        "mean of the weights of the best 3 validations",
    ]
    for name, expected in zip(means, (np.mean([5, 6, 7]), np.mean([3, 5, 1])), strict=True):
        assert len(means[name]) == 2
        for array in means[name].values():
            assert array.dtype == np.float32
            np.testing.assert_allclose(array, expected, rtol=1e-6)


def test_the_best_that_are_the_last_are_one_mean(model, tmp_path):
    assert list(dict(filled(tmp_path, model, 99).means())) == ["mean of the weights of the last 7 validations"]


def test_nothing_is_kept_when_nothing_is_asked_for(model, tmp_path):
    assert list(filled(tmp_path, model, 0).means()) == []
    assert not (tmp_path / "snapshots").exists()


def test_what_a_resumed_run_makes_again_is_forgotten(model, tmp_path):
    snapshots = filled(tmp_path, model, 2)
    snapshots.forget_after(50)
    assert steps(tmp_path) == [30, 50]


def test_one_validation_has_no_mean(model, tmp_path):
    snapshots = Snapshots(tmp_path / "snapshots", 4)
    snapshots.add(1, 1.0, model)
    assert list(snapshots.means()) == []


def test_score_is_read_without_the_arrays_and_damage_is_named(model, tmp_path):
    filled(tmp_path, model, 1)
    path = sorted((tmp_path / "snapshots").glob("*.npz"))[0]
    assert read_info(path) == read(path)[1] == {"step": 30, "score": 9.0}
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DamagedCheckpoint, match=path.name):
        read_info(path)
    with pytest.raises(DamagedCheckpoint, match=path.name):
        mean_of([path])


def test_a_damaged_file_is_named_and_left_out_of_the_means(model, tmp_path):
    snapshots = filled(tmp_path, model, 3)
    path = tmp_path / "snapshots" / "step-00000060.npz"
    path.write_bytes(path.read_bytes()[:200])
    said = []
    means = dict(snapshots.means(said.append))
    assert len(said) == 1 and "step-00000060.npz" in said[0]
    assert next(iter(means)) == "mean of the weights of the last 3 validations"
    for array in means["mean of the weights of the last 3 validations"].values():
        np.testing.assert_allclose(array, np.mean([5, 7, 3]), rtol=1e-6)
    assert [p.name for p in (tmp_path / "snapshots").glob("*.damaged")] == ["step-00000060.npz.damaged"]


def test_weights_in_half_precision_are_kept_too(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, dtype="bfloat16")])
    model.compile("sgd", loss="mse")
    for array in dict(filled(tmp_path, model, 3).means())["mean of the weights of the last 3 validations"].values():
        assert str(array.dtype) == "bfloat16"
        np.testing.assert_allclose(array.astype("float32"), 6.0)
