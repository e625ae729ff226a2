"""The event contract: each way to break it has its reason, each way to keep it its row."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from feature_repo.events import (
    EVENT_SCHEMA,
    Dataset,
    EventsInvalid,
    check_events,
    complete_columns,
    merge_duplicates,
    read_dataset,
    write_dataset,
)
from feature_repo.toy_shop import toy_dataset

NOW = datetime(2024, 6, 1, tzinfo=UTC)
GOOD = {"user_id": "u1", "basket_id": "b1", "item_id": "i1", "at": "2024-05-01T10:00:00Z"}


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame([{**GOOD, **row} for row in rows])


def reasons(*rows: dict[str, Any]) -> list[str]:
    """Return the reason for each refused row, none for the good ones."""
    return check_events(complete_columns(frame(*rows)), NOW)[1].tolist()


def test_four_columns_are_enough() -> None:
    events = complete_columns(frame({}))
    assert events.columns.tolist() == EVENT_SCHEMA.names
    row = events.iloc[0]
    assert (row["event_type"], row["quantity"], row["discount"], row["store_id"]) == ("purchase", 1, 0, "")
    assert np.isnan(row["price"])
    assert len(row["event_id"]) == 16
    assert row["at"] == pd.Timestamp("2024-05-01T10:00:00Z")
    assert check_events(events, NOW)[1].empty


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"user_id": None}, "user_id is missing"),
        ({"item_id": ""}, "item_id is missing"),
        ({"basket_id": "x" * 129}, "basket_id is longer than 128 characters"),
        ({"item_id": "a\nb"}, "item_id holds control characters"),
        ({"at": "yesterday"}, "at is not an ISO 8601 time"),
        ({"at": None}, "at is not an ISO 8601 time"),
        ({"at": "2024-06-03T00:00:00Z"}, "at lies in the future"),
        ({"event_type": "refund"}, "event_type is not one of purchase, impression, click"),
        ({"quantity": -1}, "quantity is not a whole number from 1 to 1000000"),
        ({"quantity": 0}, "quantity is not a whole number from 1 to 1000000"),
        ({"quantity": 1.5}, "quantity is not a whole number from 1 to 1000000"),
        ({"quantity": "many"}, "quantity is not a whole number from 1 to 1000000"),
        ({"price": -0.01}, "price is negative or infinite"),
        ({"price": float("inf")}, "price is negative or infinite"),
        ({"price": "free"}, "price is negative or infinite"),
        ({"discount": -1}, "discount is negative or infinite"),
    ],
)
def test_each_broken_rule_has_its_reason(row: dict[str, Any], reason: str) -> None:
    assert reasons(row, {"basket_id": "b2"}) == [reason]


def test_a_clock_a_little_ahead_is_forgiven() -> None:
    assert reasons({"at": "2024-06-01T20:00:00Z"}) == []


def test_one_basket_has_one_user_and_one_time() -> None:
    assert reasons({}, {"item_id": "i2", "user_id": "u2"}) == ["its basket belongs to another user"]
    assert reasons({}, {"item_id": "i2", "at": "2024-05-01T11:00:00Z"}) == [
        "its basket was bought at another time"
    ]
    later_click = {"item_id": "i2", "at": "2024-05-01T11:00:00Z", "event_type": "click"}
    assert reasons({}, later_click) == []


def test_integer_ids_stay_what_they_were() -> None:
    for ids in ([1041453, 995242], [1041453.0, 995242.0]):
        assert complete_columns(frame({}, {}).assign(item_id=ids))["item_id"].tolist() == [
            "1041453",
            "995242",
        ]
    holes = complete_columns(frame({}, {}).assign(item_id=[1041453, None]))["item_id"].tolist()
    assert holes == ["1041453", None]


def test_times_without_a_zone_are_utc_and_others_are_converted() -> None:
    at = complete_columns(frame({"at": "2024-05-01T10:00:00"}, {"at": "2024-05-01T10:00:00+02:00"}))["at"]
    assert at.dt.hour.tolist() == [10, 8]
    naive = complete_columns(frame({}).assign(at=pd.Timestamp("2024-05-01T10:00:00")))["at"]
    assert str(naive.dtype) == "datetime64[us, UTC]"


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (
            frame({}).rename(columns={"item_id": "itemid"}),
            r"unknown column 'itemid' \(did you mean 'item_id'\?\)",
        ),
        (frame({}).drop(columns="at"), r"column\(s\) at missing"),
        (frame({}).iloc[:0], "no events"),
    ],
)
def test_files_of_another_shape_are_refused(raw: pd.DataFrame, says: str) -> None:
    with pytest.raises(EventsInvalid, match=says):
        complete_columns(raw)


def test_repeated_events_are_dropped_and_lines_of_one_item_add_up() -> None:
    rows = frame(
        {"event_id": "e1", "quantity": 1, "price": 4.0},
        {"event_id": "e1", "quantity": 1, "price": 4.0},
        {"event_id": "e2", "quantity": 3, "price": 2.0},
        {"event_id": "e3", "quantity": 1, "price": 9.0, "item_id": "i0"},
    )
    merged, counts = merge_duplicates(complete_columns(rows))
    assert counts == {"repeated_events": 1, "merged_lines": 1}
    assert merged["item_id"].tolist() == ["i0", "i1"]
    assert merged["quantity"].tolist() == [1, 4]
    assert merged["price"].tolist() == [9.0, 2.5]  # (4 + 3 * 2) / 4


def test_an_unknown_price_stays_unknown_when_lines_are_merged() -> None:
    merged, _ = merge_duplicates(complete_columns(frame({"event_id": "a"}, {"event_id": "b", "price": 2.0})))
    assert merged["quantity"].tolist() == [2]
    assert merged["price"].isna().all()


def test_a_data_set_comes_back_as_it_was_written(tmp_path: Path) -> None:
    shop = toy_dataset(users=4, weeks=3)
    manifest = write_dataset(tmp_path / "d", shop)
    again = read_dataset(tmp_path / "d")
    assert again.manifest == manifest
    pd.testing.assert_frame_equal(again.events, shop.events, check_dtype=False)
    assert (manifest["timezone"], manifest["users"]) == ("UTC", 4)
    assert not (tmp_path / "d.part").exists()
    write_dataset(tmp_path / "d", shop)  # writing over an old one replaces it


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", toy_dataset(users=2, weeks=2))
    with (tmp_path / "d" / "events.parquet").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(EventsInvalid, match="changed after it was written"):
        read_dataset(tmp_path / "d")


def test_no_data_set_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(EventsInvalid, match="run ingest_events first"):
        read_dataset(tmp_path)


def test_the_hash_follows_the_content(tmp_path: Path) -> None:
    shop = toy_dataset(users=3, weeks=2)
    first = write_dataset(tmp_path / "a", shop)["data_hash"]
    assert write_dataset(tmp_path / "b", shop)["data_hash"] == first
    other = Dataset(shop.events.assign(price=1.0), shop.items)
    assert write_dataset(tmp_path / "c", other)["data_hash"] != first
