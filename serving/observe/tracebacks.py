"""An error -> its traceback without what it says: a fault of ours may repeat what a shopper has sent."""

from __future__ import annotations

import logging
import traceback

from serving.errors import RecommendError

# Our own errors name a field, never its value, and the system's a file or an address.
QUOTED = (RecommendError, OSError)
MOST = 8  # errors of one chain, which may be a ring


class Wordless(logging.Filter):
    """Gives a line of the log the traceback of `wordless`, whoever formats it afterwards."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let the line through."""
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = wordless(record.exc_info[1])
        return True


def wordless(error: BaseException) -> str:
    """Return where an error and those behind it were raised, and of which type they are."""
    told: list[str] = []
    behind: BaseException | None = error
    while behind is not None and len(told) < MOST:
        words = f": {behind}" if isinstance(behind, QUOTED) else ""
        told.append("".join(traceback.format_tb(behind.__traceback__)) + type(behind).__qualname__ + words)
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
    return "\nwhich came after:\n".join(told)
