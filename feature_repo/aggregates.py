"""A user's events -> the user's row: the latest events, each once, in order of time.

A row is a set: `fold` merges more events into it, in any order and with any repetition. So a stream that is
late, repeated or killed holds the same row as a batch over the archive. Every feature of a user is a function
of the row and of the requested time (`before`), never of the order in which events arrived.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from feature_repo.kernels.history import DAY_S as DAY_S
from feature_repo.kernels.history import is_orderly, repeated, summarise

DECAY_DAYS = (15.0, 60.0, 120.0)  # the second is half of the third, the first a quarter of the second
SESSION_GAP_S = 30 * 60.0  # a session ends after so long without an event
KINDS = ("purchase", "impression", "click")  # what `kind` counts; the order is stored
PURCHASE, IMPRESSION, CLICK = range(3)
MAX_PURCHASES = 4_096  # lines kept per user, the latest; Complete Journey's busiest has 4,193 a year
MAX_VIEWS = 512  # impressions and clicks kept per user, the latest
BATCH = -1  # version of a row that no stream has written
_FORMAT = 3
_HEADER = struct.Struct("<HHIIq")  # format, 0, items, lines, version
_COLUMNS = (
    ("at", "<f8"),
    ("item", "<u2"),
    ("kind", "u1"),
    ("basket", "<u4"),
    ("key", "<u8"),
    ("paid", "<f4"),
    ("discount", "<f4"),
)
_MARK_BYTES = 8
_LINE_BYTES = sum(np.dtype(dtype).itemsize for _, dtype in _COLUMNS)


@dataclass(slots=True)
class UserEvents:
    """The events of one user, one entry per line of a basket or view, sorted by (at, basket, item, key).

    `items` holds the distinct item ids (str) or item codes (int) in order, `item` a line's position there.
    `key` identifies an event (`hash_ids` of the event id), `basket` a basket among those of one moment. Money
    is the total cost of the line and the total discount. The row holds the events of a stream up to
    `version`, see `feature_repo.stream.archive`.
    """

    items: np.ndarray  # (m,) sorted
    at: np.ndarray  # (n,) float64 seconds since the epoch, UTC
    item: np.ndarray  # (n,) uint16
    kind: np.ndarray  # (n,) uint8, index of KINDS
    basket: np.ndarray  # (n,) uint32
    key: np.ndarray  # (n,) uint64
    paid: np.ndarray  # (n,) float32
    discount: np.ndarray  # (n,) float32
    version: int = BATCH

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self.at)

    def before(self, at: float) -> UserEvents:
        """Return the events strictly before `at`, without copying them."""
        if len(self) == 0 or self.at[-1] < at:
            return self
        return self.where(slice(int(np.searchsorted(self.at, at))))

    def where(self, rows: slice | np.ndarray) -> UserEvents:
        """Return some of the lines; the items stay whole."""
        return UserEvents(  # written out: `replace` takes several times as long, and every request needs it
            self.items,
            self.at[rows],
            self.item[rows],
            self.kind[rows],
            self.basket[rows],
            self.key[rows],
            self.paid[rows],
            self.discount[rows],
            self.version,
        )

    def begins(self) -> np.ndarray:
        """Return which lines are the first of their basket, (n,) bool."""
        first = np.ones(len(self), bool)
        first[1:] = (self.at[1:] != self.at[:-1]) | (self.basket[1:] != self.basket[:-1])
        return first

    @property
    def baskets(self) -> int:
        """Number of baskets; a basket is one number at one moment."""
        return int(np.count_nonzero(self.begins()))

    def codes(self) -> np.ndarray:
        """Return the item of each line, (n,)."""
        return self.items[self.item]

    def distinct(self) -> np.ndarray:
        """Return the items that occur, sorted."""
        return self.items[np.bincount(self.item, minlength=len(self.items)) > 0]

    def named(self, ids: np.ndarray) -> UserEvents:
        """Return the events with item codes replaced by `ids[code]`, for codes in the order of their ids."""
        return replace(self, items=ids[self.items])


class Totals(NamedTuple):
    """Sums over one user's events before a moment. Money is in the shop's currency, times are in seconds.

    Spans end at the moment. A session holds the purchases and clicks since the last pause of SESSION_GAP_S;
    it is empty if that pause still lasts.
    """

    baskets: float
    lines: float
    first_basket_at: float
    last_basket_at: float
    spend: float
    discount: float
    baskets_1h: float
    baskets_7d: float
    spend_7d: float
    baskets_60d: float
    spend_60d: float
    items_60d: float  # distinct ones
    impressions: float
    clicks: float
    clicks_10m: float
    session_lines: float
    session_at: float  # when it began


@dataclass(slots=True)
class UserHistory:
    """The purchases of one user before a moment; each array has one entry per distinct item, sorted by item.

    `decayed[j]` is the count of baskets with the item, each weighted by exp(-age / DECAY_DAYS[j]).
    """

    items: np.ndarray  # (h,)
    count: np.ndarray  # (h,) float32 baskets with it
    decayed: np.ndarray  # (3, h) float64
    first_at: np.ndarray  # (h,) float64
    last_at: np.ndarray  # (h,) float64


def no_events(kind_of_items: type = np.str_) -> UserEvents:
    """Return the row of a user without events."""
    columns: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype in _COLUMNS}
    return UserEvents(np.empty(0, kind_of_items), **columns)


def make_events(items: Sequence[str] | np.ndarray, *columns: np.ndarray, version: int = BATCH) -> UserEvents:
    """Return one user's lines, in any order, as a row.

    Args:
        items: one entry per line, ids or codes.
        columns: at, kind, basket, key, paid and discount of each line.
        version: the version of the last line.
    """
    ids = np.asarray(items)
    distinct, item = np.unique(ids.astype(str) if ids.dtype == object else ids, return_inverse=True)
    at, kind, basket, key, paid, discount = columns
    made = UserEvents(distinct, at, item.ravel(), kind, basket, key, paid, discount, version)
    return _trimmed(_in_order(_once(made)))


def fold(row: UserEvents, more: UserEvents) -> UserEvents:
    """Return the row with more events in it; both arguments stay unchanged.

    Of events with one key the first that was folded stays. Lines beyond MAX_PURCHASES or MAX_VIEWS are
    dropped, the earliest first; the result does not depend on when they are dropped.

    Args:
        row: the existing row.
        more: a row too, as `make_events` returns it.
    """
    version = max(row.version, more.version)
    known = np.isin(more.key, row.key) if len(more) > 100 else (row.key[:, None] == more.key).any(0)
    if known.all():
        return row if version == row.version else replace(row, version=version)
    if known.any():
        more = compact(more.where(~known))
    items, own, its = _united(row.items, more.items)
    columns = {name: np.concatenate([getattr(row, name), getattr(more, name)]) for name, _ in _COLUMNS}
    columns["item"] = np.concatenate([own[row.item], its[more.item]])
    merged = UserEvents(items, version=version, **columns)
    later = len(row) == 0 or more.at[0] > row.at[-1]  # the usual case: no late events
    return _trimmed(merged if later else _in_order(merged))


def _once(events: UserEvents) -> UserEvents:
    """Return the first event of each key."""
    if len(set(events.key.tolist())) == len(events):
        return events
    _, first = np.unique(events.key, return_index=True)
    return compact(events.where(np.sort(first)))


def _in_order(events: UserEvents) -> UserEvents:
    return events.where(np.lexsort((events.key, events.item, events.basket, events.at)))


def _united(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the union of two sorted arrays, and the place of each array's entries in it."""
    place = np.searchsorted(first, second)
    new = np.ones(len(second), bool)
    inside = place < len(first)
    new[inside] = first[place[inside]] != second[inside]
    union = np.insert(first.astype(np.promote_types(first.dtype, second.dtype)), place[new], second[new])
    before = np.searchsorted(place[new], np.arange(len(first)), "right")  # new entries before each old one
    return union, np.arange(len(first)) + before, place + np.cumsum(new) - new


def _trimmed(events: UserEvents) -> UserEvents:
    kept = latest(events)
    if kept is not events:
        kept = compact(kept)
    columns = {name: getattr(kept, name).astype(dtype, copy=False) for name, dtype in _COLUMNS}
    return UserEvents(kept.items, version=kept.version, **columns)


def latest(events: UserEvents) -> UserEvents:
    """Return the lines that a row keeps: the latest MAX_PURCHASES and MAX_VIEWS."""
    bought = events.kind == PURCHASE
    if bought.sum() <= MAX_PURCHASES and (~bought).sum() <= MAX_VIEWS:
        return events
    kept = [np.flatnonzero(bought)[-MAX_PURCHASES:], np.flatnonzero(~bought)[-MAX_VIEWS:]]
    return events.where(np.sort(np.concatenate(kept)))


def is_cut_off(events: UserEvents) -> bool:
    """Return whether a row may lack older purchases: it holds as many lines as it keeps."""
    return len(events) >= MAX_PURCHASES and int((events.kind == PURCHASE).sum()) >= MAX_PURCHASES


def compact(events: UserEvents) -> UserEvents:
    """Return the events without unused items; a batch may name more of them than a row can."""
    there, item = np.unique(events.item, return_inverse=True)
    return replace(events, items=events.items[there], item=item.ravel())


def merge_lines(events: UserEvents) -> UserEvents:
    """Return the events with one purchase line per basket and item: repeated scans are added up.

    Features must not depend on how an item was scanned. Rows keep both lines, because each is an event that
    may come again. Without repeated scans the argument itself is returned.
    """
    again = repeated(events.at, events.basket, events.item, events.kind)
    if not again.any():
        return events
    bought = events.kind == PURCHASE  # impressions may lie between purchases
    merged, first = events.where(~again), np.flatnonzero(~again[bought])
    lines = merged.kind == PURCHASE
    merged.paid[lines] = np.add.reduceat(events.paid[bought], first, dtype=np.float64)
    merged.discount[lines] = np.add.reduceat(events.discount[bought], first, dtype=np.float64)
    return merged


def summary_of(events: UserEvents, at: float) -> tuple[UserHistory, Totals]:
    """Return the purchases and the sums over all events as of `at`; all events lie before it."""
    count, values, sums = summarise(
        events.at,
        events.basket,
        events.item,
        events.kind,
        events.paid,
        events.discount,
        len(events.items),
        at,
        DECAY_DAYS[2] * DAY_S,
        SESSION_GAP_S,
    )
    totals = Totals(*sums.tolist())
    items = events.items
    if not count.all():  # some items were seen, but never bought
        bought = np.flatnonzero(count)
        # `values[:, bought]` has another layout, for which numba compiles each loop again: it takes seconds.
        items, count, values = items[bought], count[bought], values.take(bought, axis=1)
    return UserHistory(
        items=items,
        count=count,
        decayed=values[:3],
        first_at=values[3],
        last_at=values[4],
    ), totals


def hash_ids(ids: Iterable[str]) -> np.ndarray:
    """Return a 64-bit hash of each id, (n,) uint64, the same on every machine (BLAKE2b)."""
    digests = b"".join(hashlib.blake2b(one.encode(), digest_size=8).digest() for one in ids)
    return np.frombuffer(digests, "<u8")


def pack(events: UserEvents, user_id: str = "") -> bytes:
    """Return the row as the bytes that the online store keeps (little endian, no pickle).

    Layout: header, the mark of the user, each column, the item ids as UTF-8 joined by newlines.
    """
    events = compact(events)
    header = _HEADER.pack(_FORMAT, 0, len(events.items), len(events), events.version)
    columns = [getattr(events, name).astype(dtype, copy=False).tobytes() for name, dtype in _COLUMNS]
    return b"".join([header, _mark(user_id), *columns, "\n".join(events.items.tolist()).encode()])


def _mark(user_id: str) -> bytes:
    return hashlib.blake2b(user_id.encode(), digest_size=_MARK_BYTES).digest()


def check_owner(row: bytes, user_id: str) -> None:
    """Check that a packed row is this user's; a store may hold or send the row of another.

    Raises:
        ValueError: it is another user's, or names none.
    """
    if row[_HEADER.size : _HEADER.size + _MARK_BYTES] != _mark(user_id):
        raise ValueError("packed row of another user, or of nobody: publish the features again")


def unpack(row: bytes, to_codes: Callable[[bytes, int], np.ndarray] | None = None) -> UserEvents:
    """Return the row that `pack` wrote; its columns are views of the bytes.

    Args:
        row: the bytes.
        to_codes: takes the ids as one text, one a line, and their number, and returns their codes; with it
            the items are codes, -1 for an id that the catalogue lacks.

    Raises:
        ValueError: the bytes are not a packed row of this format, or hold lines that no event can produce.
    """
    if len(row) < _HEADER.size:
        raise ValueError(f"a packed row has at least {_HEADER.size} bytes, this one has {len(row)}")
    found, _, m, n, version = _HEADER.unpack_from(row)
    if found != _FORMAT:
        raise ValueError(
            f"packed row of format {found}; this code reads {_FORMAT}: publish the features again"
        )
    start = _HEADER.size + _MARK_BYTES
    end = start + n * _LINE_BYTES
    if len(row) < end:
        raise ValueError(f"packed row of {n} lines is cut short at {len(row)} of {end} bytes")
    columns = {}
    for name, dtype in _COLUMNS:
        columns[name] = np.frombuffer(row, dtype, n, start)
        start += columns[name].nbytes
    if not is_orderly(columns["at"], columns["kind"], columns["paid"], columns["discount"], len(KINDS)):
        raise ValueError(
            f"packed row of {n} lines holds an invalid time, kind or amount, or lines out of order: "
            "it is damaged"
        )
    items: np.ndarray = np.empty(0, "U1" if to_codes is None else np.int64)
    if m:
        text = row[start:]
        items = np.array(text.decode().split("\n")) if to_codes is None else to_codes(text, m)
    if len(items) != m or (n and columns["item"].max() >= m):
        raise ValueError(f"packed row names other than the {m} items that its header says: it is damaged")
    return UserEvents(items, version=version, **columns)
