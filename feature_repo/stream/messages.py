"""A message of the stream -> a checked event: the contract of `events.py`, one message at a time.

A batch can be ordered, compared and refused as a whole; a stream must decide about each message alone. An
invalid message becomes a dead letter, with the reason.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson
import pyarrow as pa

from feature_repo.events import (
    CLOCK_SKEW,
    EVENT_SCHEMA,
    EVENT_TYPES,
    MAX_PRICE,
    MAX_QUANTITY,
)
from feature_repo.ids import MAX_ID_LENGTH, is_id
from feature_repo.stream.archive import ARCHIVE_SCHEMA

MAX_MESSAGE_BYTES = 65_536  # an event has a few hundred
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIELDS = frozenset(EVENT_SCHEMA.names)
_NEEDED = ("event_id", "user_id", "basket_id", "item_id")

Event = tuple[str, str, str, str, str, int, int, float | None, float, str]  # in the order of EVENT_SCHEMA


class MessageInvalid(ValueError):
    """An invalid message: the text names the field and the expected value, never the found value."""


def parse_event(key: bytes | None, value: bytes | None, now: float) -> Event:
    """Return a message as the values of EVENT_SCHEMA; time is in microseconds, an unknown price None.

    Args:
        key: the user's id; Kafka keeps the messages of one key in order.
        value: a JSON object with the columns of EVENT_SCHEMA. If absent, `event_type` is a purchase,
            `quantity` 1, `discount` 0, `store_id` empty.
        now: seconds since the epoch; an event may lie a day ahead of it, no more.

    Raises:
        MessageInvalid: the message is not a valid event.
    """
    raw = _decoded(value)
    for name in _NEEDED:
        _check_id(name, raw.get(name))
    if key is None or key != raw["user_id"].encode():
        raise MessageInvalid("the key is not the event's user_id, by which a user's events stay in order")
    kind = raw.get("event_type", "purchase")
    if kind not in EVENT_TYPES:
        raise MessageInvalid(f"event_type is not one of {', '.join(EVENT_TYPES)}")
    store = raw.get("store_id")
    if store not in (None, ""):
        _check_id("store_id", store)
    quantity = raw.get("quantity", 1)
    if isinstance(quantity, bool) or not isinstance(quantity, int) or not 1 <= quantity <= MAX_QUANTITY:
        raise MessageInvalid(f"quantity is not a whole number from 1 to {MAX_QUANTITY}")
    price, discount = raw.get("price"), raw.get("discount", 0.0)
    if price is not None:
        price = _money("price", price)
    at = _microseconds(raw.get("at"), now)
    return (
        raw["event_id"],
        kind,
        raw["user_id"],
        raw["basket_id"],
        raw["item_id"],
        at,
        quantity,
        price,
        _money("discount", discount),
        store or "",
    )


def _decoded(value: bytes | None) -> dict[str, Any]:
    """Return the JSON object of a message; all its fields are known."""
    if not value:
        raise MessageInvalid("the message is empty, expected a JSON object")
    if len(value) > MAX_MESSAGE_BYTES:
        raise MessageInvalid(f"the message has {len(value)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        raw = orjson.loads(value)
    except ValueError as error:
        raise MessageInvalid("the message is not JSON in UTF-8") from error
    if not isinstance(raw, dict):
        raise MessageInvalid(f"the message is a JSON {type(raw).__name__}, expected an object")
    if not raw.keys() <= _FIELDS:
        raise MessageInvalid(
            f"{len(raw.keys() - _FIELDS)} unknown field(s); an event has {', '.join(EVENT_SCHEMA.names)}"
        )
    return raw


def parse_id(value: bytes | None) -> str | None:
    """Return the event's id in a message, None if it has none."""
    try:
        raw = orjson.loads(value or b"")
    except ValueError:
        return None
    return raw.get("event_id") if isinstance(raw, dict) else None


def events_table(events: list[Event], versions: list[int]) -> pa.Table:
    """Return checked events as a table of ARCHIVE_SCHEMA."""
    columns: list[Any] = list(zip(*events, strict=True)) if events else [()] * len(EVENT_SCHEMA)
    columns[5] = pa.array(columns[5], pa.int64()).cast(EVENT_SCHEMA.field("at").type)
    columns[7] = [float("nan") if price is None else price for price in columns[7]]
    arrays = [pa.array(c, f.type) for c, f in zip([*columns, versions], ARCHIVE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=ARCHIVE_SCHEMA)


def _check_id(name: str, value: Any) -> None:
    if not is_id(value):
        raise MessageInvalid(f"{name} is not a text of 1 to {MAX_ID_LENGTH} printable characters")


def _money(name: str, value: Any) -> float:
    # `not <=` also refuses NaN: JSON cannot express it, but a decoder may accept it.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_PRICE:
        raise MessageInvalid(f"{name} is not a number from 0 to {MAX_PRICE:.0f}")
    return float(value)


def _microseconds(value: Any, now: float) -> int:
    try:
        at = datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise MessageInvalid("at is not an ISO 8601 time") from error
    span = (at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH
    found = (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds
    if found < 0:
        raise MessageInvalid("at lies before 1970")
    if found > (now + CLOCK_SKEW.total_seconds()) * 1e6:
        raise MessageInvalid("at lies in the future")
    return found
