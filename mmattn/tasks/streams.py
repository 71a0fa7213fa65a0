"""Language modelling by a decoder that remembers: texts are read as streams, in training and when they are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import ops

from mmattn import backend
from mmattn.bundle import Bundle
from mmattn.data.streams import StreamBatches
from mmattn.stream_model import StreamModel
from mmattn.tasks.language import LanguageModelling
from mmattn.training.likelihood import counted, scores_of

STREAMS = 8  # that a text is scored in, at most: where each begins, the model remembers nothing yet


class StreamModelling(LanguageModelling):
    """The side of a run whose model remembers from batch to batch: see `mmattn.stream_model.StreamModel`.

    Args: as `LanguageModelling`; `batches` are such as `mmattn.data.streams` makes.
    """

    def _trained(self) -> keras.Model:
        model = StreamModel(self.language_model, self.batches["train"].batch_size)
        model.build({"target_ids": (None, None)})
        return model

    @staticmethod
    def trials(parts: dict[str, Any], vocabulary_size: int) -> dict[str, Callable[[], Any]]:
        """What to try before data are read, by place in the configuration; a setting that cannot work raises."""
        tried = LanguageModelling.trials(parts, vocabulary_size)
        return {**tried, "model": lambda: StreamModel(tried["model"](), 1)}

    @staticmethod
    def measurer(model: keras.Model) -> Callable[[Any], dict[str, float]]:
        """A function that takes a split's batches and gives their scores, read with the model's own memory."""
        measure, known = stream_measurer(model), model.decoder.memory_length
        return lambda batches: measure(batches.one_pass(streams_of(batches.batch_size)), known)

    def _generation(self) -> dict[str, Any]:
        return {**super()._generation(), "documents": bool(self.batches["train"].documents)}

    def _tested(self, bundle: Bundle) -> tuple[dict[str, float], dict[str, Any]]:
        """The scores, and those by the length of the memory: none, as in training, and longer."""
        known = bundle.model.decoder.memory_length
        lengths = dict.fromkeys([0, known, 2 * known, 4 * known])
        scores = by_memory(bundle.model, self.batches["test"], lengths)
        self.say("\n".join(table(scores)))
        by_length = {str(length): found for length, found in scores.items()}
        return scores[known], {"test_by_memory": by_length, "test_streams": streams_of(self.batches["test"].batch_size)}


def stream_measurer(model: keras.Model) -> Callable[[Iterable[Any], int], dict[str, float]]:
    """A function that takes the batches of a pass and how many positions to remember, and gives the scores of
    `mmattn.training.likelihood.scores_of`.

    It begins without a memory, which grows to that many. Later changes of the weights count.
    """

    def total(batch: Any, state: Any) -> tuple[Any, Any]:
        inputs, labels, weights = batch
        length = state["hidden"][0].shape[1]
        logits, state = model.read(inputs["target_ids"], state, memory_length=length, reset=inputs["reset"])
        return counted(labels, logits, weights), state

    compiled = backend.compile(total, jit=False, variables_of=model)

    def measure(batches: Iterable[Any], memory_length: int) -> dict[str, float]:
        loss = hits = count = 0.0
        state = None
        with backend.no_gradient():
            for batch in batches:
                state = model.decoder.empty_state(len(batch[1]), memory_length) if state is None else state
                found, state = compiled(keras.tree.map_structure(ops.convert_to_tensor, batch), state)
                loss, hits, count = loss + float(found[0]), hits + float(found[1]), count + float(batch[2].sum())
        return scores_of(loss, hits, count)

    return measure


def by_memory(model: keras.Model, batches: Any, memory_lengths: Iterable[int], batch_size: int | None = None) -> Any:
    """The scores of one pass over the batches for each length of the memory, by that length.

    `batch_size`: how many streams; None: those of the batches, at most `STREAMS`.
    """
    measure, size = stream_measurer(model), streams_of(batches.batch_size) if batch_size is None else batch_size
    return {length: measure(batches.one_pass(size), length) for length in memory_lengths}


def streams_of(batch_size: int) -> int:
    """How many streams a text is scored in, where batches have so many rows."""
    return min(batch_size, STREAMS)


def table(scores: dict[int, dict[str, float]]) -> list[str]:
    """Lines of a table: loss by memory length.

    >>> print("\\n".join(table({0: scores_of(2.0, 0, 1), 64: scores_of(1.5, 0, 1)})))
    memory  loss    perplexity
         0  2.0000  7.3891
        64  1.5000  4.4817
    >>> table({0: scores_of(2.0, 0, 1), 64: scores_of(2.0, 0, 1)})[-1]
    'No text goes on after its first segment, so that nothing is remembered.'
    """
    rows = [f"{length:6d}  {found['loss']:.4f}  {found['perplexity']:.4f}" for length, found in scores.items()]
    if 0 in scores and len(rows) > 1 and len({found["loss"] for found in scores.values()}) == 1:
        rows.append("No text goes on after its first segment, so that nothing is remembered.")
    return ["memory  loss    perplexity", *rows]


def evaluate(
    bundle: Bundle, source: Any, settings: dict[str, Any], batch_size: int, memory_lengths: Sequence[int] | None = None
) -> dict[int, dict[str, float]]:
    """A bundle's scores on a source by the length of its memory, in segments of the length that it was trained on.

    Args:
        bundle: of a model that remembers.
        source: records with `text`.
        settings: the bundle's.
        batch_size: streams that the text is cut into, of which there are at most `STREAMS`.
        memory_lengths: None: the one in the settings, or that it was trained with.
    """
    length, known = settings["context_length"] or 256, settings["memory_length"] or bundle.model.decoder.memory_length
    batches = StreamBatches(source, bundle.tokenizer.encode, batch_size, length, documents=settings["documents"])
    return by_memory(bundle.model, batches, memory_lengths or [known])
