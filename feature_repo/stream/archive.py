"""CONTRACT the archive: every event the shop ever sent, as Parquet segments of the offline store.

`base.parquet` is the last published data set; the other segments hold the events of the stream since then.
Training, back-fills and `reco replay` read the archive; a repeated event counts once. The `version` of an
event records its arrival: BATCH for the base, otherwise a number that grows with each message of the Kafka
partition. So the archive shows which events a user's row of some version held in the online store.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feature_repo.aggregates import BATCH, KINDS, UserEvents, hash_ids, make_events
from feature_repo.atomic_files import is_damage, is_gone, replaced
from feature_repo.events import EVENT_SCHEMA

ARCHIVE_SCHEMA = EVENT_SCHEMA.append(pa.field("version", pa.int64()))
BASE = "base.parquet"
EVENTS = "events"  # the archive's folder in the offline store
READ_ATTEMPTS = 5
BATCH_EVENTS = 200_000  # in memory while rows are made: about 1 KiB each
MOST_READS = 32  # of the whole archive; one with more than 6 million events gets larger batches instead
Read = TypeVar("Read")


class ArchiveDamaged(ValueError):
    """A segment cannot be read; the message names it."""


def write_segment(archive: Path, events: pa.Table, name: str) -> None:
    """Write one segment atomically; a segment of the same name is replaced.

    It is on disk when this returns: then the stream's position moves on, and the merged segments are removed.

    Args:
        archive: the directory; created if it is missing.
        events: columns of EVENT_SCHEMA; without `version` they are of a data set.
        name: of the file, ending in .parquet.
    """
    with replaced(archive / name, durable=True) as part:
        pq.write_table(with_version(events), part, compression="zstd")


def with_version(events: pa.Table) -> pa.Table:
    """Return events as a table of ARCHIVE_SCHEMA; without a version they are of a data set."""
    if "version" not in events.column_names:
        events = events.append_column("version", pa.array(np.full(len(events), BATCH, np.int64)))
    return events.select(ARCHIVE_SCHEMA.names).cast(ARCHIVE_SCHEMA)


def read_archive(
    archive: Path, users: Collection[str] | None = None, event_type: str | None = None
) -> pa.Table:
    """Return the events of all segments, each event once, as it first arrived; those of the base come first.

    Args:
        archive: the directory.
        users: whose events are wanted; None are those of all.
        event_type: that is wanted; None are all.

    Raises:
        ArchiveDamaged: a segment cannot be read.
    """
    chosen = None if users is None else pc.field("user_id").isin(pa.array(list(users), pa.string()))
    if event_type is not None:
        of_type = pc.field("event_type") == event_type
        chosen = of_type if chosen is None else chosen & of_type
    tables = _again_if_merged(
        lambda: [
            _read(file, filters=chosen, schema=ARCHIVE_SCHEMA) for file in sorted(archive.glob("*.parquet"))
        ]
    )
    if not tables:
        return ARCHIVE_SCHEMA.empty_table()
    events = pa.concat_tables(tables)
    events = events.take(pc.sort_indices(events, [("version", "ascending")]))
    first = pa.table({"event_id": events["event_id"], "row": np.arange(len(events))})
    kept = first.group_by("event_id", use_threads=False).aggregate([("row", "min")])["row_min"]
    # The groups of PyArrow need not be in the order of their first rows.
    return events if len(kept) == len(events) else events.take(np.sort(kept.to_numpy()))


def archived_rows(archive: Path, users: Collection[str] | None) -> Iterator[tuple[str, UserEvents]]:
    """Yield the rows of all users, or of some, from a batch of events at a time; each time all are read."""
    counts = _again_if_merged(lambda: _events_of_users(archive))
    most = max(BATCH_EVENTS, counts.total() // MOST_READS)
    batch: list[str] = []
    left = most
    for user in counts if users is None else counts.keys() & users:
        if batch and counts[user] > left:
            yield from rows_of(read_archive(archive, batch))
            batch, left = [], most
        batch.append(user)
        left -= counts[user]
    if batch:
        yield from rows_of(read_archive(archive, batch))


def _events_of_users(archive: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for file in archive.glob("*.parquet"):
        for pair in _read(file, columns=["user_id"])["user_id"].value_counts().to_pylist():
            counts[pair["values"]] += pair["counts"]
    return counts


def _again_if_merged(read: Callable[[], Read]) -> Read:
    """Return what reading all segments gives, and read again if the stream merged some meanwhile."""
    for _ in range(READ_ATTEMPTS - 1):
        with contextlib.suppress(FileNotFoundError):
            return read()
    return read()


def _read(file: Path, **options: Any) -> pa.Table:
    try:
        return pq.read_table(file, **options)
    except (pa.ArrowException, ValueError, OSError) as error:
        if is_gone(error):
            raise FileNotFoundError(file) from error
        if not is_damage(error):
            raise
        raise ArchiveDamaged(
            f"{file} cannot be read ({type(error).__name__}): restore it from a backup; without one, move it "
            "away, and its events are lost"
        ) from error


def rows_of(events: pa.Table) -> Iterator[tuple[str, UserEvents]]:
    """Yield each user's row as a batch computes it; the stream holds the same row after these events.

    Args:
        events: columns of ARCHIVE_SCHEMA, in any order, each event once.
    """
    if not len(events):
        return
    user, users = pd.factorize(events["user_id"].to_numpy(zero_copy_only=False), sort=True)
    order = np.argsort(user, kind="stable")
    bounds = np.searchsorted(user[order], np.arange(len(users) + 1))
    columns = [column[order] for column in lines_of(events)]
    version = events["version"].to_numpy()[order]
    for code, name in enumerate(users.tolist()):
        rows = slice(bounds[code], bounds[code + 1])
        yield name, make_events(*[column[rows] for column in columns], version=int(version[rows].max()))


def lines_of(events: pa.Table) -> tuple[np.ndarray, ...]:
    """Return the arguments of `make_events`: item ids, at, kind, basket, key, paid and discount."""
    price, discount = events["price"].to_numpy(), events["discount"].to_numpy()
    units = np.where(np.isnan(price), 0, events["quantity"].to_numpy())  # 0 without a price
    baskets = events["basket_id"].combine_chunks().dictionary_encode()
    hashes = hash_ids(baskets.dictionary.to_pylist()).astype(np.uint32)
    return (
        events["item_id"].to_numpy(zero_copy_only=False),
        seconds(events["at"]),
        pc.index_in(events["event_type"], pa.array(KINDS)).to_numpy().astype(np.uint8),
        hashes[baskets.indices.to_numpy()],
        hash_ids(events["event_id"].to_pylist()),
        (np.nan_to_num(price) * units).astype(np.float32),
        (np.nan_to_num(discount) * units).astype(np.float32),
    )


def seconds(at: pa.ChunkedArray) -> np.ndarray:
    """Return times as seconds since the epoch, float64, the double nearest to the microseconds."""
    return at.cast(pa.timestamp("us", "UTC")).cast(pa.int64()).to_numpy() / 1e6


# The stream's events: one segment per partition and flush, named by the versions that it spans.

_STREAMED = re.compile(r"stream-(\d+)-(\d+)-(\d+)\.parquet")
MOST_SEGMENTS = 64  # of one partition; more are merged into one
WHOLE_ROWS = 1_000_000  # a segment of so many stays as it is: merging it again and again would take minutes


def streamed_name(partition: int, first: int, last: int) -> str:
    """Return the file name of a partition's segment from one version to another."""
    return f"stream-{partition:05d}-{first:020d}-{last:020d}.parquet"


def last_events(archive: Path, partitions: Collection[int]) -> dict[int, tuple[int, str]]:
    """Return version and id of the newest event in the archive of those partitions that have any.

    A segment may hold fewer versions than its name says: their users may have been forgotten since.
    """
    newest: dict[int, tuple[int, str]] = {}
    for file, (partition, _, last) in _streamed(archive):
        if partition not in partitions:
            continue  # another consumer may merge its segments now
        known = newest.get(partition, (BATCH, ""))
        if last > known[0] and len(events := _read(file, columns=["version", "event_id"])):
            version = pc.max(events["version"])
            event_id = events["event_id"][pc.index(events["version"], version).as_py()]
            newest[partition] = max(known, (version.as_py(), event_id.as_py()))
    return newest


def streamed_users(archive: Path, partitions: Collection[int]) -> set[str]:
    """Return the users with events from some partitions."""
    files = [file for file, (partition, *_) in _streamed(archive) if partition in partitions]
    columns = [_read(file, columns=["user_id"])["user_id"] for file in files]
    return {user for column in columns for user in pc.unique(column).to_pylist()}


def merge_segments(
    archive: Path, partition: int, kept: Callable[[pa.Table], pa.Table] = lambda events: events
) -> None:
    """Merge a partition's small segments into one; a concurrent reader sees every event, once or twice.

    `kept` leaves out events that were forgotten since their segment was written.
    """
    segments = [(file, first, last) for file, (own, first, last) in _streamed(archive) if own == partition]
    if len(segments) <= MOST_SEGMENTS:
        return
    segments = [one for one in segments if len(_read(one[0], columns=[])) < WHOLE_ROWS]
    if len(segments) <= MOST_SEGMENTS:
        return
    whole = kept(pa.concat_tables([_read(file, schema=ARCHIVE_SCHEMA) for file, *_ in segments]))
    name = streamed_name(
        partition, min(first for _, first, _ in segments), max(last for *_, last in segments)
    )
    write_segment(archive, whole, name)
    for file, *_ in segments:
        if file.name != name:
            file.unlink()


def _streamed(archive: Path) -> list[tuple[Path, tuple[int, int, int]]]:
    matched = [(file, _STREAMED.fullmatch(file.name)) for file in sorted(archive.glob("stream-*.parquet"))]
    return [(file, (int(m[1]), int(m[2]), int(m[3]))) for file, m in matched if m]
