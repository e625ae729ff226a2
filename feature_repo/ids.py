"""CONTRACT the id: what users, items, baskets, stores, events, facts and requests may be called."""

from __future__ import annotations

from typing import TypeGuard

MAX_ID_LENGTH = 128  # characters


def is_id(value: object) -> TypeGuard[str]:
    """Say whether a value is a text of 1 to MAX_ID_LENGTH printable characters."""
    return isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH and value.isprintable()
