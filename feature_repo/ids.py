"""CONTRACT the id, the name and the path: valid names of users, items, models, bundles and their files.

Ids come from the shop, in any script; they are used as keys only. A name or a path that comes from outside
may become a place on a disk: it is plain ASCII, so that no two of them look alike.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TypeGuard

MAX_ID_LENGTH = 128  # characters
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"  # no leading dot: neither "..", nor a hidden file
_PATH = re.compile(rf"{_PART}(/{_PART}){{0,7}}")


def is_id(value: object) -> TypeGuard[str]:
    """Say whether a value is a text of 1 to MAX_ID_LENGTH printable characters."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH and value.isprintable()


def is_name(value: object) -> TypeGuard[str]:
    """Say whether a value may name a model or a bundle: 1 to 63 of a-z, 0-9 and, but for the first, '-'."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def is_path(value: object) -> TypeGuard[str]:
    """Say whether a value is a path that stays below where it begins, of at most 8 parts with plain names."""
    return isinstance(value, str) and _PATH.fullmatch(value) is not None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" with the nearest known word; empty if no word is near."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]!r}?" if near else ""


def closest(word: str, known: Iterable[str], otherwise: str = "there is") -> str:
    """Return `did_you_mean`, or `otherwise` and a list of all known words if no word is near."""
    words = list(known)
    return did_you_mean(word, words) or f"{otherwise} {', '.join(words) or 'none'}"
