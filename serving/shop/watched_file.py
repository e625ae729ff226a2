"""A file that people edit while requests come -> what it says now; a broken one keeps what was last read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Generic, TypeVar

Content = TypeVar("Content")
Stamp = tuple[int, int]  # modified at, ns; size, bytes
_NEVER: Stamp = (-1, -1)
log = logging.getLogger(__name__)


class WatchedFile(Generic[Content]):
    """A file, which need not exist, and what it said when it could last be read.

    One that can't be read changes nothing and is said in the log: what was forbidden must not come back
    because of a typo. Nor because of a file that is just being written: a change, its end included, is
    believed by the second look that finds it the same.
    """

    def __init__(self, file: Path, read: Callable[[Path], Content], nothing: Content, name: str) -> None:
        """Take the file and how it is read.

        Args:
            file: where it is.
            read: returns what it says; raises ValueError with what is wrong and how to mend it.
            nothing: what no file says.
            name: what it is, for people.
        """
        self.name = name
        self.broken = ""  # why it could not be read when it was last tried
        self.settled = False  # the last two looks found the same
        self._file, self._read, self._nothing = file, read, nothing
        self._seen: Stamp | None = _NEVER  # by the last look; None: no file
        self._taken: Stamp | None = None  # of what was last read
        self._wrong: Stamp | None = None  # of what can't be: not read again until it changes

    def changed(self) -> Content | None:
        """Return what the file says now, or None while nothing new can be read; to be asked repeatedly."""
        stamp = None
        try:
            stamp = self._look()
            if not self.settled or (stamp is not None and stamp == self._wrong):
                return None
            content = None
            if stamp != self._taken:
                content = self._nothing if stamp is None else self._read(self._file)
                self._look()
                if not self.settled:  # it was written while it was read
                    return None
        except (OSError, ValueError) as error:
            self._wrong = stamp if isinstance(error, ValueError) else None
            if str(error) != self.broken:
                log.error("%s: %s; what was last read stays in force", self._file, error)
            self.broken = str(error)
            return None
        self._taken, self._wrong, self.broken = stamp, None, ""
        return content

    def _look(self) -> Stamp | None:
        try:
            stat = self._file.stat()
            stamp: Stamp | None = (stat.st_mtime_ns, stat.st_size)
        except FileNotFoundError:
            stamp = None
        self.settled, self._seen = stamp == self._seen, stamp
        return stamp


def read_regular(file: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file; a pipe is not opened, that would wait for its other end.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is none, or too large.
    """
    stat = file.stat()
    if not S_ISREG(stat.st_mode) or stat.st_size > max_bytes:
        raise ValueError(f"expected a regular file of at most {max_bytes} bytes")
    return file.read_bytes()
