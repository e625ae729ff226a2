"""A user's purchase events -> the user's history row, one basket at a time.

`fold` is the only way a history changes: training replays the archive through it, the stream
feeds it live, and a batch is a loop over it, so all three hold the same state.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

DECAY_DAYS = (15.0, 60.0, 120.0)
DAY_S = 86_400
MAX_ITEMS = 1_024  # items kept per user; the least recently and least often bought are dropped
_VERSION = 1
_HEADER = struct.Struct("<HHIqqIIdd")


@dataclass(slots=True)
class UserHistory:
    """What one user bought so far; all arrays have one entry per distinct item, sorted by item.

    `items` holds item ids (str) or item codes (int), whichever the caller folds; times are
    seconds since the epoch (UTC). `decayed[:, j]` is the count of baskets with the item, each
    weighted by exp(-age / DECAY_DAYS[j]) as of the item's own `last_at`.
    """

    items: np.ndarray  # (n,)
    count: np.ndarray  # (n,) float32
    decayed: np.ndarray  # (n, 3) float32
    first_at: np.ndarray  # (n,) int64
    last_at: np.ndarray  # (n,) int64
    basket_count: int = 0
    line_count: int = 0
    first_basket_at: int = 0
    last_basket_at: int = 0
    spend: float = 0.0
    discount: float = 0.0

    def decayed_at(self, at: int) -> np.ndarray:
        """Return the decayed counts as of `at`, (n, 3) float64."""
        age_days = np.maximum(at - self.last_at, 0) / DAY_S
        return self.decayed * np.exp(-age_days[:, None] / np.array(DECAY_DAYS))


def empty_history(dtype: type = np.str_) -> UserHistory:
    """Return the history of a user who has bought nothing."""
    return UserHistory(
        items=np.empty(0, dtype),
        count=np.empty(0, np.float32),
        decayed=np.empty((0, len(DECAY_DAYS)), np.float32),
        first_at=np.empty(0, np.int64),
        last_at=np.empty(0, np.int64),
    )


def fold(history: UserHistory, at: int, items: np.ndarray, spend: float, discount: float) -> UserHistory:
    """Return the history after one more basket; `history` itself is left as it was.

    Args:
        history: the state before the basket.
        at: the basket's time, seconds since the epoch; may be earlier than what was folded before.
        items: the basket's distinct items, sorted, same kind as `history.items`.
        spend: what was paid for the basket, in the shop's currency.
        discount: what was taken off, in the shop's currency.
    """
    dtype = np.promote_types(history.items.dtype, items.dtype)
    where = np.searchsorted(history.items, items)
    known = np.zeros(len(items), bool)
    inside = where < len(history.items)
    known[inside] = history.items[where[inside]] == items[inside]
    old, new = where[known], items[~known]

    count, decayed = history.count.copy(), history.decayed.copy()
    first_at, last_at = history.first_at.copy(), history.last_at.copy()
    tau_s = np.array(DECAY_DAYS) * DAY_S
    later = np.maximum(at, last_at[old])[:, None]
    decayed[old] = decayed[old] * np.exp((last_at[old, None] - later) / tau_s) + np.exp((at - later) / tau_s)
    count[old] += 1
    first_at[old] = np.minimum(first_at[old], at)
    last_at[old] = later[:, 0]

    order = np.argsort(np.concatenate([history.items.astype(dtype), new.astype(dtype)]), kind="stable")
    grown = len(new)
    merged = UserHistory(
        items=np.concatenate([history.items.astype(dtype), new.astype(dtype)])[order],
        count=np.concatenate([count, np.ones(grown, np.float32)])[order],
        decayed=np.concatenate([decayed, np.ones((grown, len(DECAY_DAYS)), np.float32)])[order],
        first_at=np.concatenate([first_at, np.full(grown, at, np.int64)])[order],
        last_at=np.concatenate([last_at, np.full(grown, at, np.int64)])[order],
        basket_count=history.basket_count + 1,
        line_count=history.line_count + len(items),
        first_basket_at=min(history.first_basket_at, at) if history.basket_count else at,
        last_basket_at=max(history.last_basket_at, at),
        spend=history.spend + spend,
        discount=history.discount + discount,
    )
    if len(merged.items) > MAX_ITEMS:
        weight = merged.decayed_at(merged.last_basket_at)[:, -1]
        _keep(merged, np.sort(np.argsort(-weight, kind="stable")[:MAX_ITEMS]))
    return merged


def _keep(history: UserHistory, rows: np.ndarray) -> None:
    for column in ("items", "count", "decayed", "first_at", "last_at"):
        setattr(history, column, getattr(history, column)[rows])


def pack(history: UserHistory) -> bytes:
    """Return the history as the bytes that the online store keeps (little endian, no pickle).

    Layout: header, then the columns `count`, `decayed`, `first_at`, `last_at`, then the item ids
    as UTF-8 joined by newlines.
    """
    n = len(history.items)
    header = _HEADER.pack(
        _VERSION,
        len(DECAY_DAYS),
        n,
        history.first_basket_at,
        history.last_basket_at,
        history.basket_count,
        history.line_count,
        history.spend,
        history.discount,
    )
    columns = [
        history.count.astype("<f4"),
        history.decayed.astype("<f4"),
        history.first_at.astype("<i8"),
        history.last_at.astype("<i8"),
    ]
    return b"".join([header, *(c.tobytes() for c in columns), "\n".join(map(str, history.items)).encode()])


def unpack(row: bytes) -> UserHistory:
    """Return the history that `pack` wrote.

    Raises:
        ValueError: the bytes are not a packed history of this version.
    """
    if len(row) < _HEADER.size:
        raise ValueError(f"a packed history has at least {_HEADER.size} bytes, this one has {len(row)}")
    version, decays, n, first, last, baskets, lines, spend, discount = _HEADER.unpack_from(row)
    if (version, decays) != (_VERSION, len(DECAY_DAYS)):
        raise ValueError(
            f"packed history version {version} with {decays} decays; this code reads {_VERSION} with 3"
        )
    end = _HEADER.size + n * (4 + 4 * decays + 16)
    if len(row) < end:
        raise ValueError(f"packed history of {n} items is cut short at {len(row)} of {end} bytes")
    at = _HEADER.size

    def column(dtype: str, width: int) -> np.ndarray:
        nonlocal at
        values = np.frombuffer(row, dtype, n * width, at)
        at += values.nbytes
        return values

    count, decayed = column("<f4", 1), column("<f4", decays).reshape(n, decays)
    first_at, last_at = column("<i8", 1), column("<i8", 1)
    ids = row[at:].decode().split("\n") if n else []
    if len(ids) != n:
        raise ValueError(f"packed history names {len(ids)} items, its header says {n}")
    return UserHistory(
        np.array(ids) if n else np.empty(0, "U1"),
        count,
        decayed,
        first_at,
        last_at,
        baskets,
        lines,
        first,
        last,
        spend,
        discount,
    )
