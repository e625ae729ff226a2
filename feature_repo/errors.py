"""The base of errors that a person can act on, and the exit code of each kind.

0 done, 1 a check failed, 2 wrong usage, 3 a service cannot be reached, 4 another process is in the way.
"""

import re
from typing import Any

CHECK_FAILED, USAGE, UNREACHABLE, CONFLICT = 1, 2, 3, 4


class RecoError(Exception):
    """An expected error: a command prints its message, without a traceback, and ends with its exit code."""

    exit_code: int = CHECK_FAILED


def without_password(text: str) -> str:
    """Return a text without the user and password that a URL in it may hold, even with an @ or / in them."""
    return re.sub(r"//\S*@", "//", text)


def refusal(error: Exception, kind: Any) -> str:
    """Return why msgspec refused a message as one of a kind, without text of its sender: logs show it."""
    text = str(error)
    if "unknown field" not in text:
        return text
    return f"it has an unknown field; known are {', '.join(kind.__struct_fields__)}"
