"""Text to token ids and back, the same ids everywhere.

A `Tokenizer` is one SentencePiece model and nothing beside it: the special ids, the vocabulary and the normalisation
of the text all lie in its bytes. `sentencepiece` runs it in Python, tensorflow-text runs the same bytes inside a
TensorFlow graph, so training, inference and an exported model can't disagree. SentencePiece: Kudo and Richardson
2018, https://arxiv.org/abs/1808.06226.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import sentencepiece

from mmattn.preprocess.normalization import BLANK
from mmattn.preprocess.vocabulary import (
    SPECIAL_IDS,
    read_joiner,
    read_model_type,
    train_model,
    valid_text,
    without_prefix,
)
from mmattn.preprocess.words import group_words, join_tokens

UNKNOWN = "\u2047"  # how SentencePiece writes an unknown piece in decoded text


class Tokenizer:
    """A SentencePiece tokenizer with the special ids pad 0, unk 1, bos 2 and eos 3.

    Args:
        model_bytes: a serialised SentencePiece model, as `Tokenizer.train`, `Tokenizer.save` or `spm_train` wrote it.

    Attributes:
        model_type: "bpe", "unigram", "char" or "word".
        joiner: the mark at the end of a piece that goes on in the next one; None for a model without such marks.

    Raises:
        ValueError: the bytes are not a SentencePiece model, or its special ids are others.

    Example:
        >>> texts = ["A dog runs.", "Two dogs run!"]
        >>> tokenizer = Tokenizer.train(texts, vocabulary_size=24, normalization="caption")
        >>> ids = tokenizer.encode("A  DOG,   runs")
        >>> tokenizer.decode([2, *ids, 3, 0, 0])
        'a dog runs'
        >>> [word for word, _ in tokenizer.words(ids)]
        ['a', 'dog', 'runs']
        >>> Tokenizer(tokenizer.model_bytes).encode("two dogs") == tokenizer.encode("two dogs")
        True

        Text that subword-nmt has segmented, and characters:

        >>> tokenizer = Tokenizer.train(["brea@@ king news", "news @-@ room"], model_type="word", joiner="@@")
        >>> tokenizer.vocabulary_size, tokenizer.decode(tokenizer.encode("brea@@ king news"))
        (9, 'breaking news')
        >>> tokenizer = Tokenizer.train(["To be,\\n\\nor not"], model_type="char")
        >>> tokenizer.decode(tokenizer.encode("\\nnot  to be"))
        '\\nnot  to be'
    """

    pad_id: ClassVar[int] = SPECIAL_IDS["pad_id"]
    unk_id: ClassVar[int] = SPECIAL_IDS["unk_id"]
    bos_id: ClassVar[int] = SPECIAL_IDS["bos_id"]
    eos_id: ClassVar[int] = SPECIAL_IDS["eos_id"]

    def __init__(self, model_bytes: bytes) -> None:
        self.model_bytes = bytes(model_bytes)
        self._tensorflow: Any = None
        self._rest: Any = None  # the model of `encode_rest`
        if not self.model_bytes:
            raise ValueError("A SentencePiece model is needed; these are 0 bytes.")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=self.model_bytes)
        except RuntimeError as error:
            size = len(self.model_bytes)
            raise ValueError(f"These {size} bytes are not a SentencePiece model: damaged, or another file.") from error
        found = (self._model.pad_id(), self._model.unk_id(), self._model.bos_id(), self._model.eos_id())
        wanted = (self.pad_id, self.unk_id, self.bos_id, self.eos_id)
        if found != wanted:
            raise ValueError(
                f"The special ids (pad, unk, bos, eos) of a tokenizer must be {wanted}; this model has {found} "
                "(-1: none). Train it with pad_id=0, unk_id=1, bos_id=2, eos_id=3."
            )
        self.model_type = read_model_type(self.model_bytes)
        self.joiner = read_joiner(self.model_bytes)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocabulary_size: int | None = None,
        model_type: Literal["bpe", "unigram", "char", "word"] = "bpe",
        *,
        normalization: Literal["none", "nfc", "nfkc", "nfkc_lower", "caption"] = "none",
        joiner: str | None = None,
        character_coverage: float = 1.0,
        byte_fallback: bool = False,
        shrink: bool = False,
    ) -> Tokenizer:
        """Learns a vocabulary from texts. The same texts and arguments give the same bytes: one thread, no sampling.

        Args:
            texts: the training texts; all of them are read into memory.
            vocabulary_size: number of ids, the 4 special ones (and 256 bytes with `byte_fallback`) included. For "char"
                and "word" an upper limit that leaves out the rarest; None takes all that occur.
            model_type: "bpe" (Sennrich et al. 2016); "unigram" (Kudo 2018); "char", one id for each character, line
                ends and repeated blanks included; "word" for text that is segmented already: its tokens are what
                blanks (of ASCII) separate, and neighbouring unknown ones share one unk.
            normalization: "none" or "nfc", which keep each blank (but "word"); "nfkc" or "nfkc_lower", where each run
                of blanks is one; "caption", lower-case words alone: letters, digits, marks and apostrophes, all else
                one blank. `mmattn.preprocess.normalization` states each exactly. See `normalize`.
            joiner: for "word", the mark of a token that goes on in the next one, "@@" in the text of subword-nmt.
                `decode` and `words` join such tokens; a mark at the end of a text vanishes.
            character_coverage: share of the characters in the texts that get an id of their own; the rarest others
                become unk (or bytes). 0.9995 is usual for Chinese and Japanese.
            byte_fallback: write a character outside the vocabulary as its UTF-8 bytes instead of unk.
            shrink: texts that cannot fill `vocabulary_size` give the largest vocabulary that they can fill, instead
                of an error. "char" and "word" always do.

        Raises:
            ValueError: there is no text, the arguments do not fit each other, or `vocabulary_size` is more than the
                texts can fill or less than their characters need; the message names the size that fits.
        """
        return cls(
            train_model(
                texts,
                vocabulary_size,
                model_type,
                normalization=normalization,
                joiner=joiner,
                character_coverage=character_coverage,
                byte_fallback=byte_fallback,
                shrink=shrink,
            )
        )

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, special ones included."""
        return int(self._model.get_piece_size())

    @property
    def normalization(self) -> str:
        """What the model does to its text, by the names of `train`: found out on a text that tells them apart; "other"
        for what is none of them.

        >>> Tokenizer.train(["a dog"], vocabulary_size=20, normalization="nfkc", shrink=True).normalization
        'nfkc'
        """
        found = self.normalize("E\u0301\ufb01! x")
        shown = {
            "E\u0301\ufb01! x": "none",
            "\u00c9\ufb01! x": "nfc",
            "\u00c9fi! x": "nfkc",
            "\u00e9fi! x": "nfkc_lower",
        }
        return {**shown, "\u00e9fi x": "caption"}.get(found, "other")

    def normalize(self, text: str) -> str:
        """The text as the tokenizer sees it: `decode(encode(text))`, where nothing is unknown and no mark joins.

        >>> tokenizer = Tokenizer.train(["a dog"], vocabulary_size=20, normalization="caption", shrink=True)
        >>> tokenizer.normalize("Café №1: don\u2019t—STOP! 🐕")
        "café no1 don't stop"
        """
        normal = self._model.normalize(valid_text(text)).replace(BLANK, " ")
        return normal if self.model_type == "char" else normal.removeprefix(" ")

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without bos and eos. No text gives a special id other than unk."""
        return self._model.encode(valid_text(text))

    def encode_rest(self, text: str) -> list[int]:
        """Token ids of a text that goes on with a word: `encode` without the blank that it puts before every text.

        >>> tokenizer = Tokenizer.train(["sing", "sang"], vocabulary_size=20, shrink=True)
        >>> tokenizer.encode_rest("ing") == tokenizer.encode("ing")[1:]
        True
        """
        if self._rest is None:
            self._rest = sentencepiece.SentencePieceProcessor(model_proto=without_prefix(self.model_bytes))
        return self._rest.encode(valid_text(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids: up to the first eos, without pad and bos; an unknown piece reads " \u2047 "."""
        real = self._real(ids)
        text = self._model.decode(real)
        if self.model_type != "word":
            return text
        marked = bool(real and self.joiner) and self._model.id_to_piece(real[-1]).endswith(self.joiner or "")
        return text.removeprefix(" ").removesuffix((self.joiner or "") if marked else "")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One string for each id, special ids too, as SentencePiece writes it: a leading "\u2581" is a blank."""
        return [self._model.id_to_piece(i) for i in self._checked(ids)]

    def words(self, ids: Sequence[int], text: str | None = None) -> list[tuple[str, list[int]]]:
        """Merges pieces into words, for pictures of where the decoder looked.

        A word begins at a blank; marked tokens are joined, as by `decode`. Chinese, Japanese, Thai, Lao, Khmer and
        Burmese have no blanks, so there each piece is a word of its own, unless the tokens of a "word" model say it.
        The bytes of one character stay together; pad, bos and what follows eos belong to no word.

        Args:
            ids: the tokens.
            text: what they are the tokens of, where that is known: unknown pieces are shown as they stand there.

        Returns:
            (word, positions) in order: `positions` are the places in `ids` of the pieces of that word.
        """
        shown = [] if text is None else self._model.encode(valid_text(text), out_type=str)
        units = self._units(ids, shown)
        return join_tokens(units, self.joiner) if self.model_type == "word" else group_words(units)

    def tf_encode(self, strings: Any) -> Any:
        """The ids of `encode`, computed by tensorflow-text inside a TensorFlow graph. Needs tensorflow-text.

        Args:
            strings: string tensor (B,), UTF-8.

        Returns:
            int32 ragged tensor (B, number of ids), without bos and eos. A scalar string gives one row, an int32 tensor.
        """
        import tensorflow as tf
        import tensorflow_text

        if self._tensorflow is None:
            with tf.init_scope():
                self._tensorflow = tensorflow_text.SentencepieceTokenizer(self.model_bytes, out_type=tf.int32)
        return self._tensorflow.tokenize(strings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model as one file, as SentencePiece's own programs do. A crash leaves the old file or the new."""
        path = Path(path)
        descriptor, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.model_bytes)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Reads what `save` wrote. ValueError names the file if it is damaged or is something else."""
        try:
            return cls(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[bytes]]:
        return type(self), (self.model_bytes,)

    def __repr__(self) -> str:
        return f"Tokenizer(vocabulary_size={self.vocabulary_size})"

    def _checked(self, ids: Sequence[int]) -> list[int]:
        checked = [int(i) for i in ids]
        size = self.vocabulary_size
        for i in checked:
            if not 0 <= i < size:
                raise ValueError(f"Token id {i} is not in this vocabulary: ids are 0 to {size - 1}.")
        return checked

    def _real(self, ids: Sequence[int]) -> list[int]:
        checked = self._checked(ids)
        end = checked.index(self.eos_id) if self.eos_id in checked else len(checked)
        return [i for i in checked[:end] if i not in (self.pad_id, self.bos_id)]

    def _units(self, ids: Sequence[int], shown: Sequence[str]) -> Iterable[tuple[str, list[int]]]:
        """(text, positions) of each piece: the byte pieces of one character as one, pad, bos and eos not at all."""
        raw = b""
        places: list[int] = []
        for position, i in enumerate(self._checked(ids)):
            if raw and (not self._model.is_byte(i) or len(raw) == 4):
                yield raw.decode("utf-8", "replace"), places
                raw, places = b"", []
            if i == self.eos_id:
                return
            piece = self._model.id_to_piece(i)
            if self._model.is_byte(i):
                raw, places = raw + bytes([int(piece[1:-1], 16)]), [*places, position]
                if _whole(raw):
                    yield raw.decode("utf-8"), places
                    raw, places = b"", []
            elif i == self.unk_id:
                yield (shown[position].replace(BLANK, " ") if position < len(shown) else UNKNOWN), [position]
            elif i not in (self.pad_id, self.bos_id):
                yield piece.replace(BLANK, " "), [position]
        if raw:
            yield raw.decode("utf-8", "replace"), places


def _whole(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
