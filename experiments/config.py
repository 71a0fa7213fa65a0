"""From the command line to a configuration. Only this folder and the command line import Hydra and OmegaConf."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mmattn.data.captions import CaptionFileError
from mmattn.data.text_files import TextFileError

CONF = Path(__file__).resolve().parent.parent / "conf"


class ConfigProblem(Exception):
    """The configuration cannot be used. Each of `problems` is a sentence that begins with the place."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclasses.dataclass
class Options:
    """`folders`: the user's own configuration folders. `show`: print the configuration and stop."""

    folders: list[str] = dataclasses.field(default_factory=list)
    show: bool = False


def split_arguments(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Takes `--cfg job` and `--config-dir DIR` (Hydra's names) out of the command line; the rest are overrides.

    >>> split_arguments(["a=b", "--config-dir", ".", "--cfg", "job"])
    (Options(folders=['.'], show=True), ['a=b'])
    """
    options, overrides = Options(), []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = value if equals else next(words, "")
            if not Path(folder).is_dir():
                raise ConfigProblem([f"--config-dir {folder}: there is no such folder."])
            options.folders.append(folder)
        elif name in ("--cfg", "-c"):
            kind = value if equals else next(words, "job")
            if kind != "job":
                raise ConfigProblem([f"--cfg {kind}: only `--cfg job` is known."])
            options.show = True
        elif word.startswith("-"):
            raise ConfigProblem([f"{word} is unknown. Options: --cfg job, --config-dir DIR; all else is KEY=VALUE."])
        elif "=" not in word and not word.startswith("~"):
            raise ConfigProblem([f"{word!r} is no setting: KEY=VALUE is wanted, such as experiment=shapes_caption."])
        else:
            overrides.append(in_quotes(word))
    return options, overrides


def in_quotes(override: str) -> str:
    """The override with its value in quotes where Hydra's grammar needs them, as for a letter beyond ASCII.

    What begins with a quote or a bracket is the user's own; a value with commas is taken for a text, not for several.

    >>> in_quotes("data.path=päare=1.tsv"), in_quotes("fit.epochs=3"), in_quotes("a=[1,2]")
    ("data.path='päare=1.tsv'", 'fit.epochs=3', 'a=[1,2]')
    """
    key, equals, value = override.partition("=")
    if not equals or not value or value[0] in "[{'\"":
        return override
    try:
        if not OverridesParser.create().parse_override(override).is_sweep_override():
            return override
    except HydraException:
        pass
    return f"{key}={_quoted(value)}"


def _quoted(text: str) -> str:
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)  # backslashes count only before a quote
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def compose(name: str, overrides: Sequence[str], folders: Sequence[str] = ()) -> DictConfig:
    """`conf/<name>.yaml` with overrides such as `experiment=shapes_caption` or `decoder.num_layers=3`.

    Args:
        folders: the user's own configuration folders, searched after ours for groups and experiments.

    Raises:
        ConfigProblem: an unknown key or group, or text that is no override.
    """
    _resolvers()
    override_keys(overrides)
    places = [_quoted(f"file://{Path(folder).resolve()}") for folder in folders]
    search = [f"hydra.searchpath=[{','.join(places)}]"] if places else []
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = hydra.compose(name, overrides=[*search, *overrides], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigProblem([_in_words(error, name, overrides)]) from error
    finally:
        GlobalHydra.instance().clear()
    with open_dict(cfg):
        choices = cfg.pop("hydra").runtime.choices
        if "run" in cfg and cfg.run.name is None:
            cfg.run.name = str(choices.get("experiment", name))
    return cfg


def group_keys(group: str) -> set[str]:
    """The keys that any of our own options of a group has."""
    options = [OmegaConf.load(path) for path in sorted((CONF / group).glob("*.yaml"))]
    return {str(key) for option in options for key in option}


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that overrides set; raises ConfigProblem for text that is no override."""
    parser, keys = OverridesParser.create(), []
    for override in overrides:
        try:
            keys.append(parser.parse_override(override).key_or_group)
        except HydraException as error:
            rule = "A value with = , : or brackets of its own wants quotes inside of those of the shell: \"key='a=b'\"."
            raise ConfigProblem([f"{override}: no setting such as key=value ({first_line(error)}). {rule}"]) from error
    return keys


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Plain dicts and lists, every `${...}` filled in.

    Raises:
        ConfigProblem: a value is missing (`???`), or a `${...}` names nothing.
    """
    missing = [path for path, value in _paths(OmegaConf.to_container(cfg)) if value == "???"]
    if missing:
        raise ConfigProblem([f"{key} has no value: give one, as in {key}=..." for key in missing])
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigProblem([f"{error.full_key or 'The configuration'}: {first_line(error)}"]) from error
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def instantiate(config: dict[str, Any]) -> Any:
    """Makes every `_target_` node's object; what a constructor refuses becomes a ConfigProblem with the node's path."""
    try:
        return hydra.utils.instantiate(config, _convert_="all")
    except InstantiationException as error:
        path = re.search(r"full_key: (\S+)", str(error))
        cause = error.__cause__ or error
        raise ConfigProblem([f"{path[1] if path else 'The configuration'}: {first_line(cause)}"]) from error


def _resolvers() -> None:
    def absolute(path: str) -> str:
        return str(Path(path).expanduser().resolve())

    OmegaConf.register_new_resolver("absolute", absolute, replace=True)
    OmegaConf.register_new_resolver("file_name", lambda path: Path(path).name, replace=True)


def _in_words(error: Exception, name: str, overrides: Sequence[str]) -> str:
    text = str(error)
    wrong_key = re.search(r"Could not override '([^']+)'", text)
    if wrong_key:
        key = wrong_key[1]
        return f"{key} is not in the configuration.{_close(key, name, overrides)} (+{key}=... adds a new key.)"
    group = re.search(r"In '[^']*': Could not find '([^']+)'", text)
    if group:
        options = re.search(r"Available options in '[^']+':\s*(.*)", text, re.DOTALL)
        known = re.findall(r"^\s*(\w+)$", options[1], re.MULTILINE) if options else []
        return f"{group[1].replace('/', '=', 1)} does not exist." + (
            f" There are: {', '.join(known)}." if known else ""
        )
    return first_line(error)


def _close(key: str, name: str, overrides: Sequence[str]) -> str:
    """Keys that resemble a wrong one, of the configuration that the chosen groups make."""
    groups = [override for override in overrides if "." not in override.partition("=")[0]]
    for chosen in (groups, []):
        try:
            with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
                known = [path for path, _ in _paths(OmegaConf.to_container(hydra.compose(name, overrides=chosen)))]
            break
        except (HydraException, OmegaConfBaseException):
            continue
    else:
        return ""
    near = get_close_matches(key, known, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _paths(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """Each key of nested dicts with its value."""
    found = []
    for key, value in node.items() if isinstance(node, dict) else ():
        here = f"{path}.{key}" if path else str(key)
        found += [(here, value), *_paths(value, here)]
    return found


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    if not str(error) and error.__cause__ is not None:
        return first_line(error.__cause__)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, CaptionFileError | TextFileError):  # says in further lines where the problems are
        return " ".join(lines)
    text = lines[0] if lines else type(error).__name__
    return text if not isinstance(error, (TypeError, KeyError)) else f"{type(error).__name__}: {text}"
