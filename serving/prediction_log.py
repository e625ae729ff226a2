"""CONTRACT one record per response: answers in, Parquet segments out; a reader for monitoring.

The request never waits for the log: `append` puts the record on a bounded queue and a thread writes
it. Records that do not fit or cannot be written are dropped and counted. The log holds user ids, because
erasure and replay need them; text logs never do.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feature_repo.atomic_files import is_damage, is_gone, replaced
from serving.metrics import LOG_OPEN, LOG_RECORDS
from serving.schemas import Request, Response

STAMP = "%Y%m%dT%H%M%S"  # when a segment began, in UTC: its name starts with it
LONGEST = timedelta(days=2)  # from then to its last record; the setting allows a day
_TIME = pa.timestamp("us", "UTC")
_STRINGS = pa.list_(pa.string())
RECORD_SCHEMA = pa.schema(
    {
        "request_id": pa.string(),
        "user_id": pa.string(),
        "basket": _STRINGS,
        "store_id": pa.string(),
        "at": _TIME,
        "k": pa.int32(),
        "bundle_id": pa.string(),
        "rung": pa.string(),
        "degraded_reason": pa.string(),
        "item_ids": _STRINGS,
        "scores": pa.list_(pa.float32()),
        "sources": _STRINGS,
        "features": pa.list_(pa.float32()),  # the items' rows one after the other; see `feature_rows`
        "stage_ms": pa.map_(pa.string(), pa.float32()),
        "answered_at": _TIME,
        "row_version": pa.int64(),  # of the user's row that was read; null if there was none
        "profile": pa.string(),
        "prices": pa.list_(pa.float32()),  # as shown; null where no fact says one
        "experiment": pa.string(),  # these five are null outside an experiment; see `Trial`
        "variant": pa.string(),
        "unit": pa.string(),
        "place_explored": pa.int32(),
        "propensities": pa.list_(pa.float32()),
    }
)
FEATURE_NAMES_KEY = b"feature_names"  # file metadata: a JSON list
_REPEATING = [
    "bundle_id",
    "rung",
    "degraded_reason",
    "store_id",
    "profile",
    "experiment",
    "variant",
    "sources.list.element",
    "item_ids.list.element",
]
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")
_CHUNK = 64  # records turned into columns at a time; each turn holds the interpreter for ~0.5 ms
_TAKEN = LOG_RECORDS.labels("taken")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """An answer's part in an experiment.

    `propensities` is the chance of each shown item to stand in its place, given that the answer explores,
    (items,) float32. Inverse-propensity estimates weigh with 1 / propensity.
    """

    experiment: str
    variant: str
    unit: str  # the variant was drawn for it: here the request
    place_explored: int | None = None  # counted from 0; None: this answer does not explore
    propensities: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One answer: the request, the response, and the features the ranker saw.

    `features` has one row per returned item, in the response's order, (len(items), F). It has no rows if a
    fallback answered, or a cached list that was computed for another request. `answered_at` is in seconds
    since the epoch (UTC). `row_version` is that of the user's row: `reco replay` finds its events with it.
    """

    request: Request
    response: Response
    features: np.ndarray
    answered_at: float
    row_version: int | None = None
    trial: Trial | None = None


class LogDamaged(ValueError):
    """A segment cannot be read; the message names it."""


class RecordSink(Protocol):
    """Takes records: the prediction log, or a list in an evaluation."""

    def append(self, record: Record, /) -> object:
        """Take one record, without making its request wait."""


def records_to_table(records: Sequence[Record], feature_names: Sequence[str]) -> pa.Table:
    """Return the records as a table of RECORD_SCHEMA, the feature names in its metadata."""
    requests, responses = [one.request for one in records], [one.response for one in records]

    def each(owners: Sequence[object], *names: str) -> dict[str, list[Any]]:
        return {name: [one and getattr(one, name) for one in owners] for name in names}

    def shown(name: str) -> list[list[Any]]:
        return [[getattr(item, name) for item in response.items] for response in responses]

    columns = {
        **each(requests, "user_id", "basket", "store_id", "k", "profile"),
        **each(responses, "request_id", "bundle_id", "rung", "degraded_reason"),
        **each(records, "row_version"),
        **each([record.trial for record in records], *(one.name for one in fields(Trial))),
        "at": _times(request.at for request in requests),
        "answered_at": _times(record.answered_at for record in records),
        "item_ids": shown("item_id"),
        "scores": shown("score"),
        "sources": shown("source"),
        "prices": shown("price"),
        "features": _flat([record.features for record in records], len(feature_names)),
        "stage_ms": [list(response.stage_ms.items()) for response in responses],
    }
    return pa.table(columns, schema=_schema(feature_names))


def read_log(
    directory: Path, since: datetime | None = None, until: datetime | None = None, features: bool = True
) -> pa.Table:
    """Return the records answered in [since, until), oldest first; an empty log is an empty table.

    Segments of another feature schema are converted to the newest one: features are matched by name, and
    one that a segment lacks is NaN there. Without `features`, most of a log's bytes, that column is null.

    Raises:
        LogDamaged: a segment cannot be read.
    """
    return join_segments(list(read_segments(directory, since, until, features)), features)


def read_segments(
    directory: Path, since: datetime | None = None, until: datetime | None = None, features: bool = True
) -> Iterator[pa.Table]:
    """Yield the records of one segment after the other, see `read_log`: a long log fits no memory."""
    bounds = [("answered_at", op, at) for op, at in ((">=", since), ("<", until)) if at is not None]
    # One schema for all: columns that a segment of an older version lacks are null.
    every = sorted(directory.glob("*.parquet"))
    for path in [path for path in every if not is_older(path, since)] or every[-1:]:  # one has the names
        if (segment := _read_segment(path, bounds or None, features)) is not None:
            yield segment


def join_segments(segments: Sequence[pa.Table], features: bool = True) -> pa.Table:
    """Return the records of segments, or of parts of them, as one table in order of time."""
    if not segments:
        return records_to_table([], [])
    if not features:
        return pa.concat_tables([one.replace_schema_metadata() for one in segments]).sort_by("answered_at")
    names = feature_names(segments[-1])
    return pa.concat_tables([_with_features(segment, names) for segment in segments]).sort_by("answered_at")


def is_older(segment: Path, since: datetime | None) -> bool:
    """Return whether a segment was surely closed before a time: its name begins with its start."""
    if since is None or since.year < 2 or not re.match(r"\d{8}T\d{6}-", segment.name):
        return False
    return segment.name[:15] < (since.astimezone(UTC) - LONGEST).strftime(STAMP)


def _read_segment(
    path: Path, bounds: list[tuple[str, str, datetime]] | None, features: bool
) -> pa.Table | None:
    """Return a segment's records, or None if `reco feedback --keep-days` has just deleted it."""
    try:
        columns = None if features else [name for name in pq.read_schema(path).names if name != "features"]
        table = pq.read_table(path, columns=columns, filters=bounds)
    except (pa.ArrowException, ValueError, OSError) as error:
        if is_gone(error):
            return None
        if not is_damage(error):
            raise
        raise LogDamaged(
            f"{path} cannot be read ({type(error).__name__}), expected a segment of the prediction log: "
            "restore it from a backup; without one, move it away, and its answers are lost"
        ) from error
    for field in RECORD_SCHEMA:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(RECORD_SCHEMA.names)


def feature_names(table: pa.Table) -> list[str]:
    """Return the names of the columns of `feature_rows(table)`."""
    names: list[str] = json.loads((table.schema.metadata or {}).get(FEATURE_NAMES_KEY, b"[]"))
    return names


def feature_rows(table: pa.Table) -> np.ndarray:
    """Return the feature rows of all returned items, (items, F) float32, in the table's order."""
    flat = pc.list_flatten(table["features"]).to_numpy()
    return np.asarray(flat, np.float32).reshape(-1, max(len(feature_names(table)), 1))


class PredictionLog:
    """Writes records to Parquet segments in one directory, from a thread of its own.

    A segment gets its name when it holds `segment_records` records, is `segment_s` seconds old, or the log
    is closed. Until then it is a stream with a hidden name that readers skip. The next log in this directory
    publishes the segments of killed processes: a killed process loses its last `poll_s` seconds.
    """

    def __init__(
        self,
        directory: Path,
        feature_names: Sequence[str],
        *,
        queue_records: int = 8_192,
        segment_records: int = 10_000,
        segment_s: float = 60.0,
        poll_s: float = 1.0,
    ) -> None:
        self.directory = directory
        self.written = 0
        self.dropped = 0
        self._names = tuple(feature_names)
        # A deque and a poll, not a Queue: a thread that wakes on every request would compete with the next
        # request for the interpreter.
        self._queue: deque[Record] = deque()
        self._queue_records = queue_records
        self._segment_records, self._segment_s = segment_records, segment_s
        self._poll_s = poll_s
        self._segment: _Segment | None = None
        self._closing = threading.Event()
        # Several processes, and pods that all have the same process id, write to one directory.
        self._writer = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="prediction-log", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> None:
        """Queue one record and return at once; it is dropped when the queue is full or closed."""
        _TAKEN.inc()  # at once: this count outlives a killed process
        LOG_OPEN.inc()
        if len(self._queue) >= self._queue_records or self._closing.is_set():
            self._drop(1)
        else:
            self._queue.append(record)

    def close(self) -> None:
        """Write the queued records and wait until they are on disk."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        self._recover()
        while not self._closing.wait(self._poll_s):
            self._write_queued()
        self._write_queued()
        self._finish_segment()

    def _recover(self) -> None:
        try:
            if count := recover_segments(self.directory):
                LOG_RECORDS.labels("recovered").inc(count)
                _log.warning("prediction log: %d records of a killed process recovered", count)
        except OSError as error:
            _log.warning("prediction log: segments of killed processes stay open: %s", error)
        except Exception:  # noqa: BLE001 - the edge of the thread: one bad segment must not end the log
            _log.exception("prediction log: segments of killed processes stay open")

    def _write_queued(self) -> None:
        while self._queue:
            chunk = [self._queue.popleft() for _ in range(min(_CHUNK, len(self._queue)))]
            self._write(chunk)
            time.sleep(0)
        if self._segment and time.monotonic() - self._segment.opened_at >= self._segment_s:
            self._finish_segment()

    def _write(self, chunk: list[Record]) -> None:
        try:
            table = records_to_table(chunk, self._names)
            if self._segment is None:
                name = f"{self._writer}-{next(self._numbers):06d}"
                self._segment = _Segment(self.directory, name, table.schema)
            self._segment.write(table)
        except OSError as error:
            self._abandon_segment(error, len(chunk))
        except Exception:  # noqa: BLE001 - the edge of the thread: one bad record must not end the log
            _log.exception("prediction log: %d records could not be written", len(chunk))
            self._drop(len(chunk))
        if self._segment and self._segment.rows >= self._segment_records:
            self._finish_segment()

    def _finish_segment(self) -> None:
        if self._segment is None:
            return
        try:
            self._segment.publish()
        except OSError as error:
            self._abandon_segment(error, 0)
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("prediction log: a segment could not be published")
            self._abandon_segment(error, 0)
        else:
            self.written += self._segment.rows
            LOG_RECORDS.labels("written").inc(self._segment.rows)
            LOG_OPEN.dec(self._segment.rows)
            self._segment = None

    def _abandon_segment(self, error: Exception, unwritten: int) -> None:
        lost = unwritten
        if self._segment is not None:
            lost += self._segment.rows
            self._segment.discard()
            self._segment = None
        self._drop(lost)
        _log.warning("prediction log: %d records lost, cannot write to %s: %s", lost, self.directory, error)

    def _drop(self, records: int) -> None:
        self.dropped += records
        LOG_RECORDS.labels("dropped").inc(records)
        LOG_OPEN.dec(records)


class _Segment:
    """One Parquet file to be: an Arrow stream with a hidden name first, which survives a killed process."""

    def __init__(self, directory: Path, name: str, schema: pa.Schema) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime(STAMP, time.gmtime(time.time()))
        self._path = directory / f"{stamp}-{name}.parquet"
        self._file = _stream_of(self._path).open("xb")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)  # ends with this process, however that ends
            self._writer = pa.ipc.new_stream(self._file, schema, options=_COMPRESSED)
        except BaseException:
            self.discard()
            raise
        self.opened_at = time.monotonic()
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        self._writer.write_table(table)
        self._file.flush()
        self.rows += len(table)

    def publish(self) -> None:
        self._writer.close()
        self._file.flush()
        _to_parquet(self._path)
        self.discard()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            _stream_of(self._path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closing writes the buffer, which a full disk refuses
            self._file.close()


def recover_segments(directory: Path) -> int:
    """Publish the segments that killed processes left open; return the number of their records.

    A segment is open as long as its writer lives: the writer holds a lock on it.
    """
    count = 0
    for stream in sorted(directory.glob(".*.parquet.tmp")):
        not_ours = (FileNotFoundError, BlockingIOError, PermissionError)
        with contextlib.suppress(*not_ours), stream.open("r+b") as file:
            stat = os.fstat(file.fileno())  # NFS locks a file only if it is open for writing
            if not stat.st_size and time.time() - stat.st_mtime < 60:
                continue  # its writer may be about to lock it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if stream.exists():  # else another process was first
                count += _to_parquet(directory / stream.name[1:].removesuffix(".tmp"))
                stream.unlink()
    return count


def _stream_of(segment: Path) -> Path:
    return segment.with_name(f".{segment.name}.tmp")


def _to_parquet(segment: Path) -> int:
    """Write a segment from its stream, as far as the stream is whole; return the number of records."""
    batches = _whole_batches(_stream_of(segment))
    first = next(batches, None)
    if first is None:
        return 0
    count = 0
    # A dictionary of the features would cost more than all others.
    form = {"compression": "zstd", "compression_level": 1, "use_dictionary": _REPEATING}
    with replaced(segment) as part, pq.ParquetWriter(part, first.schema, **form) as writer:
        for batch in itertools.chain([first], batches):
            writer.write_batch(batch)
            count += len(batch)
            time.sleep(0)
    return count


def _whole_batches(stream: Path) -> Iterator[pa.RecordBatch]:
    with stream.open("rb") as file:  # read batch by batch: a whole stream takes tens of megabytes
        try:
            reader = pa.ipc.open_stream(file)
            while True:
                yield reader.read_next_batch()
        except (StopIteration, pa.ArrowInvalid):  # the end may be cut off
            return
        except OSError as error:  # Arrow's own says the same
            if not is_damage(error):
                raise


def _schema(names: Sequence[str]) -> pa.Schema:
    return RECORD_SCHEMA.with_metadata({FEATURE_NAMES_KEY: json.dumps(list(names)).encode()})


def _times(seconds: Iterable[float]) -> list[int]:
    return [round(at * 1e6) for at in seconds]


def _flat(rows: Iterable[np.ndarray], width: int) -> list[np.ndarray]:
    # reshape refuses rows of another width; without it they would run into each other
    return [np.asarray(row, np.float32).reshape(len(row), width).ravel() for row in rows]


def _with_features(table: pa.Table, names: list[str]) -> pa.Table:
    present = feature_names(table)
    if present == names:
        return table
    place = {name: column for column, name in enumerate(present)}
    source = feature_rows(table)
    aligned = np.full((len(source), len(names)), np.nan, np.float32)
    for column, name in enumerate(names):
        if name in place:
            aligned[:, column] = source[:, place[name]]
    counts = np.asarray(pc.list_value_length(table["features"]).to_numpy()) // max(len(present), 1)
    rows = np.split(aligned, np.cumsum(counts)[:-1]) if len(counts) else []
    field = RECORD_SCHEMA.field("features")
    column = pa.array(_flat(rows, len(names)), field.type)
    table = table.set_column(table.schema.get_field_index("features"), field, column)
    return table.replace_schema_metadata(_schema(names).metadata)
