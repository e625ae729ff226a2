"""A message of the stream -> a checked event: the contract of `events.py`, one message at a time.

A batch can be ordered, compared and refused as a whole; a stream must decide about each message alone. An
invalid message becomes a dead letter, with the reason.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import orjson
import pyarrow as pa

from feature_repo.errors import refusal
from feature_repo.events import CLOCK_SKEW, EVENT_SCHEMA, EVENT_TYPES, MAX_PRICE, MAX_QUANTITY
from feature_repo.ids import MAX_ID_LENGTH, is_id
from feature_repo.stream.archive import ARCHIVE_SCHEMA
from feature_repo.stream.erasure import microseconds

MAX_MESSAGE_BYTES = 65_536  # an event has a few hundred
_Money = Annotated[float, msgspec.Meta(ge=0, le=MAX_PRICE)]

Event = tuple[str, str, str, str, str, int, int, float | None, float, str]  # in the order of EVENT_SCHEMA


class MessageInvalid(ValueError):
    """An invalid message: the text names the field and the expected value, never the found value."""


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """The columns of EVENT_SCHEMA in the JSON object of a message."""

    event_id: str
    user_id: str
    basket_id: str
    item_id: str
    at: str
    event_type: str = "purchase"
    quantity: Annotated[int, msgspec.Meta(ge=1, le=MAX_QUANTITY)] = 1
    price: _Money | None = None
    discount: _Money = 0.0
    store_id: str | None = None


_DECODER = msgspec.json.Decoder(_Message)


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
    value = value or b""
    if len(value) > MAX_MESSAGE_BYTES:
        raise MessageInvalid(f"the message has {len(value)} bytes, at most {MAX_MESSAGE_BYTES} are read")
    try:
        event = _DECODER.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageInvalid(f"the message is no event: {refusal(error, _Message)}") from error
    for name in ("event_id", "user_id", "basket_id", "item_id", *(["store_id"] if event.store_id else [])):
        if not is_id(value := getattr(event, name)) or value.isspace():  # a training would refuse the latter
            raise MessageInvalid(f"{name} is not a text of 1 to {MAX_ID_LENGTH} printable characters")
    if key is None or key != event.user_id.encode():
        raise MessageInvalid("the key is not the event's user_id, by which a user's events stay in order")
    if event.event_type not in EVENT_TYPES:
        raise MessageInvalid(f"event_type is not one of {', '.join(EVENT_TYPES)}")
    return (
        event.event_id,
        event.event_type,
        event.user_id,
        event.basket_id,
        event.item_id,
        _microseconds(event.at, now),
        event.quantity,
        event.price,
        event.discount,
        event.store_id or "",
    )


def parse_id(value: bytes | None) -> str | None:
    """Return the event's id in a message, None if it has none."""
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return orjson.loads(value or b"")["event_id"]
    return None


def events_table(events: list[Event], versions: list[int]) -> pa.Table:
    """Return checked events as a table of ARCHIVE_SCHEMA."""
    columns: list[Any] = list(zip(*events, strict=True)) if events else [()] * len(EVENT_SCHEMA)
    columns[5] = pa.array(columns[5], pa.int64()).cast(EVENT_SCHEMA.field("at").type)
    columns[7] = [float("nan") if price is None else price for price in columns[7]]
    return pa.table(dict(zip(ARCHIVE_SCHEMA.names, [*columns, versions], strict=True)), ARCHIVE_SCHEMA)


def _microseconds(text: str, now: float) -> int:
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise MessageInvalid("at is not an ISO 8601 time") from error
    found = microseconds(at if at.tzinfo else at.replace(tzinfo=UTC))
    if found < 0:
        raise MessageInvalid("at lies before 1970")
    if found > (now + CLOCK_SKEW.total_seconds()) * 1e6:
        raise MessageInvalid("at lies in the future")
    return found
