"""Trains a model: `mmattn train experiment=shapes_caption`, or `python experiments/train.py experiment=shapes_caption`.

`mmattn train resume=DIR` continues the run in that folder; `mmattn train --cfg job` prints the configuration and stops.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "experiments"

from omegaconf import OmegaConf

from mmattn.bundle import BundleError
from mmattn.tasks.grounding import lines
from mmattn.training import tensorboard
from mmattn.training.callbacks import Interrupted, StopSignals
from mmattn.training.checkpoint import CheckpointError
from mmattn.training.fit import TrainingError
from mmattn.training.folder import RunFolderError, RunLock, git_commit, new_run_folder, versions, write_json, write_text

from .checks import check_keys, check_targets, check_unread
from .config import ConfigProblem, compose, group_keys, instantiate, override_keys, resolve, split_arguments
from .crosschecks import cross_problems, task_of, try_parts
from .run import SPLITS, Run

HARMLESS = ("fit.checkpoint_minutes", "batches.threads", "batches.workers", "run.tensorboard")
SUPPLIED = {
    "task": ("parts", "sources", "folder", "seed", "say", "reject"),
    "model": ("encoder", "decoder", "num_classes"),
    "encoder": ("vocabulary_size",),
    "decoder": ("vocabulary_size",),
    "tokenizer": ("texts",),
    "source_tokenizer": ("texts",),
    "batches": (
        *("source", "read_image", "encode_text", "encode_source", "encode_target", "words", "vocabulary_size"),
        "classes",
    ),
    "schedule": ("total_steps",),
    "optimizer": ("learning_rate",),
    "features": ("backbone", "reader"),
}
NODES = (
    "task", "model", "encoder", "decoder", "tokenizer", "batches", "loss", "schedule", "optimizer", "runtime", "fit",
    "validation", "final",
)  # fmt: skip
KNOWN = {
    "": (*NODES, "data", "size", "run", "limit", "card", "image_size"),
    "run": ("root", "seed", "tensorboard", "name"),
    "limit": SPLITS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 the run failed, 2 wrong configuration, 128 + n for signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    folder: Path | None = None
    resume: list[str] = []
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        resume = [word.partition("=")[2] for word in arguments if word.startswith("resume=")]  # a path, as it is
        options, rest = split_arguments([word for word in arguments if not word.startswith("resume=")])
        if resume:
            folder = Path(resume[-1]).expanduser().resolve()
            config = resumed_config(folder, rest)
        else:
            cfg = compose("train", rest, options.folders)
            if options.show:
                print(OmegaConf.to_yaml(cfg), end="")
                return 0
            config = checked_config(cfg)
        runtime = instantiate({"runtime": config["runtime"]})["runtime"]
        with ExitStack() as stack:
            try:
                stack.enter_context(runtime.applied(config["run"]["seed"]))
            except (ValueError, RuntimeError) as error:
                raise ConfigProblem([f"runtime: {error}"]) from error
            parts = make_parts(config)
            sources = instantiate({"data": {split: config["data"][split] for split in SPLITS}})["data"]
            if folder is None:
                folder = start_folder(config, arguments)
            with StopSignals() as signals, RunLock(folder):
                return run(parts, sources, config, folder, signals)
    except ConfigProblem as error:
        for problem in error.problems:
            print(f"mmattn: {problem}", file=sys.stderr)
        if folder is not None and not resume and not any(folder.glob("checkpoints/*")):
            shutil.rmtree(folder)  # nothing is in it, and no resume could get past the same problem
        return 2
    except (TrainingError, CheckpointError, RunFolderError, BundleError) as error:
        print(f"mmattn: {error}", file=sys.stderr)
        return 1
    except (Interrupted, OSError) as error:  # OSError: a full disk, a folder that went away
        hint = f"\nContinue with: {continue_command(folder)}" if folder is not None else ""
        print(f"\nmmattn: {error}.{hint}", file=sys.stderr)
        return error.exit_code if isinstance(error, Interrupted) else 1


def run(
    parts: dict[str, Any], sources: dict[str, Any], config: dict[str, Any], folder: Path, signals: StopSignals
) -> int:
    """From the run folder on."""
    print(f"Run folder: {folder}\nTo continue it after a stop: {continue_command(folder)}")
    if (folder / "results.json").exists():
        print(f"This run is complete; its results are in {folder / 'results.json'}.")
        return 0
    if changed := changed_since(folder):
        print(f"Not as when the run began: {', '.join(changed)}. It may end otherwise than it would have.")
    the_run = Run(parts, sources, config, folder, signals, say)
    the_run.train()
    results = the_run.finish()
    for split in ("test", "test_shuffled"):
        if split in results:
            print(f"{split}: " + "  ".join(f"{name} {value:.4g}" for name, value in results[split].items()))
    if "perplexity" in results:
        print(f"perplexity of the references {results['perplexity']:.4g}, over {results['perplexity_tokens']} tokens")
    for signature in results.get("signatures", {}).values():
        print(signature)
    for line in lines(results.get("attention", {})):
        print(line)
    bundle = shlex.quote(str(folder / "bundle"))
    print(f"Bundle: {folder / 'bundle'}\nTry it: mmattn {the_run.task.command} --bundle {bundle}")
    return 0


def checked_config(cfg: Any, resolved: bool = False) -> dict[str, Any]:
    """The resolved configuration, with every key and plain value checked; nothing has been made or read yet.

    Args:
        resolved: it comes from a run folder, where no `${...}` is left that could tell which keys are read.
    """
    config = resolve(cfg)
    task = task_of(config)
    problems = check_keys(config, {**KNOWN, "": (*KNOWN[""], *task.nodes)})
    problems += [f"{name} is missing: {task.__name__} needs it." for name in task.nodes if name not in config]
    flat = [
        f"{name}={config[name]} is a group of keys, one of which is set by {name}.KEY=VALUE."
        for name in (*NODES, *task.nodes)
        if not isinstance(config.get(name), dict | None)
    ]
    if flat:  # nothing below could look into it
        raise ConfigProblem([*problems, *flat])
    problems += [f"data.{split} is missing: a source for each of {', '.join(SPLITS)} is wanted." for split in SPLITS
                 if not isinstance(config["data"].get(split), dict)]  # fmt: skip
    problems += check_targets({k: v for k, v in config.items() if k != "card"}, SUPPLIED)
    raw = OmegaConf.to_container(cfg)
    assert isinstance(raw, dict)
    if not resolved:
        problems += check_unread(raw, {"size": group_keys("size"), "data": group_keys("data")})  # type: ignore[arg-type]
    problems += cross_problems(config)
    if config["run"]["tensorboard"] and not tensorboard.installed():
        problems.append('run.tensorboard=true needs TensorBoard: pip install "mmattn[tensorboard]".')
    if problems:
        raise ConfigProblem(problems)
    return config


def make_parts(config: dict[str, Any]) -> dict[str, Any]:
    """The objects of the configuration except the data, each tried out as far as it goes without data."""
    parts = instantiate({name: config[name] for name in (*NODES, *task_of(config).nodes)})
    try_parts(parts, config)
    return parts


def resumed_config(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration that the run was started with, and of the overrides those that cannot change its result."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigProblem([f"resume={folder}: no run folder of a training; it has no config.yaml."])
    refused = [key for key in override_keys(overrides) if key not in HARMLESS]
    if refused:
        rule = f"a resumed run keeps its configuration. What can be changed: {', '.join(HARMLESS)}."
        raise ConfigProblem([f"{key} cannot be set together with resume: {rule}" for key in refused])
    cfg = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(list(overrides)))
    return checked_config(cfg, resolved=True)


def changed_since(folder: Path) -> list[str]:
    """What decides a result beside the configuration and is not as it was when the run began."""
    try:
        run, before = (json.loads((folder / f"{name}.json").read_text()) for name in ("run", "versions"))
    except (OSError, ValueError):
        return []
    then, now = ({"commit": c, **v} for c, v in ((run["git_commit"], before), (commit(), versions())))
    return [f"{n} {now.get(n)} (was {then.get(n)})" for n in {**then, **now} if then.get(n) != now.get(n)]


def commit() -> str | None:
    return git_commit(Path(__file__).resolve())


def start_folder(config: dict[str, Any], arguments: Sequence[str]) -> Path:
    """A new run folder with all that says what was run."""
    root = Path(config["run"]["root"]).expanduser().resolve()
    try:
        folder = new_run_folder(root, str(config["run"]["name"]))
    except OSError as error:
        raise ConfigProblem([f"run.root={root}: no folder can be made there. {error.strerror}."]) from error
    write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(config)))
    command = shlex.join(["mmattn", "train", *arguments])
    write_json(folder / "run.json", {"command": command, "seed": config["run"]["seed"], "git_commit": commit()})
    write_json(folder / "versions.json", versions())
    return folder


def continue_command(folder: Path) -> str:
    return f"mmattn train resume={shlex.quote(str(folder))}"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
