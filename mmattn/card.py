"""What a bundle says about itself: the model card (Markdown), and the short description of `mmattn info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RESIZE = {
    "squash": "squashed to it, without keeping their shape",
    "pad": "fitted into it whole, with a border",
    "crop": "cut to its shape around their centre",
}


def card_text(info: Mapping[str, Any]) -> str:
    """The model card.

    Args:
        info: the content of bundle.json. Its "card" may hold title, summary, data, terms, command (texts), scores (a
            dict, or a dict of dicts) and limits (a text or a list of texts); further entries are listed as they are.
    """
    card = dict(info["card"])
    parts = [
        f"# {card.pop('title', 'An mmattn captioner')}",
        str(card.pop("summary", "Describes a photo in one sentence.")),
    ]
    parts += ["## Use", _usage(), _settings(info)]
    for key, heading in (
        ("data", "Training data"),
        ("scores", "Scores"),
        ("limits", "Limits"),
        ("command", "Trained by"),
        ("terms", "Terms"),
    ):
        if key in card:
            value = card.pop(key)
            parts += [f"## {heading}", f"    {value}" if key == "command" else _block(value)]
    if card:
        parts += ["## More", _block(card)]
    weights = info["weights"]
    parts += [
        "## Files",
        f"{weights['parameters']:,} parameters, stored as {weights['dtype']}: each array within "
        f"{weights['relative_error']:.2g} of the trained one (relative, Euclidean), log-probabilities of the probe "
        f"within {weights['log_prob_error']:.2g}. Written by mmattn {info['mmattn_version']} with Keras "
        f"{info['keras_version']}, format {info['format_version']}. bundle.json holds the SHA-256 of every file, and a "
        "bundle with a changed file does not load. This card is written from bundle.json.",
    ]
    return "\n\n".join(parts) + "\n"


def description(info: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """A few lines on a bundle whose files have been verified. `sizes`: bytes by file name."""
    card, weights, reader = info["card"], info["weights"], info["reader"]
    rows = [
        ("title", card.get("title", "-")),
        (
            "kind",
            f"{info['kind']}, format {info['format_version']}, written by mmattn {info['mmattn_version']}, "
            f"Keras {info['keras_version']}",
        ),
        (
            "model",
            f"{_part(info['model'], 'encoder')} -> {_part(info['model'], 'decoder')}, "
            f"{weights['parameters']:,} parameters as {weights['dtype']}",
        ),
        ("pictures", f"{reader['size'][0]} x {reader['size'][1]} pixels (height x width), {reader['resize']}"),
        ("tokenizer", f"{info['tokenizer']['vocabulary_size']:,} tokens"),
        ("generation", ", ".join(f"{key} {value}" for key, value in info["generation"].items())),
    ]
    rows += [(key, str(card[key])) for key in ("data", "terms", "command") if key in card]
    if "scores" in card:
        rows.append(("scores", _inline(card["scores"])))
    limits = card.get("limits", [])
    rows += [("limits", str(limit)) for limit in (limits if isinstance(limits, list) else [limits])]
    rows += [("file", f"{name}  {size:,} bytes, fingerprint right") for name, size in sizes.items()]
    rows.append(("total", f"{sum(sizes.values()) / 1e6:.1f} MB"))
    return "\n".join(f"{name:<11} {' '.join(str(value).split())}" for name, value in rows)


def _usage() -> str:
    return (
        "    mmattn caption photo.jpg --bundle THIS_FOLDER\n\n"
        "    import mmattn\n"
        '    captioner = mmattn.Captioner.load("THIS_FOLDER")\n'
        '    print(captioner.caption("photo.jpg")[0].text)'
    )


def _settings(info: Mapping[str, Any]) -> str:
    reader, generation = info["reader"], info["generation"]
    height, width = reader["size"]
    method = f"beam search with {generation['num_beams']} beams" if generation["method"] == "beam" else "greedy search"
    text = (
        f"Photos are read at {height} x {width} pixels (height x width), "
        f"{_RESIZE.get(reader['resize'], reader['resize'])}. Captions come from {method}, "
        f"length penalty {generation['length_penalty']}, at most {generation['max_length']} tokens."
    )
    if generation["low_confidence"] > 0:
        text += f" A caption whose confidence is below {generation['low_confidence']} is marked as such."
    return text


def _block(value: Any) -> str:
    if isinstance(value, Mapping) and value and all(isinstance(row, Mapping) for row in value.values()):
        columns = list(dict.fromkeys(key for row in value.values() for key in row))
        lines = [["", *columns], ["---"] * (len(columns) + 1)]
        lines += [[str(name), *(_number(row.get(key, "")) for key in columns)] for name, row in value.items()]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    if isinstance(value, Mapping):
        return "\n".join(f"- {name}: {_number(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "\n".join(f"- {_number(item)}" for item in value)
    return str(value)


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(
            f"{key} ({_inline(item)})" if isinstance(item, Mapping) else f"{key} {_number(item)}"
            for key, item in value.items()
        )
    return _number(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _part(model: Any, name: str) -> str:
    part = model.get("config", {}).get(name) if isinstance(model, Mapping) else None
    return str(part.get("class_name")) if isinstance(part, Mapping) else "?"
