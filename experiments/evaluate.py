"""Scores a bundle: `mmattn evaluate bundle=DIR data=flickr8k data.root=FOLDER`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "experiments"

from omegaconf import OmegaConf

from mmattn.bundle import Bundle, BundleError, find_bundle, load_bundle
from mmattn.bundle_files import check_generation
from mmattn.data.batches import CaptionBatches
from mmattn.inference import Captioner
from mmattn.preprocess.image import ImageReadError
from mmattn.training.callbacks import listed
from mmattn.training.describe import Describer
from mmattn.training.folder import write_json
from mmattn.training.subset import First
from mmattn.training.validation import Prediction, describe_pictures, score, score_shuffled

from .checks import check_keys, check_targets, check_unread
from .config import ConfigProblem, compose, group_keys, instantiate, resolve, split_arguments
from .grounding import attention_on_shapes, lines

KEYS = (
    "bundle", "data", "runtime", "split", "limit", "batch_size", "shuffled", "output", "image_size", "generation",
)  # fmt: skip


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
    except KeyboardInterrupt:
        return 130


def checked_config(cfg: Any) -> dict[str, Any]:
    """The resolved configuration, with keys and values checked; nothing has been read yet."""
    config = resolve(cfg)
    raw = OmegaConf.to_container(cfg)
    assert isinstance(raw, dict)
    splits = [key for key, value in config["data"].items() if isinstance(value, dict)]
    problems = check_keys(config, {"": KEYS})
    problems += check_targets({"data": config["data"], "runtime": config["runtime"]}, {})
    problems += check_unread(raw, {"data": group_keys("data")})  # type: ignore[arg-type]
    if config["split"] not in splits:
        problems.append(f"split={config['split']} is not in data. There are: {', '.join(splits)}.")
    for key, least in (("limit", 2), ("batch_size", 1)):
        value = config[key]
        if not (value is None and key == "limit") and (not isinstance(value, int) or value < least):
            problems.append(f"{key}={value!r} must be a whole number, at least {least}.")
    if problems:
        raise ConfigProblem(problems)
    return config


def evaluate(config: dict[str, Any]) -> int:
    """Describes the pictures, prints the scores and writes them where that was asked for."""
    bundle = load_bundle(find_bundle(config["bundle"]))
    try:
        settings = check_generation({**bundle.generation, **config["generation"]})
    except ValueError as error:  # BundleError is one
        raise ConfigProblem([str(error)]) from error
    source = instantiate({"data": {config["split"]: config["data"][config["split"]]}})["data"][config["split"]]
    if config["limit"] is not None:
        source = First(source, config["limit"])
    unreadable: list[str] = []
    predictions = predict(bundle, source, settings, config["batch_size"], unreadable)
    results: dict[str, Any] = {"pictures": len(predictions), "generation": settings, "scores": score(predictions)}
    print(f"{len(predictions)} pictures, with {listed(settings)}\n{listed(results['scores'])}")
    if config["shuffled"] and len(predictions) > 1:
        results["scores_shuffled"] = score_shuffled(predictions)
        print(f"Photos shuffled: {listed(results['scores_shuffled'])}")
    captioner = Captioner(bundle.model, bundle.tokenizer, bundle.reader, settings)
    if looked := attention_on_shapes(captioner, source):
        results["attention"] = looked
        print("\n".join(lines(looked)))
    if config["output"] is not None:
        results |= {"unreadable": unreadable, "captions": [dataclasses.asdict(p) for p in predictions]}
        write_json(Path(config["output"]).expanduser().resolve(), results)
    return 1 if unreadable else 0


def predict(
    bundle: Bundle, source: Any, settings: dict[str, Any], batch_size: int, unreadable: list[str]
) -> list[Prediction]:
    """The bundle's captions of a source; pictures that cannot be read are named on stderr and in `unreadable`."""

    def reject(record: dict[str, Any], error: Exception) -> None:
        unreadable.append(str(record["id"]))
        print(f"mmattn: {error}", file=sys.stderr)

    batches = CaptionBatches(
        source,
        bundle.reader,
        bundle.tokenizer.encode,
        batch_size,
        max_length=settings["max_length"] + 1,
        shuffle=False,
        skip_errors=(ImageReadError,),
        on_error=reject,
    )
    decoding = {name: value for name, value in settings.items() if name != "low_confidence"}
    return describe_pictures(Describer(bundle.model, bundle.tokenizer), batches.examples, decoding)


if __name__ == "__main__":
    sys.exit(main())
