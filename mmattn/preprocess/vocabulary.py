"""Learning a SentencePiece model: the same texts give the same bytes, and what does not fit is said in words.

A model is a protocol buffer. What `sentencepiece` neither writes nor tells (the kind of the model, the rule that joins
marked pieces) is written and read here, byte by byte, so that protobuf is not needed. The fields:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import sentencepiece

from mmattn.preprocess.normalization import BLANK, COLLAPSING, NORMALIZATIONS, normalization_rules

SPECIAL_IDS = {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}  # numbered as in the model's bytes

_WHOLE = ("word", "char")  # their pieces are given by the text: all of them, or the most frequent
_TRAINER, _TRAINER_TYPE, _NORMALIZER, _PREFIX, _DENORMALIZER, _CHARSMAP = 2, 3, 3, 3, 5, 2  # numbers of fields
_LONGEST_KEY = 256  # bytes
_SURROGATE = re.compile("[\ud800-\udfff]")


def valid_text(text: str) -> str:
    """The text, with U+FFFD for half a surrogate pair, which broken JSON holds and UTF-8 has no bytes for."""
    if not isinstance(text, str):
        raise TypeError(f"A text must be a str, not {type(text).__name__}.")
    return _SURROGATE.sub("\ufffd", text)


def train_model(
    texts: Iterable[str],
    vocabulary_size: int | None,
    model_type: str,
    *,
    normalization: str,
    joiner: str | None,
    character_coverage: float,
    byte_fallback: bool,
    shrink: bool,
) -> bytes:
    """The bytes of a SentencePiece model; see `Tokenizer.train`, which states the arguments and errors."""
    _check(texts, vocabulary_size, model_type, normalization, joiner, character_coverage, byte_fallback)
    blanks_count = model_type == "char" and normalization not in COLLAPSING
    corpus = [text for text in map(valid_text, texts) if (text if blanks_count else text.strip())]
    if not corpus:
        raise ValueError("A tokenizer is trained on at least one text; there is none, or all are empty.")
    options: dict[str, Any] = {**SPECIAL_IDS, **_normalizer(normalization, model_type)}
    if joiner is not None and joiner != (seen := options["normalizer"].normalize(joiner).removeprefix(BLANK)):
        raise ValueError(f"joiner={joiner!r} must outlive the normalisation; {normalization!r} makes it {seen!r}.")
    whole = model_type in _WHOLE
    if whole and vocabulary_size is None:
        options["use_all_vocab"] = True
    if model_type == "word":
        options["unk_surface"] = " \u2047"  # a token as any other
    if blanks_count:  # SentencePiece does not see a line end at the end of a text
        options["required_chars"] = "".join(end for end in "\n\r" if any(end in text for text in corpus))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocabulary_size or len(SPECIAL_IDS) + 1,
            hard_vocab_limit=not (shrink or whole),
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
    return model.getvalue() if joiner is None else model.getvalue() + _joining(joiner)


def read_model_type(model: bytes) -> str:
    """The kind of a model, one of `MODEL_TYPES`."""
    trainer = next((value for number, value in _fields(model) if number == _TRAINER), b"")
    kind = next((value for number, value in _fields(trainer) if number == _TRAINER_TYPE), b"\1")
    return MODEL_TYPES.get(int.from_bytes(kind[:1], "big"), "unigram")


def without_prefix(model: bytes) -> bytes:
    """The model without the blank before a text: of a field that is there twice, what is said last holds."""
    return model + bytes([_NORMALIZER << 3 | 2, 2, _PREFIX << 3, False])


def read_joiner(model: bytes) -> str | None:
    """The mark that `_joining` stored, None if there is none.

    Raises:
        ValueError: other rules than those of a mark. They may come from a stranger, and SentencePiece's code for
            looking into them may never come back.
    """
    for number, rules in _fields(model):
        if number != _DENORMALIZER or not any(field == _CHARSMAP for field, _ in _fields(rules)):
            continue
        charsmap = next(value for field, value in _fields(rules) if field == _CHARSMAP)
        spelling = _only_key(charsmap)
        if not spelling.endswith(" ") or _joining_rules(spelling[:-1]) != rules:
            raise ValueError("The model rewrites decoded text by rules that are not those of a joiner: it is not used.")
        return spelling[:-1]
    return None


def _only_key(charsmap: bytes) -> str:
    """The one spelling in a compiled table, "" where there is none or several: the single path through its trie.

    The table is a length, then the units of a double array (Yata et al. 2007, in the form of the library darts-clone),
    then the texts that spellings become.
    """
    units = np.frombuffer(charsmap[4 : 4 + int.from_bytes(charsmap[:4], "little") // 4 * 4], "<u4").astype("int64")
    key, place = b"", 0
    while len(key) < _LONGEST_KEY and 0 <= place < len(units):
        unit = int(units[place])
        place ^= unit >> 10 << ((unit & 1 << 9) >> 6)
        near = [b for b in range(1, 256) if place ^ b < len(units) and units[place ^ b] & (1 << 31 | 255) == b]
        if not near:
            return key.decode("utf-8", "replace")
        key, place = key + bytes([near[0]]), place ^ near[0]
    return ""


def _joining_rules(joiner: str) -> bytes:
    """The rules that make SentencePiece's own decoding drop `joiner` and the blank after it."""
    plain: dict[str, Any] = dict.fromkeys(("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces"), False)
    sentencepiece.set_min_log_level(2)  # errors alone
    return sentencepiece.SentencePieceNormalizer(norm_map=[(joiner + " ", "")], **plain).serialized_normalizer_spec()


def _joining(joiner: str) -> bytes:
    """The field of a model that holds `_joining_rules`."""
    rules = _joining_rules(joiner)
    size, length = b"", len(rules)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([_DENORMALIZER << 3 | 2]) + size + bytes([length]) + rules


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, value) of each field of a protocol buffer that `sentencepiece` has accepted; of a number, its bytes."""
    place = 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
            if byte < 128:
                return value

    while place < len(message):
        key = number()
        begin, kind = place, key & 7
        if kind == 0:
            number()
        elif kind == 2:
            size = number()
            begin, place = place, place + size
        else:
            place += {1: 8, 5: 4}.get(kind, 0)
        yield key >> 3, message[begin:place]


def _check(
    texts: Iterable[str],
    vocabulary_size: int | None,
    model_type: str,
    normalization: str,
    joiner: str | None,
    character_coverage: float,
    byte_fallback: bool,
) -> None:
    if isinstance(texts, str):
        raise TypeError("texts must be a list of strings; this is one string.")
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {NORMALIZATIONS}, not {normalization!r}.")
    if model_type not in MODEL_TYPES.values():
        raise ValueError(f"model_type must be one of {tuple(MODEL_TYPES.values())}, not {model_type!r}.")
    if vocabulary_size is None and model_type not in _WHOLE:
        raise ValueError(f'model_type="{model_type}" needs a vocabulary_size; "word" and "char" alone can do without.')
    if vocabulary_size is not None and vocabulary_size <= len(SPECIAL_IDS):
        raise ValueError(f"vocabulary_size={vocabulary_size} leaves no room beside the {len(SPECIAL_IDS)} special ids.")
    if not 0.98 <= character_coverage <= 1:
        raise ValueError(f"character_coverage must lie between 0.98 and 1, not at {character_coverage}.")
    if byte_fallback and model_type in _WHOLE:
        raise ValueError(f'byte_fallback=True fits model_type "bpe" and "unigram", not "{model_type}".')
    if joiner is not None:
        if model_type != "word":
            raise ValueError(f'joiner={joiner!r} fits model_type="word", not "{model_type}".')
        if not joiner or BLANK in joiner or any(map(str.isspace, joiner)):
            raise ValueError(f'joiner must be a mark without blanks, as "@@", not {joiner!r}.')


def _normalizer(normalization: str, model_type: str) -> dict[str, Any]:
    """Options of SentencePiece. A "char" model adds no blank before a text, so that one character is one id."""
    flags: dict[str, Any] = {"remove_extra_whitespaces": normalization in COLLAPSING or model_type == "word"}
    if model_type == "char":
        flags["add_dummy_prefix"] = False
    rules = [] if normalization == "none" else normalization_rules(normalization)
    if model_type == "word":
        rules = [*{**dict(rules), **dict.fromkeys("\t\n\v\f\r" + BLANK, " ")}.items()]
    if not rules:
        return {"normalization_rule_name": "identity", **flags}
    sentencepiece.set_min_log_level(2)  # errors alone
    # From memory: a table read from a file would leave the file's path in the model.
    return {"normalizer": sentencepiece.SentencePieceNormalizer(norm_map=rules, **flags)}


def _explain(message: str, texts: int, size: int | None) -> str:
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
