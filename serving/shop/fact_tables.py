"""Facts over the catalogue's codes -> the arrays of excluded items, prices and coupons that a request reads.

A table that changes is replaced as a whole, so a request reads one consistent table to the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from feature_repo.facts import Fact


@dataclass(frozen=True, slots=True)
class Table:
    """The values of one kind of fact, one row for each item; NaN where the fact is withdrawn."""

    codes: np.ndarray  # (m,) int64, sorted
    value: np.ndarray  # (m,) float64
    at: np.ndarray  # (m,) float64, when it became known
    valid_from: np.ndarray  # (m,) float64, -inf where open
    valid_until: np.ndarray  # (m,) float64, inf where open

    def with_rows(self, new: Table) -> Table:
        """Return the table merged with another; for an item in both, the later fact wins."""
        place = np.searchsorted(self.codes, new.codes)
        exists = np.zeros(len(new.codes), bool)
        inside = place < len(self.codes)
        exists[inside] = self.codes[place[inside]] == new.codes[inside]
        change = exists.copy()
        change[exists] = new.at[exists] >= self.at[place[exists]]
        columns = []
        for name in COLUMNS:
            column, added = getattr(self, name).copy(), getattr(new, name)
            column[place[change]] = added[change]
            columns.append(np.insert(column, place[~exists], added[~exists]))
        return Table(*columns)

    def rows(self, keep: np.ndarray) -> Table:
        """Return the rows at the indices, or under the mask, `keep`."""
        return Table(*(getattr(self, name)[keep] for name in COLUMNS))

    def valid(self, at: float) -> np.ndarray:
        """Return the codes of the rows that are valid at a time."""
        return self.codes[(self.valid_from <= at) & (at < self.valid_until)]

    def look_up(self, codes: np.ndarray, at: float, into: np.ndarray) -> None:
        """Write the values of `codes` at a time into an array; other places keep theirs."""
        last = len(self.codes) - 1
        # Codes are sorted and distinct: if the last one equals its row number, each of them does.
        in_rows = self.codes[-1] == last
        place = np.minimum(codes if in_rows else self.codes.searchsorted(codes), last)
        value = self.value[place]
        holds = (
            (self.codes[place] == codes)
            & (self.valid_from[place] <= at)
            & (at < self.valid_until[place])
            & (value == value)  # not withdrawn
        )
        np.copyto(into, value, where=holds)


COLUMNS = ("codes", "value", "at", "valid_from", "valid_until")
EMPTY = Table(np.empty(0, np.int64), *(np.empty(0) for _ in COLUMNS[1:]))


def table_of(facts: Iterable[tuple[int, Fact]]) -> Table:
    """Return facts of one kind and store as a table; of two facts with one code the later wins."""
    latest: dict[int, Fact] = {}
    for code, fact in facts:
        if code not in latest or latest[code].at <= fact.at:
            latest[code] = fact
    rows = sorted(latest.items())
    numbers = [
        [_or(fact.value, np.nan) for _, fact in rows],
        [fact.at for _, fact in rows],
        [_or(fact.valid_from, -np.inf) for _, fact in rows],
        [_or(fact.valid_until, np.inf) for _, fact in rows],
    ]
    return Table(np.array([code for code, _ in rows], np.int64), *(np.array(n, np.float64) for n in numbers))


def _or(value: float | str | None, default: float) -> float:
    return default if value is None else float(value)


class Numbers:
    """Facts of one kind with numeric values: one table for all stores and one for each store."""

    def __init__(self, excludes: float | None = None) -> None:
        """Create an empty table; `excludes` is the value that excludes an item, if the kind has one."""
        self._excludes = excludes
        self._tables: dict[str | None, Table] = {}
        # Store -> codes excluded without dates, and the rows that exclude for a time.
        self._excluded: dict[str | None, tuple[np.ndarray, Table]] = {}

    def add(self, facts: list[tuple[int, Fact]]) -> None:
        """Take facts in, each with its item's code."""
        by_store: dict[str | None, list[tuple[int, Fact]]] = {}
        for code, fact in facts:
            by_store.setdefault(fact.store_id, []).append((code, fact))
        for store_id, group in by_store.items():
            table = self._tables.get(store_id, EMPTY).with_rows(table_of(group))
            self._tables[store_id] = table
            if self._excludes is not None:
                out = table.rows(table.value == self._excludes)
                for_good = np.isneginf(out.valid_from) & np.isposinf(out.valid_until)
                self._excluded[store_id] = (out.codes[for_good], out.rows(~for_good))

    def excluded(self, at: float, store_id: str | None) -> list[np.ndarray]:
        """Return the codes that are excluded everywhere, and those excluded in the store."""
        parts = []
        for store in (None,) if store_id is None else (None, store_id):
            if (out := self._excluded.get(store)) is not None:
                parts += [out[0], out[1].valid(at)]
        return parts

    def look_up(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return the value of each code at a time; a store's value wins over the one for all stores."""
        values = np.full(len(codes), np.nan)
        for store in (None,) if store_id is None else (None, store_id):
            if (table := self._tables.get(store)) is not None and len(table.codes):
                table.look_up(codes, at, values)
        return values


class Offer(NamedTuple):
    """One coupon of one item; without a code, it withdraws the earlier offers."""

    at: float
    fact_id: str
    coupon: str | None
    valid_from: float
    valid_until: float


class Coupons:
    """Coupons by the store and the shopper they are for."""

    def __init__(self) -> None:
        # (store, user) -> code -> offers, latest first
        self._offers: dict[tuple[str | None, str | None], dict[int, tuple[Offer, ...]]] = {}

    def add(self, facts: list[tuple[int, Fact]]) -> None:
        """Take facts in, each with its item's code."""
        for code, fact in facts:
            scope = self._offers.setdefault((fact.store_id, fact.user_id), {})
            coupon = fact.value if isinstance(fact.value, str) else None
            starts, ends = _or(fact.valid_from, -np.inf), _or(fact.valid_until, np.inf)
            new = Offer(fact.at, fact.fact_id, coupon, starts, ends)
            offers = {offer.coupon: offer for offer in scope.get(code, ())}
            if coupon not in offers or offers[coupon].at <= new.at:
                offers[coupon] = new
            scope[code] = tuple(sorted(offers.values(), key=itemgetter(0, 1), reverse=True))

    def look_up(
        self, codes: np.ndarray, at: float, user_id: str | None, store_id: str | None
    ) -> list[str | None]:
        """Return the coupon that is valid for each code at a time.

        A coupon for this shopper wins over one for this store, and that over one for all shoppers. Of several
        the latest wins.
        """
        keys = dict.fromkeys([(store_id, user_id), (None, user_id), (store_id, None), (None, None)])
        # A store or a shopper without coupons costs nothing.
        scopes = [scope for key in keys if (scope := self._offers.get(key))]
        requested = codes.tolist()
        distinct = set(requested)
        offered = set[int]().union(*(scope.keys() & distinct for scope in scopes))
        coupons = {code: _first(code, at, scopes) for code in offered}
        return list(map(coupons.get, requested))


def _first(code: int, at: float, scopes: list[dict[int, tuple[Offer, ...]]]) -> str | None:
    for scope in scopes:
        for _, _, coupon, starts, ends in scope.get(code, ()):
            if starts <= at < ends:
                if coupon is not None:
                    return coupon
                break  # the earlier offers of this scope are withdrawn
    return None
