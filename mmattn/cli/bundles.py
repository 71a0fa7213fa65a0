"""Which command a bundle is for."""

from __future__ import annotations

from typing import Any

from mmattn.cli.console import UsageError, quiet_start

COMMANDS = {
    "captioner": "caption",
    "translator": "translate",
    "language_model": "generate",
    "masked_language_model": "fill",
    "classifier": "classify",
}


def check_kind(name: str | None, kind: str) -> dict[str, Any]:
    """The content of a bundle's bundle.json, once the bundle is of the kind that a command needs.

    Empty where there is no bundle or a damaged one: what is wrong with it is said by those who load it.

    Raises:
        UsageError: it is of another kind; the message names the command that it is for.
    """
    with quiet_start():
        from mmattn.bundle import BundleError, find_bundle
        from mmattn.bundle_files import read_info
        from mmattn.bundle_kinds import KINDS
    try:
        info = read_info(find_bundle(name, kind))
    except BundleError:
        return {}
    if info["kind"] != kind:
        raise UsageError(
            f"{name!r} is the bundle of {KINDS[info['kind']].name}, and {KINDS[kind].name} is needed here. "
            f"Its command is: mmattn {COMMANDS[info['kind']]}"
        )
    return info
