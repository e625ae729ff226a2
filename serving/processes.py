"""Two ports -> several processes that answer there: started, watched, restarted and ended together.

The parent binds the ports and answers nothing itself. Each child is a fork of one process that has imported
everything (`serving.fork_server`), and accepts on the parent's HTTP socket: what waits there for a child that
dies is taken by the others. The gRPC port is opened by each child; the parent holds it, so that no other
endpoint gets in between.
What children map from the bundle's files they share: the item table and the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.multiprocess import mark_process_dead

from feature_repo.errors import RecoError
from serving.metrics import FOLDER, REQUEST_LOG_DROPPED, parent_of, registry_of, shown
from serving.observe.stderr_log import head, write_whole
from serving.settings import Settings

FIRST_PAUSE_S = 0.5  # before a child is started that died twice without an answer between
# Until a child was ready, a start is unlikely to help; afterwards a long pause would be a hole for callers.
LONGEST_PAUSE_S, LONGEST_READY_PAUSE_S = 30.0, 1.0
LONGEST_EVENT = 1 << 24  # bytes: the message of a child that failed may quote its settings
SAY_S = 1.0  # a line to stderr is waited for no longer
_log = logging.getLogger(__name__)


class NoneStarts(RecoError, RuntimeError):
    """No process of the endpoint could start; message and exit code are those of a child."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Slot:
    """One place for a child: its process, and the end of the last one."""

    process: psutil.Process | None = None
    code: int | None = None  # exit status of the last one
    ready: dict[str, Any] | None = None  # its ready line
    failed: NoneStarts | None = None  # why the last one could not start
    deaths: int = 0  # since it was last ready


class Processes:
    """The children of one endpoint."""

    def __init__(
        self,
        settings: Settings,
        http_socket: socket.socket,
        grpc_socket: socket.socket,
        bundle: Path,
        home: Path | None,
    ) -> None:
        """Take the sockets, both bound, and the bundle and the home that the children serve."""
        # A shopper has one name in the request logs of all children.
        key = settings.request_log_key or secrets.token_hex(16)
        self._settings = replace(settings, grpc_port=grpc_socket.getsockname()[1], request_log_key=key)
        self._http_socket = http_socket
        self._bundle, self._home = bundle, home
        self._slots = [Slot() for _ in range(settings.processes)]
        self._forks: asyncio.subprocess.Process | None = None
        self._requests = socket.socket()  # to it, as soon as it runs
        self._asking = asyncio.Lock()
        self._began = time.monotonic()
        self._was_ready = self._said_ready = False
        hold(grpc_socket)

    def run(self) -> None:
        """Keep the children alive until SIGTERM or SIGINT, then let them finish their requests.

        Once a child has been ready, nothing else ends the endpoint: children that die are started again,
        with growing pauses.

        Raises:
            NoneStarts: none of them can start, and none has ever been ready.
        """
        with metrics_folder() as folder, shown(self._settings.metrics_address, registry_of(folder)):
            self._folder = folder
            asyncio.run(self._run())
        failure = self._first_start_failed()
        if failure is not None:
            raise failure

    def _first_start_failed(self) -> NoneStarts | None:
        """Return why no child starts, if none has ever been ready."""
        failures = [slot.failed for slot in self._slots if slot.failed]
        return failures[0] if len(failures) == len(self._slots) and not self._was_ready else None

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        for sig in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(sig, self._stop)
        await asyncio.gather(*(self._keep(slot) for slot in self._slots))
        self._requests.close()
        if self._forks is not None:
            await self._forks.wait()

    def _stop(self) -> None:
        """Let the children drain; called again, they do not wait for requests in flight."""
        if not self._stopping.is_set():
            self._http_socket.close()  # else connections would wait that no child accepts any more
            longest_s = self._settings.drain_s + self._settings.grace_s + 5
            self._loop.call_later(longest_s, self._kill_all)
        self._stopping.set()
        self._signal_all(signal.SIGTERM)
        # It still imports. Later it stays to the end: it knows when a child has really ended.
        if self._forks is not None and not any(slot.process for slot in self._slots):
            with contextlib.suppress(ProcessLookupError):
                self._forks.terminate()

    def _kill_all(self) -> None:
        self._signal_all(signal.SIGKILL)
        if self._forks is not None and self._forks.returncode is None:
            self._forks.kill()  # while stopped it would report nothing and never end

    def _signal_all(self, sig: int) -> None:
        for slot in self._slots:
            if slot.process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    slot.process.send_signal(sig)

    async def _keep(self, slot: Slot) -> None:
        while not self._stopping.is_set():
            before = slot.failed
            try:
                ended = _ended(await self._live(slot))
            except OSError as error:  # processes, files or memory are short now: no fault of the bundle's
                ended = ""
                if not self._stopping.is_set():
                    _log.error("a process could not be started, which is tried again: %s", error)
            if self._stopping.is_set():
                return
            slot.deaths += 1
            if slot.ready is not None:
                slot.ready, slot.deaths = None, 1
                _log.error("a process died (%s); another one is started", ended)
            elif ended:
                if slot.failed is before:  # it gave no reason of its own
                    slot.failed = NoneStarts(f"a process ended at its start ({ended})", 1)
                if self._first_start_failed():
                    self._stop()
                    return
                _log.error("a process could not start, which is tried again: %s", slot.failed)
            await self._pause(pause_s(slot.deaths, self._was_ready))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _live(self, slot: Slot) -> int:
        """Start a child and read its events until it ends; return its exit status.

        Raises:
            OSError: it could not be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                forks = await self._fork(theirs)
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_EVENT)
        slot.process = slot.code = None
        try:
            async for line in reader:
                if line.endswith(b"\n"):
                    self._hear(slot, json.loads(line))
        finally:
            writer.close()
        if slot.process is not None:
            mark_process_dead(slot.process.pid, self._folder)
        # Without an exit status, the process that would have reported it has ended, too.
        return await forks.wait() if slot.code is None else slot.code

    async def _fork(self, events: socket.socket) -> asyncio.subprocess.Process:
        """Ask for a child that writes its events to a socket; return the process whose fork it is.

        Raises:
            OSError: it could not be started.
        """
        async with self._asking:
            while True:
                if self._forks is None or self._forks.returncode is not None:
                    self._forks = await self._start_fork_server()
                files = [events.fileno(), self._http_socket.fileno()]
                try:
                    socket.send_fds(self._requests, [os.fsencode(self._bundle)], files)
                except ConnectionError:  # it has just ended
                    await self._forks.wait()
                else:
                    return self._forks

    async def _start_fork_server(self) -> asyncio.subprocess.Process:
        self._requests.close()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            return await asyncio.create_subprocess_exec(
                *self._command(theirs.fileno()),
                env=self._settings.to_env() | {"PROMETHEUS_MULTIPROC_DIR": str(self._folder)},
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for us: we signal the children
            )

    def _command(self, requests: int) -> list[str]:
        home = () if self._home is None else ("--home", str(self._home))
        return [
            *(sys.executable, "-P", "-m", "serving.server", "--bundle", str(self._bundle)),
            *(*home, "--forks", str(requests)),
        ]

    def _hear(self, slot: Slot, message: dict[str, Any]) -> None:
        match message["event"]:
            case "forked":
                with contextlib.suppress(psutil.NoSuchProcess):
                    slot.process = psutil.Process(message["pid"])
                    if self._stopping.is_set():  # the others have had theirs: a second one would hurry them
                        slot.process.send_signal(signal.SIGTERM)
            case "not_forked":
                raise OSError(message["message"])
            case "ended":
                slot.code = message["code"]
            case "ready":
                slot.ready, slot.failed, self._was_ready = message, None, True
                self._say_ready(message)
            case "bundle":  # the next one that must be started begins with it: it is known to be good
                self._bundle = Path(message["bundle"])
                assert slot.process is not None
                say({**message, "pid": slot.process.pid})
            case "failed":
                slot.failed = NoneStarts(message["message"], message["exit_code"])

    def _say_ready(self, message: dict[str, Any]) -> None:
        if self._said_ready or not all(slot.ready for slot in self._slots):
            return
        self._said_ready = True
        family = [process.pid for process in psutil.Process().children(recursive=True)]
        own = {
            "processes": len(self._slots),
            "ready_s": round(time.monotonic() - self._began, 2),
            "memory_mb": memory_mb(os.getpid(), *family),
        }
        say(message | own)


def say(event: dict[str, Any]) -> None:
    """Write one line for those who run the endpoint."""
    write_line(json.dumps(head(event["event"], time.time()) | event))


def write_line(text: str) -> None:
    """Write a line to stderr; if stderr is not read, it is left to a thread that ends with the process."""

    def write() -> None:
        try:
            write_whole(sys.stderr.buffer, text.encode(errors="backslashreplace") + b"\n")
        except (OSError, ValueError):  # a closed pipe; the endpoint answers all the same
            REQUEST_LOG_DROPPED.inc()

    writing = threading.Thread(target=write, name="say", daemon=True)
    writing.start()
    writing.join(SAY_S)


def hold(bound: socket.socket) -> None:
    """Let the children share a port that is bound here, and no other process.

    They bind with SO_REUSEPORT, which needs the same of us. Any other endpoint first binds without it and
    is refused, as we have not SO_REUSEADDR any more: this socket never listens.
    """
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def pause_s(deaths: int, was_ready: bool) -> float:
    """Return how long to wait before a child is started again: the first time not at all.

    Args:
        deaths: of its place, since a child there was last ready.
        was_ready: whether any child of the endpoint has ever been ready.
    """
    longest_s = LONGEST_READY_PAUSE_S if was_ready else LONGEST_PAUSE_S
    return 0.0 if deaths < 2 else min(FIRST_PAUSE_S * 2.0 ** (deaths - 2), longest_s)


def memory_mb(*pids: int) -> float | None:
    """Return the memory of some processes, pages that they share counted once (PSS); None if unknown."""
    try:
        return round(sum(psutil.Process(pid).memory_full_info().pss for pid in pids) / (1 << 20), 1)
    except (psutil.Error, AttributeError):  # not ours to know, or no Linux
        return None


@contextlib.contextmanager
def metrics_folder() -> Iterator[str]:
    """Yield a folder for the children's counters, in memory where there is such a place.

    Each child writes its counters to a mapped file: on a disk that is full or busy, it would die or wait.
    """
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    for left in place.glob(f"{FOLDER}[0-9]*-*"):  # by an endpoint that was killed
        parent = parent_of(str(left))
        if parent == os.getpid() or not psutil.pid_exists(parent):  # in a pod each endpoint is process 1
            shutil.rmtree(left, ignore_errors=True)  # it may belong to another user
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-", dir=place) as folder:
        yield folder


def _ended(code: int) -> str:
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
