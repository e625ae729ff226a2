"""A small JSON file -> the items that must not be offered now: out of stock, banned."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from stat import S_ISREG

log = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
LISTS = ("out_of_stock", "banned")


def read_excluded(file: Path) -> list[str]:
    """Return the item ids that the file excludes.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not {"out_of_stock": [ids], "banned": [ids]}; an unknown key is a typing error.
    """
    try:
        content = json.loads(file.read_bytes())
    except RecursionError as error:
        raise ValueError("expected no nesting but two lists") from error
    if not isinstance(content, dict) or not content.keys() <= set(LISTS):
        raise ValueError('expected {"out_of_stock": [ids], "banned": [ids]} and no other key')
    for name, ids in content.items():
        if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
            raise ValueError(f"expected {name} to be a list of item ids, each a string")
    return [item for ids in content.values() for item in ids]


class AvailabilityFile:
    """The file `{"out_of_stock": [ids], "banned": [ids]}`, which need not exist.

    A file that can't be read keeps the last good list and is said in the log: an item known to be sold out
    must not come back because of a typo.
    """

    def __init__(self, file: Path) -> None:
        self.broken = ""  # why it could not be read when it was last tried
        self._file = file
        self._stamp: tuple[int, int] | None = None  # of the last good list
        self._wrong: tuple[int, int] | None = None  # of what is no list: not parsed again until it changes

    def changed(self) -> list[str] | None:
        """Return the item ids that are excluded now, or None while nothing new can be read."""
        stamp = None
        try:
            stat = self._file.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._wrong:
                return None
            if not S_ISREG(stat.st_mode) or stat.st_size > MAX_BYTES:
                raise ValueError(f"expected a regular file of at most {MAX_BYTES} bytes")
            ids = None if stamp == self._stamp else read_excluded(self._file)
        except FileNotFoundError:
            ids = None if self._stamp is None else []
            stamp = None
        except (OSError, ValueError) as error:
            self._wrong = stamp if isinstance(error, ValueError) else None
            if str(error) != self.broken:
                log.error("%s: %s; the last good list stays in force", self._file, error)
            self.broken = str(error)
            return None
        self._stamp, self._wrong, self.broken = stamp, None, ""
        return ids
