"""Translation: a sentence in, the same in another language out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import keras

from mmattn.bundle import Bundle, save_bundle
from mmattn.data.pair_batches import PairBatches
from mmattn.generation import TextGenerator
from mmattn.metrics import detokenize, translation_scores
from mmattn.tasks.parts import blame, check_encoder, tokenizer_of
from mmattn.training.validation import Choice, Prediction, Scoring, finish, predict

Report = Callable[[str, str], None]
SCORES = ("bleu", "chrf", "bp", "mean_length", "exact")


class Translation:
    """The translator's side of a run.

    Args:
        parts: the objects of the configuration: tokenizer, source_tokenizer or None for one vocabulary of both
            languages, batches, encoder, decoder, model, scoring (how BLEU is computed), validation, final.
        sources: train, valid and test, records with `source`, `targets` and `id`.
        folder: the run folder.
        seed: of the batches.
        say: takes each line for the user.
        reject: called with the id of a pair that is left out and the reason.
    """

    command: ClassVar = 'translate "A SENTENCE"'  # of mmattn, to try the bundle
    nodes: ClassVar = ("source_tokenizer", "scoring")
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
        self.parts, self.sources, self.seed, self.say = parts, sources, seed, say
        self.scoring = parts["scoring"]
        self._tokenizers(folder)
        self.batches = {}
        for split in sources:
            with blame(f"data.{split}" if split != "train" else "batches"):
                self.batches[split] = self._batches(split)
        for batches in self.batches.values():
            for place, why in batches.faults:
                reject(place, why)
        train = self.batches["train"]
        others = ", ".join(f"{len(source)} {split}" for split, source in sources.items() if split != "train")
        say(
            f"Pairs: {train.num_examples} train, {others}. "
            f"{len(train.faults)} too long and {'cut' if train.too_long == 'cut' else 'left out'} (rejected.jsonl). "
            f"{self.tokenizer}."
        )
        say(
            f"Batches: {train.steps_per_epoch} a pass in {len(train.buckets)} shapes, {train.padding:.1%} padding, "
            f"{train.labels_per_epoch / train.steps_per_epoch:.0f} target tokens each."
        )
        with blame("model"):
            self.model = self._model()
        self.generate = TextGenerator(self.model, self.tokenizer).best

    @staticmethod
    def trials(parts: dict[str, Any], vocabulary_size: int) -> dict[str, Callable[[], Any]]:
        """What to try before data are read, by place in the configuration; a setting that cannot work raises."""

        def encoder() -> None:
            check_encoder(parts["encoder"], partial, "an encoder of tokens: encoder=text")
            parts["encoder"](vocabulary_size=vocabulary_size)

        pair = {"id": "1", "source": "a", "targets": ["b"]}
        return {"encoder": encoder, "batches": lambda: parts["batches"](source=[pair], encode_source=lambda text: [4])}

    def validate(self, step: int) -> dict[str, float]:
        """The scores of translations of the validation split."""
        options = self.parts["validation"]
        return self.scoring(predict(self.generate, self._valid(options.examples), options.decoding(), self.scoring))

    def _valid(self, most: int | None) -> Callable[[], Any]:
        return partial(self.batches["valid"].examples, most)

    def finish(self, folder: Path, card: dict[str, Any], monitor: str) -> dict[str, Any]:
        """Chooses the decoding on the validation split, writes the bundle, scores it on the test split."""

        def bundled(choice: Choice) -> Bundle:
            generation = {**choice.options, "max_source_length": self.batches["train"].max_length}
            return save_bundle(
                folder / "bundle", self.model, self.tokenizer, generation=generation, card=card,
                weights_dtype=self.parts["final"].weights_dtype, source_tokenizer=self.source_tokenizer,
            )  # fmt: skip

        def test(bundle: Bundle, options: dict[str, Any]) -> tuple[list[Prediction], dict[str, Any]]:
            generate = TextGenerator(bundle.model, bundle.tokenizer).best
            made = predict(generate, self.batches["test"].examples, options, self.scoring)
            return in_order(made, self.sources["test"]), self.scoring.signatures(made)

        final = self.parts["final"]
        return finish(
            self.generate, self._valid(final.examples), self.parts["validation"].decoding(), final, self.scoring,
            monitor, folder, bundled, test, self.say,
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

    def _batches(self, split: str) -> Any:
        return self.parts["batches"](
            source=self.sources[split],
            encode_source=(self.source_tokenizer or self.tokenizer).encode,
            encode_target=self.tokenizer.encode,
            seed=self.seed,
            **({} if split == "train" else {"too_long": "cut"}),
        )

    def _model(self) -> keras.Model:
        size = self.tokenizer.vocabulary_size
        encoder = self.parts["encoder"](vocabulary_size=(self.source_tokenizer or self.tokenizer).vocabulary_size)
        model = self.parts["model"](encoder=encoder, decoder=self.parts["decoder"](vocabulary_size=size))
        model.build({"source_ids": (None, None), "target_ids": (None, None)})
        return model


class TranslationScoring(Scoring):
    """How translations are scored.

    Args:
        tokenize: sacrebleu's tokenizer for BLEU: "none" for text that is tokenised already, "13a" for raw text.
        lowercase: compare without case.
        joiner: the mark of references that are segmented into subwords, such as "@@"; it is taken out of them.
        detokenize: code of the language, such as "en", of a model that writes Moses' tokens, to compare it with raw
            references: see `mmattn.metrics.detokenize`, which the translations go through.
    """

    def __init__(
        self, tokenize: str = "13a", lowercase: bool = False, joiner: str | None = None, detokenize: str | None = None
    ) -> None:
        super().__init__("targets", SCORES, self._score)
        self.tokenize, self.lowercase, self.joiner, self.detokenize = tokenize, lowercase, joiner, detokenize
        self._found(["a"], [["a"]])  # an unknown tokenizer is refused here

    def signatures(self, predictions: list[Prediction]) -> dict[str, Any]:
        """sacrebleu's signatures of the scores, for the record."""
        found = self._found([p.text for p in predictions], [p.references for p in predictions])
        return {"bleu_line": found["bleu_line"], "signatures": found["signatures"]}

    def _score(self, texts: list[str], references: list[list[str]]) -> dict[str, float]:
        found = self._found(texts, references)
        equal = [text in map(self._joined, several) for text, several in zip(texts, references, strict=True)]
        return {**{name: found[name] for name in SCORES if name in found}, "exact": sum(equal) / len(equal)}

    def _found(self, texts: list[str], references: list[list[str]]) -> dict[str, Any]:
        whole = [[self._joined(text) for text in several] for several in references]
        if self.detokenize is not None:
            texts = [detokenize(text, self.detokenize) for text in texts]
        return translation_scores(texts, whole, tokenize=self.tokenize, lowercase=self.lowercase)

    def _joined(self, text: str) -> str:
        return text if self.joiner is None else text.replace(f"{self.joiner} ", "")


def in_order(predictions: list[Prediction], source: Any) -> list[Prediction]:
    """The predictions in the order of the source's records, after a search that went by length."""
    places = {str(source[index]["id"]): index for index in range(len(source))}
    return sorted(predictions, key=lambda prediction: places[prediction.id])


def evaluate(
    bundle: Bundle, source: Any, settings: dict[str, Any], batch_size: int, scoring: TranslationScoring
) -> tuple[list[Prediction], dict[str, float], dict[str, Any]]:
    """A bundle's translations of a source, their scores and signatures."""
    batches = PairBatches(
        source,
        (bundle.source_tokenizer or bundle.tokenizer).encode,
        bundle.tokenizer.encode,
        max_length=settings["max_source_length"],
        too_long="cut",
        eval_batch_size=batch_size,
    )
    options = {name: value for name, value in settings.items() if name not in ("low_confidence", "max_source_length")}
    made = predict(TextGenerator(bundle.model, bundle.tokenizer).best, batches.examples, options, scoring)
    predictions = in_order(made, source)
    return predictions, scoring(predictions), scoring.signatures(predictions)
