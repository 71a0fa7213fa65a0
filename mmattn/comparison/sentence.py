"""One sentence through a translator: what it makes of it, and which words it looked at.

    python -m mmattn.comparison.sentence RUN/bundle "ein mann"

prints a JSON object. It is a process of its own because whoever compares models loads none of them.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from mmattn.inference import Translator
from mmattn.inference.translation import SourceError


def translated(translator: Translator, sentence: str) -> dict[str, Any]:
    """A sentence's translation and its alignment.

    Returns:
        {"translation": text}, and of a model with attention "source_words" (W'), "target_words" (W) and "weights"
        (W, W'), see `mmattn.inference.translator.Alignment`.

    Raises:
        SourceError: the sentence is too long.
    """
    translation = translator.translate(sentence)[0]
    if not attends(translator.model):
        return {"translation": translation.text}
    found = translator.attention(sentence, translation)
    return {
        "translation": translation.text,
        "source_words": list(found.source_words),
        "target_words": list(found.target_words),
        "weights": found.weights.tolist(),
    }


def attends(model: Any) -> bool:
    """Whether a model looks at its source by attention. A decoder without has None as its `attention`."""
    return getattr(getattr(model, "decoder", None), "attention", ...) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description="Translates one sentence.")
    parser.add_argument("bundle", help="the folder of a translator")
    parser.add_argument("sentence")
    arguments = parser.parse_args()
    try:
        found = translated(Translator.load(arguments.bundle), arguments.sentence)
    except SourceError as error:
        found = {"problem": error.reason}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
