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
        self._file = file
        self._stamp: tuple[int, int] | None = None

    def changed(self) -> list[str] | None:
        """Return the item ids that are excluded now, or None while nothing new can be read."""
        file = self._file
        try:
            stat = file.stat()
            if not S_ISREG(stat.st_mode) or stat.st_size > MAX_BYTES:
                raise ValueError(f"expected a regular file of at most {MAX_BYTES} bytes")
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            return read_excluded(file)
        except FileNotFoundError:
            gone, self._stamp = self._stamp is not None, None
            return [] if gone else None
        except (OSError, ValueError) as error:
            log.error("%s: %s; the last good list stays in force", file, error)
            return None
