"""What must fit together across the configuration, found out before data is read."""

from __future__ import annotations

from typing import Any

import keras

from .checks import locate
from .config import ConfigProblem, first_line

# What an optimizer of Keras takes without a word, and cannot work with: name -> (rule, test).
OPTIMIZER_RULES = {
    **dict.fromkeys(
        ("beta_1", "beta_2", "adam_beta_1", "adam_beta_2", "ema_momentum", "momentum"),
        ("in [0, 1)", lambda v: 0 <= v < 1),
    ),
    **dict.fromkeys(("weight_decay", "adam_weight_decay"), ("0 or more", lambda v: v >= 0)),
    **dict.fromkeys(("epsilon", "clipnorm", "global_clipnorm", "clipvalue"), ("more than 0", lambda v: v > 0)),
}


def task_of(config: dict[str, Any]) -> Any:
    """The class of the run's task.

    Raises:
        ConfigProblem: there is none of that name, or it is no task.
    """
    target = config["task"].get("_target_")
    try:
        task = locate(str(target))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigProblem([f"task._target_: {target!r} cannot be imported. {error}"]) from error
    if not hasattr(task, "nodes"):
        raise ConfigProblem([f"task._target_: {target!r} is no task. See mmattn.tasks for those that there are."])
    return task


def cross_problems(config: dict[str, Any]) -> list[str]:
    """Problems between nodes, in words with their paths; what is wrong by itself is left to the other checks."""
    problems = []
    reader, encoder = config.get("reader") or {}, config["encoder"] or {}
    wanted, given = encoder.get("image_size"), reader.get("size")
    if isinstance(wanted, list) and isinstance(given, list) and wanted != given:
        problems.append(
            f"reader.size={given} must be encoder.image_size={wanted}: the encoder takes pictures of one size."
        )
    for path, side in (
        ("batches.max_length", "decoder"),
        ("batches.length", "decoder"),
        ("validation.max_length", "decoder"),
        ("batches.max_length", "encoder"),
    ):
        node, (place, key) = config[side] or {}, path.split(".")
        positions = node.get("max_length") if node.get("positions") == "learned" else None
        length = config[place].get(key)
        if isinstance(positions, int) and isinstance(length, int) and length > positions:
            problems.append(f"{path}={length} is more than {side}.max_length={positions}, its learned positions.")
    if (config.get("scoring") or {}).get("detokenize"):
        problems.append("scoring.detokenize is for mmattn evaluate: a run compares tokens with tokens.")
    if config["data"].get("test_references", config["data"].get("kind")) != config["data"].get("kind"):
        problems.append("data.test_references is for mmattn evaluate: a run compares like with like.")
    for name, (rule, fits) in OPTIMIZER_RULES.items():
        value = config["optimizer"].get(name)
        if isinstance(value, int | float) and not fits(value):
            problems.append(f"optimizer.{name}={value} must be {rule}.")
    monitor, scores = config["fit"].get("monitor"), task_of(config).scores
    if monitor not in scores:
        problems.append(f"fit.monitor={monitor} is no score. Scores: {', '.join(scores)}.")
    if config["model"].get("share_embeddings") and config.get("source_tokenizer"):
        problems.append("model.share_embeddings=true needs one vocabulary: source_tokenizer=null.")
    seed = config["run"].get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        problems.append(f"run.seed={seed!r} must be a whole number from 0 to {2**32 - 1}.")
    for split, count in config["limit"].items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            problems.append(f"limit.{split}={count!r} must be a whole number of examples, at least 1, or null for all.")
    return problems


def try_parts(parts: dict[str, Any], config: dict[str, Any]) -> None:
    """Completes each part with a stand-in for what the run will add.

    Raises:
        ConfigProblem: one of them refuses its values.
    """
    size = config["tokenizer"].get("vocabulary_size") or 100
    trials: dict[str, Any] = {
        "decoder": lambda: parts["decoder"](vocabulary_size=size),
        "schedule": lambda: parts["schedule"](total_steps=10**9),
        **parts["task"].func.trials(parts, size),
    }
    made: dict[str, Any] = {}
    problems = []
    if getattr(parts["loss"], "twins", False) != parts["batches"].keywords.get("twins", False):
        problems.append("batches.twins=true and RDropCrossEntropy as the loss go together: each pair twice, or once.")
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
