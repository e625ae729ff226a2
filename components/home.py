"""The state folder -> its champion, its bundles, and the lock that keeps two writers apart."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class NoChampion(Exception):
    """Nothing was promoted under this home yet, or its pointer cannot be read."""

    exit_code = 2


class Conflict(Exception):
    """Somebody else is changing the same thing; try again when they are done."""

    exit_code = 4


@dataclass(frozen=True)
class Champion:
    """The pointer that endpoint and command follow: `champion.json`."""

    bundle_id: str
    version: str
    model_name: str
    path: str  # of the bundle, relative to home so that the folder can move
    cut: str
    promoted_at: str

    def bundle(self, home: Path) -> Path:
        """Return where the bundle lies."""
        return home / self.path


def read_champion(home: Path) -> Champion:
    """Return the champion of this home.

    Raises:
        NoChampion: saying what was found and how to get one.
    """
    file = home / "champion.json"
    try:
        return Champion(**json.loads(file.read_bytes()))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoChampion(
            f"{home} has no champion: train one with `reco run`, or point --home at one"
        ) from error
    except (ValueError, TypeError) as error:
        raise NoChampion(
            f"{file} is not a champion pointer: write it again with `reco promote champion`"
        ) from error


def write_champion(home: Path, champion: Champion) -> None:
    """Point at another bundle, atomically: a reader sees the old pointer or the new one."""
    write_json(home / "champion.json", asdict(champion))


def write_json(file: Path, document: Any) -> None:
    """Write a JSON document so that a reader sees the old one or the new one, even after a power cut."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(file)


@contextmanager
def locked(file: Path, doing: str) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends.

    Raises:
        Conflict: another process holds it; the message says which, and what it is doing.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
