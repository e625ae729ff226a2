"""A run in progress -> lines that a person can follow, on stderr."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

REFRESH_S = 1.0
HEARTBEAT_S = 30.0
WIDEST = 160  # columns of a line in a file
_EXECUTOR = re.compile(r"^\[KFP Executor [^\]]*\]: (.*)$")
# Lines that KFP's executor and libraries print, which say nothing about the step's work.
_NOISE = (
    "Looking for component",
    "Loading KFP component",
    "Got executor_input",
    "Wrote executor output",
    "Loading faiss",
    "Could not load library with",
    "Successfully loaded faiss",
    "Please consider",
)


@dataclass
class _StepLine:
    last_words: str = ""
    began: float = field(default_factory=time.monotonic)
    said_at: float = field(default_factory=time.monotonic)


class Progress:
    """Reports one run; a terminal sees the lines of all running steps change, a file gets heartbeats.

    A context: on a terminal the changing lines are there while it lasts.
    """

    def __init__(self, stream: IO[str]) -> None:
        from rich.console import Console
        from rich.live import Live

        width = None if stream.isatty() else WIDEST
        self._console = Console(file=stream, force_terminal=stream.isatty(), width=width, highlight=False)
        # Nothing in a file. No thread of its own: `refresh` draws.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._running: dict[str, _StepLine] = {}
        self._drawn_at = 0.0
        self._count = self._total = self._width = 0

    def __enter__(self) -> Progress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """Write one line."""
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    def begin(self, run_id: str, steps: list[str], already: int) -> None:
        """Announce the run and its steps."""
        self._count, self._total, self._width = already, len(steps), max(map(len, steps))
        kept = f", {already} kept from before" if already else ""
        self.say(f"run {run_id}: {len(steps)} steps{kept}")

    def start(self, step: str) -> None:
        """Add a step to those that run."""
        self._running[step] = _StepLine()

    def hear(self, step: str, line: str) -> None:
        """Take one line of a step's output."""
        if words := spoken(line):
            self._running[step].last_words = words

    def done(self, step: str, parameters: Mapping[str, Any]) -> None:
        """Report success, and the step's small outputs."""
        self._count += 1
        gave = summary(parameters) or self._running[step].last_words
        self.say(self._line(step, f"{self._count:>{len(str(self._total))}}", gave))
        del self._running[step]

    def failed(self, step: str) -> None:
        """Report failure."""
        self.say(self._line(step, "!", "failed"), "red")
        del self._running[step]

    def refresh(self) -> None:
        """Show the running steps: on a terminal each second, in a file each half minute."""
        now = time.monotonic()
        if now - self._drawn_at < REFRESH_S:
            return
        self._drawn_at = now
        if self._console.is_terminal:
            from rich.text import Text

            lines = [self._line(step, "", one.last_words) for step, one in self._running.items()]
            lines.append(f"{self._count} of {self._total} steps done")
            self._live.update(Text("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True)
            return
        for step, one in self._running.items():
            if now - one.said_at >= HEARTBEAT_S:
                one.said_at = now
                self.say(self._line(step, "", one.last_words))

    def _line(self, step: str, number: str, said: str) -> str:
        digits = len(str(self._total))
        mark = f"[{number:>{digits}}/{self._total}]" if number else " " * (2 * digits + 3)
        seconds = time.monotonic() - self._running[step].began
        return f"{mark} {step:<{self._width}} {duration(seconds):>9}  {said[:WIDEST]}"


def spoken(line: str) -> str:
    """Return the text of a step's line without KFP's prefix; nothing for KFP's own lines."""
    found = _EXECUTOR.match(line.strip())
    if found is None or found[1].startswith(_NOISE):
        return ""
    return found[1]


def summary(parameters: Mapping[str, Any]) -> str:
    """Return a step's small outputs on one line; its seconds are a column of their own."""
    parts = []
    for name, value in sorted(parameters.items()):
        if isinstance(value, Mapping):
            parts += [
                f"{key} {_short(inner)}"
                for key, inner in sorted(value.items())
                if _short(inner) and not key.endswith("seconds")
            ]
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
