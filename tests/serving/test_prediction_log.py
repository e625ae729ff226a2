"""Records of answers reach Parquet segments in the background, and are read back as they were."""

import errno
import os
import shutil
import threading
import tracemalloc
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from serving import prediction_log
from serving.prediction_log import (
    RECORD_SCHEMA,
    LogDamaged,
    PredictionLog,
    Record,
    Trial,
    feature_names,
    feature_rows,
    read_log,
    records_to_table,
    recover_segments,
)
from serving.schemas import Recommendation, Request, Response
from tests.chaos.procs import eventually
from tests.serving.conftest import metric

NAMES = ("recency_days", "count")
NOON = datetime(2017, 12, 5, 12, tzinfo=UTC)


def record(number: int = 0, items: int = 2, names: tuple[str, ...] = NAMES, rung: str = "full") -> Record:
    shown = tuple(
        Recommendation(f"i{n}", 0.5 / (n + 1), "history", "bought before", None if n else 1.5)
        for n in range(items)
    )
    request = Request(("a", "b"), NOON.timestamp(), "user-7", None, 10, f"r{number}")
    response = Response(f"r{number}", shown, "bundle-1", rung, False, None, {"ranking": 1.5, "total": 2.5})
    features = np.arange(items * len(names), dtype=np.float32).reshape(items, len(names)) + number
    return Record(request, response, features, NOON.timestamp() + number)


def test_a_record_round_trips() -> None:
    trial = Trial("exploration", "explored", "r3", 1, np.array([1, 0.25], np.float32))
    table = records_to_table([replace(record(3), trial=trial), record(4, items=0, rung="empty")], NAMES)
    assert table.schema.equals(RECORD_SCHEMA)
    assert feature_names(table) == list(NAMES)
    first, second = table.to_pylist()
    assert first == {
        "request_id": "r3",
        "user_id": "user-7",
        "basket": ["a", "b"],
        "store_id": None,
        "at": NOON,
        "k": 10,
        "profile": "default",
        "bundle_id": "bundle-1",
        "rung": "full",
        "degraded_reason": None,
        "item_ids": ["i0", "i1"],
        "scores": [0.5, 0.25],
        "sources": ["history", "history"],
        "features": [3.0, 4.0, 5.0, 6.0],
        "stage_ms": [("ranking", 1.5), ("total", 2.5)],
        "answered_at": NOON + timedelta(seconds=3),
        "row_version": None,
        "prices": [1.5, None],
        "experiment": "exploration",
        "variant": "explored",
        "unit": "r3",
        "place_explored": 1,
        "propensities": [1.0, 0.25],
    }
    assert [second[one.name] for one in fields(Trial)] == [None] * 5
    assert (second["item_ids"], second["features"]) == ([], [])
    np.testing.assert_array_equal(feature_rows(table), [[3, 4], [5, 6]])


def test_appended_records_are_read_back_in_order_and_between_times(tmp_path: Path) -> None:
    log = PredictionLog(tmp_path / "log", NAMES, segment_records=50)
    for number in range(130):
        log.append(record(number))
    log.close()
    assert (log.written, log.dropped) == (130, 0)
    assert len(list((tmp_path / "log").glob("*.parquet"))) == 3  # whole chunks of 64: 64, 64, 2
    whole = read_log(tmp_path / "log")
    assert whole["request_id"].to_pylist() == [f"r{n}" for n in range(130)]
    assert feature_rows(whole).shape == (260, 2)
    part = read_log(tmp_path / "log", NOON + timedelta(seconds=10), NOON + timedelta(seconds=20))
    assert part["request_id"].to_pylist() == [f"r{n}" for n in range(10, 20)]


def test_an_empty_log_is_an_empty_table(tmp_path: Path) -> None:
    assert len(read_log(tmp_path / "never written")) == 0
    before = set(threading.enumerate())  # another test of this process may have left one
    PredictionLog(tmp_path / "log", NAMES).close()
    assert "prediction-log" not in {thread.name for thread in set(threading.enumerate()) - before}
    assert read_log(tmp_path / "log").schema.equals(RECORD_SCHEMA)


def test_a_segment_is_written_when_its_time_is_over(tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, NAMES, segment_s=0.05, poll_s=0.01)
    log.append(record())
    eventually(lambda: list(tmp_path.glob("*.parquet")))
    assert not list(tmp_path.glob(".*.tmp"))
    log.close()
    assert len(read_log(tmp_path)) == 1


def test_a_full_queue_drops_and_counts_and_never_waits(tmp_path: Path) -> None:
    log, before = (
        PredictionLog(tmp_path, NAMES, queue_records=10, poll_s=600.0),
        metric("reco_log_records_open"),
    )
    for number in range(1_000):  # a call that waited for room would wait for the ten minutes of `poll_s`
        log.append(record(number))
    assert metric("reco_log_records_open") == before + 10, "what waits in the queue is not lost"
    log.close()
    assert (log.written, log.dropped) == (10, 990)
    log.append(record())
    assert log.dropped == 991
    assert metric("reco_log_records_open") == before


def test_an_unwritable_disk_costs_records_not_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "log"
    place.write_text("a file where the directory should be")
    log = PredictionLog(place, NAMES, poll_s=0.01)
    log.append(record(0))
    eventually(lambda: log.dropped == 1)
    place.unlink()  # space again
    log.append(record(1))
    log.close()
    assert (log.written, log.dropped) == (1, 1)
    assert "1 records lost" in caplog.text
    assert "user-7" not in caplog.text


def test_a_full_disk_leaves_no_partial_segment(tmp_path: Path) -> None:
    """A directory that vanishes under an open segment fails at its rename, as a full disk does."""
    log = PredictionLog(tmp_path / "log", NAMES, poll_s=0.01)
    log.append(record(0))
    eventually(lambda: list((tmp_path / "log").glob(".*.tmp")))
    next((tmp_path / "log").glob(".*.tmp")).unlink()
    log.append(record(1))
    log.close()
    assert (log.written, log.dropped) == (0, 2)
    assert list((tmp_path / "log").iterdir()) == []


def test_a_killed_process_loses_only_the_end_of_its_log(tmp_path: Path) -> None:
    """The stream is whole up to the last write; here the process died in the middle of that one."""
    log = PredictionLog(tmp_path, NAMES, poll_s=0.01)
    for number in range(3):
        log.append(record(number))
        eventually(lambda number=number: log._segment is not None and log._segment.rows == number + 1)  # type: ignore[misc]
    [stream] = tmp_path.glob(".*.tmp")
    assert recover_segments(tmp_path) == 0, "its writer lives"
    content = stream.read_bytes()
    log.close()

    left = tmp_path / "left"
    for cut, expected in ((0, ["r0", "r1", "r2"]), (100, ["r0", "r1"]), (len(content) - 3, [])):
        left.mkdir()
        (left / stream.name).write_bytes(content[: len(content) - cut])
        (left / ".older.parquet.tmp").write_bytes(b"PAR1")
        PredictionLog(left, NAMES).close()
        assert read_log(left)["request_id"].to_pylist() == expected
        assert not list(left.glob(".*"))
        shutil.rmtree(left)


def test_a_stream_is_turned_into_a_segment_batch_by_batch(tmp_path: Path) -> None:
    """The whole stream at once stayed with the process: its allocator does not give such blocks back."""
    segment = prediction_log._Segment(tmp_path, "a", records_to_table([], NAMES).schema)
    noise = np.random.default_rng(0)
    for number in range(64):
        one, basket = record(number), tuple(noise.bytes(32).hex() for _ in range(1_000))
        one = replace(one, request=replace(one.request, basket=basket))
        segment.write(records_to_table([one], NAMES))
    [stream] = tmp_path.glob(".*.tmp")
    size = stream.stat().st_size
    tracemalloc.start()
    segment.publish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 2_000_000
    assert peak < size / 4
    assert len(read_log(tmp_path)) == 64


def test_a_stream_that_cannot_be_read_is_no_stream_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / ".a.parquet.tmp").symlink_to("/proc/self/mem")  # its first page is an input/output error
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        prediction_log._to_parquet(tmp_path / "a.parquet")
    assert not (tmp_path / "a.parquet").exists()


def test_segments_that_ended_before_are_not_opened(tmp_path: Path) -> None:
    def write(name: str) -> None:
        pq.write_table(records_to_table([record()], NAMES), tmp_path / name)

    write(f"{NOON - timedelta(days=1):%Y%m%dT%H%M%S}-a.parquet")
    write("of-another-name.parquet")
    assert len(read_log(tmp_path, since=datetime(1, 1, 1, tzinfo=UTC))) == 2, "two days before are no date"
    (tmp_path / f"{NOON - timedelta(days=3):%Y%m%dT%H%M%S}-b.parquet").write_bytes(b"not read")
    assert len(read_log(tmp_path, since=NOON - timedelta(seconds=1))) == 2


@pytest.mark.parametrize("features", [True, False])
def test_a_segment_that_is_deleted_while_a_log_is_read_is_left_out(tmp_path: Path, features: bool) -> None:
    pq.write_table(records_to_table([record()], NAMES), tmp_path / "1.parquet")
    (tmp_path / "2.parquet").symlink_to("gone")  # listed, and not there any more
    assert len(read_log(tmp_path, features=features)) == 1


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("damage", ["empty", "cut short", "flipped"])
def test_a_damaged_segment_is_named(tmp_path: Path, damage: str, features: bool) -> None:
    """A page that is damaged inside is an OSError to pyarrow, and its message names no file."""
    pq.write_table(records_to_table([record()], NAMES), tmp_path / "1.parquet")
    content = (tmp_path / "1.parquet").read_bytes()
    broken = {
        "empty": b"",
        "cut short": content[:-100],
        "flipped": content[:4] + b"\xff" * 200 + content[204:],
    }
    (tmp_path / "2.parquet").write_bytes(broken[damage])
    with pytest.raises(LogDamaged, match=r"2\.parquet cannot be read .* move it away"):
        read_log(tmp_path, features=features)


def test_a_disk_that_is_full_at_once_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("serving.prediction_log.pa.ipc.new_stream", full)
    log = PredictionLog(tmp_path, NAMES, poll_s=0.01)
    log.append(record())
    log.close()
    assert (log.written, log.dropped, list(tmp_path.iterdir())) == (0, 1, [])


def test_one_bad_record_does_not_end_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = PredictionLog(tmp_path, NAMES, poll_s=0.01)
    log.append(record(items=2, names=("one",)))  # of another width
    eventually(lambda: log.dropped == 1)
    log.append(record(1))
    log.close()
    assert (log.written, log.dropped) == (1, 1)


@pytest.mark.parametrize(("act", "written"), [("recover_segments", 2), ("_to_parquet", 1)])
def test_a_segment_that_fails_for_want_of_memory_does_not_end_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, written: int
) -> None:
    whole, failures = getattr(prediction_log, act), iter([MemoryError("malloc of size 64 failed")])

    def fails_once(path: Path) -> int:
        for error in failures:
            raise error
        return int(whole(path))

    monkeypatch.setattr(prediction_log, act, fails_once)
    log = PredictionLog(tmp_path, NAMES, segment_s=0.0, poll_s=0.01)
    for number in (1, 2):
        log.append(record(number))
        eventually(lambda number=number: log.written + log.dropped == number)  # type: ignore[misc]
    log.close()
    assert (log.written, log.dropped) == (written, 2 - written)


def test_segments_of_an_older_feature_schema_are_matched_by_name(tmp_path: Path) -> None:
    pq.write_table(
        records_to_table([record(0, names=("count", "gone"))], ("count", "gone")), tmp_path / "1.parquet"
    )
    pq.write_table(records_to_table([record(1)], NAMES), tmp_path / "2.parquet")
    table = read_log(tmp_path)
    assert feature_names(table) == list(NAMES)
    np.testing.assert_array_equal(feature_rows(table), [[np.nan, 0], [np.nan, 2], [1, 2], [3, 4]])


def test_a_segment_from_before_the_experiments_is_read_with_nulls(tmp_path: Path) -> None:
    newer = records_to_table([record(1)], NAMES)
    pq.write_table(newer, tmp_path / "2-new.parquet")
    added = ["prices", *(one.name for one in fields(Trial))]
    pq.write_table(records_to_table([record(0)], NAMES).drop_columns(added), tmp_path / "1-old.parquet")
    table = read_log(tmp_path)
    assert table["request_id"].to_pylist() == ["r0", "r1"]
    assert table.schema.equals(RECORD_SCHEMA)
    assert [table[name][0].as_py() for name in added] == [None] * 6


def test_writers_in_one_directory_do_not_overwrite_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods that share a volume all have process id 1."""
    monkeypatch.setattr("serving.prediction_log.os.getpid", lambda: 1)
    writers = [PredictionLog(tmp_path, NAMES) for _ in range(3)]
    for number, writer in enumerate(writers):
        writer.append(record(number))
    for writer in writers:
        writer.close()
    assert read_log(tmp_path)["request_id"].to_pylist() == ["r0", "r1", "r2"]
    assert len(list(tmp_path.iterdir())) == 3
