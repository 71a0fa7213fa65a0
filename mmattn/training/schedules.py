"""Learning-rate schedules: a linear warm-up, then one of three ways down."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

DECAYS = ("cosine", "inverse_sqrt", "constant")


@keras.saving.register_keras_serializable(package="mmattn")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises in a straight line to `peak` over `warmup_steps`, then decays.

    - `cosine`: half a cosine from `peak` to `final_fraction * peak` at `total_steps`, where it stays (Loshchilov and
      Hutter 2017).
    - `inverse_sqrt`: peak * sqrt(warmup_steps / step), as in Vaswani et al. 2017, section 5.3.
    - `constant`: stays at `peak`.

    The first update (step 0) already moves: it uses peak / warmup_steps.

    Args:
        peak: the highest learning rate, more than 0. `noam_peak` gives the paper's.
        warmup_steps: updates until `peak`; 0 for none.
        total_steps: updates until the end of the cosine; only `cosine` needs it.
        decay: "cosine", "inverse_sqrt" or "constant".
        final_fraction: where the cosine ends, as a share of `peak`.

    >>> schedule = WarmupSchedule(peak=1.0, warmup_steps=10, total_steps=110)
    >>> [round(float(schedule(step)), 3) for step in (0, 9, 59, 109, 500)]
    [0.1, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(
        self,
        peak: float,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        decay: str = "cosine",
        final_fraction: float = 0.0,
    ) -> None:
        super().__init__()
        if not (peak > 0 and math.isfinite(peak)):
            raise ValueError(f"peak={peak} is not a learning rate: it must be more than 0, for example 0.001.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be 0 or more.")
        if decay not in DECAYS:
            raise ValueError(f"decay={decay!r} is unknown. Known: {', '.join(DECAYS)}.")
        if not 0 <= final_fraction <= 1:
            raise ValueError(f"final_fraction={final_fraction} must be in [0, 1].")
        if decay == "cosine" and (total_steps is None or total_steps <= warmup_steps):
            raise ValueError(
                f"decay='cosine' needs total_steps > warmup_steps={warmup_steps}; total_steps is {total_steps}. "
                "More epochs or a shorter warm-up (schedule.warmup_steps) fits."
            )
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.decay = decay
        self.final_fraction = final_fraction

    def __call__(self, step: Any) -> Any:
        count = ops.cast(step, "float32") + 1.0  # the update now being made: 1, 2, ...
        warmup = float(max(self.warmup_steps, 1))
        if self.decay == "cosine":
            assert self.total_steps is not None
            share = (count - self.warmup_steps) / float(self.total_steps - self.warmup_steps)
            down = 0.5 * (1.0 + ops.cos(math.pi * ops.clip(share, 0.0, 1.0)))
            after = self.final_fraction + (1.0 - self.final_fraction) * down
        elif self.decay == "inverse_sqrt":
            after = ops.sqrt(warmup / ops.maximum(count, warmup))
        else:
            after = ops.ones_like(count)
        factor = ops.where(count < self.warmup_steps, count / warmup, after)
        return self.peak * factor

    def get_config(self) -> dict[str, Any]:
        return {
            "peak": self.peak,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
            "decay": self.decay,
            "final_fraction": self.final_fraction,
        }


def noam_peak(hidden_dim: int, warmup_steps: int) -> float:
    """The paper's peak: hidden_dim^-0.5 * warmup_steps^-0.5 (Vaswani et al. 2017, equation 3, at its maximum).

    >>> round(noam_peak(512, 4000), 6)
    0.000699
    """
    return float(hidden_dim**-0.5 * warmup_steps**-0.5)
