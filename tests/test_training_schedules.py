"""Laws of mmattn.training.schedules, against the published formulas."""

from __future__ import annotations

import itertools
import math

import keras
import pytest

from mmattn.training.schedules import WarmupSchedule, noam_peak


def test_inverse_sqrt_with_the_noam_peak_is_equation_3_of_the_paper():
    width, warmup = 512, 40
    schedule = WarmupSchedule(noam_peak(width, warmup), warmup, decay="inverse_sqrt")
    for step in (1, 2, 39, 40, 41, 100, 5000):
        paper = width**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert float(schedule(step - 1)) == pytest.approx(paper, rel=1e-5)


def test_cosine_reaches_its_floor_at_the_last_step_and_stays():
    schedule = WarmupSchedule(2.0, 10, total_steps=50, final_fraction=0.1)
    for step in range(10, 50):
        share = (step + 1 - 10) / 40
        assert float(schedule(step)) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2), abs=1e-6)
    assert float(schedule(49)) == float(schedule(10_000)) == pytest.approx(0.2)


@pytest.mark.parametrize("decay", ["cosine", "inverse_sqrt", "constant"])
def test_warmup_is_a_straight_line_that_never_starts_at_zero_and_peaks_once(decay):
    schedule = WarmupSchedule(0.8, 8, total_steps=100, decay=decay)
    values = [float(schedule(step)) for step in range(100)]
    assert values[:8] == pytest.approx([0.1 * n for n in range(1, 9)])
    assert max(values) == pytest.approx(0.8)
    assert all(a >= b for a, b in itertools.pairwise(values[7:]))


@pytest.mark.parametrize("decay", ["cosine", "inverse_sqrt", "constant"])
def test_no_warmup_starts_at_the_peak(decay):
    assert float(WarmupSchedule(0.5, 0, total_steps=10**6, decay=decay)(0)) == pytest.approx(0.5)


def test_schedule_survives_serialization_inside_an_optimizer():
    schedule = WarmupSchedule(0.5, 3, total_steps=20, final_fraction=0.2)
    optimizer = keras.optimizers.deserialize(keras.optimizers.serialize(keras.optimizers.Adam(schedule)))
    again = optimizer._learning_rate
    assert again.get_config() == schedule.get_config()
    assert [float(again(s)) for s in range(25)] == [float(schedule(s)) for s in range(25)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak": 0.0}, "peak=0.0 is not a learning rate"),
        ({"peak": float("nan")}, "peak=nan"),
        ({"peak": 1.0, "warmup_steps": -1}, "warmup_steps=-1"),
        ({"peak": 1.0, "decay": "linear"}, "decay='linear' is unknown. Known: cosine, inverse_sqrt, constant"),
        ({"peak": 1.0}, "needs total_steps > warmup_steps=0; total_steps is None"),
        ({"peak": 1.0, "warmup_steps": 5, "total_steps": 5}, "needs total_steps > warmup_steps=5"),
        ({"peak": 1.0, "total_steps": 5, "final_fraction": 1.5}, "final_fraction=1.5"),
    ],
)
def test_impossible_schedules_are_refused_in_words(arguments, message):
    with pytest.raises(ValueError, match=message):
        WarmupSchedule(**arguments)
