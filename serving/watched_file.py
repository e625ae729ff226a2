"""A file that people edit while requests come -> what it says now; a broken one keeps what was last read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import Generic, TypeVar

Content = TypeVar("Content")
log = logging.getLogger(__name__)


class WatchedFile(Generic[Content]):
    """A file, which need not exist, and what it said when it could last be read.

    One that can't be read changes nothing and is said in the log: what was forbidden must not come back
    because of a typo.
    """

    def __init__(
        self, file: Path, read: Callable[[Path], Content], nothing: Content, max_bytes: int, name: str
    ) -> None:
        """Take the file and how it is read.

        Args:
            file: where it is.
            read: returns what it says; raises ValueError with what is wrong and how to mend it.
            nothing: what no file says.
            max_bytes: a larger one is not read.
            name: what it is, for people.
        """
        self.name = name
        self.broken = ""  # why it could not be read when it was last tried
        self._file, self._read, self._nothing, self._max_bytes = file, read, nothing, max_bytes
        self._stamp: tuple[int, int] | None = None  # of what was last read
        self._wrong: tuple[int, int] | None = None  # of what can't be: not read again until it changes

    def changed(self) -> Content | None:
        """Return what the file says now, or None while nothing new can be read."""
        stamp = None
        try:
            stat = self._file.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._wrong:
                return None
            if not S_ISREG(stat.st_mode) or stat.st_size > self._max_bytes:
                raise ValueError(f"expected a regular file of at most {self._max_bytes} bytes")
            content = None if stamp == self._stamp else self._read(self._file)
        except FileNotFoundError:
            content = None if self._stamp is None else self._nothing
            stamp = None
        except (OSError, ValueError) as error:
            self._wrong = stamp if isinstance(error, ValueError) else None
            if str(error) != self.broken:
                log.error("%s: %s; what was last read stays in force", self._file, error)
            self.broken = str(error)
            return None
        self._stamp, self._wrong, self.broken = stamp, None, ""
        return content
