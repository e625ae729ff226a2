"""Every event counts once, as it first arrived; a batch makes the same rows of them as a stream."""

import os
import tracemalloc
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feature_repo.aggregates import (
    BATCH,
    CLICK,
    IMPRESSION,
    PURCHASE,
    fold,
    hash_ids,
    make_events,
    no_events,
    pack,
    summary_of,
)
from feature_repo.events import EVENT_SCHEMA
from feature_repo.stream import archive
from feature_repo.stream.archive import (
    ARCHIVE_SCHEMA,
    BASE,
    ArchiveDamaged,
    archived_rows,
    last_events,
    lines_of,
    merge_segments,
    read_archive,
    rows_of,
    seconds,
    streamed_name,
    write_segment,
)

MONDAY = datetime(2024, 1, 1, tzinfo=UTC)


def table(*rows: dict[str, Any]) -> pa.Table:
    """Events of EVENT_SCHEMA, with `version` if a row has one; omitted values get defaults."""
    filled = []
    for number, row in enumerate(rows):
        made = {
            "event_id": f"e{number}",
            "event_type": "purchase",
            "user_id": "ann",
            "basket_id": "b",
            "item_id": "tea",
            "at": MONDAY + timedelta(minutes=number),
            "quantity": 1,
            "price": 2.0,
            "discount": 0.0,
            "store_id": "",
        }
        filled.append(made | row)
    schema = ARCHIVE_SCHEMA if any("version" in row for row in rows) else EVENT_SCHEMA
    return pa.Table.from_pylist(filled, schema=schema)


def ids(events: pa.Table) -> list[str]:
    return sorted(events["event_id"].to_pylist())


# ------------------------------------------------------------------------------------------ segments


def test_an_archive_without_segments_is_empty(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        assert read_archive(folder).schema == ARCHIVE_SCHEMA
        assert len(read_archive(folder, ["ann"])) == 0
        assert list(rows_of(read_archive(folder))) == []


def test_a_data_set_has_the_batch_version_and_a_segment_its_own_versions(tmp_path: Path) -> None:
    write_segment(tmp_path, table({"event_id": "old"}), BASE)
    write_segment(tmp_path, table({"event_id": "new", "version": 17}), "0-17.parquet")
    read = read_archive(tmp_path)
    assert read.schema == ARCHIVE_SCHEMA
    assert dict(zip(read["event_id"].to_pylist(), read["version"].to_pylist(), strict=True)) == {
        "old": BATCH,
        "new": 17,
    }


def test_segments_survive_a_round_trip(tmp_path: Path) -> None:
    """Microseconds, an unknown price, letters of any script, and columns in another order."""
    rows = table(
        {"at": MONDAY + timedelta(microseconds=1), "price": None, "item_id": "thé", "version": 3},
        {
            "at": MONDAY + timedelta(microseconds=2),
            "event_type": "click",
            "user_id": "Ünal",
            "version": 2**40,
        },
    )
    write_segment(tmp_path, rows.select(rows.column_names[::-1]), "any.parquet")
    assert read_archive(tmp_path).sort_by("version").equals(rows)


# ------------------------------------------------------------------------------------------- one event


def test_a_damaged_segment_is_named_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_SEGMENTS", 0)
    write_segment(tmp_path, table({"event_id": "e"}), BASE)
    segment = tmp_path / streamed_name(0, 0, 9)
    segment.write_bytes(b"half a segment")
    message = f"{segment.name} cannot be read .*: restore it from a backup"
    reads: list[Callable[[], object]] = [
        lambda: read_archive(tmp_path),
        lambda: last_events(tmp_path, {0}),
        lambda: merge_segments(tmp_path, 0),
    ]
    for read in reads:
        with pytest.raises(ArchiveDamaged, match=message):
            read()


@pytest.mark.parametrize("names", [("a.parquet", "b.parquet"), ("b.parquet", "a.parquet")])
def test_an_event_in_two_segments_counts_once_as_it_first_arrived(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """The smallest version was folded first; the names of the segments do not matter."""
    early = table({"event_id": "x", "item_id": "tea", "version": 4}, {"event_id": "y", "version": 5})
    late = table({"event_id": "x", "item_id": "milk", "version": 9}, {"event_id": "z", "version": 2})
    write_segment(tmp_path, early, names[0])
    write_segment(tmp_path, late, names[1])
    read = {row["event_id"]: row for row in read_archive(tmp_path).to_pylist()}
    assert sorted(read) == ["x", "y", "z"]
    assert (read["x"]["item_id"], read["x"]["version"]) == ("tea", 4)


def test_the_base_comes_first_in_its_own_order(tmp_path: Path) -> None:
    """Of 2,000 events PyArrow numbers a few groups late."""
    base = table(*({} for _ in range(2_000)))
    write_segment(tmp_path, base, BASE)
    streamed = table(*({"version": number} for number in range(2_100)))
    write_segment(tmp_path, streamed[1_000:], streamed_name(0, 1_000, 2_099))
    assert read_archive(tmp_path)["event_id"].to_pylist() == [f"e{number}" for number in range(2_100)]


def test_a_stream_resumes_behind_the_newest_version_in_its_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names give the stream's position; the users of the last events may have been forgotten since."""
    for partition, first, held in ((0, 0, [0, 1]), (0, 2, []), (0, 4, [4]), (1, 0, [])):
        events = table(*[{"event_id": f"{partition}-{at}", "version": at} for at in held])
        events = events if held else ARCHIVE_SCHEMA.empty_table()
        write_segment(tmp_path, events, streamed_name(partition, first, first + 1))
    assert last_events(tmp_path, {0, 1}) == {0: (4, "0-4")}
    monkeypatch.setattr(archive, "MOST_SEGMENTS", 1)
    merge_segments(tmp_path, 0)
    assert last_events(tmp_path, {0, 1}) == {0: (4, "0-4")}
    assert ids(read_archive(tmp_path)) == ["0-0", "0-1", "0-4"]


def test_a_consumer_opens_no_segment_of_another_s_partition(tmp_path: Path) -> None:
    """The other one may merge and remove it at any moment."""
    write_segment(tmp_path, table({"event_id": "a", "version": 3}), streamed_name(0, 3, 3))
    (tmp_path / streamed_name(1, 7, 7)).write_bytes(b"half a segment")
    assert last_events(tmp_path, {0}) == {0: (3, "a")}


def test_a_merge_leaves_out_forgotten_events_and_large_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_SEGMENTS", 1)
    monkeypatch.setattr(archive, "WHOLE_ROWS", 3)
    for first, held in ((0, [0, 1, 2]), (3, [3]), (4, [4])):
        events = table(*[{"event_id": f"e{at}", "version": at} for at in held])
        write_segment(tmp_path, events, streamed_name(0, first, held[-1]))

    def kept(events: pa.Table) -> pa.Table:
        return events.filter(pc.not_equal(events["event_id"], "e3"))

    merge_segments(tmp_path, 0, kept)
    assert sorted(file.name for file in tmp_path.glob("*.parquet")) == [
        streamed_name(0, 0, 2),
        streamed_name(0, 3, 4),
    ]
    assert ids(read_archive(tmp_path)) == ["e0", "e1", "e2", "e4"]


def test_segments_merged_during_a_read_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(3):
        write_segment(tmp_path, table({"event_id": f"e{at}", "version": at}), streamed_name(0, at, at))
    read = pq.read_table

    def slow(file: Path, **options: Any) -> pa.Table:
        if "filters" in options:  # read_archive has listed the files, and now the stream merges them
            merge_segments(tmp_path, 0)
        return read(file, **options)

    monkeypatch.setattr(archive, "MOST_SEGMENTS", 1)
    monkeypatch.setattr("feature_repo.stream.archive.pq.read_table", slow)
    assert ids(read_archive(tmp_path)) == ["e0", "e1", "e2"]
    assert len(list(tmp_path.glob("*.parquet"))) == 1


@pytest.mark.parametrize("most", [1, 3, 100])
def test_rows_are_those_of_the_whole_archive_however_few_events_are_read_at_a_time(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "BATCH_EVENTS", most)
    users = ["ann", "bob", "cid", "ann", "bob", "ann"]
    write_segment(tmp_path, table(*[{"user_id": user} for user in users]), BASE)
    write_segment(tmp_path, table({"event_id": "new", "user_id": "bob", "version": 1}), "0.parquet")
    whole = dict(rows_of(read_archive(tmp_path)))
    assert whole.keys() == {"ann", "bob", "cid"}
    found = list(archived_rows(tmp_path, None))
    assert len(found) == 3
    assert all(pack(row) == pack(whole[user]) for user, row in found)
    some = dict(archived_rows(tmp_path, {"bob", "unknown"}))
    assert {user: pack(row) for user, row in some.items()} == {"bob": pack(whole["bob"])}


def test_only_the_users_asked_for_are_read(tmp_path: Path) -> None:
    users = ["ann", "bob", "cid", "ann"]
    write_segment(tmp_path, table(*[{"user_id": user} for user in users]), BASE)
    write_segment(tmp_path, table({"event_id": "new", "user_id": "bob", "version": 1}), "0.parquet")
    assert ids(read_archive(tmp_path, ["ann"])) == ["e0", "e3"]
    assert ids(read_archive(tmp_path, {"bob", "unknown"})) == ["e1", "new"]
    assert len(read_archive(tmp_path, ["unknown"])) == 0
    assert len(read_archive(tmp_path, [])) == 0
    assert len(read_archive(tmp_path)) == 5


# ------------------------------------------------------------------------------------------------ rows


def test_a_row_by_hand() -> None:
    events = table(
        {"item_id": "tea", "quantity": 3, "price": 2.0, "discount": 0.5, "basket_id": "b1", "version": 4},
        {"item_id": "milk", "event_type": "click", "basket_id": "-", "price": None, "version": 8},
        {"item_id": "tea", "event_type": "impression", "basket_id": "-", "version": 6},
        {"item_id": "bread", "price": None, "discount": 0.5, "basket_id": "b2", "version": 5},
        {"item_id": "jam", "user_id": "bob", "version": 3},
    )
    (ann, row), (bob, other) = rows_of(events)
    assert (ann, bob) == ("ann", "bob")
    assert row.items.tolist() == ["bread", "milk", "tea"]
    assert row.item.tolist() == [2, 1, 2, 0]
    assert row.at.tolist() == [MONDAY.timestamp() + 60 * minute for minute in range(4)]
    assert row.kind.tolist() == [PURCHASE, CLICK, IMPRESSION, PURCHASE]
    assert row.paid[[0, 3]].tolist() == [6, 0], "an unknown price counts as 0"
    assert row.discount[[0, 3]].tolist() == [1.5, 0]
    assert row.basket[[0, 3]].tolist() == hash_ids(["b1", "b2"]).astype(np.uint32).tolist()
    assert row.key.tolist() == hash_ids([f"e{number}" for number in range(4)]).tolist()
    assert row.version == 8
    assert (other.items.tolist(), other.version) == (["jam"], 3)
    assert summary_of(row, MONDAY.timestamp() + 3_600)[1].spend == 6


def test_a_long_id_takes_its_memory_once() -> None:
    """Not once for each line of all shoppers: 128 letters take half a kilobyte there."""
    lines = [{"user_id": f"u{number % 100:03d}", "version": number} for number in range(20_000)]
    peaks = []
    for letters in (4, 128):
        events = table({"user_id": "v" * letters, "item_id": "i" * letters, "version": 0}, *lines[1:])
        tracemalloc.start()
        assert sum(len(row) for _, row in rows_of(events)) == len(lines)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize("micros", [0, 1, 499_999, 500_000, 999_999])
def test_times_are_the_doubles_nearest_to_their_microseconds(micros: int) -> None:
    at = MONDAY + timedelta(microseconds=micros)
    [(_, row)] = rows_of(table({"at": at, "version": 0}))
    assert row.at[0] == (int(MONDAY.timestamp()) * 1_000_000 + micros) / 1e6
    assert round(row.at[0] * 1e6) % 1_000_000 == micros, "neighbouring microseconds stay distinct"
    assert len(row.before(at.timestamp())) == 0
    assert len(row.before((at + timedelta(microseconds=1)).timestamp())) == 1
    for unit in ("us", "ns"):
        assert seconds(pa.chunked_array([pa.array([at], pa.timestamp(unit, "UTC"))]))[0] == row.at[0]


one_event = st.fixed_dictionaries(
    {
        "event_type": st.sampled_from(["purchase", "purchase", "click", "impression"]),
        "user_id": st.sampled_from(["ann", "bob", "ü"]),
        "basket_id": st.sampled_from(["b1", "b2", "b3"]),
        "item_id": st.sampled_from(["tea", "milk", "10", "9", "é"]),
        "at": st.integers(0, 3_000_000).map(lambda micros: MONDAY + timedelta(microseconds=micros)),
        "quantity": st.integers(1, 5),
        "price": st.none() | st.floats(0, 100),
        "discount": st.floats(0, 5),
    }
)


@settings(max_examples=80, deadline=None)
@given(events=st.lists(one_event, min_size=1, max_size=25), random=st.randoms(use_true_random=False))
def test_a_batch_makes_the_rows_that_folding_one_by_one_makes(
    events: list[dict[str, Any]], random: Random, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Events in any order, some of them repeated, in any split into segments."""
    folder = tmp_path_factory.mktemp("archive")
    numbered = [event | {"event_id": f"e{n}", "version": n} for n, event in enumerate(events)]
    repeated = numbered + random.sample(numbered, len(numbered) // 2)
    random.shuffle(repeated)
    for name, part in enumerate(pieces(repeated, random)):
        write_segment(folder, table(*part), f"{name}.parquet")
    folded = {event["user_id"]: no_events() for event in events}
    for event in repeated:
        line = make_events(*lines_of(table(event)), version=event["version"])
        folded[event["user_id"]] = fold(folded[event["user_id"]], line)
    batch = dict(rows_of(read_archive(folder)))
    assert {user: pack(row) for user, row in batch.items()} == {
        user: pack(row) for user, row in folded.items()
    }
    alone = sorted(folded)[0]
    [(_, row)] = rows_of(read_archive(folder, [alone]))
    assert pack(row) == pack(folded[alone])


def pieces(events: Sequence[dict[str, Any]], random: Random) -> list[Sequence[dict[str, Any]]]:
    """Cut the events into segments of any size."""
    cuts = sorted(random.randint(0, len(events)) for _ in range(2))
    return [part for part in (events[: cuts[0]], events[cuts[0] : cuts[1]], events[cuts[1] :]) if part]


def test_a_segment_is_on_disk_before_its_messages_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    write_segment(tmp_path, EVENT_SCHEMA.empty_table(), BASE)
    assert BASE in synced[0]
    assert synced[1] == str(tmp_path)
