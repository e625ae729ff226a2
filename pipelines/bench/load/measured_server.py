"""A command -> a server that is ready, with the processor time and memory of its processes."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import psutil

from pipelines.inspect.signals import read_samples
from pipelines.live.supervisor import await_end
from serving.settings import Settings

START_S = 600.0  # two servers import for half a minute; on a busy machine for minutes
STOP_S = 10.0
_READY = b'{"event": "ready"'


@dataclass(frozen=True)
class MeasuredServer:
    """A server, with every process that it started."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]  # its ready line

    def cpu_ms(self) -> float:
        """Return the processor time of all its processes so far, ended children included."""
        return sum(_cpu_s(process) for process in processes_of(self.process.pid)) * 1e3

    def memory_mb(self) -> dict[str, float]:
        """Return resident memory; proportional memory, where a shared page counts in parts; and anonymous.

        All in MiB. Anonymous memory is resident memory without the pages of mapped files. The kernel takes
        and returns those by its own needs.
        """
        total = {"rss": 0.0, "pss": 0.0, "anonymous": 0.0}
        for process in processes_of(self.process.pid):
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                total["rss"] += memory.rss / 2**20
                total["pss"] += memory.pss / 2**20
                total["anonymous"] += (memory.rss - memory.shared) / 2**20
        return total

    def samples(self, metric: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric in its /metrics now, by those of its labels in their order.

        Raises:
            OSError: it shows no metrics.
        """
        samples = read_samples(f"{self.ready['http']}/metrics").get(metric, ())
        return {tuple(labels.values()): value for labels, value in samples}


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str], output: Path) -> Iterator[MeasuredServer]:
    """Start a server and wait for its ready line; it ends with the block, together with its children.

    Args:
        command: it writes a line {"event": "ready", "http": ADDRESS, ...} to stderr.
        environment: all its variables.
        output: file that gets its output.

    Raises:
        RuntimeError: it did not become ready; the message holds its output.
    """
    with output.open("wb") as out:
        process = subprocess.Popen(command, env=dict(environment), stdout=out, stderr=out)
    try:
        yield MeasuredServer(process, _wait_ready(process, output))
    finally:
        _stop(process)


def private(settings: Settings, **changes: Any) -> Settings:
    """Return settings of a server that only this machine reaches, on ports that the system chooses."""
    return replace(settings, host="127.0.0.1", http_port=0, grpc_port=0, **changes)


def processes_of(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants that run now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _wait_ready(process: subprocess.Popen[bytes], output: Path) -> dict[str, Any]:
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        for line in output.read_bytes().splitlines(keepends=True):
            if line.startswith(_READY) and line.endswith(b"\n"):
                ready: dict[str, Any] = orjson.loads(line)
                return ready
        time.sleep(0.05)
    text = output.read_text(errors="replace").strip()[-2_000:]
    raise RuntimeError(f"the server did not start: {text or 'it output nothing'}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the server as an operator would; kill it if it does not end, and kill its children."""
    family = processes_of(process.pid)
    process.terminate()
    await_end(process, STOP_S)
    for child in family[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _cpu_s(process: psutil.Process) -> float:
    """Return a process's own seconds of processor time, and those of its children that ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0
