"""Tiny models of text, whose weights are large enough that what they write depends on what they read."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mmattn.decoders import TransformerDecoder
from mmattn.encoders.text import TextEncoder
from mmattn.heads import MaskedLanguageModel
from mmattn.model import EncoderDecoder, LanguageModel
from mmattn.preprocess.text import Tokenizer

ENGLISH = ["a red circle left of a blue square", "two dogs run on the beach", "the boy eats green apples"]
GERMAN = ["ein roter kreis links von einem blauen quadrat", "zwei hunde laufen am strand", "der junge isst äpfel"]
JOINT = Tokenizer.train((ENGLISH + GERMAN) * 9, vocabulary_size=80, shrink=True)
SOURCE = Tokenizer.train(ENGLISH * 9, vocabulary_size=50, shrink=True)
TARGET = Tokenizer.train(GERMAN * 9, vocabulary_size=60, shrink=True)
SIZES: dict[str, Any] = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2}


def translation_model(source: Tokenizer, target: Tokenizer, seed: int = 3, **changes: Any) -> EncoderDecoder:
    keras.utils.set_random_seed(seed)
    sizes = SIZES | changes
    encoder = TextEncoder(source.vocabulary_size, **sizes)
    decoder = TransformerDecoder(target.vocabulary_size, **sizes)
    model = EncoderDecoder(encoder, decoder, share_embeddings=source is target)
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    return sharpened(model)


def language_model(tokenizer: Tokenizer, seed: int = 3, **changes: Any) -> LanguageModel:
    keras.utils.set_random_seed(seed)
    model = LanguageModel(TransformerDecoder(tokenizer.vocabulary_size, cross_attention=False, **(SIZES | changes)))
    model.build({"target_ids": (None, None)})
    return sharpened(model)


def sharpened(model: Any) -> Any:
    for v in model.weights:
        if v.path.endswith("kernel"):
            v.assign(v * 4.0)
        elif v.path.endswith("embeddings"):
            v.assign(v * 0.5)
        elif v.path.endswith("output_bias"):  # so that some sentences end
            v.assign(np.eye(1, v.shape[0], 3, dtype="float32")[0])
    return model


def log_probs(model: Any, **inputs: Any) -> np.ndarray:
    """Log-probabilities (T, V) of a full call on one row, with the start, padding and unknown tokens ruled out."""
    batch = {name: np.array([ids], "int32") for name, ids in inputs.items()}
    logits = keras.ops.convert_to_numpy(model(batch, training=False))[0].astype("float64")
    logits = logits - logits.max(axis=1, keepdims=True)
    found = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found[:, :3] = -np.inf
    return found


def plain_greedy(model: Any, most: int, prompt: list[int] | None = None, **source: Any) -> tuple[list[int], float]:
    """Greedy search by a full call for each token: the ids without end, and the sum of their log-probabilities.

    As the settings' default has it, the end is no first token.
    """
    ids, total = list(prompt or []), 0.0
    while len(ids) < most:
        row = log_probs(model, target_ids=[2, *ids], **source)[-1]
        if not ids:
            row[3] = -np.inf
        total += row.max()
        if row.argmax() == 3:
            break
        ids.append(int(row.argmax()))
    return ids, total


def masked_model(tokenizer: Tokenizer, seed: int = 3, **changes: Any) -> MaskedLanguageModel:
    keras.utils.set_random_seed(seed)
    model = MaskedLanguageModel(TextEncoder(tokenizer.vocabulary_size + 1, **(SIZES | changes)))
    model.build({"source_ids": (None, None)})
    return sharpened(model)
