"""The files of a bundle folder: used only if their fingerprints fit, written all at once. Knows no model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmattn.bundle_kinds import KINDS, check_generation
from mmattn.card import card_text

FORMAT, FORMAT_VERSION = "mmattn-bundle", 3
INFO, WEIGHTS, TOKENIZER, CARD = "bundle.json", "weights.npz", "tokenizer.model", "README.md"
SOURCE_TOKENIZER = "source_tokenizer.model"
SPECIAL_IDS = {"pad": 0, "unk": 1, "bos": 2, "eos": 3}
_MOST_BYTES, _MOST_INFO_BYTES, _MOST_LEVELS = 16 * 2**30, 16 * 2**20, 200


class BundleError(ValueError):
    """A bundle that is damaged, unsafe, too new or incomplete. The message names the file and the reason."""


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """bundle.json and the bytes of all files it lists, each compared with its fingerprint."""
    info = read_info(folder)
    files = {}
    for name, entry in info["files"].items():
        data = _file_bytes(folder, name, entry["bytes"])
        if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise BundleError(
                f"{name}: changed or damaged. Its {len(data)} bytes are not the {entry['bytes']} bytes whose SHA-256 "
                f"{INFO} holds"
            )
        files[name] = data
    return info, files


def read_info(folder: Path) -> dict[str, Any]:
    """bundle.json alone."""
    if not os.path.exists(folder / INFO):
        raise BundleError(f"{INFO}: missing. {os.fspath(folder)!r} is not an mmattn bundle")
    return _parse(_file_bytes(folder, INFO, _MOST_INFO_BYTES))


def _file_bytes(folder: Path, name: str, most: int) -> bytes:
    """One file of the folder itself: no link, no device, no more than `most` bytes. What is checked is what is used."""
    path = folder / name
    try:
        if path.is_symlink():
            raise BundleError(f"{name}: a link. A bundle holds its files itself")
        descriptor = os.open(
            path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        )
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{name}: not a regular file")
            if status.st_size > most:
                raise BundleError(f"{name}: changed or damaged. It has {status.st_size} bytes, {most} are allowed")
            return file.read(most)
    except FileNotFoundError:
        raise BundleError(f"{name}: missing") from None
    except OSError as error:
        raise BundleError(f"{name}: cannot be read ({error.strerror or error})") from error


def _parse(data: bytes) -> dict[str, Any]:
    """bundle.json, once its own fingerprint, its version and the shape of each entry are right."""
    try:
        info = json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{INFO}: damaged ({error})") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise BundleError(f"{INFO}: not an mmattn bundle (no format {FORMAT!r})")
    _check_depth(info)
    version = info.get("format_version")
    if type(version) is not int or version > FORMAT_VERSION:
        raise BundleError(
            f"{INFO}: format version {version}, written by mmattn {info.get('mmattn_version')}; this mmattn "
            f"{own_version()} reads up to {FORMAT_VERSION}. Update it: pip install --upgrade mmattn"
        )
    if info.get("digest") != _digest(info):
        raise BundleError(f"{INFO}: changed or damaged. Its content does not fit its digest")
    _check_entries(info)
    return info


def _check_depth(value: Any) -> None:
    """So that nothing that walks through it later meets Python's limit."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        nested = [node for node in level if isinstance(node, dict | list)]
        if not nested:
            return
        level = [item for node in nested for item in (node.values() if isinstance(node, dict) else node)]
    raise BundleError(f"{INFO}: nested deeper than {_MOST_LEVELS} levels")


def _check_entries(info: Mapping[str, Any]) -> None:
    kind = _checked_kind(info)
    parts = ["model", "special_ids", "generation", "card", "weights", "check", "files"]
    for key in [*parts, *(part for part in KINDS[kind].parts if part != "classes")]:
        if not isinstance(info.get(key), dict):
            raise BundleError(f"{INFO}: {key} is missing or not an object")
    for name, value in SPECIAL_IDS.items():
        if type(info["special_ids"].get(name)) is not int or info["special_ids"][name] != value:
            raise BundleError(
                f"{INFO}: special_ids.{name} is {info['special_ids'].get(name, 'missing')}, it must be {value}"
            )
    try:
        check_generation(info["generation"], kind)
    except ValueError as error:
        raise BundleError(f"{INFO}: {error}") from error
    if "classes" in KINDS[kind].parts:
        _check_classes(info.get("classes"))
    needed = {WEIGHTS, CARD} | set(tokenizer_files(info))
    for file in tokenizer_files(info):
        entry = info[file.removesuffix(".model")]
        if not isinstance(entry, dict) or type(entry.get("vocabulary_size")) is not int:
            raise BundleError(f"{INFO}: {file.removesuffix('.model')}.vocabulary_size is missing")
    numbers = {key: info["weights"].get(key) for key in ("parameters", "relative_error", "log_prob_error")}
    if bad := [key for key, value in numbers.items() if type(value) not in (int, float)]:
        raise BundleError(f"{INFO}: weights.{bad[0]} is missing or no number")
    texts = {key: info.get(key) for key in ("mmattn_version", "keras_version")} | {
        "weights.dtype": info["weights"].get("dtype")
    }
    if bad := [key for key, value in texts.items() if not isinstance(value, str)]:
        raise BundleError(f"{INFO}: {bad[0]} is missing or no text")
    arrays = info["weights"].get("arrays")
    if not isinstance(arrays, dict) or not all(isinstance(entry, dict) for entry in arrays.values()):
        raise BundleError(f"{INFO}: weights.arrays is missing or no table of arrays")
    _check_probe(info["check"], KINDS[kind].probe, outputs(info))
    if missing := needed - info["files"].keys():
        raise BundleError(f"{INFO}: files lists no {', '.join(sorted(missing))}")
    for name, entry in info["files"].items():
        _check_file_name(name)
        size = entry.get("bytes") if isinstance(entry, dict) else None
        if type(size) is not int or not 0 <= size <= _MOST_BYTES or not isinstance(entry.get("sha256"), str):
            raise BundleError(f"{INFO}: files.{name} must be bytes (up to {_MOST_BYTES}) and sha256")


def _checked_kind(info: Mapping[str, Any]) -> str:
    kind = info.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise BundleError(f"{INFO}: kind={kind!r} is not known. Known: {', '.join(KINDS)}")
    if info["format_version"] < (least := KINDS[kind].format_version):
        raise BundleError(f"{INFO}: kind={kind!r} needs format version {least}, and it has {info['format_version']}")
    if "source_tokenizer" in info and kind != "translator":
        raise BundleError(f"{INFO}: source_tokenizer belongs to a translator, and this is {KINDS[kind].name}")
    return kind


def tokenizer_files(info: Mapping[str, Any]) -> list[str]:
    """The files of the tokenizers; the source's own comes second. Each is described by the entry of its name."""
    if "tokenizer" not in KINDS[info["kind"]].parts:
        return []
    return [TOKENIZER, *([SOURCE_TOKENIZER] if "source_tokenizer" in info else [])]


def outputs(info: Mapping[str, Any]) -> int:
    """How many numbers a model of this bundle gives at each place: its tokens, a mask included, or its classes."""
    if info["kind"] == "classifier":
        return len(info["classes"])
    return info["tokenizer"]["vocabulary_size"] + (info["kind"] == "masked_language_model")


def _check_classes(classes: Any) -> None:
    if not isinstance(classes, list) or not classes or not all(isinstance(name, str) for name in classes):
        raise BundleError(f"{INFO}: classes is missing or no list of names")
    if len(set(classes)) != len(classes):
        raise BundleError(f"{INFO}: classes names one twice")


def _check_probe(check: Mapping[str, Any], rows: int, outputs: int) -> None:
    try:
        ids, log_probs = np.asarray(check["ids"]), np.asarray(check["log_probs"], "float64")
        fits = (
            ids.dtype.kind == "i"
            and ids.shape == log_probs.shape
            and ids.ndim == 2
            and 0 <= ids.min() <= ids.max() < outputs
        )
        fits = fits and ids.shape[0] == rows and np.isfinite(log_probs).all() and 0 < check["tolerance"] < 1
    except (KeyError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise BundleError(f"{INFO}: check must be ids, log_probs and tolerance of the probe")


def _check_file_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or name == INFO:
        raise BundleError(f"{INFO}: files names {name!r}, which is not a plain file name inside the bundle")


def as_bytes(files: Mapping[str, str | bytes] | None) -> dict[str, bytes]:
    for name in files or {}:
        _check_file_name(name)
        if name in (WEIGHTS, TOKENIZER, SOURCE_TOKENIZER, CARD):
            raise BundleError(f"{name}: the bundle writes this file itself")
    return {name: value.encode() if isinstance(value, str) else bytes(value) for name, value in (files or {}).items()}


def write_folder(target: Path, info: dict[str, Any], files: dict[str, bytes]) -> None:
    """A new folder beside the target, whole and on the disk, which then takes the target's name."""
    files = {**files, CARD: card_text(info).encode()}
    info["files"] = {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in sorted(files.items())}
    info["digest"] = _digest(info)
    text = _readable(info)
    target.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    fresh, old = (target.parent / f".{target.name}.{word}-{unique}" for word in ("new", "old"))
    fresh.mkdir()
    try:
        for name, data in {**files, INFO: text.encode()}.items():
            with open(fresh / name, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        if target.exists():
            os.rename(target, old)
        try:
            os.rename(fresh, target)
        except OSError:
            if old.exists():
                os.rename(old, target)
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


def replaceable(folder: str | os.PathLike[str]) -> Path:
    target = Path(os.path.realpath(folder))
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return target
    try:
        info = json.loads((target / INFO).read_bytes())
        listed = {INFO, *info["files"]} if info["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        listed = None
    if listed is None:
        raise BundleError(
            f"{os.fspath(folder)!r} exists and is not a bundle: it will not be replaced. Give a new folder"
        )
    if others := sorted(path.name for path in target.iterdir() if path.name not in listed and path.name[0] != "."):
        raise BundleError(f"{os.fspath(folder)!r} holds {others[0]!r} beside a bundle: it will not be replaced")
    return target


def _digest(info: Mapping[str, Any]) -> str:
    return hashlib.sha256(dumps({k: v for k, v in info.items() if k != "digest"}).encode()).hexdigest()


def dumps(value: Any) -> str:
    """JSON in the one form that the digest is taken of. Refuses what JSON has no word for."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BundleError(f"{INFO} holds plain data alone: {error}") from error


def plain(value: Any) -> Any:
    """The value as JSON gives it back: lists for tuples, texts for keys. Refuses what JSON has no word for."""
    dumps(value)
    return json.loads(json.dumps(value))


def _readable(info: Mapping[str, Any]) -> str:
    """JSON with one line an entry, lists of plain values on one line."""
    text = json.dumps(info, indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"\[\n([^][{}]*?)\n *\]", lambda m: "[" + re.sub(r"\n *", " ", m[1]).strip() + "]", text) + "\n"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def own_version() -> str:
    import mmattn

    return str(getattr(mmattn, "__version__", "0"))
