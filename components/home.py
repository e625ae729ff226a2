"""The state folder -> the parts that run in it, and the lock that keeps two writers apart."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from feature_repo.atomic_files import write_file
from feature_repo.errors import CONFLICT, RecoError


class Conflict(RecoError):
    """Somebody else is changing the same thing; try again when they are done."""

    exit_code = CONFLICT


def write_json(file: Path, document: Any) -> None:
    """Write a JSON document so that a reader sees the old one or the new one, even after a power cut."""
    write_file(file, json.dumps(document, indent=1) + "\n", durable=True)


@dataclass(frozen=True)
class Running:
    """What the parts of a `reco up` use: `up.json`, for commands that are given beside it."""

    store_url: str  # as in `Settings.store_url`
    bootstrap: str  # of the broker
    own_store: bool  # it is one that `reco up` started, with its data in `store/`


def read_running(home: Path) -> Running | None:
    """Return what runs under this home now; None if nothing does, whatever it left behind."""
    if not _is_held(home / "up.lock"):
        return None
    try:
        return Running(**json.loads((home / "up.json").read_bytes()))
    except FileNotFoundError:  # it is just starting
        return None


@contextmanager
def announced(home: Path, running: Running) -> Iterator[None]:
    """Say what runs under this home as long as it does; only its owner may read it, as a URL may say much."""
    file = home / "up.json"
    write_file(file, json.dumps(asdict(running)), private=True)
    try:
        yield
    finally:
        file.unlink()


def _is_held(lock: Path) -> bool:
    try:
        with lock.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _take(stream: IO[str]) -> None:
    """Lock a file for us alone; who only looks whether it is locked (`_is_held`) is gone after a moment."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.05)
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(file: Path, doing: str) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends.

    Raises:
        Conflict: another process holds it; the message says which, and what it is doing.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        try:
            _take(stream)
        except BlockingIOError as error:
            stream.seek(0)
            holder = stream.read().strip() or "another process"
            raise Conflict(
                f"{holder} (lock {file}): wait for it and try again; nothing was changed"
            ) from error
        stream.truncate(0)
        stream.write(f"process {os.getpid()} is {doing}")
        stream.flush()
        yield
        stream.truncate(0)
