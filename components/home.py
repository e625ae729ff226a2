"""The state folder -> the parts that run in it, and the lock that keeps two writers apart."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from feature_repo.atomic_files import write_file
from feature_repo.errors import CONFLICT, RecoError, without_password
from serving.settings import configured_home

MODEL_NAME = "checkout-recommender"  # in the registry, unless another is named
UPDATE_LOCK = "update.lock"  # `extend` and `refresh` build in one folder each, and register its content
LOOK_S = 0.1  # `read_running` holds a lock for a moment; a writer waits that long for it


class Conflict(RecoError):
    """Another process is changing the same thing; try again when it is done."""

    exit_code = CONFLICT


class Busy(Conflict):
    """Another process works under the same lock: the same call may be made again when it has ended."""


def default_tracking_uri(home: Path) -> str:
    """Return the registry that needs no server: SQLite and plain files under home."""
    return f"sqlite:///{(home / 'mlflow.db').absolute()}"


def dataset_lock(folder: Path) -> FileLock:
    """Return the lock of a data set in `datasets/`: a watch and an erasure write it."""
    return FileLock(folder.with_name(f"{folder.name}.lock"))


def write_json(file: Path, document: Any) -> None:
    """Write a JSON document so that a reader sees the old one or the new one, even after a power cut."""
    write_file(file, json.dumps(document, indent=1) + "\n", durable=True)


def command(home: Path, words: str) -> str:
    """Return a `reco` command that can be pasted: it names the home unless that is the default."""
    started_as = sys.argv[0]
    program = (
        shlex.quote(started_as) if Path(started_as).name == "reco" and not shutil.which("reco") else "reco"
    )
    default = configured_home().absolute() == home.absolute()
    return f"{program} {words}" if default else f"{program} --home {shlex.quote(str(home))} {words}"


def registry_command(home: Path, tracking_uri: str, model_name: str, words: str) -> str:
    """Return the command for a model of a registry, without the password that its URI may hold."""
    if tracking_uri not in ("", default_tracking_uri(home)):
        words += f" --tracking-uri {shlex.quote(without_password(tracking_uri))}"
    if model_name not in ("", MODEL_NAME):
        words += f" --model-name {shlex.quote(model_name)}"
    return command(home, words)


def pasteable(home: Path, text: str) -> str:
    """Return a text whose commands in backticks can be pasted: most messages do not know the home."""
    return re.sub("`reco (?=[a-z])", lambda _: f"`{command(home, '')}", text)


@dataclass(frozen=True)
class Running:
    """What the parts of a `reco up` use: `up.json`, for commands that are given beside it."""

    store_url: str  # as in `Settings.store_url`
    bootstrap: str  # of the broker
    own_store: bool  # it is one that `reco up` started, with its data in `store/`
    cluster: str = ""  # the Kubernetes API of `reco up --slots`
    gateway: str = ""  # the address of the shoppers' requests there


def read_running(home: Path) -> Running | None:
    """Return the addresses of the `reco up` that runs under this home; None without one."""
    if not _is_held(home / "up.lock"):
        return None
    try:
        return Running(**json.loads((home / "up.json").read_bytes()))
    except FileNotFoundError:  # it is just starting
        return None


@contextmanager
def announced(home: Path, running: Running) -> Iterator[None]:
    """Write `up.json` while the context lasts; only its owner may read it: a URL may hold a password."""
    file = home / "up.json"
    write_file(file, json.dumps(asdict(running)), private=True)
    try:
        yield
    finally:
        file.unlink()


def _is_held(lock: Path) -> bool:
    # Not filelock: it would create the file, and would need the right to write.
    try:
        with lock.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def locked(file: Path, doing: str, way_out: str = "wait for it and try again") -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends.

    `way_out` is what helps while another process holds it.

    Raises:
        Busy: another process holds it; the message names the process and its work.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, timeout=LOOK_S, preserve_lock_file=True)
    try:
        lock.acquire()
    except Timeout as error:
        holder = file.read_text(encoding="utf-8").strip() or "another process"
        raise Busy(f"{holder} (lock {file}): {way_out}; nothing was changed") from error
    try:
        file.write_text(f"process {os.getpid()} is {doing}", encoding="utf-8")
        yield
        file.write_text("", encoding="utf-8")
    finally:
        lock.release()
