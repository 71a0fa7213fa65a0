"""The `mmattn` command. Nothing heavy is imported before a command is known to be well formed.

Exit codes: 0 done; 1 something failed (a photo, a line, a bundle, a run); 2 the command line is wrong; 130
interrupted; 141 whoever read our output went away; 143 told to stop (SIGTERM).

>>> main(["--version"])
mmattn 0.2.0
0
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import mmattn
from mmattn.cli import caption, classify, fill, generate, translate
from mmattn.cli.console import Terminated, UsageError, complain, harmless, quiet_start
from mmattn.memory import keep_memory

_BACKENDS = ("tensorflow", "jax", "torch")
_EXPERIMENTS = {
    "train": "train a model, or go on with a run",
    "evaluate": "score a model on a data set",
    "compare": "train several models on the same data and write a report",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (by default the process' own, without the program) and returns the exit code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if argv is None:  # a process of its own
        keep_memory()
    try:
        with contextlib.suppress(AttributeError, ValueError):  # a replaced stdout need not be a file
            sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # file names may be any bytes
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as stop:
        return 143 if isinstance(stop, Terminated) else 130
    except OSError as error:  # of our output: whoever read it went away, or the disk is full
        with contextlib.suppress(OSError, ValueError):  # so that Python's own flush at exit finds an open file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        complain(str(error))
        return 1


def resource(name: str) -> Path:
    """The folder `conf` or `experiments`: inside the installed package, or beside it in a checkout.

    Raises:
        FileNotFoundError: if it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / name, package.parent / name
    if inside.is_dir():
        return inside
    if beside.is_dir() and (package.parent / "pyproject.toml").is_file():
        return beside
    raise FileNotFoundError(f"This installation of mmattn has no folder {name!r}, neither in {package} nor beside it")


def experiment(name: str) -> types.ModuleType:
    """The module mmattn.experiments.<name>, wherever its folder lies."""
    package = types.ModuleType("mmattn.experiments")
    package.__path__ = [str(resource("experiments"))]
    sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(f"mmattn.experiments.{name}")


def _dispatch(argv: list[str]) -> int:
    if argv and argv[0] in _EXPERIMENTS:  # the rest is Hydra's
        if {"-h", "--help"} & set(argv[1:]):
            print(_experiment_help(argv[0]))
            return 0
        return _guarded(lambda: _run_experiment(argv[0], argv[1:]))
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what there is to say
        return stop.code if isinstance(stop.code, int) else 0
    return _guarded(lambda: arguments.run(arguments))


def _guarded(run: Callable[[], int]) -> int:
    chosen = os.environ.get("KERAS_BACKEND", "")
    if chosen and chosen not in _BACKENDS:
        complain(f"KERAS_BACKEND={chosen} is no backend of mmattn's. Those are: {', '.join(_BACKENDS)}")
        return 2
    try:
        return run()
    except UsageError as error:
        complain(str(error))
        return 2
    except ModuleNotFoundError as error:
        if error.name not in _BACKENDS:
            raise
        complain(
            f"Keras is set to the backend {error.name}, which is not installed. Install it, or set the environment "
            "variable KERAS_BACKEND to the one that is: tensorflow, jax or torch"
        )
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmattn",
        allow_abbrev=False,
        description="Captions and classifies photos, translates, writes text; trains and evaluates models that do.",
        epilog="exit codes: 0 done, 1 something failed, 2 wrong command line, 130 interrupted",
    )
    parser.add_argument("--version", action="version", version=f"mmattn {mmattn.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    text = (
        "Writes one line a photo: path, tab, caption. A caption that the model is unsure of is followed by a tab and "
        "'[low confidence]'. A file that is no readable photo is reported on standard error, the others are still "
        "described, and the exit code is 1."
    )
    command = commands.add_parser("caption", allow_abbrev=False, help="describe photos", description=text)
    caption.add_arguments(command)
    command.set_defaults(run=caption.run)
    command = commands.add_parser(
        "translate",
        allow_abbrev=False,
        help="translate sentences or a file",
        description=translate.DESCRIPTION,
        epilog=translate.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    translate.add_arguments(command)
    command.set_defaults(run=translate.run)
    text = "Writes text with a language model, after a prompt or from nothing."
    command = commands.add_parser("generate", allow_abbrev=False, help="write text", description=text)
    generate.add_arguments(command)
    command.set_defaults(run=generate.run)
    text = "Says what stands for [MASK] in a sentence: writes the sentence with the likeliest word filled in."
    command = commands.add_parser("fill", allow_abbrev=False, help="fill in missing words", description=text)
    fill.add_arguments(command)
    command.set_defaults(run=fill.run)
    text = "Writes one line a photo: path, tab, class, tab, probability. Files are read as by mmattn caption."
    command = commands.add_parser("classify", allow_abbrev=False, help="say what photos show", description=text)
    classify.add_arguments(command)
    command.set_defaults(run=classify.run)
    text = "Says what a bundle is, after checking its files."
    command = commands.add_parser("info", allow_abbrev=False, help="say what a bundle is", description=text)
    command.add_argument(
        "bundle", metavar="BUNDLE", help="a model's folder, or the name of a shipped one, or 'default'"
    )
    text = "also run the model and compare what it computes with what it computed when it was saved"
    command.add_argument("--check", action="store_true", help=text)
    command.set_defaults(run=_info)
    for name, text in _EXPERIMENTS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _info(arguments: argparse.Namespace) -> int:
    with quiet_start():
        from mmattn.bundle import BundleError, describe, find_bundle, load_bundle
    try:
        folder = find_bundle(arguments.bundle)
        print("\n".join(harmless(line) for line in describe(folder).split("\n")))
        if arguments.check:
            bundle = load_bundle(folder)
            print(
                f"check       log-probabilities within {bundle.check():.2g} of those at its saving "
                f"(up to {bundle.info['check']['tolerance']} is rounding)"
            )
    except BundleError as error:
        complain(str(error))
        return 1
    return 0


def _run_experiment(name: str, overrides: list[str]) -> int:
    with quiet_start():
        module = experiment(name)
    return int(module.main(overrides))


def _experiment_help(name: str) -> str:
    """The help of an experiment's command: what can be chosen, read from the folder conf without Hydra."""
    conf = resource("conf")
    groups = sorted(
        path for path in conf.iterdir() if path.is_dir() and (name == "compare" or path.name != "comparison")
    )
    if name == "evaluate":
        groups = [path for path in groups if path.name in ("data", "runtime")]
    lines = [
        f"usage: mmattn {name} [GROUP=OPTION ...] [KEY=VALUE ...] [--cfg job] [--config-dir DIR]",
        "",
        f"Everything is set by Hydra overrides; the defaults are in {conf / name}.yaml",
        "",
        "  --cfg job          show the whole configuration and stop",
        "  --config-dir DIR   a folder with groups and experiments of your own",
        *(["  resume=DIR         go on with the run in that folder"] if name == "train" else []),
        *(["", "A setting of `mmattn train` is one of every member's. The same command goes on after a stop."]
          if name == "compare" else []),
        "",
        "groups and their options:",
    ]  # fmt: skip
    for group in groups:
        lines.append(f"  {group.name}={' | '.join(sorted(path.stem for path in group.glob('*.yaml')))}")
    return "\n".join(lines)
