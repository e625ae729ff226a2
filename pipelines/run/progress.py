"""A run in progress -> lines that a person can follow, on stderr."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

HEARTBEAT_S = 30.0
WIDEST = 160  # columns of a line in a file
_EXECUTOR = re.compile(r"^\[KFP Executor [^\]]*\]: (.*)$")
# Lines that KFP's executor prints for every step.
_NOISE = ("Looking for component", "Loading KFP component", "Got executor_input", "Wrote executor output")


class Progress:
    """Reports one run; a terminal sees the running step's line change, a file gets a heartbeat."""

    def __init__(self, stream: IO[str], usual_s: Mapping[str, float] | None = None) -> None:
        """Take the stream, and the usual seconds of each step."""
        from rich.console import Console

        width = None if stream.isatty() else WIDEST
        self._console = Console(file=stream, force_terminal=stream.isatty(), width=width, highlight=False)
        self._usual_s = usual_s or {}
        self._width = max((len(name) for name in self._usual_s), default=0)

    def say(self, text: str) -> None:
        """Write one line."""
        self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, run_id: str, steps: list[str], already: int) -> None:
        """Announce the run: its steps, and how long they usually take."""
        self._width = max(len(name) for name in steps)
        left = sum(self._usual_s.get(name, 0.0) for name in steps[already:])
        kept = f", {already} kept from before" if already else ""
        eta = f", about {duration(left)}" if left else ""
        self.say(f"run {run_id}: {len(steps)} steps{kept}{eta}")

    def step(self, name: str, number: int, steps: list[str]) -> StepProgress:
        """Return the progress of one step, a context for as long as it runs."""
        left = None
        if name in self._usual_s:
            left = sum(self._usual_s.get(other, 0.0) for other in steps[number - 1 :])
        head = f"[{number:>{len(str(len(steps)))}}/{len(steps)}] {name:<{self._width}}"
        return StepProgress(self._console, head, left)


class StepProgress:
    """Reports one step."""

    def __init__(self, console: Console, head: str, left_s: float | None) -> None:
        """Take the console, the head of the line, and the usual seconds of all steps that are left."""
        self._console, self._head, self._left_s = console, head, left_s
        self.last_words = ""
        self._stop = threading.Event()
        self._reporter: Live | threading.Thread | None = None
        self._started_at = 0.0

    def __enter__(self) -> StepProgress:
        """Start reporting."""
        self._started_at = time.monotonic()
        if self._console.is_terminal:
            from rich.live import Live

            self._reporter = Live(
                console=self._console,
                get_renderable=self._line,
                refresh_per_second=1,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        else:
            self._reporter = threading.Thread(target=self._beat, daemon=True)
        self._reporter.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Stop reporting; `done` or `failed` reports the result."""
        self._stop.set()
        if isinstance(self._reporter, threading.Thread):
            self._reporter.join()
        elif self._reporter is not None:
            self._reporter.stop()

    @property
    def seconds(self) -> float:
        """Return how long the step has been running."""
        return time.monotonic() - self._started_at

    def hear(self, line: str) -> None:
        """Take one line of the step's output."""
        if words := spoken(line):
            self.last_words = words

    def done(self, parameters: Mapping[str, Any]) -> None:
        """Report success, and the step's small outputs."""
        gave = summary(parameters) or self.last_words
        self._write(f"{self._head} {duration(self.seconds):>7}  {gave[:WIDEST]}")

    def failed(self) -> None:
        """Report failure."""
        self._write(f"{self._head} {duration(self.seconds):>7}  failed", "red")

    def _line(self) -> Text:
        from rich.text import Text

        left = "" if self._left_s is None else f", {duration(max(self._left_s - self.seconds, 0))} to go"
        line = f"{self._head} {duration(self.seconds):>7}{left}  {self.last_words}"
        return Text(line[:WIDEST], no_wrap=True, overflow="ellipsis")

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            self._write(self._line().plain)

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)


def spoken(line: str) -> str:
    """Return the text of a step's line without KFP's prefix; nothing for KFP's own lines."""
    found = _EXECUTOR.match(line.strip())
    if found is None or found[1].startswith(_NOISE):
        return ""
    return found[1]


def summary(parameters: Mapping[str, Any]) -> str:
    """Return a step's small outputs on one line."""
    parts = []
    for name, value in sorted(parameters.items()):
        if isinstance(value, Mapping):
            parts += [f"{key} {_short(inner)}" for key, inner in sorted(value.items()) if _short(inner)]
        elif _short(value):
            parts.append(_short(value) if name == "Output" else f"{name} {_short(value)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds in s, min or h."""
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
