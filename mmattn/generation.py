"""Texts from a model: the one place that turns a batch of encoder inputs into texts, in training and in inference.

Shapes: B batch, S source tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from mmattn.decoding import Generated, Generator
from mmattn.layers.checks import IN_ATTENTION
from mmattn.preprocess.text import Tokenizer

SOURCE = "source_ids"
_WIDTHS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Text:
    """One generated text.

    Attributes:
        text: the sentence, without blanks around it.
        ids: its tokens, those of a prompt included, without start and end.
        log_prob: sum of the tokens' log-probabilities, end token included, prompt left out.
        score: `log_prob` divided by the length penalty: what beam search ranks by.
        confidence: geometric mean of those probabilities, 0 to 1.
    """

    text: str
    ids: tuple[int, ...]
    log_prob: float
    score: float
    confidence: float


class TextGenerator:
    """Generates texts for batches of encoder inputs.

    Sources of words are widened with padding to 16, 32, 64, 128 or a multiple of 128 tokens, so that few compiled
    programs serve all lengths. With `length_factor` a row may become as long as its widened source allows: how long
    depends on the width alone, never on the other rows.

    Args:
        model: an `mmattn.model.EncoderDecoder`, or what has its `start` and `step`. Later changes of its weights count.
        tokenizer: of the texts that it makes.

    Call arguments:
        inputs: a dict of arrays, batch first, such as "pixels" or "source_ids" (B, S).
        nbest: how many texts for each row, best first; more than one needs as many beams.
        max_length: the most tokens of a text, end token (and prompt) included.
        method: "greedy", "beam" (one beam is greedy search, which gives the same tokens in less time) or "sample".
        num_beams: for beam search.
        patience: for beam search, see `mmattn.decoding.beam`; 1 ends it after `num_beams` finished texts, 0 is off.
        length_factor, length_offset: at most `length_factor * S + length_offset` tokens, S the widened source.
            None: `max_length` alone counts.
        options: those of `mmattn.decoding.Generator`: min_length, no_repeat_ngram, length_penalty, compiled, batches,
            prompt, first, and for "sample" seed, temperature, top_k, top_p, rows.

    Returns:
        for each row a list of up to `nbest` texts, at least one.

    Raises:
        ValueError: for settings that don't fit.
        FloatingPointError: where the model's scores are NaN.

    Example:
        >>> from mmattn.decoders import TransformerDecoder
        >>> from mmattn.encoders.text import TextEncoder
        >>> from mmattn.model import EncoderDecoder
        >>> tokenizer = Tokenizer.train(["a red circle", "a blue square"] * 9, vocabulary_size=32, shrink=True)
        >>> sizes = dict(hidden_dim=8, num_layers=1, num_heads=2)
        >>> encoder = TextEncoder(tokenizer.vocabulary_size, **sizes)
        >>> model = EncoderDecoder(encoder, TransformerDecoder(tokenizer.vocabulary_size, **sizes))
        >>> model.build({"source_ids": (None, None), "target_ids": (None, None)})
        >>> generate = TextGenerator(model, tokenizer)
        >>> inputs = {"source_ids": np.array([[*tokenizer.encode("a square"), tokenizer.eos_id]])}
        >>> [texts] = generate(inputs, nbest=2, method="beam", num_beams=2, max_length=4)
        >>> texts[0].score >= texts[1].score
        True
    """

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.longest_source = longest_source(model)
        self.generator = Generator(
            model.start,
            model.step,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            unk_id=tokenizer.unk_id,
            max_positions=longest(model),
        )

    def __call__(
        self,
        inputs: Mapping[str, Any],
        nbest: int = 1,
        *,
        max_length: int,
        method: str = "greedy",
        num_beams: int = 1,
        patience: float = 0.0,
        length_factor: float | None = None,
        length_offset: int = 1,
        **options: Any,
    ) -> list[list[Text]]:
        inputs = dict(inputs)
        if SOURCE in inputs:
            inputs[SOURCE] = ids = self._widened(inputs[SOURCE])
            if length_factor is not None:
                max_length = max(1, min(max_length, math.floor(length_factor * ids.shape[1] + length_offset)))
                options["min_length"] = min(options.get("min_length", 0), max_length - 1)
        if method == "beam" and num_beams > 1:
            options |= {"num_beams": num_beams, "num_return": nbest, "patience": patience}
        elif nbest != 1:
            raise ValueError(f"nbest={nbest} texts need as many beams; {method} search with one beam gives 1.")
        else:
            method = "greedy" if method == "beam" else method
        found = self.generator(inputs, method, max_length=max_length, **options)
        given = [0] * len(found.ids)
        if (prompt := options.get("prompt")) is not None:
            given = [int(np.count_nonzero(np.asarray(row) != self.tokenizer.pad_id)) for row in prompt]
        return [self._texts(found, row, given[row]) for row in range(len(found.ids))]

    def best(self, inputs: Mapping[str, Any], **settings: Any) -> list[Text]:
        """The best text for each row: what validation asks for."""
        return [texts[0] for texts in self(inputs, **settings)]

    def width(self, length: int) -> int:
        """S that a source of so many tokens is widened to."""
        return widened(length, self.longest_source)

    def traces(self) -> int:
        """How often a program was compiled so far."""
        return self.generator.traces()

    def _widened(self, ids: Any) -> np.ndarray:
        ids = np.asarray(keras.ops.convert_to_numpy(ids), "int32")
        more = self.width(ids.shape[1]) - ids.shape[1]
        return np.pad(ids, ((0, 0), (0, more)), constant_values=self.tokenizer.pad_id)

    def _texts(self, found: Generated, row: int, given: int) -> list[Text]:
        """Those hypotheses that there are; a row that could go on with no token at all is an empty text."""
        count = max(1, int((found.lengths[row] > 0).sum()))
        return [self._text(found, row, place, given) for place in range(count)]

    def _text(self, found: Generated, row: int, place: int, given: int) -> Text:
        length, log_prob = int(found.lengths[row, place]), float(found.log_probs[row, place])
        ids = tuple(int(i) for i in found.ids[row, place, :length] if i != self.tokenizer.eos_id)
        confidence = math.exp(log_prob / max(length - given, 1))
        return Text(self.tokenizer.decode(ids).strip(), ids, log_prob, float(found.scores[row, place]), confidence)


def widened(length: int, most: float) -> int:
    """The width that rows of so many tokens are padded to: one of a few, so that few programs are compiled.

    >>> [widened(length, 100) for length in (3, 17, 65, 130)]
    [16, 32, 100, 130]
    """
    wide = next((width for width in _WIDTHS if width >= length), -(-length // _WIDTHS[-1]) * _WIDTHS[-1])
    return int(max(length, min(wide, most)))


def longest(model: Any) -> float | None:
    """The most tokens that the model's decoder can make; infinity for one without a limit, None if it doesn't say."""
    decoder: Any = getattr(model, "decoder", None)
    return _positions(decoder) if hasattr(decoder, "max_length") else None


def longest_source(model: Any) -> float:
    """The most source tokens that the model's encoder can read; infinity for one without a limit."""
    return _positions(getattr(model, "encoder", None))


def _positions(part: Any) -> float:
    """How many positions an encoder or decoder has: `max_length`, but for those positions of ours that never end."""
    endless = getattr(part, "positions", None) in ("none", "sinusoidal", *IN_ATTENTION)
    return math.inf if endless else (getattr(part, "max_length", None) or math.inf)
