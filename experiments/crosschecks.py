"""What must fit together across the configuration, found out before data is read."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mmattn.training.validation import SCORES

from .config import ConfigProblem, first_line

# What an optimizer of Keras takes without a word, and cannot work with: name -> (rule, test).
OPTIMIZER_RULES = {
    **dict.fromkeys(("beta_1", "beta_2", "ema_momentum", "momentum"), ("in [0, 1)", lambda v: 0 <= v < 1)),
    "weight_decay": ("0 or more", lambda v: v >= 0),
    **dict.fromkeys(("epsilon", "clipnorm", "global_clipnorm", "clipvalue"), ("more than 0", lambda v: v > 0)),
}


def cross_problems(config: dict[str, Any]) -> list[str]:
    """Problems between nodes, in words with their paths; what is wrong by itself is left to the other checks."""
    problems = []
    reader, encoder, decoder = config["reader"], config["encoder"], config["decoder"]
    wanted, given = encoder.get("image_size"), reader.get("size")
    if isinstance(wanted, list) and isinstance(given, list) and wanted != given:
        problems.append(
            f"reader.size={given} must be encoder.image_size={wanted}: the encoder takes pictures of one size."
        )
    positions = decoder.get("max_length") if decoder.get("positions") == "learned" else None
    for path in ("batches", "validation"):
        length = config[path].get("max_length")
        if isinstance(positions, int) and isinstance(length, int) and length > positions:
            problems.append(
                f"{path}.max_length={length} is more than decoder.max_length={positions}, its learned positions."
            )
    for name, (rule, fits) in OPTIMIZER_RULES.items():
        value = config["optimizer"].get(name)
        if isinstance(value, int | float) and not fits(value):
            problems.append(f"optimizer.{name}={value} must be {rule}.")
    monitor = config["fit"].get("monitor")
    if monitor not in SCORES:
        problems.append(f"fit.monitor={monitor} is no score. Scores: {', '.join(SCORES)}.")
    seed = config["run"].get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        problems.append(f"run.seed={seed!r} must be a whole number from 0 to {2**32 - 1}.")
    for split, count in config["limit"].items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            problems.append(f"limit.{split}={count!r} must be a whole number of pictures, at least 1, or null for all.")
    return problems


def try_parts(parts: dict[str, Any], config: dict[str, Any]) -> None:
    """Completes each part with a stand-in for what the run will add.

    Raises:
        ConfigProblem: one of them refuses its values.
    """
    height, width = parts["reader"].size
    record = {"id": "0", "image": np.zeros((height, width, 3), "uint8"), "captions": ["a"]}
    trials: dict[str, Any] = {
        "decoder": lambda: parts["decoder"](vocabulary_size=config["tokenizer"]["vocabulary_size"]),
        "schedule": lambda: parts["schedule"](total_steps=10**9),
        "batches": lambda: parts["batches"](source=[record], read_image=parts["reader"], encode_text=lambda text: [4]),
    }
    made: dict[str, Any] = {}
    problems = []
    for path, trial in trials.items():
        try:
            made[path] = trial()
        except (TypeError, ValueError) as error:
            problems.append(f"{path}: {first_line(error)}")
    try:
        if "schedule" in made:
            optimizer = parts["optimizer"](learning_rate=made["schedule"])
            optimizer.apply([keras.ops.ones(2)], [keras.Variable([1.0, 2.0])])
    except (TypeError, ValueError, AttributeError) as error:
        problems.append(f"optimizer: {first_line(error)}")
    if problems:
        raise ConfigProblem(problems)
