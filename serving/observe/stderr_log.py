"""A log record of this process -> one line on stderr, without holding up the code that logs.

A warning comes from the event loop while requests wait. They must be answered even if stderr is not read or
its disk hangs. A traceback carries the type and place of an error but not its message, which may repeat the
content of a request.

Every line of the endpoint has one shape: a JSON object with `event`, `timestamp`, `severity`, then `trace_id`
and `span_id` if the caller sent a trace, then the fields of its event.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import select
import threading
import traceback
import warnings
from datetime import UTC, datetime
from typing import Any, BinaryIO

from serving.errors import RecommendError
from serving.metrics import REQUEST_LOG_DROPPED
from serving.schemas import TRACEPARENT

QUEUE_LINES = 256  # more wait only if stderr is not read: later ones are dropped and counted
CLOSE_S = 2.0
# Our own errors name a field, never its value; the system's errors name a file or an address.
QUOTED = (RecommendError, OSError)
MAX_ERRORS = 8  # of one chain, which may be a ring
_WRITING = threading.Lock()
# OpenTelemetry's names of severities.
_SEVERITY = {"DEBUG": "DEBUG", "INFO": "INFO", "WARNING": "WARN", "ERROR": "ERROR", "CRITICAL": "FATAL"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


def head(event: str, at: float, severity: str = "INFO", traceparent: str | None = None) -> dict[str, Any]:
    """Return the fields that every line begins with; an invalid trace is left out."""
    timestamp = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = {"event": event, "timestamp": timestamp, "severity": severity}
    if traceparent is not None and (trace := _TRACEPARENT.fullmatch(traceparent)):
        fields |= {"trace_id": trace[1], "span_id": trace[2]}
    return fields


class JsonFormatter(logging.Formatter):
    """A log record -> the line of the event `log`, in the trace of the request that is answered now."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; control characters are escaped, so that no text can forge another line."""
        fields = head("log", record.created, _SEVERITY.get(record.levelname, "INFO"), TRACEPARENT.get())
        fields |= {"logger": record.name, "message": record.getMessage()}
        if record.exc_info and record.exc_info[1] is not None:
            fields["exception.type"] = type(record.exc_info[1]).__qualname__
            fields["exception.stacktrace"] = traceback_without_messages(record.exc_info[1])
        return json.dumps(fields)


class OncePerSecond(logging.Filter):
    """Passes one line per logger, place in the code and second: a broken store must not flood the log."""

    def __init__(self, every_s: float = 1.0) -> None:
        super().__init__()
        self._every_s = every_s
        # Logger and place in the code -> time of its last line, and how many were held back since.
        self._last: dict[tuple[str, str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line appears; the next line that does says how many were held back."""
        place = (record.name, record.pathname, record.lineno)
        last, held_back = self._last.get(place, (-self._every_s, 0))
        if 0 <= record.created - last < self._every_s:  # below 0 the clock was set back
            self._last[place] = (last, held_back + 1)
            return False
        self._last[place] = (record.created, 0)
        if held_back:
            record.msg = f"{record.getMessage()} (and {held_back} more like it before)"
            record.args = ()
        return True


def traceback_without_messages(error: BaseException) -> str:
    """Return the places and types of an error and of those it came after; only QUOTED ones with a message."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < MAX_ERRORS:
        message = f": {current}" if isinstance(current, QUOTED) else ""
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(frames + type(current).__qualname__ + message)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhich came after:\n".join(parts)


def write_whole(stream: BinaryIO, lines: bytes) -> None:
    """Write lines in one piece of their own, which a pipe keeps whole up to PIPE_BUF bytes.

    They go past the stream's buffer, for which a process that ends would wait if nothing reads the stream.

    Args:
        stream: if it does not block, this waits until it takes more.
        lines: whole ones.

    Raises:
        OSError: the stream is closed.
        ValueError: the same.
    """
    raw: BinaryIO = getattr(stream, "raw", stream)
    with _WRITING:  # else the lines of two threads might leave as one longer piece
        while lines:
            if not (written := raw.write(lines)):
                select.select([], [raw], [])
            lines = lines[written or 0 :]


class BackgroundHandler(logging.Handler):
    """Writes lines from a thread of its own; the code that logs never waits for it."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)  # None is the end
        self._thread = threading.Thread(target=self._run, name="stderr-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one line; it is dropped when too many wait."""
        try:
            self._lines.put_nowait(self.format(record).encode(errors="backslashreplace") + b"\n")
        except queue.Full:
            REQUEST_LOG_DROPPED.inc()

    def close(self) -> None:
        """Write the queued lines; give up after CLOSE_S if they are not read. Python calls it at exit."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                write_whole(self._stream, line)
            except (OSError, ValueError):  # a closed pipe; the endpoint answers all the same
                REQUEST_LOG_DROPPED.inc()


def log_to(stream: BinaryIO) -> None:
    """Send this process's log, from warnings on, to a stream."""
    handler = BackgroundHandler(stream)
    handler.addFilter(OncePerSecond())
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # KServe logs each request and, with a traceback, each client error; `endpoint` logs our own faults.
    logging.getLogger("kserve").setLevel(logging.CRITICAL)
    # KServe answers with a response class that FastAPI deprecates, with a warning on each request.
    warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")
