"""The parts of `reco up` and their figures -> one live screen on a terminal, lines of text or JSON else."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from components.home import pasteable
from pipelines.inspect.signals import read_samples
from pipelines.live.supervisor import State, tail
from pipelines.tables import counted, table

LINE_S = 10.0  # between two lines of figures where there is no terminal
SCRAPE_S = 1.0


@dataclass
class Counted:
    """The endpoint's own counters since its start."""

    at: float  # monotonic
    rungs: dict[str, float]
    buckets: dict[float, float] = field(default_factory=dict)  # upper bound in seconds -> answers below it

    @classmethod
    def read(cls, url: str) -> Counted:
        """Scrape an endpoint; OSError if it does not answer."""
        samples = read_samples(f"{url}/metrics", SCRAPE_S)
        rungs: dict[str, float] = {}
        for labels, value in samples.get("reco_responses_total", ()):
            rungs[labels["rung"]] = rungs.get(labels["rung"], 0.0) + value
        buckets = samples.get("reco_answer_seconds_bucket", ())
        return cls(time.monotonic(), rungs, {float(labels["le"]): value for labels, value in buckets})

    def since(self, before: Counted) -> dict[str, Any]:
        """Return the answers since an earlier look, and the bucket of the 99th percentile.

        Empty if a counter fell: another process answered then, or the same one began again.
        """
        if any(self.rungs.get(name, 0.0) < count for name, count in before.rungs.items()):
            return {}
        rungs = {name: count - before.rungs.get(name, 0.0) for name, count in self.rungs.items()}
        below = {bound: count - before.buckets.get(bound, 0.0) for bound, count in self.buckets.items()}
        answered = sum(rungs.values())
        most = max(below.values(), default=0.0)
        p99 = next((bound for bound, count in sorted(below.items()) if count >= 0.99 * most), None)
        return {
            "answers_per_s": round(answered / (self.at - before.at), 1),
            "p99_ms": p99 * 1e3 if p99 is not None and most > 0 else None,
            "rungs": {name: round(count / answered, 4) for name, count in rungs.items() if count > 0},
        }


class Screen:
    """Shows the parts and says what happens, from entry to exit."""

    def __init__(
        self, home: Path, as_json: bool = False, console: Console | None = None, metrics: str = ""
    ) -> None:
        """Take the home of the parts, where to write (by default stdout), and the port of metrics alone."""
        self._home, self._as_json, self._console = home, as_json, console or Console()
        self._metrics = f"http://{metrics}" if metrics else ""
        self._states: Sequence[State] = ()
        self._before: Counted | None = None
        self._stop = threading.Event()
        self._live: Live | None = None
        self._beat = threading.Thread(target=self._print_figures, daemon=True)

    def __enter__(self) -> Screen:
        if self._console.is_terminal and not self._as_json:
            self._live = Live(console=self._console, get_renderable=self._page, refresh_per_second=1)
            self._live.start()
        else:
            self._beat.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last state on the terminal."""
        self._stop.set()
        if self._live:
            self._live.stop()
            self._live = None
        elif self._beat.ident:
            self._beat.join()

    def say(self, text: str) -> None:
        """Print one line, above the screen."""
        text = pasteable(self._home, text)
        if self._live:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print({"event": "said", "text": text}, text, sys.stderr)

    def show(self, states: list[State]) -> None:
        """Take the state of each part."""
        self._states = states
        if not self._live:
            self._print({"event": "parts", "parts": [asdict(state) for state in states]}, self._table())

    def figures(self) -> dict[str, Any]:
        """Return what endpoint, stream and replay say of themselves, since the last look."""
        found: dict[str, Any] = {}
        address = next((state.address for state in self._states if state.name == "endpoint"), "")
        url = address and (self._metrics or address)
        try:
            now = Counted.read(url) if url else None
        except (OSError, http.client.HTTPException):
            now = None  # its health says why
        if now and self._before:
            found |= now.since(self._before)
        self._before = now
        if (file := self._home / "stream.json").is_file() and "stream" in self._running():
            state = json.loads(file.read_bytes())
            found |= {"events": state["events"], "lag": state["lag"]}
        for name, parts in (("replay", self._running()), ("release", self._parts())):
            if (file := self._home / "up" / f"{name}.log").is_file() and name in parts:
                said = tail(file).splitlines()
                found[name] = said[-1] if said else "starting"
        return found

    def _parts(self) -> set[str]:
        return {state.name for state in self._states}

    def _running(self) -> set[str]:
        return {state.name for state in self._states if state.pid}

    def _table(self) -> str:
        rows = [[s.name, s.address, s.pid or "", s.health, s.restarts] for s in self._states]
        return table(["part", "address", "pid", "health", "restarts"], rows) + "\n"

    def _page(self) -> Text:
        return Text.from_ansi(f"{self._table()}\n{described(self.figures())}")

    def _print_figures(self) -> None:
        while not self._stop.wait(LINE_S):
            if figures := self.figures():
                self._print({"event": "figures", **figures}, described(figures))

    def _print(self, document: dict[str, Any], text: str, stream: IO[str] | None = None) -> None:
        if self._as_json:
            text, stream = json.dumps(document), None
        print(text, file=stream, flush=True)


def described(figures: dict[str, Any]) -> str:
    """Return figures as lines for people."""
    lines = []
    if "answers_per_s" in figures:
        line = f"answers  {figures['answers_per_s']:,.1f} a second"
        line += "" if figures["p99_ms"] is None else f", p99 within {figures['p99_ms']:g} ms"
        line += "".join(f", {rung} {share:.1%}" for rung, share in figures["rungs"].items())
        lines.append(line)
    if "events" in figures:
        lag = "unknown" if figures["lag"] is None else counted(figures["lag"], "message")
        lines.append(f"stream   {counted(figures['events'], 'event')}, lag {lag}")
    if "replay" in figures:
        lines.append(f"replay   {figures['replay']}")
    if "release" in figures:
        lines.append(f"release  {figures['release']}")
    return "\n".join(lines)
