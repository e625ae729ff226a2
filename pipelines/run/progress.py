"""A run as it goes -> lines that a person can follow, on stderr."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

HEARTBEAT_S = 30.0
_EXECUTOR = re.compile(r"^\[KFP Executor [^\]]*\]: (.*)$")
# What KFP's own executor says about every step.
_NOISE = ("Looking for component", "Loading KFP component", "Got executor_input", "Wrote executor output")


class Progress:
    """Tells of one run; a terminal sees the running step's line change, a file gets a heartbeat."""

    def __init__(self, stream: IO[str], usual_s: Mapping[str, float] | None = None) -> None:
        """Take the stream, and how long each step usually takes."""
        self._stream = stream
        self._terminal = stream.isatty()
        self._usual_s = usual_s or {}
        self._width = max((len(name) for name in self._usual_s), default=0)

    def say(self, text: str) -> None:
        """Write one line."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def begin(self, run_id: str, steps: list[str], already: int) -> None:
        """Tell what is going to happen."""
        self._width = max(len(name) for name in steps)
        left = sum(self._usual_s.get(name, 0.0) for name in steps[already:])
        kept = f", {already} kept from before" if already else ""
        eta = f", about {duration(left)}" if left else ""
        self.say(f"run {run_id}: {len(steps)} steps{kept}{eta}")

    def step(self, name: str, number: int, steps: list[str]) -> StepProgress:
        """Return what tells of one step while it runs, as a context."""
        left = None
        if name in self._usual_s:
            left = sum(self._usual_s.get(other, 0.0) for other in steps[number - 1 :])
        head = f"[{number:>{len(str(len(steps)))}}/{len(steps)}] {name:<{self._width}}"
        return StepProgress(self._stream, self._terminal, head, left)


class StepProgress:
    """Tells of one step."""

    def __init__(self, stream: IO[str], terminal: bool, head: str, left_s: float | None) -> None:
        """Take the head of the line and how long all that is left usually takes."""
        self._stream, self._terminal, self._head, self._left_s = stream, terminal, head, left_s
        self.last_words = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_telling, daemon=True)
        self._began = 0.0

    def __enter__(self) -> StepProgress:
        """Start telling."""
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop telling; how it ended is told by `done` or by who catches the error."""
        self._stop.set()
        self._thread.join()
        if self._terminal:
            self._write("\r\033[K")

    @property
    def seconds(self) -> float:
        """Return how long the step runs already."""
        return time.monotonic() - self._began

    def hear(self, line: str) -> None:
        """Take one line that the step said."""
        if words := spoken(line):
            self.last_words = words

    def done(self, parameters: Mapping[str, Any]) -> None:
        """Tell that the step ended well, and what it gave."""
        gave = summary(parameters) or self.last_words
        self._write(f"{self._head} {duration(self.seconds):>7}  {gave[:160]}\n")

    def failed(self) -> None:
        """Tell that it did not."""
        self._write(f"{self._head} {duration(self.seconds):>7}  failed\n")

    def _keep_telling(self) -> None:
        while not self._stop.wait(1.0 if self._terminal else HEARTBEAT_S):
            left = "" if self._left_s is None else f", {duration(max(self._left_s - self.seconds, 0))} to go"
            line = f"{self._head} {duration(self.seconds):>7}{left}  {self.last_words}"
            self._write(f"\r\033[K{line[:110]}" if self._terminal else f"{line[:160]}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def spoken(line: str) -> str:
    """Return what a step's line says, without KFP's dress; nothing for KFP's own words."""
    found = _EXECUTOR.match(line.strip())
    if found is None or found[1].startswith(_NOISE):
        return ""
    return found[1]


def summary(parameters: Mapping[str, Any]) -> str:
    """Return a step's small outputs on one line."""
    told = []
    for name, value in sorted(parameters.items()):
        if isinstance(value, Mapping):
            told += [f"{key} {_short(inner)}" for key, inner in sorted(value.items()) if _short(inner)]
        elif _short(value):
            told.append(_short(value) if name == "Output" else f"{name} {_short(value)}")
    return ", ".join(told)


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d}" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d}"


def _short(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float() if not value.is_integer():
            return f"{value:.4g}"
        case int() | float():
            return f"{int(value):,}"
        case str():
            return value
        case _:
            return ""
