"""A message keeps the event's contract, or the error names the broken rule without the value."""

import json
import re
from typing import Any

import pytest

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
        ({"user_id": 7}, "Expected `str`, got `int` - at `$.user_id`"),
        ({"basket_id": "b\n1"}, "basket_id is not a text"),
        ({"item_id": "x" * 129}, "item_id is not a text"),
        ({"store_id": "s\x00"}, "store_id is not a text"),
        ({"event_type": "return"}, "event_type is not one of"),
        ({"quantity": 0}, "Expected `int` >= 1 - at `$.quantity`"),
        ({"quantity": 1_000_001}, "Expected `int` <= 1000000 - at `$.quantity`"),
        ({"price": -1}, "Expected `float` >= 0.0 - at `$.price`"),
        ({"price": 1e300}, "Expected `float` <= 1000000000.0 - at `$.price`"),
        ({"discount": None}, "Expected `float`, got `null` - at `$.discount`"),
        ({"at": "yesterday"}, "at is not an ISO 8601 time"),
        ({"at": "1969-12-31T23:59:59Z"}, "before 1970"),
        ({"at": "2027-01-17T08:00:01Z"}, "in the future"),
        ({"x\nforged": "red"}, "it has an unknown field; known are "),
        ({"user_id": "u2"}, "key is not the event's user_id"),
        ({"item_id": " "}, "item_id is not a text of 1 to"),
    ],
)
def test_a_broken_event_says_which_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(MessageInvalid, match=re.escape(message)) as caught:
        parse(change)
    for value in change.values():
        assert len(str(value)) < 5 or str(value) not in str(caught.value)


@pytest.mark.parametrize("value", [None, b"{", b"[1]", b"\xff\xfe", b'{"event_id": "\xff"}', b" " * 70_000])
def test_a_message_that_is_no_object_is_refused(value: bytes | None) -> None:
    with pytest.raises(MessageInvalid):
        parse_event(b"u1", value, NOW)


def test_without_a_key_the_order_of_a_user_is_not_kept() -> None:
    with pytest.raises(MessageInvalid, match="key is not"):
        parse({}, key=None)


@pytest.mark.parametrize("name", ["event_id", "user_id", "basket_id", "item_id", "at"])
def test_a_missing_required_field_is_named(name: str) -> None:
    with pytest.raises(MessageInvalid, match=f"missing required field `{name}`"):
        parse({}, drop=name)


def test_events_become_rows_of_the_archive() -> None:
    table = events_table([parse({}), parse({"price": None})], [5, 6])
    assert table.schema == ARCHIVE_SCHEMA
    assert table["version"].to_pylist() == [5, 6]
    assert table["at"][0].as_py().isoformat() == "2026-03-02T08:14:00.250000+00:00"
    assert [str(price) for price in table["price"].to_pylist()] == ["1.5", "nan"]
    assert events_table([], []).schema == ARCHIVE_SCHEMA
