"""A message keeps the event's contract, or the error names the broken rule without the value."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feature_repo.stream.archive import ARCHIVE_SCHEMA
from feature_repo.stream.messages import MessageInvalid, events_table, parse_event

NOW = 1_800_000_000.0
GOOD: dict[str, Any] = {
    "event_id": "e1",
    "event_type": "click",
    "user_id": "u1",
    "basket_id": "b1",
    "item_id": "milk",
    "at": "2026-03-02T09:14:00.25+01:00",
    "quantity": 2,
    "price": 1.5,
    "discount": 0.25,
    "store_id": "s3",
}


def parse(change: dict[str, Any], key: bytes | None = b"u1", drop: str = "") -> Any:
    raw = {name: value for name, value in {**GOOD, **change}.items() if name != drop}
    return parse_event(key, json.dumps(raw).encode(), NOW)


def test_all_columns_and_the_time_in_utc() -> None:
    at = 1_772_439_240_250_000  # date -d 2026-03-02T08:14:00Z +%s
    assert parse({}) == ("e1", "click", "u1", "b1", "milk", at, 2, 1.5, 0.25, "s3")


def test_absent_fields_have_defaults() -> None:
    bare = {name: GOOD[name] for name in ("event_id", "user_id", "basket_id", "item_id", "at")}
    found = parse_event(b"u1", json.dumps(bare).encode(), NOW)
    assert found[1] == "purchase"
    assert found[6:] == (1, None, 0.0, "")
    assert parse({"store_id": None, "price": None})[7:] == (None, 0.25, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"event_id": ""}, "event_id is not a text"),
        ({"user_id": 7}, "user_id is not a text"),
        ({"basket_id": "b\n1"}, "basket_id is not a text"),
        ({"item_id": "x" * 129}, "item_id is not a text"),
        ({"event_type": "return"}, "event_type is not one of"),
        ({"event_type": ["click"]}, "event_type is not one of"),
        ({"quantity": 0}, "quantity is not a whole number"),
        ({"quantity": 1.5}, "quantity is not a whole number"),
        ({"quantity": True}, "quantity is not a whole number"),
        ({"price": -1}, "price is not a number"),
        ({"price": "1.50"}, "price is not a number"),
        ({"price": 1e300}, "price is not a number"),
        ({"discount": None}, "discount is not a number"),
        ({"at": "yesterday"}, "at is not an ISO 8601 time"),
        ({"at": 1_700_000_000}, "at is not an ISO 8601 time"),
        ({"at": "1969-12-31T23:59:59Z"}, "before 1970"),
        ({"at": "2027-01-17T08:00:01Z"}, "in the future"),
        ({"colour": "red"}, "1 unknown field"),
        ({"user_id": "u2"}, "key is not the event's user_id"),
        ({"store_id": "s\x00"}, "store_id is not a text"),
        ({"store_id": False}, "store_id is not a text"),
        ({"store_id": []}, "store_id is not a text"),
    ],
)
def test_a_broken_event_says_which_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MessageInvalid, match=message) as caught:
        parse(change)
    for value in change.values():
        assert len(str(value)) < 5 or str(value) not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "empty"),
        (b"", "empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "JSON list"),
        (b'{"price": NaN}', "not JSON"),
        (b"[" * 5_000, "not JSON"),
        (b" " * 70_000, "70000 bytes"),
    ],
)
def test_a_message_that_is_no_object_is_refused(value: bytes | None, message: str) -> None:
    with pytest.raises(MessageInvalid, match=message):
        parse_event(b"u1", value, NOW)


def test_without_a_key_the_order_of_a_user_is_not_kept() -> None:
    with pytest.raises(MessageInvalid, match="key is not"):
        parse({}, key=None)


@pytest.mark.parametrize("name", ["event_id", "user_id", "basket_id", "item_id", "at"])
def test_a_missing_required_field_is_named(name: str) -> None:
    with pytest.raises(MessageInvalid, match=f"^{name} is not"):
        parse({}, drop=name)


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
def test_any_bytes_are_an_event_or_an_invalid_message(value: bytes) -> None:
    with pytest.raises(MessageInvalid):
        parse_event(b"u1", value, time.time())


def test_events_become_rows_of_the_archive() -> None:
    table = events_table([parse({}), parse({"price": None})], [5, 6])
    assert table.schema == ARCHIVE_SCHEMA
    assert table["version"].to_pylist() == [5, 6]
    assert table["at"][0].as_py().isoformat() == "2026-03-02T08:14:00.250000+00:00"
    assert [str(price) for price in table["price"].to_pylist()] == ["1.5", "nan"]
    assert events_table([], []).schema == ARCHIVE_SCHEMA
