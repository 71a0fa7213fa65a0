"""What a bundle says about itself: the model card (Markdown), and the short description of `mmattn info`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TITLES = {
    "captioner": ("An mmattn captioner", "Describes a photo in one sentence."),
    "translator": ("An mmattn translator", "Translates one sentence at a time."),
    "language_model": ("An mmattn language model", "Continues a text."),
    "masked_language_model": ("An mmattn masked language model", "Fills in the words that are missing in a sentence."),
    "classifier": ("An mmattn classifier", "Says which of its classes a photo is of."),
}
_USAGE = {
    "captioner": ("caption photo.jpg", "Captioner", 'caption("photo.jpg")[0].text'),
    "translator": ('translate "..."', "Translator", 'translate(["..."])[0].text'),
    "language_model": ("generate", "Writer", "write()[0]"),
    "masked_language_model": ('fill "... [MASK] ..."', "MaskFiller", 'fill("... [MASK] ...")[0].text'),
    "classifier": ("classify photo.jpg", "Classifier", 'classify("photo.jpg")[0].label'),
}
_LANGUAGES = ("source_language", "target_language")
_RESIZE = {
    "squash": "squashed to it, without keeping their shape",
    "pad": "fitted into it whole, with a border",
    "crop": "cut to its shape around their centre",
}


def card_text(info: Mapping[str, Any]) -> str:
    """The model card.

    Args:
        info: the content of bundle.json. Its "card" may hold title, summary, source_language, target_language, data,
            terms, command (texts), scores (a dict, or a dict of dicts) and limits (a text or a list of texts); further
            entries are listed as they are.
    """
    card, (title, summary) = dict(info["card"]), _TITLES[info["kind"]]
    parts = [f"# {card.pop('title', title)}", str(card.pop("summary", summary))]
    if languages := _languages(card):
        parts.append(f"From {languages[0]} to {languages[1]}.")
    card = {key: value for key, value in card.items() if not languages or key not in _LANGUAGES}
    parts += ["## Use", _usage(info["kind"]), " ".join([*_tokens(info), *_settings(info)])]
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
    card, weights = info["card"], info["weights"]
    parts = [_part(info["model"], name) for name in ("encoder", "decoder") if _part(info["model"], name) != "?"]
    rows = [
        ("title", card.get("title", "-")),
        (
            "kind",
            f"{info['kind']}, format {info['format_version']}, written by mmattn {info['mmattn_version']}, "
            f"Keras {info['keras_version']}",
        ),
        ("model", f"{' -> '.join(parts) or '?'}, {weights['parameters']:,} parameters as {weights['dtype']}"),
    ]
    if "reader" in info:
        reader = info["reader"]
        rows.append(
            ("pictures", f"{reader['size'][0]} x {reader['size'][1]} pixels (height x width), {reader['resize']}")
        )
    if languages := _languages(card):
        rows.append(("languages", " -> ".join(languages)))
    vocabularies = [_said(info[name]) for name in ("source_tokenizer", "tokenizer") if name in info]
    if vocabularies:
        rows.append(("tokenizer", " -> ".join(vocabularies)))
    if "classes" in info:
        rows.append(("classes", f"{len(info['classes'])}: {_some(info['classes'])}"))
    if info["generation"]:
        rows.append(("generation", ", ".join(f"{key} {value}" for key, value in info["generation"].items())))
    rows += [(key, str(card[key])) for key in ("data", "terms", "command") if key in card]
    if "scores" in card:
        rows.append(("scores", _inline(card["scores"])))
    limits = card.get("limits", [])
    rows += [("limits", str(limit)) for limit in (limits if isinstance(limits, list) else [limits])]
    rows += [("file", f"{name}  {size:,} bytes, fingerprint right") for name, size in sizes.items()]
    rows.append(("total", f"{sum(sizes.values()) / 1e6:.1f} MB"))
    return "\n".join(f"{name:<11} {' '.join(str(value).split())}" for name, value in rows)


def _usage(kind: str) -> str:
    command, name, call = _USAGE[kind]
    return (
        f"    mmattn {command} --bundle THIS_FOLDER\n\n"
        "    import mmattn\n"
        f'    {name.lower()} = mmattn.{name}.load("THIS_FOLDER")\n'
        f"    print({name.lower()}.{call})"
    )


def _languages(card: Mapping[str, Any]) -> tuple[str, ...]:
    """The two languages, if the card names both."""
    return tuple(str(card[key]) for key in _LANGUAGES) if all(key in card for key in _LANGUAGES) else ()


def _tokens(info: Mapping[str, Any]) -> list[str]:
    """How text is cut up; what sees pictures reads none."""
    if "reader" in info:
        return []
    if "source_tokenizer" in info:
        return [f"The source has {_said(info['source_tokenizer'])}, the target {_said(info['tokenizer'])}."]
    both = " for both languages" if info["kind"] == "translator" else ""
    return [f"One vocabulary{both}: {_said(info['tokenizer'])}."]


def _said(tokenizer: Mapping[str, Any]) -> str:
    """A tokenizer in words: its size, and its model and normalisation where the bundle tells."""
    more = [str(tokenizer["model_type"])] if "model_type" in tokenizer else []
    more += [f"normalisation {tokenizer['normalization']}"] if "normalization" in tokenizer else []
    return f"{tokenizer['vocabulary_size']:,} tokens" + (f" ({', '.join(more)})" if more else "")


def _some(names: list[str]) -> str:
    """The first classes by name, in at most some hundred letters."""
    shown = ", ".join(names)
    return shown if len(shown) <= 300 else f"{shown[:300].rpartition(', ')[0]}, ..."


def _settings(info: Mapping[str, Any]) -> list[str]:
    generation = info["generation"]
    if info["kind"] == "masked_language_model":
        return [f"A sentence of more than {generation['max_source_length']} tokens is refused."]
    if info["kind"] == "classifier":
        return [_photos(info["reader"]), f"{len(info['classes'])} classes: {_some(info['classes'])}."]
    if info["kind"] == "language_model":
        window = f" It looks back on {generation['context_length']} tokens." if generation["context_length"] else ""
        drawn = f"drawn at temperature {generation['temperature']}, top_k {generation['top_k']}, top_p "
        how = f"{drawn}{generation['top_p']}" if generation["method"] == "sample" else "the likeliest at each place"
        remembered = generation.get("memory_length") or _setting(info["model"], "decoder", "memory_length")
        past = f" It has a memory of {remembered} positions a layer for what came before." if remembered else ""
        return [f"Tokens are {how}, {generation['max_length']} at most.{window}{past}"]
    method = f"beam search with {generation['num_beams']} beams" if generation["method"] == "beam" else "greedy search"
    how = (
        f"come from {method}, length penalty {generation['length_penalty']}, at most {generation['max_length']} tokens"
    )
    if info["kind"] == "translator":
        return [
            f"Translations {how} and {generation['length_factor']} x source + {generation['length_offset']} (the "
            "source's tokens rounded up to 16, 32, 64, 128 ...). A source of more than "
            f"{generation['max_source_length']} tokens is refused."
        ]
    text = [f"{_photos(info['reader'])} Captions {how}."]
    if generation["low_confidence"] > 0:
        text.append(f"A caption whose confidence is below {generation['low_confidence']} is marked as such.")
    return text


def _photos(reader: Mapping[str, Any]) -> str:
    height, width = reader["size"]
    resize = _RESIZE.get(reader["resize"], reader["resize"])
    return f"Photos are read at {height} x {width} pixels (height x width), {resize}."


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


def _setting(model: Any, part: str, name: str) -> Any:
    """What the configuration of a part says; None where it doesn't."""
    found = model
    for key in ("config", part, "config", name):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _part(model: Any, name: str) -> str:
    part = model.get("config", {}).get(name) if isinstance(model, Mapping) else None
    return str(part.get("class_name")) if isinstance(part, Mapping) else "?"
