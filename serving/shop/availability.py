"""A small JSON file -> the items that must not be offered now: out of stock, banned."""

from __future__ import annotations

import json
from pathlib import Path

from feature_repo.atomic_files import read_regular
from serving.shop.watched_file import WatchedFile

MAX_BYTES = 16 << 20
LISTS = ("out_of_stock", "banned")


def read_excluded(file: Path) -> list[str]:
    """Return the item ids that the file excludes.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is no regular file, too large, or not {"out_of_stock": [ids], "banned": [ids]};
            an unknown key is probably misspelt, so it is refused too.
    """
    try:
        content = json.loads(read_regular(file, MAX_BYTES))
    except RecursionError as error:
        raise ValueError("expected no nesting but two lists") from error
    if not isinstance(content, dict) or not content.keys() <= set(LISTS):
        raise ValueError('expected {"out_of_stock": [ids], "banned": [ids]} and no other key')
    for name, ids in content.items():
        if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
            raise ValueError(f"expected {name} to be a list of item ids, each a string")
    return [item for ids in content.values() for item in ids]


class AvailabilityFile(WatchedFile[list[str]]):
    """The file `{"out_of_stock": [ids], "banned": [ids]}`, which need not exist."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, read_excluded, [], "availability file")
