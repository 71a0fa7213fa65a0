"""What every contender of the translation benchmark is given: the sizes, one batch, and how it is asked.

Shape letters: B rows, S source length, T target length, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PAD, UNK, BOS, EOS = 0, 1, 2, 3
SIZES = Path(__file__).resolve().parents[1] / "conf" / "size"
ROWS = {"tiny": (64, 32), "small": (64, 32), "base": (16, 8)}  # rows of a training batch, of a translated batch
STEPS = {"tiny": 5, "small": 3, "base": 1}  # training steps in one measurement


@dataclass(frozen=True)
class Job:
    """The model's sizes, the batches' and the machine's.

    Args:
        train_rows, translate_rows: B of the two batches.
        length: S and T of the padded batches, and how many tokens are made for each sentence.
        dropout: of the embeddings, of the attention weights and of each residual branch, in all contenders.
        threads: of the processor, for each contender.
        xla: compile the training steps of the Keras contenders by XLA rather than keep TensorFlow's graph.
    """

    hidden_dim: int
    num_heads: int
    intermediate_dim: int
    encoder_layers: int
    decoder_layers: int
    vocabulary_size: int
    train_rows: int
    translate_rows: int
    length: int
    dropout: float
    threads: int
    xla: bool
    seed: int = 0

    @classmethod
    def of_size(cls, size: str, **settings: Any) -> Job:
        """The sizes of conf/size/text_<size>.yaml."""
        import yaml

        sizes = yaml.safe_load((SIZES / f"text_{size}.yaml").read_text(encoding="utf-8"))
        names = ("hidden_dim", "num_heads", "intermediate_dim", "encoder_layers", "decoder_layers", "vocabulary_size")
        return cls(**{name: sizes[name] for name in names}, **settings)

    def batch(self, rows: int) -> Batch:
        """Sentences of random tokens, whose lengths run evenly from half of `length` to all of it."""
        rng = np.random.default_rng(self.seed)
        lengths = np.linspace(self.length // 2, self.length, rows).round().astype(int)
        places = np.arange(self.length)

        def sentences(lengths: np.ndarray) -> np.ndarray:
            ids = rng.integers(EOS + 1, self.vocabulary_size, (rows, self.length), dtype="int32")
            ends = lengths[:, None] - 1
            return np.where(places < ends, ids, np.where(places == ends, EOS, PAD)).astype("int32")

        source, labels = (sentences(rng.permutation(lengths)), sentences(rng.permutation(lengths)))
        target = np.where(labels[:, :-1] == EOS, PAD, labels[:, :-1])
        target = np.concatenate([np.full((rows, 1), BOS, "int32"), target], axis=1)
        return Batch(source, target, labels)


@dataclass(frozen=True)
class Batch:
    """`source` (B, S) = [s1 .. sn, eos, 0 ..], `target` (B, T) = [bos, t1 .. tn, 0 ..], `labels` (B, T) likewise."""

    source: np.ndarray
    target: np.ndarray
    labels: np.ndarray

    @property
    def tokens(self) -> int:
        """Real target tokens, end tokens included."""
        return int((self.labels != PAD).sum())


class Contender(Protocol):
    """One library's model of the sizes of a job, with what was measured."""

    def __init__(self, job: Job) -> None: ...

    def parameters(self) -> int:
        """Trained numbers, shared ones once."""

    def train(self, variant: str) -> float:
        """One step of Adam on the training batch: the loss before it, the mean over the real tokens."""

    def translate(self, beams: int) -> np.ndarray:
        """(B, T) tokens for the batch to translate, without the start token: `length` of them, whatever they are."""

    def logits(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """(B, T, V) without dropout."""


def is_greedy(contender: Contender, source: np.ndarray, made: np.ndarray) -> float:
    """Share of the tokens `made` (B, T) than which a full pass over all of them finds no ordinary token likelier."""
    target = np.concatenate([np.full((len(made), 1), BOS, "int32"), made[:, :-1]], axis=1)
    logits = contender.logits(source, target)
    chosen = np.take_along_axis(logits, made[..., None], axis=-1)[..., 0]
    return float((chosen >= logits[..., EOS + 1 :].max(axis=-1) - 1e-3).mean())
