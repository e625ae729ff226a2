"""Id -> key, value -> row, in the layout of Feast's online stores (entity key serialisation 3)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from serving.errors import RowInvalid

PROJECT = "checkout"
VIEW = "user_history"
HISTORY = "history"
JOIN_KEY = "user_id"

_STRING = 2  # Feast's ValueType.STRING
_BYTES_TAG = 0x0A  # ValueProto field 1, length-delimited
HISTORY_FIELD = bytes.fromhex("0601f0f8")  # murmur3 of "user_history:history", little endian
WRITTEN_FIELD = f"_ts:{VIEW}".encode()


@dataclass(frozen=True, slots=True)
class UserRow:
    """The row that the store holds for one user: the packed history and its time."""

    history: bytes
    written_at: float  # seconds since the epoch; the history holds purchases strictly before it


def entity_key(user_id: str) -> bytes:
    """Return Feast's key of a user: counts, types and lengths as little-endian 32-bit numbers.

    Raises:
        RowInvalid: the id cannot be encoded, so no user has a row under it.
    """
    try:
        name, value = JOIN_KEY.encode(), user_id.encode()
    except UnicodeEncodeError as error:
        raise RowInvalid("a user id that is no valid Unicode") from error
    return b"".join(
        (struct.pack("<III", 1, _STRING, len(name)), name, struct.pack("<II", _STRING, len(value)), value)
    )


def bytes_value(proto: bytes) -> bytes:
    """Return the bytes in a serialised ValueProto that holds bytes and nothing else."""
    if not proto or proto[0] != _BYTES_TAG:
        raise ValueError("the stored value is not a Feast bytes value")
    length, start = _varint(proto, 1)
    if start + length != len(proto):
        raise ValueError(f"the stored value announces {length} bytes and has {len(proto) - start}")
    return proto[start:]


def timestamp(proto: bytes) -> float:
    """Return the seconds since the epoch in a serialised protobuf Timestamp."""
    values = {0x08: 0, 0x10: 0}  # field 1 seconds, field 2 nanoseconds
    at = 0
    while at < len(proto):
        tag = proto[at]
        if tag not in values:
            raise ValueError("the stored time is not a protobuf Timestamp")
        values[tag], at = _varint(proto, at + 1)
    return values[0x08] + values[0x10] / 1e9


def _varint(proto: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at` and the position behind it."""
    value = shift = 0
    while True:
        if at >= len(proto) or shift > 63:
            raise ValueError("a number in the stored value is cut short")
        byte = proto[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
