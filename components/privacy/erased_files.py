"""A user's id -> the files of a home without the user's rows, each replaced in one step.

Other processes may write the same files meanwhile. A file that changed since it was read is read again; a
file that is gone was merged into another one. The caller repeats the search until it finds nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feature_repo.atomic_files import read_json, replaced, write_file
from feature_repo.events import Dataset, EventsInvalid, read_dataset, write_dataset
from feature_repo.stream.erasure import fields_of
from serving.release.golden import FILE as GOLDEN

TIMES = ("answered_at", "at")  # the column that says when a row came to be, the first that is there
STALE_S = 600.0  # a temporary file this old belongs to a process that was killed


class _FileChanged(Exception):
    """Another process replaced the file while it was read."""


def erase_rows(file: Path, user_id: str, until: int, dry_run: bool = False) -> int:
    """Take a user's rows out of a Parquet file; return how many there were.

    Args:
        file: anything with a column `user_id`; a file without one is left alone.
        user_id: whose.
        until: microseconds since the epoch; rows of a later time stay.
        dry_run: count only.

    Raises:
        pa.ArrowException, ValueError, OSError: the file is damaged and cannot be read.
    """
    while True:
        try:
            before = _identity(file)
            schema = pq.read_schema(file)
            if "user_id" not in schema.names:
                return 0
            # Most files hold nothing of this user: the other columns are read of those that do.
            if not pc.any(_of(pq.ParquetFile(file).read(["user_id"]), user_id)).as_py():
                return 0
            table = pq.ParquetFile(file).read()
            gone = _of(table, user_id)
            if time_column := next((name for name in TIMES if name in schema.names), None):
                at = table[time_column].cast(pa.timestamp("us", "UTC")).cast(pa.int64())
                gone = pc.and_(gone, pc.fill_null(pc.less_equal(at, until), True))
            if not (count := int(pc.sum(gone).as_py() or 0)) or dry_run:
                return count
            with replaced(file) as part:
                pq.write_table(table.filter(pc.invert(gone)), part, compression="zstd")
                if _identity(file) != before:
                    raise _FileChanged
            return count
        except _FileChanged:
            continue
        except FileNotFoundError:
            return 0


def erase_dataset(folder: Path, user_id: str, until: int, dry_run: bool = False) -> int:
    """Take a user's rows out of a checked data set and seal it again; return their number.

    A data set without other users is removed.

    Raises:
        EventsInvalid: it is half written or damaged, and was not changed.
    """
    data = read_dataset(folder)
    at = pd.Timestamp(until, unit="us", tz="UTC")
    kept = ~((data.events["user_id"] == user_id) & (data.events["at"] <= at))
    try:
        lines = [read_json(line) for line in _lines(folder / "quarantine.jsonl")]
        refused = [line for line in lines if not _is_of(line, user_id)]
    except (ValueError, AttributeError) as error:
        raise EventsInvalid(f"{folder / 'quarantine.jsonl'} holds a line that is no row: {error}") from error
    # `users.parquet` may lie beside the tables and holds ids; the data set is written again without it.
    known = erase_rows(folder / "users.parquet", user_id, until, dry_run=True)
    count = int((~kept).sum()) + known + len(lines) - len(refused)
    if not count or dry_run:
        return count
    if not kept.any():
        shutil.rmtree(folder)
        return count
    write_without(folder, data, ~kept.to_numpy(), pd.DataFrame(refused, dtype=object) if refused else None)
    return count


def write_without(folder: Path, data: Dataset, gone: np.ndarray, refused: pd.DataFrame | None = None) -> None:
    """Seal a data set again without the events that are `gone`, (n,) bool, and with these refused rows."""
    dropped = data.manifest.get("dropped", {})
    forgotten = dropped.get("of forgotten users", 0) + int(gone.sum())
    # A bundle that was evaluated on the data set is measured again on the rest of it.
    was = [*data.manifest.get("was", []), data.manifest["data_hash"]]
    manifest = {**data.manifest, "was": was, "dropped": {**dropped, "of forgotten users": forgotten}}
    for name in ("rows", "users", "items", "baskets", "first_at", "last_at", "files", "data_hash"):
        manifest.pop(name, None)
    write_dataset(folder, Dataset(data.events[~gone].reset_index(drop=True), data.items, manifest), refused)


def erase_lines(file: Path, user_id: str, dry_run: bool = False) -> int:
    """Take a user's lines out of a quarantine; return how many there were.

    A line that is no row, of a file that was cut off, goes if it holds the id anywhere.
    """

    def is_of_user(line: str) -> bool:
        try:
            return _is_of(read_json(line), user_id)
        except (ValueError, AttributeError):
            escaped = json.dumps(user_id, ensure_ascii=False)[1:-1].replace("/", r"\/")  # as pandas does
            return user_id in line or escaped in line

    lines = _lines(file)
    kept = [line for line in lines if not is_of_user(line)]
    if len(kept) < len(lines) and not dry_run:
        write_file(file, "".join(line + "\n" for line in kept).encode(errors="surrogateescape"))
    return len(lines) - len(kept)


def bundles(folder: Path) -> Iterator[Path]:
    """Yield the release bundles under a folder."""
    return (file.parent for file in files(folder, GOLDEN))


def names_user(bundle: Path, user_id: str) -> int:
    """Return how many golden requests and reference answers of a bundle are of a user."""
    users = [json.loads(line)["request"].get("user_id") for line in _lines(bundle / GOLDEN)]
    count = sum(one == user_id for one in users)
    log = bundle / "reference_log.parquet"
    return count + (erase_rows(log, user_id, 2**62, dry_run=True) if log.is_file() else 0)


def complete_dataset(part: Path) -> None:
    """Give a data set its name if its writer was killed just before, when nothing had that name."""
    whole = part.with_suffix("")
    if not whole.exists():
        with contextlib.suppress(EventsInvalid):  # half written
            read_dataset(part)
            part.rename(whole)


def datasets(folder: Path) -> Iterator[Path]:
    """Yield the checked data sets under a folder."""
    for manifest in files(folder, "manifest.json"):
        if (manifest.parent / "events.parquet").is_file():
            yield manifest.parent


def files(folder: Path, pattern: str) -> list[Path]:
    """Return the files under a folder whose names match; folders that vanish meanwhile hold none."""
    found = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return sorted(file for file in found if fnmatch(file.name, pattern))


def drop_stale(folder: Path) -> None:
    """Remove temporary files of killed processes: they may hold rows, and no process reads them."""
    for pattern in (".*.part", ".*.tmp", "*.part"):
        for file in files(folder, pattern):
            if is_stale(file):
                file.unlink(missing_ok=True)


def is_stale(file: Path, after_s: float = STALE_S) -> bool:
    """Return whether a file has not been written for a while; a missing file is not stale."""
    try:
        return time.time() - file.stat().st_mtime > after_s
    except FileNotFoundError:
        return False


def _of(table: pa.Table, user_id: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.equal(table["user_id"].cast(pa.string()), user_id), False)


def _identity(file: Path) -> tuple[int, int, int]:
    stat = file.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _lines(file: Path) -> list[str]:
    """Return the lines; `str.splitlines` would also split at U+2028, which a refused row may hold."""
    if not file.is_file():
        return []
    # A file that was cut off may end within a character.
    with file.open(encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        return [line.removesuffix("\n") for line in lines]


def _is_of(refused: dict[str, object], user_id: str) -> bool:
    """Say whether a refused row names a user: as text, as a number, or in a line that did not parse."""
    named = str(refused.get("user_id", ""))
    return user_id in (named, named.removesuffix(".0"), *fields_of(str(refused.get("text", ""))))
