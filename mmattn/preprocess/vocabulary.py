"""Learning a SentencePiece model: the same texts give the same bytes, and what does not fit is said in words."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import sentencepiece

from mmattn.preprocess.normalization import caption_rules

SPECIAL_IDS = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}

_SURROGATE = re.compile("[\ud800-\udfff]")


def valid_text(text: str) -> str:
    """The text, with U+FFFD for half a surrogate pair, which broken JSON holds and UTF-8 has no bytes for."""
    if not isinstance(text, str):
        raise TypeError(f"A text must be a str, not {type(text).__name__}.")
    return _SURROGATE.sub("\ufffd", text)


def train_model(
    texts: Iterable[str],
    vocabulary_size: int,
    model_type: str,
    *,
    normalization: str,
    character_coverage: float,
    byte_fallback: bool,
    shrink: bool,
) -> bytes:
    """The bytes of a SentencePiece model; see `Tokenizer.train`, which states the arguments and errors."""
    _check(texts, vocabulary_size, model_type, normalization, character_coverage)
    corpus = [text for text in map(valid_text, texts) if text.strip()]
    if not corpus:
        raise ValueError("A tokenizer is trained on at least one text; there is none, or all are empty.")
    model = io.BytesIO()
    try:
        options: dict[str, Any] = {**SPECIAL_IDS, **_normalizer(normalization)}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocabulary_size,
            hard_vocab_limit=not shrink,
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            max_sentence_length=max(10, *(len(text.encode()) for text in corpus)),  # longer ones are dropped unsaid
            shuffle_input_sentence=False,
            num_threads=1,
            minloglevel=2,
            **options,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(_explain(str(error), len(corpus), vocabulary_size)) from error
    return model.getvalue()


def _check(
    texts: Iterable[str], vocabulary_size: int, model_type: str, normalization: str, character_coverage: float
) -> None:
    if isinstance(texts, str):
        raise TypeError("texts must be a list of strings; this is one string.")
    if normalization not in ("none", "caption"):
        raise ValueError(f'normalization must be "none" or "caption", not {normalization!r}.')
    if model_type not in ("bpe", "unigram"):
        raise ValueError(f'model_type must be "bpe" or "unigram", not {model_type!r}.')
    if vocabulary_size <= len(SPECIAL_IDS):
        raise ValueError(f"vocabulary_size={vocabulary_size} leaves no room beside the {len(SPECIAL_IDS)} special ids.")
    if not 0.98 <= character_coverage <= 1:
        raise ValueError(f"character_coverage must lie between 0.98 and 1, not at {character_coverage}.")


def _normalizer(normalization: str) -> dict[str, Any]:
    if normalization == "none":
        return {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.set_min_log_level(2)  # errors alone
    # From memory: a table read from a file would leave the file's path in the model.
    normalizer = sentencepiece.SentencePieceNormalizer(norm_map=caption_rules(), remove_extra_whitespaces=True)
    return {"normalizer": normalizer}


def _explain(message: str, texts: int, size: int) -> str:
    if high := re.search(r"too high .*<= (\d+)", message):
        return (
            f"vocabulary_size={size} is more than {texts} texts can fill; the largest that fits: {high[1]}. "
            "Give that, more texts, or shrink=True to take what fits."
        )
    if low := re.search(r"smaller than required_chars\D+\d+ vs (\d+)", message):
        return (
            f"vocabulary_size={size} is less than the {low[1]} that the special ids and the characters of the texts "
            f"need. Give at least {low[1]}, or a smaller character_coverage."
        )
    if "all_chars_count" in message:
        return f"The normalisation leaves no character of the {texts} texts."
    return f"SentencePiece could not train a vocabulary of {size} on {texts} texts: {message}"
