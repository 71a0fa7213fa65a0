"""Trains several models on the same data and writes a report: `mmattn compare comparison=article data.root=FOLDER`."""

from __future__ import annotations

import re
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "experiments"

from omegaconf import OmegaConf

from mmattn.comparison import Member, plots, read_member, write_report
from mmattn.comparison.costs import KINDS
from mmattn.comparison.runner import MemberRun
from mmattn.training.callbacks import Interrupted, StopSignals
from mmattn.training.folder import RunFolderError, RunLock

from .checks import check_keys
from .config import (
    ConfigProblem,
    compose,
    first_line,
    in_quotes,
    instantiate,
    override_keys,
    resolve,
    split_arguments,
)
from .train import checked_config as checked_training

KEYS = ("comparison_name", "title", "about", "sentence", "every", "members", "folder", "minutes", "only", "costs")
COSTS = ("lengths", "rows", "repeats", "threads")
PLACE = ("run.root", "run.name")  # of a member's run: the comparison's own
NAME = re.compile(r"[^\W_](?:[\w.,+=() -]*[\w+=)])?")  # of a member and of its folder
TAKEN = re.compile(r"lock|.*\.(?:md|html|png|tmp)", re.IGNORECASE)  # what lies beside the members' folders


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 all members, or those of `only`, have finished, 1 some have not or the folder is
    not to be had, 2 wrong configuration, 128 + n for signal n."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options, overrides = split_arguments(arguments)
        own, shared = _sorted_out(overrides)
        cfg = compose("compare", own, options.folders)
        if options.show:
            print(OmegaConf.to_yaml(cfg), end="")
            return 0
        config = checked_config(cfg)
        settings = member_settings(config, shared, options.folders)
        try:
            folder = Path(config["folder"]).expanduser().resolve()
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # RuntimeError: a home of nobody
            why = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise ConfigProblem([f"folder={config['folder']}: no folder can be made there. {why}."]) from error
        with StopSignals(), RunLock(folder):
            runs = member_runs(settings, folder)
            return compare(config, runs, folder, f"mmattn compare {shlex.join(arguments)}".strip())
    except ConfigProblem as error:
        for problem in error.problems:
            print(f"mmattn: {problem}", file=sys.stderr)
        return 2
    except RunFolderError as error:
        print(f"mmattn: {error}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt) as stop:
        print("Interrupted. The same command goes on.", file=sys.stderr)
        return getattr(stop, "exit_code", 130)


def compare(config: dict[str, Any], runs: list[MemberRun], folder: Path, command: str) -> int:
    """Trains what is not finished and measures it; the report is written anew whenever a member has changed."""
    report = None
    chosen = [run for run in runs if config["only"] is None or run.name in config["only"]]
    for run in runs:
        before = _member(run)
        try:
            if run in chosen:
                _advance(config, run)
            if config["sentence"] and _kind(run) == "translator":
                run.translate(config["sentence"], say)
        finally:  # an interrupted one, too
            if _member(run) != before:
                report = _report(config, runs, folder, command)
    report = report or _report(config, runs, folder, command)
    finished = [sum(run.finished for run in some) for some in (chosen, runs)]
    first = "" if len(chosen) == len(runs) else f"{finished[0]} of the {len(chosen)} chosen members, "
    say(f"{first}{finished[1]} of {len(runs)} finished. Report: {report} and {report.with_suffix('.html')}")
    return 0 if finished[0] == len(chosen) else 1


def _advance(config: dict[str, Any], run: MemberRun) -> None:
    """Trains a member that is not finished, and measures one that is."""
    if run.finished:
        run.state["problem"] = None
    else:
        say(f"{run.name}: {'continues' if run.run_folder else 'starts'}; its log is {run.folder / 'log.txt'}")
        run.train(config["minutes"], say)
    if config["costs"] and _kind(run) in KINDS:
        run.measure(config["costs"], say)
    say(f"{run.name}, {run.state['minutes']:.1f} minutes: {run.state['problem'] or 'finished'}")


def checked_config(cfg: Any) -> dict[str, Any]:
    """The resolved configuration of the comparison itself, with keys and values checked."""
    config = resolve(cfg)
    problems = check_keys(config, {"": KEYS})
    missing = [key for key in KEYS if key not in config]
    if missing:  # nothing below could look into it
        raise ConfigProblem(
            [*problems, *(f"{key} is missing. A comparison has: {', '.join(KEYS)}." for key in missing)]
        )
    problems += _checked_members(config)
    every = config["every"]
    if not isinstance(every, list) or not all(isinstance(word, str) for word in every):
        problems.append(f"every is a list of settings such as [size.epochs=10]. Received {every!r}.")
    minutes = config["minutes"]
    most = int(threading.TIMEOUT_MAX / 60)
    if isinstance(minutes, bool) or not isinstance(minutes, int | float) or not 0 < minutes <= most:
        problems.append(f"minutes={minutes!r} must be a number above 0, {most} at most.")
    if not isinstance(config["folder"], str) or not config["folder"].strip():
        problems.append(f"folder is a path, such as runs/mine. Received {config['folder']!r}.")
    for key in ("title", "about", "sentence"):
        if not isinstance(config[key], str) and (key == "title" or config[key] is not None):
            problems.append(f"{key} is a text{'' if key == 'title' else ', or null'}. Received {config[key]!r}.")
    if config["costs"] is not None:
        problems += check_keys({"costs": config["costs"]}, {"": ("costs",), "costs": COSTS})
        lengths = config["costs"].get("lengths") if isinstance(config["costs"], dict) else None
        if not isinstance(lengths, list) or not all(isinstance(length, int) and length > 1 for length in lengths):
            problems.append(
                f"costs.lengths is a list of whole numbers above 1, and costs=null measures none. Received {lengths!r}."
            )
        for key in COSTS[1:]:
            value = config["costs"].get(key) if isinstance(config["costs"], dict) else None
            if not (key == "threads" and value is None) and not (type(value) is int and value > 0):
                problems.append(f"costs.{key} is a whole number, at least 1. Received {value!r}.")
    if not plots.plots_installed():
        problems.append('The report has plots: pip install "mmattn[plots]".')
    if problems:
        raise ConfigProblem(problems)
    return config


def _checked_members(config: dict[str, Any]) -> list[str]:
    """Problems of `members` and `only`; names that YAML took for numbers become texts."""
    members, only = config["members"], config["only"]
    if not isinstance(members, dict) or not members:
        return ["members is a group: a name for each member, and a list of what mmattn train is told."]
    problems = [f"members.{name} is a list of settings such as [experiment=pairs]. Received {what!r}."
                for name, what in members.items()
                if not isinstance(what, list) or not all(isinstance(word, str) for word in what)]  # fmt: skip
    for name in members:
        if type(name) not in (str, int):
            problems.append(f"members: {name!r} is no text. In quotes, it is one.")
        elif not NAME.fullmatch(str(name)):
            problems.append(
                f"members: {name!r} is no name of a folder. It begins with a letter or a digit, has only these, blanks "
                "and . , + = ( ) - _ after it, and ends with none of blank . , ( -"
            )
        elif TAKEN.fullmatch(str(name)):
            problems.append(
                f"members: {name!r} is for the comparison's own files, as are lock and what ends with .md, .html, .png "
                f"or .tmp. {str(name).replace('.', '_')}_model would do."
            )
    config["members"] = {str(name): what for name, what in members.items()}
    if len({name.casefold() for name in config["members"]}) < len(members):
        problems.append(
            "members: two have the same name; capitals make no difference, as in the names of folders on some systems. "
            f"Received {', '.join(map(repr, members))}."
        )
    if only is not None:
        if not isinstance(only, list) or not only or not set(map(str, only)) <= config["members"].keys():
            problems.append(
                f"only is a list of members, or null for all. There are: {', '.join(config['members'])}. "
                f"Received {only!r}."
            )
        else:
            config["only"] = [str(name) for name in only]
    return problems


def member_settings(
    config: dict[str, Any], shared: Sequence[str], folders: Sequence[str] = ()
) -> dict[str, tuple[list[str], dict[str, Any]]]:
    """What each member is told and the configuration that it makes; all are checked before the first one starts."""
    made, problems = {}, []
    for name, overrides in config["members"].items():
        own = map(in_quotes, [*config["every"], *overrides])
        settings = [*own, *shared]  # of two values for one key the later one counts
        try:
            resolved = checked_training(compose("train", settings, folders))
        except ConfigProblem as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
            continue
        resolved["run"] = {key: value for key, value in resolved["run"].items() if f"run.{key}" not in PLACE}
        made[name] = ([*settings, *(f"--config-dir={path}" for path in folders)], resolved)
    if problems:
        raise ConfigProblem(problems)
    return made


def member_runs(settings: dict[str, tuple[list[str], dict[str, Any]]], folder: Path) -> list[MemberRun]:
    """The members with what the folder remembers of them; the caller holds its lock."""
    runs, problems = [], []
    for name, (words, resolved) in settings.items():
        try:
            runs.append(MemberRun(name, folder / name, words, resolved))
        except ValueError as error:
            problems.append(first_line(error))
    if problems:
        raise ConfigProblem(problems)
    return runs


def _sorted_out(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The settings of the comparison, and those of every member."""
    own: list[str] = []
    shared: list[str] = []
    for override, key in zip(overrides, override_keys(overrides), strict=True):
        if key in ("run", *PLACE):
            raise ConfigProblem([f"{override}: where the members' runs go is decided by folder=DIR."])
        (own if key.partition(".")[0] in (*KEYS, "comparison") else shared).append(override)
    return own, shared


def _member(run: MemberRun) -> Member:
    return read_member(run.name, run.run_folder, run.state["config"], run.state["minutes"], run.state["problem"])


def _kind(run: MemberRun) -> str | None:
    """The kind of the bundle of one that has finished."""
    return _member(run).kind if run.finished else None


def _report(config: dict[str, Any], runs: list[MemberRun], folder: Path, command: str) -> Path:
    members = [_member(run) for run in runs]
    first = next((member for member in members if member.finished and member.kind == "translator"), None)
    about = [config["about"]] if config["about"] else []
    sources = None
    if first is not None:
        try:
            sources = _sources(first)
        except ConfigProblem as error:  # the data may have moved since it was trained
            about.append(f"Left out: BLEU by length of the source, which needs the test split. {first_line(error)}")
    return write_report(folder, config["title"], members, sources, config["sentence"], about, command)


def _sources(member: Member) -> dict[str, str]:
    """The sources of a translator's test split by id."""
    test = instantiate({"data": {"test": member.config["data"]["test"]}})["data"]["test"]
    records = (test[index] for index in range(len(test)))
    return {str(record["id"]): record["source"] for record in records if "source" in record}


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
