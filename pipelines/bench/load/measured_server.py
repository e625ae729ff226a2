"""A command -> a server that is ready, and what its processes have used: for benchmarks, on Linux."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import orjson
from prometheus_client.parser import text_string_to_metric_families

START_S = 600.0  # two servers import for half a minute; on a busy machine for minutes
STOP_S = 10.0
METRICS_S = 10.0
_BEGINS = b'{"event": "'


class Events:
    """The lines {"event": KIND, ...} of a file that grows; each look reads what came since the one before.

    An endpoint says something about each request: who read it from the beginning, again and again, would take
    a processor from what is measured.
    """

    def __init__(self, said: Path) -> None:
        self._said, self._read = said, 0
        self._found: list[dict[str, Any]] = []

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return those of a kind that were written so far; a line that is not ended yet is left for later."""
        with self._said.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._read += len(new)
        self._found += [orjson.loads(line) for line in new.splitlines() if line.startswith(_BEGINS)]
        return [event for event in self._found if event["event"] == kind]


@dataclass(frozen=True)
class MeasuredServer:
    """A server, with every process that it started."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]  # its ready line
    said: Events = field(default_factory=lambda: Events(Path(os.devnull)))

    def cpu_ms(self) -> float:
        """Return the processor time that all its processes have used so far."""
        return sum(_cpu_ms(pid) for pid in processes_of(self.process.pid))

    def memory_mb(self) -> dict[str, float]:
        """Return resident memory, and proportional memory, where a page that is shared counts in parts."""
        found = {"rss": 0.0, "pss": 0.0}
        for pid in processes_of(self.process.pid):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                    name = line.partition(":")[0].lower()
                    if name in found:
                        found[name] += int(line.split()[1]) / 1024
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines {"event": KIND, ...} that it has written so far."""
        return self.said.of(kind)

    def samples(self, metric: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric in its /metrics now, by those of its labels in their order.

        Raises:
            OSError: it shows no metrics.
        """
        directly = build_opener(ProxyHandler({}))
        with directly.open(f"{self.ready['http']}/metrics", timeout=METRICS_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            tuple(sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
            if sample.name == metric
        }


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], said: Path, start_s: float = START_S
) -> Iterator[MeasuredServer]:
    """Start a server and wait for its ready line; it ends with the block, and so does what it started.

    Args:
        command: what to run; it writes a line {"event": "ready", "http": ADDRESS, ...} to stderr.
        environment: the whole of it.
        said: file that gets what it writes.
        start_s: how long it may take.

    Raises:
        RuntimeError: it did not become ready; the message holds what it said.
    """
    with said.open("wb") as out:
        process = subprocess.Popen(command, env=dict(environment), stdout=out, stderr=out)
    try:
        events = _wait_ready(process, said, start_s)
        yield MeasuredServer(process, events.of("ready")[0], events)
    finally:
        _stop(process)


def processes_of(pid: int) -> list[int]:
    """Return a process and all that descend from it, those that run now."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(place.name)] = int(_stat(int(place.name))[1])
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found


def _wait_ready(process: subprocess.Popen[bytes], said: Path, start_s: float) -> Events:
    events = Events(said)
    until = time.monotonic() + start_s
    while process.poll() is None and time.monotonic() < until:
        if events.of("ready"):
            return events
        time.sleep(0.05)
    text = said.read_text(errors="replace").strip()[-2_000:]
    raise RuntimeError(f"the server did not start: {text or 'it said nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server as its operator would; what does not go, or was left behind, is killed."""
    family = processes_of(process.pid)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in family[1:]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _cpu_ms(pid: int) -> float:
    """Return a process's own time, and that of children that ended."""
    with contextlib.suppress(OSError):
        return sum(map(int, _stat(pid)[11:15])) * 1e3 / os.sysconf("SC_CLK_TCK")
    return 0.0
