"""A log record of this process -> one line on stderr, without holding up who logs.

A warning comes from the event loop, while requests wait: nobody reads stderr, or its disk hangs, and yet they
must be answered.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import warnings
from typing import BinaryIO

from serving.metrics import REQUEST_LOG_DROPPED
from serving.observe.tracebacks import Wordless

QUEUE_LINES = 256  # more wait only if nobody reads stderr: later ones are dropped and counted
CLOSE_S = 2.0


class Seldom(logging.Filter):
    """Lets one line per place in the code and second through: a broken store must not flood the log."""

    def __init__(self, every_s: float = 1.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[
            tuple[str, int], tuple[float, int]
        ] = {}  # place -> time of its last line, held back since

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether the line appears; the next one that does tells how many were held back."""
        place = (record.pathname, record.lineno)
        last, held_back = self._last.get(place, (-self._every_s, 0))
        if record.created - last < self._every_s:
            self._last[place] = (last, held_back + 1)
            return False
        self._last[place] = (record.created, 0)
        if held_back:
            record.msg = f"{record.getMessage()} (and {held_back} more like it before)"
            record.args = ()
        return True


class Aside(logging.Handler):
    """Writes lines from a thread of its own; who logs never waits for it."""

    def __init__(self, stream: BinaryIO) -> None:
        """Take where the lines go."""
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)  # None is the end
        self._thread = threading.Thread(target=self._run, name="stderr-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hand one line over; it is dropped when too many wait."""
        try:
            self._lines.put_nowait(self.format(record).encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            REQUEST_LOG_DROPPED.inc()

    def close(self) -> None:
        """Write what waits; gives up after CLOSE_S if nobody reads it. Python calls this at its end."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line)
                self._stream.flush()
            except (OSError, ValueError):  # a closed pipe; the endpoint answers all the same
                REQUEST_LOG_DROPPED.inc()


def log_to(stream: BinaryIO) -> None:
    """Let all that this process logs from a warning on go there."""
    handler = Aside(stream)
    handler.addFilter(Seldom())
    handler.addFilter(Wordless())
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING, handlers=[handler]
    )
    # KServe logs each request and, with a traceback, each mistake of a client; `endpoint` logs what is ours.
    logging.getLogger("kserve").setLevel(logging.CRITICAL)
    # KServe answers with a response class that FastAPI deprecates, and would be told so on each request.
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")
