"""Raw rows under the contract: completed, refused with a reason, merged, written, read."""

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.events import (
    EVENT_SCHEMA,
    Dataset,
    EventsInvalid,
    as_ids,
    as_times,
    check_events,
    complete_columns,
    drop_repeated,
    merge_lines,
    read_dataset,
    write_dataset,
    write_quarantine,
)
from feature_repo.ids import MAX_ID_LENGTH

NOW = datetime(2026, 3, 2, tzinfo=UTC)
ROW: dict[str, Any] = {"user_id": "u1", "basket_id": "b1", "item_id": "milk", "at": "2026-03-01T09:00:00Z"}


def rows(*changes: dict[str, Any]) -> pd.DataFrame:
    """One good row per dict, each in its own basket, with the dict's values in it."""
    return pd.DataFrame(
        [{**ROW, "basket_id": f"b{number}", **change} for number, change in enumerate(changes)]
    )


def check(*changes: dict[str, Any]) -> tuple[pd.DataFrame, pd.Series]:
    return check_events(complete_columns(rows(*changes)), NOW)


# ------------------------------------------------------------------------------------ raw rows -> columns


def test_missing_columns_have_defaults() -> None:
    event = complete_columns(pd.DataFrame([ROW])).iloc[0]
    assert list(event.index) == EVENT_SCHEMA.names
    optional = [event[name] for name in ("event_type", "quantity", "discount", "store_id")]
    assert optional == ["purchase", 1, 0, ""]
    assert np.isnan(event["price"])
    assert event["at"] == pd.Timestamp("2026-03-01 09:00", tz="UTC")


def test_an_empty_cell_is_like_an_absent_column() -> None:
    optional = ["event_id", "event_type", "quantity", "price", "discount", "store_id"]
    absent = complete_columns(pd.DataFrame([ROW]))
    for empty in (None, "", np.nan):
        found = complete_columns(pd.DataFrame([{**ROW, **dict.fromkeys(optional, empty)}]))
        pd.testing.assert_frame_equal(found, absent)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pd.Series(["007", "7"]), ["007", "7"]),
        (pd.Series([1041453, 2]), ["1041453", "2"]),
        (pd.Series([1041453.0, np.nan]), ["1041453", None]),
        (pd.Series([1041453, None], dtype="Int64"), ["1041453", None]),
        (pd.Series([1041453.0], dtype="float32"), ["1041453"]),
        (pd.Series([Decimal("1041453.00")]), ["1041453"]),
        (pd.Series(["a", "b", "a"], dtype="category"), ["a", "b", "a"]),
        (pd.Series(["a", None], dtype="string"), ["a", None]),
        (pd.Series(["1041453.0", " x "]), ["1041453.0", " x "]),  # text is not changed
        (pd.Series([5, "x", 6.0, b"x", True, " "], dtype=object), ["5", "x", "6", None, None, None]),
        (pd.Series([1.5, np.inf, 2.0**53]), [None, None, None]),  # beyond 2^53 a float has lost digits
        (pd.Series([2.0**24], dtype="float32"), [None]),
        (pd.Series([9007199254740993]), ["9007199254740993"]),
    ],
)
def test_ids_become_exact_text(ids: pd.Series, expected: list[str | None]) -> None:
    assert as_ids(ids).tolist() == expected


@given(st.lists(st.integers(min_value=-(2**63), max_value=2**63 - 1), min_size=1))
def test_every_integer_id_keeps_its_digits(numbers: list[int]) -> None:
    assert as_ids(pd.Series(numbers, dtype="int64")).tolist() == [str(number) for number in numbers]


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("2026-03-01", "2026-03-01T00:00:00+00:00"),
        ("2026-03-01 09:00", "2026-03-01T09:00:00+00:00"),  # without a zone: UTC
        ("2026-03-01T09:00:00+02:00", "2026-03-01T07:00:00+00:00"),
        ("2026-03-01T09:00:00.123456789Z", "2026-03-01T09:00:00.123456+00:00"),
        (datetime(2026, 3, 1), "2026-03-01T00:00:00+00:00"),
        (datetime(2026, 3, 1).date(), "2026-03-01T00:00:00+00:00"),
    ],
)
def test_times_become_utc(time: Any, expected: str) -> None:
    assert as_times(pd.Series([time], dtype=object)).iloc[0].isoformat() == expected


@pytest.mark.parametrize(
    "time",
    ["", "yesterday", "now", "01.03.2026", "2026-02-30", "1700000000", None, 1700000000, 1.5, "9999-01-01"],
)
def test_an_invalid_time_is_refused(time: Any) -> None:
    good, reasons = check({"at": time}, {})
    assert list(reasons) == ["at is not an ISO 8601 time of the years 1970 to 2261"]
    assert len(good) == 1


def test_datetime_columns_of_any_zone_and_unit_become_utc() -> None:
    naive = pd.Series([pd.Timestamp("2026-03-01 09:00")])
    for column in (
        naive,
        naive.astype("datetime64[s]"),
        naive.dt.tz_localize("UTC").dt.tz_convert("America/New_York"),
    ):
        assert str(as_times(column).dtype) == "datetime64[us, UTC]"
        assert as_times(column).iloc[0] == pd.Timestamp("2026-03-01 09:00", tz="UTC")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        *(
            (rows({}).drop(columns=name), rf"column\(s\) {name} missing; found .*: add")
            for name in ("user_id", "basket_id", "item_id", "at")
        ),
        (
            rows({"pirce": 1, "colour": "red"}),
            r"'pirce', 'colour' \(did you mean 'price'\?\).*event_id, event_type.*drop",
        ),
        (
            rows({"price": 1.0, "discount": 0.0}).set_axis([*ROW, "price", "price"], axis=1),
            "'price' is there more than once",
        ),
        (rows({}).iloc[:0], "not one row"),
        (rows({"item_id": ["milk", "bread"]}), "'item_id' holds lists"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_that_breaks_the_contract_is_refused_with_its_fault(raw: pd.DataFrame, message: str) -> None:
    with pytest.raises(EventsInvalid, match=message):
        complete_columns(raw)


def test_derived_ids_are_distinct_and_always_the_same() -> None:
    raw = rows(
        {"basket_id": "b"}, {"basket_id": "b", "item_id": "bread"}, {"basket_id": "b"}, {"event_id": "mine"}
    )
    ids = complete_columns(raw)["event_id"].tolist()
    assert len(set(ids)) == 4
    assert ids[3] == "mine"
    assert ids == complete_columns(raw)["event_id"].tolist()
    assert ids[0] == complete_columns(raw.iloc[:1])["event_id"].iloc[0]
    assert all(len(one) == 16 for one in ids[:3])


# ------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(
            ({name: value}, f"{name} is neither a text of 1 to 128 printable characters nor a whole number")
            for name, value in (
                ("user_id", None),
                ("basket_id", " "),
                ("item_id", 1.5),
                ("store_id", 1.5),
                ("event_id", 1.5),
                ("store_id", "x" * (MAX_ID_LENGTH + 1)),
                ("item_id", "milk\nbread"),  # the packed history joins ids by newlines
            )
        ),
        ({"at": "2026-03-03T00:00:01Z"}, "at lies in the future"),
        ({"at": "1969-12-31T23:59:59Z"}, "at lies before 1970"),
        ({"event_type": "refund"}, "event_type is not one of purchase, impression, click"),
        *(
            ({"quantity": value}, "quantity is not a whole number")
            for value in (0, 1.5, 1_000_001, np.inf, "two")
        ),
        *(({"price": value}, "price is not a number") for value in (-0.01, np.inf, "1,19")),
        ({"discount": -1}, "discount is not a number"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    good, reasons = check({}, change, {})
    assert list(reasons.index) == [1]
    assert reasons.iloc[0].startswith(reason)
    assert list(good.index) == [0, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"item_id": "x" * MAX_ID_LENGTH},
        {"item_id": "Käse 500 g"},
        {"at": "2026-03-02T23:59:59Z"},  # within the day that clocks may differ
        {"quantity": "2"},
        {"quantity": 1_000_000},
        {"price": 0},
        {"price": Decimal("1.19")},
        {"event_type": "click", "price": None},
    ],
)
def test_a_row_at_the_edge_of_a_rule_is_good(change: dict[str, Any]) -> None:
    _, reasons = check(change)
    assert reasons.empty


OF_B, LATER = {"basket_id": "b"}, "2026-03-01T09:00:01Z"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            [OF_B, {}, {**OF_B, "user_id": "u2", "item_id": "bread"}],
            dict.fromkeys([0, 2], "its basket names two users"),
        ),
        (
            [OF_B, {**OF_B, "at": LATER, "item_id": "bread"}, {**OF_B, "item_id": "tea"}, {}],
            dict.fromkeys([0, 1, 2], "its basket was bought at two times"),
        ),
        (
            [OF_B, {**OF_B, "item_id": "tea", "at": "nonsense"}],
            {1: "at is not an ISO 8601 time of the years 1970 to 2261"},
        ),
        (
            [{"event_id": "same"}, {"event_id": "same", "item_id": "bread"}, {"event_id": "other"}],
            dict.fromkeys([0, 1], "its event_id names different lines"),
        ),
    ],
    ids=["two users", "two times", "a refused row does not spoil its basket", "an id of two lines"],
)
def test_a_basket_that_contradicts_itself_is_refused_as_a_whole(
    changes: list[dict[str, Any]], expected: dict[int, str]
) -> None:
    good, reasons = check(*changes)
    assert reasons.to_dict() == expected
    assert [*good.index] == [row for row in range(len(changes)) if row not in expected]


@pytest.mark.parametrize(
    ("published", "refused"), [(0, [0, 1, 2, 3]), (1, [2, 3]), (2, [2, 3]), (3, [0, 1, 2, 3])]
)
def test_what_is_published_stands_against_later_lines(published: int, refused: list[int]) -> None:
    """Unless it contradicts itself, as the third line does."""
    of_another = {**OF_B, "user_id": "u2", "item_id": "bread"}
    lines = rows(OF_B, {**OF_B, "item_id": "tea"}, of_another, {**OF_B, "at": LATER, "item_id": "jam"}, {})
    good, reasons = check_events(complete_columns(lines), NOW, published)
    assert [*reasons.index] == refused
    assert [*good.index] == [row for row in range(5) if row not in refused]


def test_impressions_may_have_other_times_and_users_than_the_purchase() -> None:
    """Their basket is the request's id: a checkout may give the same one to each request."""
    shown = {**OF_B, "at": "2026-03-01T08:59:00Z", "event_type": "impression"}
    earlier = {**shown, "at": "2026-03-01T08:58:00Z", "item_id": "tea"}
    good, reasons = check(OF_B, shown, earlier, {**shown, "user_id": "u2"})
    assert reasons.empty
    assert len(drop_repeated(good)) == 4


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(-1, 3)), min_size=1, max_size=20
    )
)
def test_every_row_is_good_or_refused_and_never_both(lines: list[tuple[str, str, int]]) -> None:
    raw = pd.DataFrame(
        [{**ROW, "basket_id": b, "item_id": i, "quantity": n, "price": 1.0} for b, i, n in lines]
    )
    good, reasons = check_events(complete_columns(raw), NOW)
    assert sorted([*good.index, *reasons.index]) == list(raw.index)
    merged = merge_lines(drop_repeated(good))
    assert merged["quantity"].sum() == raw.loc[raw["quantity"] > 0, "quantity"].sum()
    assert len(merged) == len(good.drop_duplicates(["basket_id", "item_id"]))
    assert not merged.duplicated(["basket_id", "item_id"]).any()


# ------------------------------------------------------------------------------------------------- merge


def test_an_event_seen_twice_counts_once_and_an_item_scanned_twice_stays_two() -> None:
    good, _ = check(*({"event_id": event, "basket_id": "b"} for event in ("e1", "e1", "e2")))
    assert drop_repeated(good)["event_id"].tolist() == ["e1", "e2"]


def test_two_lines_of_an_item_become_one_with_the_mean_per_unit() -> None:
    good, _ = check(
        {**OF_B, "quantity": 1, "price": 4.0, "discount": 0.0},
        {**OF_B, "quantity": 3, "price": 2.0, "discount": 2.0},
        {"basket_id": "c", "price": 3.0},
        {"basket_id": "c"},  # an unknown price does not count
        *[{"basket_id": "d"}] * 2,
    )
    merged = merge_lines(drop_repeated(good))
    assert merged["basket_id"].tolist() == ["b", "c", "d"]
    assert merged.loc[0, ["quantity", "price", "discount"]].tolist() == [4, 2.5, 1.5]
    np.testing.assert_array_equal(merged["price"], [2.5, 3.0, np.nan])
    assert merged["quantity"].dtype == np.int64


def test_events_are_sorted_by_time_basket_and_item() -> None:
    good, _ = check(
        {"basket_id": "z"},
        {"basket_id": "y", "item_id": "b"},
        {"basket_id": "y", "item_id": "a"},
        {"basket_id": "x", "at": "2026-03-01T10:00:00Z"},
    )
    merged = drop_repeated(good)
    assert merged["basket_id"].tolist() == ["y", "y", "z", "x"]
    assert merged["item_id"].tolist() == ["a", "b", "milk", "milk"]


# ----------------------------------------------------------------------------------------------- on disk


@pytest.fixture
def shop() -> Dataset:
    events = drop_repeated(check({"price": 1.5}, {"item_id": "bread"})[0])
    items = pd.DataFrame({"item_id": ["bread", "milk"], "category": ["bakery", ""]})
    return Dataset(events, items, {"name": "two", "timezone": "Europe/Berlin"})


def test_a_data_set_survives_a_round_trip(shop: Dataset, tmp_path: Path) -> None:
    manifest = write_dataset(tmp_path / "dataset", shop)
    found = read_dataset(tmp_path / "dataset")
    pd.testing.assert_frame_equal(found.events, shop.events)
    pd.testing.assert_frame_equal(found.items, shop.items)
    assert found.manifest == manifest
    assert pq.read_schema(tmp_path / "dataset" / "events.parquet").remove_metadata() == EVENT_SCHEMA
    assert (manifest["rows"], manifest["users"], manifest["items"], manifest["baskets"]) == (2, 1, 2, 2)
    assert (manifest["first_at"], manifest["timezone"]) == ("2026-03-01T09:00:00Z", "Europe/Berlin")
    assert (tmp_path / "dataset" / "quarantine.jsonl").read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
    shown = shop.events.assign(event_type=["purchase", "impression"])
    later = write_dataset(tmp_path / "later", Dataset(shown, shop.items, shop.manifest))
    assert later["baskets"] == 1, "a list that was shown is no basket"


def test_the_same_events_have_the_same_hash(shop: Dataset, tmp_path: Path) -> None:
    first, second = (write_dataset(tmp_path / name, shop)["data_hash"] for name in "ab")
    assert first == second
    other = Dataset(shop.events.iloc[:1], shop.items)
    assert write_dataset(tmp_path / "c", other)["data_hash"] != first


def test_a_data_set_replaces_an_empty_directory_and_an_older_data_set(shop: Dataset, tmp_path: Path) -> None:
    (tmp_path / "dataset").mkdir()
    write_dataset(tmp_path / "dataset", shop)
    (tmp_path / "dataset" / "users.parquet").write_text("of an older version")
    write_dataset(tmp_path / "dataset", Dataset(shop.events.iloc[:1], shop.items))
    assert len(read_dataset(tmp_path / "dataset").events) == 1
    assert not (tmp_path / "dataset" / "users.parquet").exists()


def test_a_kill_while_a_data_set_is_replaced_leaves_no_half(
    shop: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "dataset"
    write_dataset(place, shop)
    rename = Path.rename
    done: list[Path] = []

    def killed(source: Path, target: Path) -> Path:
        if len(done) == 1:
            raise KeyboardInterrupt
        done.append(source)
        return rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            write_dataset(place, shop)
    assert [len(read_dataset(found).events) for found in sorted(tmp_path.iterdir())] == [len(shop.events)] * 2
    write_dataset(place, shop)
    assert [found.name for found in tmp_path.iterdir()] == ["dataset"]


@pytest.mark.parametrize("stranger", ["thesis.docx", "events.parquet"])
def test_a_foreign_directory_is_not_changed(shop: Dataset, stranger: str, tmp_path: Path) -> None:
    (tmp_path / stranger).write_text("mine")
    with pytest.raises(EventsInvalid, match=f"holds {stranger}.*empty directory"):
        write_dataset(tmp_path, shop)
    assert (tmp_path / stranger).read_text() == "mine"


def test_a_flipped_byte_is_noticed(shop: Dataset, tmp_path: Path) -> None:
    write_dataset(tmp_path / "dataset", shop)
    file = tmp_path / "dataset" / "events.parquet"
    body = bytearray(file.read_bytes())
    body[100] ^= 1
    file.write_bytes(body)
    with pytest.raises(EventsInvalid, match=r"events\.parquet is missing or was changed"):
        read_dataset(tmp_path / "dataset")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (None, "no manifest"),
        ("{", "is no manifest"),
        ("[]", "is no manifest"),
        ("[" * 100_000, "is no manifest"),
        ('{"kind": "bundle", "files": {}}', "holds a bundle"),
    ],
)
def test_a_directory_without_a_valid_manifest_is_refused(
    manifest: str | None, message: str, tmp_path: Path
) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(EventsInvalid, match=message):
        read_dataset(tmp_path)


def test_the_quarantine_is_json_for_any_rows(tmp_path: Path) -> None:
    values = [np.inf, np.nan, None, pd.Timestamp("2026-03-01", tz="UTC"), "Käse\n", b"\xff"]
    rows = pd.DataFrame({"row": range(6), "reason": "odd", "price": pd.Series(values, dtype=object)})
    lines = write_quarantine(tmp_path / "new", rows).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["price"] for line in lines][:3] == ["inf", None, None]
    assert json.loads(lines[4]) == {"row": 4, "reason": "odd", "price": "Käse\n"}
