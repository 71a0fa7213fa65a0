"""Refuses wrong keys and values before anything is made: `_target_` nodes are compared with what they call."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def check_targets(config: Any, supplied: Mapping[str, Collection[str]], path: str = "") -> list[str]:
    """Problems of all `_target_` nodes of a resolved configuration, in words, each with its path.

    Args:
        supplied: path of a node -> arguments that the run will add.
    """
    problems: list[str] = []
    if isinstance(config, dict):
        if "_target_" in config:
            problems += _check_node(config, path, set(supplied.get(path, ())))
        for key, value in config.items():
            problems += check_targets(value, supplied, f"{path}.{key}" if path else str(key))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            problems += check_targets(value, supplied, f"{path}[{index}]")
    return problems


def check_keys(config: Mapping[str, Any], known: Mapping[str, Sequence[str]]) -> list[str]:
    """Problems of the plain nodes. `known`: path -> allowed keys, "" for the top."""
    problems = []
    for path, keys in known.items():
        node: Any = config
        for part in path.split(".") if path else []:
            node = node.get(part, {})
        if not isinstance(node, dict):
            problems.append(f"{path}: a group of keys is wanted ({', '.join(keys)}), not {node!r}.")
            continue
        problems += [_unknown(f"{path}.{key}" if path else key, key, keys) for key in node if key not in keys]
    return problems


def check_unread(raw: Mapping[str, Any], nodes: Mapping[str, Collection[str]]) -> list[str]:
    """Keys of free nodes (`size`, `data`) that no `${...}` of the unresolved configuration reads: most likely misspelt.

    Args:
        nodes: name of the node -> keys that the run itself reads.
    """
    texts = "\n".join(_strings(raw))
    problems = []
    for name, own in nodes.items():
        keys = [
            k
            for k in raw.get(name) or {}
            if k not in own and not (isinstance(raw[name][k], dict) and "_target_" in raw[name][k])
        ]
        unread = [key for key in keys if f"{name}.{key}" not in texts]
        read = [key for key in keys if key not in unread]
        problems += [_unknown(f"{name}.{key}", key, [*read, *own]) for key in unread]
    return problems


def parameters(target: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """The keyword arguments that a callable takes, and whether it takes any other.

    A class whose constructor hands `**kwargs` on takes what its parents take.
    """
    found: dict[str, inspect.Parameter] = {}
    functions = (
        [vars(c)["__init__"] for c in target.__mro__ if "__init__" in vars(c)] if inspect.isclass(target) else [target]
    )
    for function in functions:
        if function is object.__init__:
            return found, False
        try:
            given = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return found, True
        for name, parameter in given.items():
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and name != "self":
                found.setdefault(name, parameter)
        if not any(p.kind is p.VAR_KEYWORD for p in given.values()):
            return found, False
    return found, True


def locate(path: str) -> Any:
    """What a dotted path names.

    >>> locate("keras.optimizers.AdamX")
    Traceback (most recent call last):
    ...
    AttributeError: keras.optimizers has no 'AdamX'. Did you mean Adam or AdamW?
    """
    words = path.split(".")
    found, place = importlib.import_module(words[0]), words[0]
    for word in words[1:]:
        if not hasattr(found, word):
            try:
                importlib.import_module(f"{place}.{word}")
            except ModuleNotFoundError as error:
                if error.name != f"{place}.{word}" and inspect.ismodule(
                    found
                ):  # the module is there, what it imports is not
                    raise
                near = get_close_matches(word, dir(found), n=2)
                hint = f" Did you mean {' or '.join(near)}?" if near else ""
                raise AttributeError(f"{place} has no {word!r}.{hint}") from error
        found, place = getattr(found, word), f"{place}.{word}"
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML fits a type hint; hints beyond plain types take anything.

    >>> fits(3, float), fits("3", int), fits(None, int | None), fits([1, 2], tuple[int, int]), fits(True, int)
    (True, False, True, True, False)
    """
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, dict) or hint is Any:  # another node; its object is not made yet
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, h) for h in inside)
    if origin is typing.Literal:
        return value in inside
    if hint in (int, float):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if hint in (bool, str, types.NoneType):
        return isinstance(value, hint)
    if hint is Path:
        return isinstance(value, str)
    if origin is tuple and inside and inside[-1] is not Ellipsis:
        return isinstance(value, list) and len(value) == len(inside) and all(map(fits, value, inside))
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return isinstance(value, list) and all(fits(v, inside[0]) for v in value)
    return True


def _check_node(node: dict[str, Any], path: str, supplied: set[str]) -> list[str]:
    target = node["_target_"]
    try:
        function = locate(target)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return [f"{path}._target_: {target!r} cannot be imported. {error}"]
    if not callable(function):
        return [f"{path}._target_: {target!r} is a {type(function).__name__}, not a class or a function."]
    known, open_ended = parameters(function)
    given = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    problems = []
    hints = _hints(function)
    for key, value in given.items():
        if key not in known:
            if not open_ended:
                problems.append(f"{_unknown(f'{path}.{key}', key, list(known))} ({target} takes no such argument.)")
        elif key in hints and not fits(value, hints[key]):
            problems.append(f"{path}.{key}={value!r} does not fit: {_name(hints[key])} is wanted.")
    if "_args_" not in node:
        needed = {key for key, p in known.items() if p.default is p.empty} - given.keys() - supplied
        problems += [f"{path}.{key} is missing: {target} needs it." for key in sorted(needed & _required(function))]
    return problems


def _required(function: Any) -> set[str]:
    """Arguments without a default in the callable's own signature; a parent's may have been filled in on the way."""
    own = function.__init__ if inspect.isclass(function) else function
    try:
        return {name for name, p in inspect.signature(own).parameters.items() if p.default is p.empty}
    except (TypeError, ValueError):
        return set()


def _hints(function: Any) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    functions = (
        [vars(c)["__init__"] for c in reversed(function.__mro__) if "__init__" in vars(c)]
        if inspect.isclass(function)
        else [function]
    )
    for each in functions:
        try:
            hints |= typing.get_type_hints(each)
        except Exception:  # a hint that cannot be evaluated checks nothing
            continue
    return hints


def _unknown(path: str, key: str, known: Sequence[str]) -> str:
    near = get_close_matches(str(key), list(known), n=2, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known here: {', '.join(known)}."
    return f"{path} is unknown. {hint}"


def _name(hint: Any) -> str:
    return hint.__name__ if inspect.isclass(hint) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _strings(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [text for value in node.values() for text in _strings(value)]
    if isinstance(node, list):
        return [text for value in node for text in _strings(value)]
    return [node] if isinstance(node, str) and "${" in node else []
