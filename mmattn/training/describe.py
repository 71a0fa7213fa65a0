"""Captions for batches that are already made: what validation and tests call on whole splits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mmattn.bundle_model import longest
from mmattn.decoding import Generator
from mmattn.preprocess.text import Tokenizer


class Made(NamedTuple):
    """A caption, and the geometric mean of its tokens' probabilities, the end token included."""

    text: str
    confidence: float


class Describer:
    """Generates one caption for each row of a batch of encoder inputs ("pixels" or "features").

    Args:
        model: an `mmattn.model.EncoderDecoder`, or what has its `start` and `step`. Later changes of its weights count.
        tokenizer: its tokenizer.

    Call arguments:
        inputs: a dict of arrays, batch first, without "target_ids".
        method: "greedy" or "beam"; one beam is greedy.
        max_length, min_length, no_repeat_ngram, num_beams, length_penalty: see `mmattn.decoding`.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
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
        inputs: dict[str, Any],
        *,
        max_length: int,
        method: str = "greedy",
        num_beams: int = 1,
        length_penalty: float = 0.6,
        min_length: int = 0,
        no_repeat_ngram: int = 0,
    ) -> list[Made]:
        options: dict[str, Any] = {
            "max_length": max_length,
            "min_length": min_length,
            "no_repeat_ngram": no_repeat_ngram,
        }
        if method == "beam" and num_beams > 1:
            options |= {"num_beams": num_beams, "length_penalty": length_penalty}
        else:
            method = "greedy"
        found = self.generator(inputs, method, **options)
        made = []
        for row in range(len(found.ids)):
            confidence = math.exp(float(found.log_probs[row, 0]) / max(int(found.lengths[row, 0]), 1))
            made.append(Made(self.tokenizer.decode([int(i) for i in found.ids[row, 0]]).strip(), confidence))
        return made
