"""A small recurrent language model as a `step`, and its plain NumPy twin, for the tests of the decoding."""

from __future__ import annotations

import numpy as np
from keras import ops

PAD, UNK, BOS, END = 0, 1, 2, 3


class ToyModel:
    """`h <- tanh(h U + E[token] + context)`, `logits = h O`; tokens from `content` on have no chance at all."""

    def __init__(self, vocabulary_size: int = 32, width: int = 8, content: int = 7, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.vocabulary_size = vocabulary_size
        self.width = width
        self.embedding = rng.normal(size=(vocabulary_size, width)).astype("float32")
        self.recurrent = (0.7 * rng.normal(size=(width, width))).astype("float32")
        self.output = rng.normal(size=(width, vocabulary_size)).astype("float32")
        self.bias = np.where(np.arange(vocabulary_size) < content, 0.0, -np.inf).astype("float32")

    def start(self, inputs: dict, max_length: int):
        memory = ops.convert_to_tensor(inputs["memory"])  # (B, width)
        return {"memory": memory, "mask": None}, {"h": ops.zeros_like(memory), "nothing": None}

    def step(self, ids, index, context, state):
        h = ops.matmul(state["h"], self.recurrent) + ops.take(ops.convert_to_tensor(self.embedding), ids, axis=0)
        h = ops.tanh(h + context["memory"])
        return ops.add(ops.matmul(h, self.output), self.bias), {"h": h, "nothing": None}

    def memory(self, rows: int, seed: int = 1) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=(rows, self.width)).astype("float32")

    def log_probs(self, memory: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
        """The log-probabilities of the token after BOS and `tokens`, for one row, in float64."""
        h = np.zeros(self.width)
        for token in (BOS, *tokens):
            h = np.tanh(h @ self.recurrent.astype("float64") + self.embedding[token] + memory)
        logits = h @ self.output + self.bias
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def length_penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def permitted(tokens: tuple[int, ...], token: int, min_length: int = 0, ngram: int = 0) -> bool:
    """Whether `token` may follow `tokens`, by the rules in words."""
    if token in (PAD, UNK, BOS) or (token == END and len(tokens) < min_length):
        return False
    grown = (*tokens, token)
    grams = [grown[i : i + ngram] for i in range(len(grown) - ngram + 1)] if ngram else []
    return len(grams) < 1 or grams[-1] not in grams[:-1]
