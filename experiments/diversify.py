"""More sentence pairs out of the ones there are, by two models trained on them (data diversification).

    python experiments/diversify.py --source train.en --target train.de \\
        --forward EN_DE/bundle --backward DE_EN/bundle --output FOLDER

writes FOLDER/train.source and FOLDER/train.target, line by line: the pairs as they are; each target with the source
that the backward model makes of it; each source with the target that the forward model makes of it. A model trained on
all of them learns from several wordings of the same sentence, and no new text is needed. A made pair is left out where
one side is empty or much longer than the other.

For text that subword-nmt has cut ("brea@@ king"), give its merges by --codes (pip install subword-nmt): a bundle whose
tokenizer is "segmented" reads the text as it is, any other one reads it joined, what they make is cut again, and a made
pair with a subword that the text does not have is left out, so that the vocabulary stays what it was.

Source: Nguyen et al., "Data Diversification: A Simple Strategy For Neural Machine Translation", 2020.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "experiments"

from mmattn import Translator
from mmattn.data.pairs import ParallelSource
from mmattn.training.folder import write_text

JOINER = "@@ "
Pair = tuple[str, str]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 after saying what is wrong."""
    try:
        return diversify(_parser().parse_args(arguments))
    except (ModuleNotFoundError, OSError, ValueError) as error:  # of files, bundles and settings
        print(f"mmattn: {error}", file=sys.stderr)
        return 1


def diversify(options: argparse.Namespace) -> int:
    """Makes the pairs and writes them."""
    place = next(path for path in (options.output, *options.output.parents) if path.exists())
    if not place.is_dir():  # said before hours of work
        raise ValueError(f"--output {options.output}: no folder can be made there, {place} is a file.")
    cut = _segmenter(options.codes)
    source = ParallelSource(options.source, options.target)
    pairs = [(source[index]["source"], source[index]["targets"][0]) for index in range(len(source))]
    made = {
        "backward": zip(
            _translated(options, "backward", [b for _, b in pairs], cut), [b for _, b in pairs], strict=True
        ),
        "forward": zip([a for a, _ in pairs], _translated(options, "forward", [a for a, _ in pairs], cut), strict=True),
    }
    known = {word for pair in pairs for side in pair for word in side.split()} if options.codes else None
    chosen = list(pairs)
    for name, several in made.items():
        kept = [pair for pair in several if fits(pair, known)]
        print(f"{name}: {len(kept):,} of {len(pairs):,} made pairs", flush=True)
        chosen += kept
    options.output.mkdir(parents=True, exist_ok=True)
    for name, side in (("source", 0), ("target", 1)):
        write_text(options.output / f"train.{name}", "".join(f"{pair[side]}\n" for pair in chosen))
    print(f"{options.output}: {len(chosen):,} pairs")
    return 0


def fits(pair: Pair, known: set[str] | None = None) -> bool:
    """Whether a made pair is of use: two sentences of similar length, of `known` words alone where that is given.

    >>> fits(("a b", "c")), fits(("a b", "")), fits(("a", " ".join("b" * 40))), fits(("a", "b"), {"a"})
    (True, False, False, False)
    """
    one, other = (side.split() for side in pair)
    alike = bool(one) and bool(other) and abs(len(one) - len(other)) < 25
    return alike and (known is None or known.issuperset(one + other))


def _translated(options: argparse.Namespace, way: str, texts: list[str], cut: Callable[[str], str]) -> list[str]:
    translator = Translator.load(getattr(options, way))
    reader = translator.source_tokenizer or translator.tokenizer
    if options.codes and reader.joiner is None:
        texts = [text.replace(JOINER, "") for text in texts]
    settings = {"method": "greedy"} if options.beams == 1 else {"num_beams": options.beams}

    def progress(done: int, total: int) -> None:
        print(f"\r{way}: {done:,} of {total:,}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    found = translator.translate(texts, batch_size=128, on_error="return", progress=progress, **settings)
    return [cut(" ".join(getattr(each, "text", "").split())) for each in found]  # what was too long: an empty line


def _segmenter(codes: Path | None) -> Callable[[str], str]:
    if codes is None:
        return str
    try:
        from subword_nmt.apply_bpe import BPE
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--codes needs subword-nmt: pip install subword-nmt") from error
    with open(codes, encoding="utf-8") as file:
        return BPE(file).process_line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="the training pairs: a text file")
    parser.add_argument("--target", required=True, help="and the one with their translations")
    parser.add_argument("--forward", required=True, help="a translator's bundle, from source to target")
    parser.add_argument("--backward", required=True, help="one from target to source")
    parser.add_argument("--output", required=True, type=Path, help="folder for train.source and train.target")
    parser.add_argument("--codes", type=Path, help="subword-nmt's merges, if the text is cut by them")
    parser.add_argument("--beams", type=int, default=1, help="1, the default, is greedy search")
    return parser


if __name__ == "__main__":
    sys.exit(main())
