"""Translation: a sentence in, the same in another language out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import keras

from mmattn.bundle import Bundle, save_bundle
from mmattn.data.pair_batches import PairBatches, source_batches
from mmattn.generation import TextGenerator
from mmattn.metrics import detokenize, translation_scores
from mmattn.preprocess.text import Tokenizer
from mmattn.tasks.parts import Report, blame, check_decoding, check_part, tokenizer_of
from mmattn.training.likelihood import measurer
from mmattn.training.validation import Choice, Prediction, Scoring, decoding_of, finish, predict

SCORES = ("bleu", "chrf", "bp", "mean_length", "exact")
EVAL_BATCH = 64  # sentences that are translated at once
SURPRISE_TOKENS = 4096  # of a batch of pairs whose references are foretold
# How a bundle says that max_length alone counts, and that a search has no patience.
UNLIMITED = {"length_factor": 100.0, "length_offset": 1, "patience": 0.0}


class Translating:
    """The translator's side of a run.

    Args:
        parts: the objects of the configuration: tokenizer, source_tokenizer or None for one vocabulary of both
            languages, batches, encoder, decoder, model, scoring (how BLEU is computed), validation, final.
        sources: train, valid and test, records with `source`, `targets` and `id`.
        folder: the run folder.
        seed: of the batches.
        say: takes each line for the user.
        reject: called with the id of a pair that is left out or cut and the reason.
    """

    command: ClassVar = 'translate "A SENTENCE"'  # of mmattn, to try the bundle
    nodes: ClassVar = ("source_tokenizer", "scoring")
    fields: ClassVar = ("source", "targets")  # of a record
    scores: ClassVar = SCORES

    def __init__(
        self,
        parts: dict[str, Any],
        sources: dict[str, Any],
        folder: Path,
        seed: int,
        say: Callable[[str], None],
        reject: Report,
    ) -> None:
        self.parts, self.sources, self.say, self.reject = parts, sources, say, reject
        self._tokenizers(folder)
        self.scoring = parts["scoring"].joining(self.tokenizer)
        encode_source = (self.source_tokenizer or self.tokenizer).encode
        with blame("batches"):
            train = parts["batches"](
                source=sources["train"],
                encode_source=encode_source,
                encode_target=self.tokenizer.encode,
                seed=seed,
            )
        self.batches = {"train": train}
        self.max_length = train.max_length
        for name, why in train.faults:
            reject(name, why)
        self._say_what_there_is(train)
        with blame("model"):
            self.model = _model(
                parts, self.tokenizer.vocabulary_size, (self.source_tokenizer or self.tokenizer).vocabulary_size
            )
            self.model.build({"source_ids": (None, None), "target_ids": (None, None)})
        self.generator = TextGenerator(self.model, self.tokenizer)
        self.generate = self.generator.best

    @staticmethod
    def trials(parts: dict[str, Any], vocabulary_size: int) -> dict[str, Callable[[], Any]]:
        """What to try before data are read, by place in the configuration; a setting that cannot work raises."""

        def encoder() -> None:
            check_part(parts["encoder"], partial, "an encoder of tokens: encoder=text")
            parts["encoder"](vocabulary_size=vocabulary_size)

        pair = {"id": "1", "source": "a", "targets": ["b"]}
        longest = parts["batches"].keywords.get("max_length", 256)
        return {
            "encoder": encoder,
            "model": lambda: _model(parts, vocabulary_size, vocabulary_size),
            "final": lambda: check_decoding(parts, "translator", max_source_length=longest),
            "batches": lambda: parts["batches"](source=[pair], encode_source=lambda text: [4]),
        }

    def validate(self, step: int) -> dict[str, float]:
        """The scores of translations of the validation split."""
        options = self.parts["validation"]
        return self.scoring(predict(self.generate, self._valid(options.examples), options.decoding(), self.scoring))

    def finish(self, folder: Path, card: dict[str, Any], monitor: str) -> dict[str, Any]:
        """Chooses the decoding on the validation split, writes the bundle, scores it on the test split."""

        def bundled(choice: Choice) -> Bundle:
            generation = {**UNLIMITED, **choice.options, "max_source_length": self.max_length}
            return save_bundle(
                folder / "bundle", self.model, self.tokenizer, generation=generation, card=card,
                weights_dtype=self.parts["final"].weights_dtype, source_tokenizer=self.source_tokenizer,
            )  # fmt: skip

        def test(bundle: Bundle) -> tuple[list[Prediction], dict[str, Any]]:
            made = _translated(bundle, self.sources["test"], bundle.generation, EVAL_BATCH, self.scoring, self.reject)
            signed = self.scoring.signed(made)
            return made, {
                **signed,
                **surprise(bundle, self.sources["test"]),
                "card": {"signatures": signed["signatures"]},
            }

        final = self.parts["final"]
        return finish(
            self.generate, self._valid(final.examples), self.parts["validation"].decoding(), final, self.scoring,
            monitor, folder, bundled, test, self.say,
        )  # fmt: skip

    def _valid(self, most: int | None) -> Callable[[], Any]:
        encode = (self.source_tokenizer or self.tokenizer).encode
        return partial(
            source_batches, self.sources["valid"], encode, EVAL_BATCH, self.max_length, most, on_fault=self.reject,
            width=self.generator.width,
        )  # fmt: skip

    def _tokenizers(self, folder: Path) -> None:
        """The run's own, trained on its training pairs the first time."""
        source = self.sources["train"]
        sources = (source[index]["source"] for index in range(len(source)))
        targets = (target for index in range(len(source)) for target in source[index]["targets"])
        self.source_tokenizer = None
        if self.parts["source_tokenizer"] is not None:
            with blame("source_tokenizer"):
                path = folder / "source_tokenizer.model"
                self.source_tokenizer = tokenizer_of(path, self.parts["source_tokenizer"], sources)
            texts = targets
        else:
            texts = (text for texts in (sources, targets) for text in texts)
        with blame("tokenizer"):
            self.tokenizer = tokenizer_of(folder / "tokenizer.model", self.parts["tokenizer"], texts)

    def _say_what_there_is(self, train: Any) -> None:
        others = ", ".join(
            f"{len(source)} {split} sentences" for split, source in self.sources.items() if split != "train"
        )
        faults = f" {len(train.faults)} of train left out or cut: see rejected.jsonl." if train.faults else ""
        self.say(f"Pairs: {train.num_examples} train, {others}.{faults} {self.tokenizer}.")
        self.say(
            f"Batches: {train.steps_per_epoch} a pass in {len(train.buckets)} shapes, {train.padding:.1%} padding, "
            f"{train.labels_per_epoch / train.steps_per_epoch:.0f} target tokens each"
            f"{', each pair twice' if train.twins else ''}."
        )


class TranslationScoring(Scoring):
    """How translations are scored.

    Args:
        tokenize: sacrebleu's tokenizer for BLEU: "none" for text that is tokenised already, "13a" for raw text, or what
            else `mmattn.metrics.translation_scores` takes.
        lowercase: compare without case.
        detokenize: code of the language, such as "en", of a model that writes Moses' tokens, to compare it with raw
            references: see `mmattn.metrics.detokenize`, which the translations go through.
        joiner: the mark of references that are segmented into subwords, such as "@@"; it is taken out of them.
    """

    def __init__(
        self, tokenize: str = "13a", lowercase: bool = False, detokenize: str | None = None, joiner: str | None = None
    ) -> None:
        super().__init__("targets", SCORES, self._score)
        self.tokenize, self.lowercase, self.detokenize, self.joiner = tokenize, lowercase, detokenize, joiner
        self._found(*self.prepared(["a"], [["a"]]))  # what is unknown or not installed is refused here

    def joining(self, tokenizer: Tokenizer) -> TranslationScoring:
        """The same for references that are segmented as the tokenizer wants its text."""
        return TranslationScoring(self.tokenize, self.lowercase, self.detokenize, self.joiner or tokenizer.joiner)

    def signed(self, predictions: list[Prediction]) -> dict[str, Any]:
        """sacrebleu's line and signatures, for the record."""
        texts, references = self.prepared([p.text for p in predictions], [p.references for p in predictions])
        found = self._found(texts, references)
        return {"bleu_line": found["bleu_line"], "signatures": found["signatures"]}

    def _score(self, texts: list[str], references: list[list[str]]) -> dict[str, float]:
        texts, references = self.prepared(texts, references)
        found = self._found(texts, references)
        fold = str.lower if self.lowercase else str
        equal = [fold(text) in map(fold, several) for text, several in zip(texts, references, strict=True)]
        return {**{name: found[name] for name in SCORES if name in found}, "exact": sum(equal) / len(equal)}

    def prepared(self, texts: list[str], references: list[list[str]]) -> tuple[list[str], list[list[str]]]:
        """What is compared: both as sacrebleu gets them."""
        if self.joiner is not None:
            references = [[text.replace(f"{self.joiner} ", "") for text in several] for several in references]
        if self.detokenize is not None:
            texts = [detokenize(text, self.detokenize) for text in texts]
        return texts, references

    def _found(self, texts: list[str], references: list[list[str]]) -> dict[str, Any]:
        return translation_scores(texts, references, tokenize=self.tokenize, lowercase=self.lowercase)


def evaluate(
    bundle: Bundle,
    source: Any,
    settings: dict[str, Any],
    batch_size: int,
    scoring: TranslationScoring,
    reject: Report,
) -> tuple[list[Prediction], dict[str, float], dict[str, Any]]:
    """A bundle's translations of a source, their scores, sacrebleu's line and signatures.

    A source of more than `max_source_length` tokens is cut and told to `reject`.
    """
    predictions = _translated(bundle, source, settings, batch_size, scoring, reject)
    more = {**scoring.signed(predictions), **surprise(bundle, source, settings["max_source_length"])}
    return predictions, scoring(predictions), more


def surprise(bundle: Bundle, source: Any, longest: int | None = None) -> dict[str, Any]:
    """How well a bundle foretells the references token by token, the true tokens before each given.

    Returns:
        {"perplexity": exp of the mean loss a token, end tokens included, "perplexity_tokens": how many}; nothing where
        no pair is short enough. Pairs of more than `longest` tokens on a side are left out.
    """
    longest = longest or bundle.generation["max_source_length"]
    encode = (bundle.source_tokenizer or bundle.tokenizer).encode
    try:
        pairs = PairBatches(source, encode, bundle.tokenizer.encode, SURPRISE_TOKENS, longest, seed=0, shuffle=False)
    except ValueError:  # all are too long
        return {}
    scores = measurer(bundle.model)(islice(pairs.iterate(), pairs.steps_per_epoch))
    return {"perplexity": scores["perplexity"], "perplexity_tokens": pairs.labels_per_epoch}


def _translated(
    bundle: Bundle, source: Any, settings: dict[str, Any], batch_size: int, scoring: Scoring, reject: Report
) -> list[Prediction]:
    """In the order of the source's records, after a search that goes by length."""
    encode, longest = (bundle.source_tokenizer or bundle.tokenizer).encode, settings["max_source_length"]
    generator = TextGenerator(bundle.model, bundle.tokenizer)
    examples = partial(source_batches, source, encode, batch_size, longest, on_fault=reject, width=generator.width)
    made = predict(generator.best, examples, decoding_of(settings), scoring)
    places = {str(source[index]["id"]): index for index in range(len(source))}
    return sorted(made, key=lambda prediction: places[prediction.id])


def _model(parts: dict[str, Any], vocabulary_size: int, source_vocabulary_size: int) -> keras.Model:
    """Not built yet."""
    encoder = parts["encoder"](vocabulary_size=source_vocabulary_size)
    decoder = parts["decoder"](vocabulary_size=vocabulary_size)
    if not getattr(decoder, "has_cross_attention", True):
        raise ValueError("a translator's decoder looks at the source: decoder.cross_attention=true.")
    return parts["model"](encoder=encoder, decoder=decoder)
