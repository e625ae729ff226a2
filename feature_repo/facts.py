"""CONTRACT the fact: a price, cost, stock, ban, promotion or coupon and its time of validity; check, fold.

A fact is a JSON object: `fact_id`, `fact`, `item_id`, `value`, `at` (when it became known) and, where they
apply, `store_id` (absent: every store), `user_id` (of a coupon; absent: every user), `valid_from` (the fact
holds from then on) and `valid_until` (it holds until then). `VALUES` lists the valid values; null withdraws
the earlier value.

Of the facts with one key, the fact with the latest (at, fact_id) is valid, in any order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import orjson

from feature_repo.errors import refusal
from feature_repo.ids import MAX_ID_LENGTH, is_id

MAX_BYTES = 16_384
CLOCK_SKEW_S = 86_400.0  # how far ahead of now `at` may lie: a fact from 2999 would hold for ever
LATEST = datetime(9999, 12, 31, tzinfo=UTC).timestamp() + 86_400.0  # the end of the year 9999
VALUES: dict[str, tuple[float, str]] = {  # fact -> largest number, and the expected value
    "price": (1e9, "the current price of one unit, a number from 0 to 1e9"),
    "stock": (1e9, "units left, a number from 0 to 1e9"),
    "ban": (1, "true or 1 banned, false or 0 not"),
    "promotion": (1, "the discount's share of the price, a number from 0 to 1"),
    "cost": (1e9, "the shop's cost of one unit, a number from 0 to 1e9"),
    "coupon": (math.nan, f"the coupon's code, 1 to {MAX_ID_LENGTH} printable characters"),
}
_SEPARATOR = "\x1f"  # unprintable, so that no id holds it


class FactInvalid(ValueError):
    """An invalid fact: the message names the field and the expected value, never the found value."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact; times are seconds since the epoch (UTC), None if open."""

    fact_id: str
    fact: str
    item_id: str
    value: float | str | None
    at: float
    store_id: str | None = None
    user_id: str | None = None
    valid_from: float | None = None
    valid_until: float | None = None

    @property
    def key(self) -> str:
        """The subject of the fact. An item may have several coupons, but one fact of each other kind."""
        coupon = self.value if isinstance(self.value, str) else ""
        parts = (self.fact, self.item_id, self.store_id or "", self.user_id or "", coupon)
        return _SEPARATOR.join(parts)

    def to_json(self) -> bytes:
        """Return the fact as the original JSON object, keys sorted."""
        fields: dict[str, Any] = {"fact_id": self.fact_id, "fact": self.fact, "item_id": self.item_id}
        for name in ("store_id", "user_id"):
            if (text := getattr(self, name)) is not None:
                fields[name] = text
        for name in ("at", "valid_from", "valid_until"):
            if (time := getattr(self, name)) is not None:
                fields[name] = datetime.fromtimestamp(time, UTC).isoformat()
        return orjson.dumps({**fields, "value": self.value}, option=orjson.OPT_SORT_KEYS)

    def ranked(self) -> bytes:
        """Return bytes that order facts with one key by precedence: `at`, `fact_id`, then the whole fact."""
        return b"%016d%b\x00%b" % (round(self.at * 1e6), self.fact_id.encode(), self.to_json())


def subject_of(key: str) -> tuple[str, str | None, str | None]:
    """Return item, store and user of the fact with a key, None for all; no item: the key is damaged."""
    _, item_id, store_id, user_id, *_ = [*key.split(_SEPARATOR), "", "", "", ""]
    return item_id, store_id or None, user_id or None


def unranked(ranked: bytes) -> bytes:
    """Return the JSON object in the bytes of `Fact.ranked`."""
    return ranked[ranked.index(b"\x00") + 1 :]


def valid_facts(facts: Iterable[Fact]) -> list[tuple[str, bytes]]:
    """Return for each key the bytes of the valid fact, see `Fact.ranked`."""
    highest: dict[str, bytes] = {}
    for fact in facts:
        key = fact.key
        highest[key] = max(fact.ranked(), highest.get(key, b""))
    return list(highest.items())


class _RawFact(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON object of a fact."""

    fact_id: str
    fact: str
    item_id: str
    value: float | str | bool | None
    at: str
    store_id: str | None = None
    user_id: str | None = None
    valid_from: str | None = None
    valid_until: str | None = None


_DECODER = msgspec.json.Decoder(_RawFact)


def parse_fact(text: bytes, now: float | None = None) -> Fact:
    """Check one fact and return it.

    Args:
        text: JSON.
        now: seconds since the epoch; the clock's where absent. `at` may lie a day ahead of it. Infinity: the
            fact was stored, so its writer has checked its times.

    Raises:
        FactInvalid: naming the field and the expected value.
    """
    if len(text) > MAX_BYTES:
        raise FactInvalid(f"{len(text)} bytes long, a fact has at most {MAX_BYTES}")
    try:
        raw = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FactInvalid(f"no fact: {refusal(error, _RawFact)}") from error
    kind = raw.fact
    if kind not in VALUES:
        raise FactInvalid(f"fact is not one of {', '.join(VALUES)}")
    for name in ("fact_id", "item_id", "store_id", "user_id"):
        if (one := getattr(raw, name)) is not None and not is_id(one):
            raise FactInvalid(f"{name} is not a text of 1 to {MAX_ID_LENGTH} printable characters")
    if raw.user_id is not None and kind != "coupon":
        raise FactInvalid(f"user_id is given, but a {kind} is the same for every user: leave it out")
    at, valid_from, valid_until = _times(raw, now)
    value = _value(kind, raw.value)
    return Fact(raw.fact_id, kind, raw.item_id, value, at, raw.store_id, raw.user_id, valid_from, valid_until)


def parse_lines(lines: Iterable[bytes]) -> tuple[list[Fact], list[tuple[int, str]]]:
    """Return the facts in a file of one JSON object a line, and number and reason of each invalid line.

    Empty lines are skipped.
    """
    facts, refused = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            facts.append(parse_fact(line))
        except FactInvalid as error:
            refused.append((number, str(error)))
    return facts, refused


def _times(raw: _RawFact, now: float | None) -> tuple[float, float | None, float | None]:
    at = _time("at", raw.at)
    valid_from = None if raw.valid_from is None else _time("valid_from", raw.valid_from)
    valid_until = None if raw.valid_until is None else _time("valid_until", raw.valid_until)
    if at > (datetime.now(UTC).timestamp() if now is None else now) + CLOCK_SKEW_S:
        raise FactInvalid("at lies in the future; what holds later has a valid_from")
    if valid_from is not None and valid_until is not None and valid_until <= valid_from:
        raise FactInvalid("valid_until is not after valid_from: the fact would never hold")
    if raw.fact in ("stock", "ban") and valid_from is not None and valid_from > at and now != math.inf:
        raise FactInvalid(
            f"valid_from is later than at, but a {raw.fact} replaces the one that holds until then: send it "
            "when it begins"
        )
    return at, valid_from, valid_until


def _value(kind: str, value: float | str | bool | None) -> float | str | None:
    largest, expected = VALUES[kind]
    if value is None:
        return None
    if kind == "coupon":
        valid = is_id(value)
    elif kind == "ban":
        valid = value in (0, 1)  # true and false, too
    else:
        valid = isinstance(value, float) and 0 <= value <= largest
    if not valid:
        raise FactInvalid(f"value is not that of a {kind}: expected {expected}, or null")
    return value if isinstance(value, str) else float(value)


def _time(name: str, text: str) -> float:
    try:
        parsed = datetime.fromisoformat(text)
        time = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise FactInvalid(f"{name} is no ISO 8601 time, expected for example 2017-12-05T18:30:00Z") from error
    if time == LATEST:  # the largest time of a language, 23:59:59.999999, rounded
        time -= 1.0
    if not 0 <= time < LATEST:
        raise FactInvalid(f"{name} lies before 1970 or after the year 9999")
    return time
