"""Rows of one user leave a file whole, the rest of it stays as it was, and a sealed data set stays sealed."""

import hashlib
import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.privacy.erased_files import (
    complete_dataset,
    drop_stale,
    erase_dataset,
    erase_lines,
    erase_rows,
    names_user,
)
from feature_repo.events import Dataset, read_dataset, write_dataset, write_quarantine
from feature_repo.stream.erasure import microseconds
from feature_repo.toy_shop import toy_dataset

NOON = datetime(2024, 3, 2, 12, tzinfo=UTC)
UNTIL = microseconds(NOON)
LATE = 2**61  # microseconds: later than any event


def test_a_data_set_whose_writer_was_killed_before_its_name_gets_it(tmp_path: Path) -> None:
    whole, half = tmp_path / "dataset", tmp_path / "other.part"
    write_dataset(whole, toy_dataset())
    events = len(read_dataset(whole).events)
    part = whole.rename(tmp_path / "dataset.part")
    half.mkdir()
    complete_dataset(part)
    complete_dataset(half)
    assert len(read_dataset(whole).events) == events
    assert (part.exists(), half.exists(), (tmp_path / "other").exists()) == (False, True, False)


def test_the_users_rows_up_to_the_time_go_and_no_others(tmp_path: Path) -> None:
    file = tmp_path / "events.parquet"
    users = ["u1", "u10", "u1", None, "u1"]
    at = pa.array(
        [NOON, NOON, NOON + timedelta(seconds=1), NOON, NOON - timedelta(days=9)], pa.timestamp("us", "UTC")
    )
    table = pa.table({"user_id": users, "at": at, "n": range(5)}).replace_schema_metadata(
        {"feature_names": "[]"}
    )
    pq.write_table(table, file)
    assert erase_rows(file, "u1", UNTIL, dry_run=True) == 2
    assert pq.read_table(file).equals(table)
    assert erase_rows(file, "u1", UNTIL) == 2
    left = pq.read_table(file)
    assert left["n"].to_pylist() == [1, 2, 3]
    assert left.schema.metadata == table.schema.metadata
    assert erase_rows(file, "u1", UNTIL) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["events.parquet"]


def test_a_file_without_users_or_times(tmp_path: Path) -> None:
    pq.write_table(pa.table({"item_id": ["u1"]}), tmp_path / "items.parquet")
    pq.write_table(pa.table({"user_id": ["u1", "u2"]}), tmp_path / "users.parquet")
    assert erase_rows(tmp_path / "items.parquet", "u1", UNTIL) == 0
    assert erase_rows(tmp_path / "users.parquet", "u1", UNTIL) == 1
    assert erase_rows(tmp_path / "gone.parquet", "u1", UNTIL) == 0  # merged into another meanwhile


def test_a_file_that_is_replaced_while_it_is_rewritten_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows published at that moment must not be overwritten by older ones."""
    file = tmp_path / "base.parquet"
    pq.write_table(pa.table({"user_id": ["u1", "old"]}), file)
    write, others = pq.write_table, [pa.table({"user_id": ["u1", "new"]})]

    def interrupted(*args: object, **named: object) -> None:
        write(*args, **named)
        if others:
            write(others.pop(), tmp_path / "part")
            os.replace(tmp_path / "part", file)

    monkeypatch.setattr("components.privacy.erased_files.pq.write_table", interrupted)
    assert erase_rows(file, "u1", UNTIL) == 1
    assert pq.read_table(file)["user_id"].to_pylist() == ["new"]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    data = toy_dataset(users=12, weeks=6)
    refused = pd.DataFrame(
        [
            {"row": 1, "reason": "bad", "user_id": "user-001", "text": None},
            {"row": 2, "reason": "bad", "user_id": "user-0011", "text": None},
            {"row": 3, "reason": "torn", "user_id": None, "text": '"user-001",b,c,d,e,f,g,h,i'},
        ]
    )
    write_dataset(tmp_path / "dataset", data, refused)
    return tmp_path / "dataset"


def test_a_data_set_is_sealed_again_without_the_user(dataset: Path) -> None:
    before = read_dataset(dataset)
    own = int((before.events["user_id"] == "user-001").sum())
    assert own > 0
    assert erase_dataset(dataset, "user-001", LATE, dry_run=True) == own + 2
    assert read_dataset(dataset).manifest == before.manifest
    assert erase_dataset(dataset, "user-001", LATE) == own + 2
    after = read_dataset(dataset)
    others = before.events[before.events["user_id"] != "user-001"].reset_index(drop=True)
    pd.testing.assert_frame_equal(after.events, others)
    pd.testing.assert_frame_equal(after.items, before.items)
    assert after.manifest["users"] == before.manifest["users"] - 1
    assert after.manifest["rows"] == len(others)
    assert after.manifest["dropped"]["of forgotten users"] == own
    assert after.manifest["timezone"] == before.manifest["timezone"]
    assert after.manifest["data_hash"] != before.manifest["data_hash"]
    assert after.manifest["was"] == [before.manifest["data_hash"]]
    [left] = (dataset / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(left)["user_id"] == "user-0011"
    assert erase_dataset(dataset, "user-001", LATE) == 0


def test_a_data_set_of_an_older_version_loses_its_table_of_users(dataset: Path) -> None:
    file, manifest = dataset / "users.parquet", json.loads((dataset / "manifest.json").read_bytes())
    pq.write_table(pa.table({"user_id": ["buys-nothing", "user-002"], "age": ["45-54", "25-34"]}), file)
    manifest["files"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (dataset / "manifest.json").write_text(json.dumps(manifest))
    assert erase_dataset(dataset, "nobody", LATE) == 0
    assert erase_dataset(dataset, "buys-nothing", LATE) == 1
    assert not file.exists()
    assert read_dataset(dataset).manifest["rows"] == manifest["rows"]


def test_a_data_set_without_other_users_goes(tmp_path: Path) -> None:
    data = toy_dataset(users=3, weeks=6)
    events = data.events[data.events["user_id"] == "user-001"].reset_index(drop=True)
    write_dataset(tmp_path / "dataset", Dataset(events, data.items, data.manifest))
    assert erase_dataset(tmp_path / "dataset", "user-001", LATE) == len(events)
    assert not (tmp_path / "dataset").exists()


def test_refused_rows_and_lines_that_did_not_parse(tmp_path: Path) -> None:
    file = tmp_path / "quarantine.jsonl"
    lines = [{"user_id": "12.0"}, {"user_id": "120"}, {"user_id": None, "text": "12,x"}, {"text": "b,121,x"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert erase_lines(file, "12", dry_run=True) == erase_lines(file, "12") == 2
    assert [json.loads(line) for line in file.read_text().splitlines()] == [lines[1], lines[3]]
    assert erase_lines(file, "12") == 0
    damaged = ['"12"', "9", '{"user_id": "12', "[" * 100_000]
    file.write_text("\n".join(damaged))
    assert erase_lines(file, "12") == 2
    assert file.read_text().splitlines() == [damaged[1], damaged[3]]


@pytest.mark.parametrize(
    ("user", "line"),
    [
        ("Smith, John", json.dumps({"text": '"Smith, John",b1,i1,2026-01-01,extra'})),
        ("a/b", '{"user_id": "a\\/b", "te'),  # pandas escapes slashes; the line was cut off
        ('a"b', '{"user_id": "a\\"b", "te'),
        ("Doe, Jane", json.dumps({"text": 'x, "Doe, Jane" ,b2'})),
        ("o'neill", json.dumps({"text": "\"unbalanced,o'neill"})),
    ],
)
def test_a_line_that_did_not_parse_is_searched_for_any_form_of_the_id(
    tmp_path: Path, user: str, line: str
) -> None:
    file = tmp_path / "quarantine.jsonl"
    file.write_text(line + "\n")
    assert erase_lines(file, "b1") == (user == "Smith, John")
    file.write_text(line + "\n")
    assert erase_lines(file, user) == 1
    assert not file.read_text()


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_refused_row_may_hold_a_character_that_breaks_lines(tmp_path: Path, mark: str) -> None:
    """JSON leaves these characters as they are; Python's `splitlines` takes them for the end of a line."""
    data = toy_dataset(users=3, weeks=6)
    refused = pd.DataFrame(
        {"row": [1, 2], "reason": "bad", "user_id": ["user-001", "user-002"], "item_id": f"mi{mark}lk"}
    )
    dataset = tmp_path / "dataset"
    write_dataset(dataset, data, refused)
    file = write_quarantine(tmp_path, refused)
    assert erase_lines(file, "user-001") == 1
    own = int((data.events["user_id"] == "user-001").sum())
    assert erase_dataset(dataset, "user-001", LATE) == own + 1
    for left in (file, dataset / "quarantine.jsonl"):
        assert json.loads(left.read_text())["item_id"] == f"mi{mark}lk"


def test_a_user_in_a_bundle_is_found_there(tmp_path: Path) -> None:
    asked: list[dict[str, dict[str, str]]] = [
        {"request": {"user_id": user}} if user else {"request": {}} for user in ("u1", None, "u10", "u1")
    ]
    (tmp_path / "golden.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    assert [names_user(tmp_path, user) for user in ("u1", "u10", "u2")] == [2, 1, 0]
    log = pa.table(
        {"user_id": ["u2", "u1"], "answered_at": pa.array([NOON, NOON], pa.timestamp("us", "UTC"))}
    )
    pq.write_table(log, tmp_path / "reference_log.parquet")
    assert [names_user(tmp_path, user) for user in ("u1", "u10", "u2")] == [3, 1, 1]


def test_files_of_a_killed_process_go_and_files_being_written_stay(tmp_path: Path) -> None:
    for name in (".a.parquet.part", ".b.parquet.tmp", "snapshots.part", "c.parquet"):
        (tmp_path / name).write_bytes(b"rows")
        os.utime(tmp_path / name, (time.time() - 3_600,) * 2)
    (tmp_path / ".new.part").write_bytes(b"rows")
    drop_stale(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".new.part", "c.parquet"]
