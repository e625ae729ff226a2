"""A file's new content -> the file, replaced in one step; and the reading and the SHA-256 of a file.

The content is written beside the file under a hidden name that ends in `.part`, and then renamed. An error
removes the temporary file. A killed process leaves it behind: readers must skip such names.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import Any


@contextmanager
def replaced(file: Path, *, durable: bool = False, private: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `file`, which takes its place when the block ends without an error.

    Two processes may replace the same file: the last one wins, and neither sees a part of the other's.

    Args:
        file: the file to replace or to create; its folder is created if it is missing.
        durable: wait until content and name are on disk, so that it survives a power cut.
        private: only the owner may read the file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not the process's number alone: threads share it, and so may containers with one volume.
    part = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        if private:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield part
        if durable:
            with part.open("rb+") as stream:
                os.fsync(stream.fileno())
        part.replace(file)
        if durable:
            _sync_folder(file.parent)  # the new name is its content
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network mounts sync files alone
            raise
    finally:
        os.close(number)


def is_gone(error: Exception) -> bool:
    """Return whether a file was deleted; one that another node of a shared disk deleted is stale."""
    return isinstance(error, FileNotFoundError) or (
        isinstance(error, OSError) and error.errno == errno.ESTALE
    )


def is_damage(error: Exception) -> bool:
    """Return whether a file's content made its reading fail, not the machine or its file system.

    Those give an error a number, or are out of memory; libraries that parse a file give none.
    """
    return not isinstance(error, MemoryError) and getattr(error, "errno", None) is None


def is_part(file: Path) -> bool:
    """Return whether a killed process may have left this file behind."""
    return file.name.startswith(".") and file.name.endswith(".part")


def write_file(file: Path, content: str | bytes, *, durable: bool = False, private: bool = False) -> None:
    """Replace a file by this content; a text is written as UTF-8. See `replaced`."""
    with replaced(file, durable=durable, private=private) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


def write_output(file: Path, content: str) -> None:
    """Write to a place that a person named: a file is replaced, a link followed, a pipe written."""
    if file.exists() and not file.is_file():
        file.write_text(content, encoding="utf-8")
    else:
        write_file(file.resolve(), content)


def read_regular(file: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file; opening a pipe would block until its other end opens.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is no regular file, or too large.
    """
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        stat = os.fstat(stream.fileno())
        if not S_ISREG(stat.st_mode) or stat.st_size > max_bytes:
            raise ValueError(f"expected a regular file of at most {max_bytes} bytes")
        return stream.read(max_bytes)


def read_json(content: str | bytes) -> Any:
    """Return the document that a JSON text holds.

    Raises:
        ValueError: it is no JSON, or nested deeper than Python reads.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
