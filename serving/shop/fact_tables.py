"""Facts over the catalogue's codes -> arrays that a request reads: what is excluded, and what items cost.

Every table is replaced as a whole when it changes: a request reads the one it has found to the end.
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
    """What is said of items, one row each; NaN where what was said is withdrawn."""

    codes: np.ndarray  # (m,) int64, sorted
    value: np.ndarray  # (m,) float64
    at: np.ndarray  # (m,) float64, when it became known
    valid_from: np.ndarray  # (m,) float64, -inf where open
    valid_until: np.ndarray  # (m,) float64, inf where open

    def with_rows(self, new: Table) -> Table:
        """Return the table with rows of another: where both speak of an item, the later known stands."""
        place = np.searchsorted(self.codes, new.codes)
        known = np.zeros(len(new.codes), bool)
        inside = place < len(self.codes)
        known[inside] = self.codes[place[inside]] == new.codes[inside]
        change = known.copy()
        change[known] = new.at[known] >= self.at[place[known]]
        columns = []
        for name in COLUMNS:
            column, added = getattr(self, name).copy(), getattr(new, name)
            column[place[change]] = added[change]
            columns.append(np.insert(column, place[~known], added[~known]))
        return Table(*columns)

    def rows(self, keep: np.ndarray) -> Table:
        """Return the rows that `keep` names or marks."""
        return Table(*(getattr(self, name)[keep] for name in COLUMNS))

    def valid(self, at: float) -> np.ndarray:
        """Return the codes of rows that hold at a time."""
        return self.codes[(self.valid_from <= at) & (at < self.valid_until)]

    def look_up(self, codes: np.ndarray, at: float, into: np.ndarray) -> None:
        """Write what holds of `codes` at a time into an array, and leave it where nothing does."""
        last = len(self.codes) - 1
        # Sorted and distinct: if the last code is the number of its row, then so is each.
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
    """Return facts of one kind and store as a table; of two with one code the later known stands."""
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
    """Facts of one kind whose values are numbers, in one table for every store and one for each store."""

    def __init__(self, excludes: float | None = None) -> None:
        """Take the value that keeps an item from being offered, if the kind has one."""
        self._excludes = excludes
        self._tables: dict[str | None, Table] = {}
        self._excluded: dict[str | None, tuple[np.ndarray, Table]] = {}  # codes for good, and for a time

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
        """Return codes that are excluded everywhere, and those that are in the store."""
        parts = []
        for store in (None,) if store_id is None else (None, store_id):
            if (out := self._excluded.get(store)) is not None:
                parts += [out[0], out[1].valid(at)]
        return parts

    def look_up(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return what holds of each code at a time; the store's own word comes before the one for all."""
        found = np.full(len(codes), np.nan)
        for store in (None,) if store_id is None else (None, store_id):
            if (table := self._tables.get(store)) is not None and len(table.codes):
                table.look_up(codes, at, found)
        return found


class Offer(NamedTuple):
    """One coupon of one item; no code: what was offered before it is withdrawn."""

    at: float
    fact_id: str
    coupon: str | None
    valid_from: float
    valid_until: float


class Coupons:
    """Coupons by whom and where they are for."""

    def __init__(self) -> None:
        # (store, user) -> code -> offers, latest known first
        self._offers: dict[tuple[str | None, str | None], dict[int, tuple[Offer, ...]]] = {}

    def add(self, facts: list[tuple[int, Fact]]) -> None:
        """Take facts in, each with its item's code."""
        for code, fact in facts:
            scope = self._offers.setdefault((fact.store_id, fact.user_id), {})
            coupon = fact.value if isinstance(fact.value, str) else None
            starts, ends = _or(fact.valid_from, -np.inf), _or(fact.valid_until, np.inf)
            new = Offer(fact.at, fact.fact_id, coupon, starts, ends)
            known = {offer.coupon: offer for offer in scope.get(code, ())}
            if coupon not in known or known[coupon].at <= new.at:
                known[coupon] = new
            scope[code] = tuple(sorted(known.values(), key=itemgetter(0, 1), reverse=True))

    def look_up(
        self, codes: np.ndarray, at: float, user_id: str | None, store_id: str | None
    ) -> list[str | None]:
        """Return the coupon that holds for each code at a time.

        One for this shopper comes before one for this store, and that before one for everybody; of several
        the latest known is shown.
        """
        scopes = dict.fromkeys([(store_id, user_id), (None, user_id), (store_id, None), (None, None)])
        # A store that nothing is known of and a shopper without coupons cost nothing.
        known = [scope for key in scopes if (scope := self._offers.get(key))]
        asked = codes.tolist()
        wanted = set(asked)
        offered = set[int]().union(*(scope.keys() & wanted for scope in known))
        found = {code: _first(code, at, known) for code in offered}
        return list(map(found.get, asked))


def _first(code: int, at: float, scopes: list[dict[int, tuple[Offer, ...]]]) -> str | None:
    for scope in scopes:
        for _, _, coupon, starts, ends in scope.get(code, ()):
            if starts <= at < ends:
                if coupon is not None:
                    return coupon
                break  # what was offered here before is withdrawn
    return None
