"""A file edited while the endpoint runs -> its content; after an invalid edit, the last valid content."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")
Stamp = tuple[int, ...]  # modified at and changed at, ns; inode; size, bytes
_NEVER: Stamp = ()
log = logging.getLogger(__name__)


class WatchedFile(Generic[Content]):
    """A file, which need not exist, and its content at the last successful read.

    A file that can't be read is logged and changes nothing: a banned item must not come back because of a
    typo, or because the file is just being written. So a change, a deletion included, counts once two looks
    in a row find the file the same.
    """

    def __init__(self, file: Path, read: Callable[[Path], Content], nothing: Content) -> None:
        """Watch a file that `read` reads or refuses by a ValueError; a missing one holds `nothing`."""
        self.broken = ""  # the fault of the latest attempt to read it
        self.settled = False  # the last two looks found the same state
        self._file, self._read, self._nothing = file, read, nothing
        self._seen: Stamp | None = _NEVER  # at the last look; None: no file
        self._taken: Stamp | None = None  # of the content that was last read
        self._wrong: Stamp | None = None  # of invalid content, which is not read again until it changes

    def changed(self) -> Content | None:
        """Return the current content, or None while there is nothing new to read; call it repeatedly."""
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
            stamp: Stamp | None = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size)
        except FileNotFoundError:
            stamp = None
        self.settled, self._seen = stamp == self._seen, stamp
        return stamp
