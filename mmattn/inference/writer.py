"""Texts written by a language model: a bundle and the decoding behind one object."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import keras
import numpy as np

from mmattn import backend
from mmattn.bundle import find_bundle, load_bundle
from mmattn.bundle_kinds import check_generation
from mmattn.bundle_model import generation_of
from mmattn.generation import TextGenerator, longest
from mmattn.preprocess.text import Tokenizer


class Writer:
    """Continues texts.

    A model reads as many tokens as it has positions, or as its bundle says it was trained on (`context_length`). A
    longer text is written in windows: when one is full, its second half begins the next. A model that remembers, such
    as one with a `TransformerXLDecoder`, has what a full window has read in its memory, and goes on from there.

    Args:
        model: an `mmattn.model.LanguageModel` (or what has its `start` and `step`).
        tokenizer: its tokenizer.
        generation: defaults for decoding; what is left out is taken from `mmattn.bundle_kinds.KINDS`.

    Raises:
        ValueError: a default that isn't known or doesn't fit.

    >>> from mmattn.decoders import TransformerDecoder
    >>> from mmattn.model import LanguageModel
    >>> tokenizer = Tokenizer.train(["to be or not to be"] * 9, vocabulary_size=24, shrink=True)
    >>> decoder = TransformerDecoder(tokenizer.vocabulary_size, 8, num_layers=1, num_heads=2, cross_attention=False)
    >>> writer = Writer(LanguageModel(decoder), tokenizer)
    >>> texts = writer.write("to be", max_length=12, seed=1, count=2)
    >>> len(texts), all(text.startswith("to be") for text in texts)
    (2, True)
    >>> writer.write("to be", max_length=12, seed=1) == texts[:1]
    True
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, generation: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.generation = generation_of(model, generation, "language_model")
        if not getattr(model, "built", True):
            model.build({"target_ids": (None, None)})
        self.generator = TextGenerator(model, tokenizer)

    @classmethod
    def load(
        cls, name_or_folder: str | os.PathLike[str] | None = None, custom_objects: Mapping[str, Any] | None = None
    ) -> Writer:
        """A writer from a bundle's folder, or from the name of a shipped one (None: the default one).

        Raises:
            mmattn.bundle.BundleError: no such bundle, it is no language model's, or it is damaged, unsafe or too new.
        """
        bundle = load_bundle(find_bundle(name_or_folder, "language_model"), custom_objects, kind="language_model")
        return cls(bundle.model, bundle.tokenizer, bundle.generation)

    def write(
        self,
        prompt: str = "",
        *,
        count: int = 1,
        seed: int | None = None,
        compiled: bool | str = "auto",
        **settings: Any,
    ) -> list[str]:
        """Texts that begin with a prompt.

        Args:
            prompt: what each text begins with.
            count: how many texts.
            seed: of what is drawn: the same seed, the same texts, whatever `count`. None: another one each time.
            compiled: as for `mmattn.Captioner.caption`.
            settings: other values than the defaults in `generation`: max_length (the most tokens of a text, those of
                the prompt included), method ("sample" or "greedy"), temperature, top_k, top_p, context_length (the
                most tokens that the model looks back on, 0: as many as it can), memory_length (of a model that
                remembers: how many positions before those, 0: as many as in training).

        Returns:
            `count` texts, each with the prompt as the tokenizer writes it.

        Raises:
            ValueError: a setting that isn't known or doesn't fit; a prompt that is as long as `max_length` or that
                holds a character the model doesn't know.

        Source: top_p: Holtzman et al. 2020, section 3.1.
        """
        chosen = check_generation({**self.generation, **settings}, "language_model")
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        most = longest(self.model) or math.inf
        if chosen["context_length"] > most:
            raise ValueError(f"context_length={chosen['context_length']} exceeds the model's longest sequence, {most}")
        window = int(min(chosen["context_length"] or most, most, chosen["max_length"]))
        ids = self._read(prompt, chosen["max_length"])
        for name in ("memory_length", "documents"):
            if chosen[name] and not self._remembers:
                raise ValueError(f"{name}={chosen[name]} goes with a model that remembers; this does not")
        seed = secrets.randbits(31) if seed is None else seed
        write = self._in_segments if self._remembers else self._in_windows
        return [self.tokenizer.decode(row) for row in write(ids, count, window, seed, chosen, compiled)]

    @property
    def _remembers(self) -> bool:
        return hasattr(getattr(self.model, "decoder", None), "empty_state")

    def _in_windows(
        self, ids: list[int], count: int, window: int, seed: int, chosen: Mapping[str, Any], compiled: bool | str
    ) -> list[list[int]]:
        """Texts of which the second half of a full window begins the next."""
        rows, going = [list(ids) for _ in range(count)], list(range(count))
        for number in range(chosen["max_length"]):  # one window a turn
            keep = window // 2 if number or len(ids) >= window else len(ids)
            length = min(window, keep + chosen["max_length"] - len(rows[going[0]]))
            prompts = [rows[row][len(rows[row]) - keep :] for row in going]
            found = self._window(prompts, length, going, seed + number, chosen, compiled)
            for row, made in zip(going, found, strict=True):
                rows[row] += made[keep:]
            going = [row for row, made in zip(going, found, strict=True) if len(made) == length]  # the others ended
            if not going or len(rows[going[0]]) >= chosen["max_length"]:
                break
        return rows

    def _in_segments(
        self, ids: list[int], count: int, window: int, seed: int, chosen: Mapping[str, Any], compiled: bool | str
    ) -> list[list[int]]:
        """Texts of which the model remembers what a full window has read, when it goes on with the last token."""
        state = self.model.decoder.empty_state(1, chosen["memory_length"] or None)
        begun = [self.tokenizer.bos_id, *ids]
        while len(begun) > window:
            state, begun = self._remembered([begun[:window]], state), begun[window:]
        state = keras.tree.map_structure(partial(keras.ops.repeat, repeats=count, axis=0), state)
        rows, going, unread = [list(ids) for _ in range(count)], list(range(count)), [begun] * count
        for number in range(chosen["max_length"]):  # one window a turn
            keep = len(unread[0]) - 1
            length = min(window, keep + chosen["max_length"] - len(rows[going[0]]))
            past = {"state": state, "first": np.array([row[0] for row in unread])}
            found = self._window([row[1:] for row in unread], length, going, seed + number, chosen, compiled, **past)
            for row, made in zip(going, found, strict=True):
                rows[row] += made[keep:]
            alive = [place for place, made in enumerate(found) if len(made) == length]
            going = [going[place] for place in alive]
            if not going or len(rows[going[0]]) >= chosen["max_length"]:
                break
            kept = keras.tree.map_structure(partial(keras.ops.take, indices=np.array(alive), axis=0), state)
            state = self._remembered([[unread[place][0], *found[place][:-1]] for place in alive], kept)
            unread = [found[place][-1:] for place in alive]
        return rows

    def _remembered(self, read: list[list[int]], state: Any) -> Any:
        """The state after rows of tokens have been read; it stays as long as it is."""
        with backend.no_gradient():
            return self.model.read(np.array(read, "int32"), state, memory_length=state["hidden"][0].shape[1])[1]

    def _read(self, prompt: str, max_length: int) -> list[int]:
        ids = self.tokenizer.encode(prompt) if prompt else []
        if len(ids) >= max_length:
            raise ValueError(f"the prompt has {len(ids)} tokens, and max_length={max_length} must exceed that")
        if self.tokenizer.unk_id in ids:
            unknown = next((c for c in prompt if self.tokenizer.unk_id in self.tokenizer.encode(c)), prompt)
            raise ValueError(f"the prompt holds {unknown!r}, which the model's vocabulary lacks")
        return ids

    def _window(
        self,
        prompts: list[list[int]],
        length: int,
        numbers: list[int],
        seed: int,
        chosen: Mapping[str, Any],
        compiled: bool | str,
        state: Any = None,
        first: Any = None,
    ) -> list[list[int]]:
        """The tokens of one window, those of the prompt included. `numbers` of the texts: the noise depends on them."""
        options: dict[str, Any] = {"method": chosen["method"], "max_length": length, "compiled": compiled}
        if chosen["method"] == "sample":
            options |= {name: chosen[name] for name in ("temperature", "top_k", "top_p")}
            options |= {"seed": seed, "rows": np.array(numbers)}
        if prompts[0]:
            options["prompt"] = prompts
        starts: dict[str, Any] = {"target_ids": np.full((len(prompts), 1), self.tokenizer.bos_id, "int32")}
        if state is not None:
            starts["state"] = state
            options["first"] = first
        return [list(text.ids) for text in self.generator.best(starts, **options)]
