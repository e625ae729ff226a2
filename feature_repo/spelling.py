"""An unknown word -> the known word that was probably meant, as a hint for an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" with the nearest known word; empty if no word is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else ""


def closest(word: str, known: Iterable[str], otherwise: str = "there is") -> str:
    """Return `did_you_mean`, or `otherwise` and a list of all known words if no word is near."""
    words = list(known)
    return did_you_mean(word, words) or f"{otherwise} {', '.join(words) or 'none'}"
