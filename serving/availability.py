"""A small JSON file -> the items that must not be offered now: out of stock, banned."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from stat import S_ISREG

import numpy as np

from feature_repo.statistics import Statistics

log = logging.getLogger(__name__)

MAX_BYTES = 16 << 20
CHECK_S = 0.5  # how often the file's modification time is looked at
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


class Availability:
    """Codes of the items that `{"out_of_stock": [ids], "banned": [ids]}` names.

    The file is read again when it changes, within half a second. A file that can't be read keeps the last
    good list and is said in the log: an item known to be sold out must not come back because of a typo.
    """

    def __init__(self, file: Path | None, statistics: Statistics) -> None:
        """Take the file, which need not exist (nothing is excluded then), and the catalogue."""
        self._file = file
        self._statistics = statistics
        self._looked_at = -CHECK_S
        self._stamp: tuple[int, int] | None = None
        self._codes = np.empty(0, np.int64)

    def excluded(self) -> np.ndarray:
        """Return the excluded codes, int64."""
        now = time.monotonic()
        if self._file is not None and now - self._looked_at >= CHECK_S:
            self._looked_at = now
            self._refresh(self._file)
        return self._codes

    def _refresh(self, file: Path) -> None:
        try:
            stat = file.stat()
            if not S_ISREG(stat.st_mode) or stat.st_size > MAX_BYTES:
                raise ValueError(f"expected a regular file of at most {MAX_BYTES} bytes")
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            ids = read_excluded(file)
        except FileNotFoundError:
            self._stamp, self._codes = None, np.empty(0, np.int64)
        except (OSError, ValueError) as error:
            log.error("%s: %s; the last good list stays in force", file, error)
        else:
            self._codes = self._statistics.codes(ids)
