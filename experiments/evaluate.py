"""Scores a bundle: `mmattn evaluate bundle=DIR data=flickr8k data.root=FOLDER`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "experiments"

from omegaconf import OmegaConf

from mmattn.bundle import Bundle, BundleError, find_bundle, load_bundle
from mmattn.bundle_kinds import check_generation
from mmattn.tasks import captioning, classification, language, masked, streams, translation
from mmattn.tasks.grounding import lines
from mmattn.training.callbacks import listed
from mmattn.training.folder import write_json
from mmattn.training.subset import First
from mmattn.training.validation import CAPTIONS, score_shuffled

from .checks import check_keys, check_targets, check_unread
from .config import ConfigProblem, compose, first_line, group_keys, instantiate, resolve, split_arguments
from .run import wrong_records

KEYS = (
    "bundle", "data", "runtime", "split", "limit", "batch_size", "shuffled", "output", "image_size", "generation",
    "scoring", "memory_length",
)  # fmt: skip
TASKS: dict[str, Any] = {
    "captioner": captioning.Captioning,
    "translator": translation.Translating,
    "language_model": language.LanguageModelling,
    "masked_language_model": masked.MaskedModelling,
    "classifier": classification.Classifying,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a picture or the bundle cannot be read, 2 wrong configuration."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        options, overrides = split_arguments(arguments)
        cfg = compose("evaluate", overrides, options.folders)
        if options.show:
            print(OmegaConf.to_yaml(cfg), end="")
            return 0
        config = checked_config(cfg)
        runtime = instantiate({"runtime": config["runtime"]})["runtime"]
        with runtime.applied(seed=0):
            return evaluate(config)
    except ConfigProblem as error:
        for problem in error.problems:
            print(f"mmattn: {problem}", file=sys.stderr)
        return 2
    except BundleError as error:
        print(f"mmattn: {error}", file=sys.stderr)
        return 1
    except FloatingPointError as error:
        print(f"mmattn: the bundle gives no numbers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def checked_config(cfg: Any) -> dict[str, Any]:
    """The resolved configuration, with keys and values checked; nothing has been read yet."""
    config = resolve(cfg)
    raw = OmegaConf.to_container(cfg)
    assert isinstance(raw, dict)
    splits = [key for key, value in config["data"].items() if isinstance(value, dict)]
    problems = check_keys(config, {"": KEYS})
    problems += check_targets({name: config[name] for name in ("data", "runtime", "scoring")}, {})
    problems += check_unread(raw, {"data": group_keys("data")})  # type: ignore[arg-type]
    if not isinstance(config["scoring"], dict):
        problems.append(f"scoring={config['scoring']} is a group of keys: scoring.tokenize=none, for example.")
    if config["split"] not in splits:
        problems.append(f"split={config['split']} is not in data. There are: {', '.join(splits)}.")
    for key, least in (("limit", 2), ("batch_size", 1)):
        value = config[key]
        if not (value is None and key == "limit") and (not isinstance(value, int) or value < least):
            problems.append(f"{key}={value!r} must be a whole number, at least {least}.")
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 0 for value in memory_lengths(config)):
        problems.append(
            f"memory_length={config['memory_length']!r} must be a whole number, 0 or more, or a list of them."
        )
    if problems:
        raise ConfigProblem(problems)
    return config


def memory_lengths(config: dict[str, Any]) -> list[Any]:
    """Those that were asked for."""
    asked = config["memory_length"]
    return asked if isinstance(asked, list) else [] if asked is None else [asked]


def evaluate(config: dict[str, Any]) -> int:
    """Runs the bundle on the data, prints the scores and writes them where that was asked for."""
    bundle = load_bundle(find_bundle(config["bundle"]))
    try:
        changes = dict(config["generation"])
        if "num_beams" in changes and "method" not in changes and "num_beams" in bundle.generation:
            changes["method"] = "beam"
        settings = check_generation({**bundle.generation, **changes}, bundle.kind)
    except ValueError as error:  # BundleError is one
        raise ConfigProblem([str(error)]) from error
    made = instantiate({"data": {config["split"]: config["data"][config["split"]]}, "scoring": config["scoring"]})
    source = made["data"][config["split"]]
    fields = TASKS[bundle.kind].fields
    if len(source) and not set(fields) <= source[0].keys():
        other = f"{wrong_records(fields, source[0])} data=... chooses another source."
        raise ConfigProblem([f"data, for a {bundle.kind}: {other}"])
    if config["limit"] is not None:
        source = First(source, config["limit"])
    unreadable: list[str] = []

    def reject(name: str, reason: str) -> None:
        unreadable.append(name)
        print(f"mmattn: {reason if name in reason else f'{name}: {reason}'}", file=sys.stderr)

    memory = memory_lengths(config) or settings.get("memory_length")
    asked = {"memory_length": memory, "generation.documents": settings.get("documents")}
    if not remembers(bundle) and (names := [name for name, value in asked.items() if value]):
        are = "is for language models that remember, and this bundle's model does not"
        raise ConfigProblem([f"{name} {are}." for name in names])
    if bundle.kind in ("captioner", "translator"):
        results = scored_texts(bundle, source, settings, config, made["scoring"], reject)
    else:
        try:
            results = scored_labels(bundle, source, settings, config, reject)
        except ValueError as error:  # a text shorter than a window, a class that the bundle doesn't know
            raise ConfigProblem([f"data: {first_line(error)}"]) from error
    results["unreadable"] = unreadable
    if config["output"] is not None:
        write_json(Path(config["output"]).expanduser().resolve(), results)
    if unreadable:
        print(
            f"mmattn: exit code 1 because {len(unreadable)} records could not be read whole, see above", file=sys.stderr
        )
    return 1 if unreadable else 0


def scored_labels(
    bundle: Bundle, source: Any, settings: dict[str, Any], config: dict[str, Any], reject: Callable[[str, str], None]
) -> dict[str, Any]:
    """How well a bundle finds the tokens or classes that are there."""
    more: dict[str, Any] = {}
    batch_size = config["batch_size"]
    if remembers(bundle):
        found = streams.evaluate(bundle, source, settings, batch_size, memory_lengths(config))
        print("\n".join(streams.table(found)))
        scored_in = streams.streams_of(batch_size)
        return {"scores": next(iter(found.values())), "scores_by_memory": found, "streams": scored_in}
    if bundle.kind == "language_model":
        scores = language.evaluate(bundle, source, settings, batch_size)
    elif bundle.kind == "masked_language_model":
        scores = masked.evaluate(bundle, source, settings, batch_size, reject)
    else:
        scores, more = classification.evaluate(bundle, source, batch_size, reject)
    print(listed(scores))
    return {"scores": scores, **more}


def remembers(bundle: Bundle) -> bool:
    """Whether its model keeps what it has read before its window."""
    return hasattr(getattr(bundle.model, "decoder", None), "empty_state")


def scored_texts(
    bundle: Bundle,
    source: Any,
    settings: dict[str, Any],
    config: dict[str, Any],
    scoring: Any,
    reject: Callable[[str, str], None],
) -> dict[str, Any]:
    """How near the texts that a bundle makes come to the references."""
    size = config["batch_size"]
    if bundle.kind == "captioner":
        scoring = CAPTIONS
        predictions, scores, more = captioning.evaluate(bundle, source, settings, size, reject)
    else:
        scoring = scoring.joining(bundle.tokenizer)
        predictions, scores, more = translation.evaluate(bundle, source, settings, size, scoring, reject)
    results: dict[str, Any] = {"examples": len(predictions), "generation": settings, "scores": scores}
    print(f"{len(predictions)} examples, with {listed(settings)}\n{listed(scores)}")
    if config["shuffled"] and len(predictions) > 1:
        results["scores_shuffled"] = score_shuffled(predictions, scoring)
        print(f"Inputs shuffled: {listed(results['scores_shuffled'])}")
    said = [more["bleu_line"], *more["signatures"].values()] if "signatures" in more else []
    if "perplexity" in more:
        said.append(f"perplexity of the references {more['perplexity']:.4g}, over {more['perplexity_tokens']} tokens")
    print("\n".join([*said, *lines(more.get("attention", {}))]))
    return {**results, **more, "predictions": [dataclasses.asdict(p) for p in predictions]}


if __name__ == "__main__":
    sys.exit(main())
