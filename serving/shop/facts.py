"""The fact store and the rules file -> the facts about a request's items.

A thread polls for changes four times a second; no request waits for it. A fact's dates are compared with the
request's time: a coupon ends to the second, without an event.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from feature_repo.facts import Fact
from feature_repo.statistics import NO_ITEM, Statistics
from serving.errors import FactsUnavailable
from serving.metrics import FACT_READS, FACTS_COMPLETE_UNTIL, FACTS_KNOWN, FACTS_READ_AT, RULES_BROKEN
from serving.shop.fact_store import FactStore, complete_until
from serving.shop.rules import NO_RULES, Minimum, Plan, RulesFile

POLL_S = 0.25
AHEAD_S = 1.0  # plans are made so long before a rule begins or ends
BREATH_S = 0.005  # pause between two pages of facts, which leaves the interpreter to requests
SETTLING_S = 2.0  # patience at a start with a store that fails, or a rules file that is being written
_log = logging.getLogger(__name__)


class KnownFacts(NamedTuple):
    """What `LiveFacts` has read: the sources that gave anything, and the items with a stock or a ban."""

    sources: frozenset[str]
    item_ids: np.ndarray  # (n,) str, in the order of the codes
    codes: Mapping[tuple[str, str | None], np.ndarray]  # (kind, store) -> (m,) int64


class LiveFacts:
    """The current facts, over the codes of one catalogue.

    If the store or the rules file can't be read, the facts last read stay: a sold-out item must not come
    back because of a typo or a dead server. Items outside the catalogue are left out.
    """

    def __init__(
        self,
        statistics: Statistics,
        store: FactStore | None = None,
        rules_file: RulesFile | None = None,
    ) -> None:
        """Read all facts, then watch for changes until `close`."""
        self._statistics = statistics
        self._store, self._rules_file = store, rules_file
        self.rules = NO_RULES
        self._sequence = 0
        self._numbers = {
            "price": Numbers(),
            "promotion": Numbers(),
            "stock": Numbers(excludes=0.0),
            "ban": Numbers(excludes=1.0),
            "cost": Numbers(),
        }
        self._coupons = Coupons()
        self._broken = ""
        # Sources that are not read completely yet.
        self._unread = {"fact store", "rules file"}
        self._nonempty: set[str] = set()  # sources that have given any fact or rule
        self._elsewhere: set[str] = set()  # kinds with a fact about an item outside the catalogue
        self._closing = threading.Event()
        until = (
            time.monotonic() + SETTLING_S
        )  # a fault of a moment must not bring back sold-out or banned items
        while True:
            while self._poll(pause_s=0.0):
                pass
            is_read = store is None or "fact store" not in self._unread
            if (is_read and (rules_file is None or rules_file.settled)) or time.monotonic() >= until:
                break
            time.sleep(POLL_S)
        # A thread that never starts would keep this object and its catalogue until a full garbage collection.
        self._thread = None
        if store is not None or rules_file is not None:
            self._thread = threading.Thread(target=self._watch, name="facts", daemon=True)
            self._thread.start()

    @property
    def state(self) -> str:
        """Return "ready" if the latest read of the store and of the rules succeeded, else "unavailable"."""
        broken = self._broken or (self._rules_file is not None and self._rules_file.broken)
        return "unavailable" if broken else "ready"

    def known(self) -> KnownFacts:
        """Return the sources and items read so far, for `lacks` of facts that are opened after this call."""
        codes = {
            (kind, store): table.codes
            for kind in ("stock", "ban")
            for store, table in list(self._numbers[kind].tables.items())
        }
        return KnownFacts(frozenset(self._nonempty), self._statistics.item_ids, codes)

    def lacks(self, before: KnownFacts) -> list[str]:
        """Return the sources that gave facts before and are unread here, or have lost facts.

        A store keeps a row for each withdrawn fact, so one that lacks the row of an item's stock or ban was
        lost. A rules file may have been emptied or removed.
        """
        missing = self._unread | ({"fact store"} - self._nonempty)
        for (kind, store), were in before.codes.items():
            expected = self._statistics.each_code(before.item_ids[were].tolist())
            rows = self._numbers[kind].tables.get(store, EMPTY).codes
            if not np.isin(expected[expected != NO_ITEM], rows).all():
                missing.add("fact store")
        return sorted(missing & before.sources)

    @property
    def rules_fault(self) -> str:
        """Return why the rules file has not been read, "" if it has, or without one."""
        if self._rules_file is None:
            return ""
        unread = "it is being written all the time" if "rules file" in self._unread else ""
        return self._rules_file.broken or unread

    def excluded(self, at: float, store_id: str | None) -> np.ndarray:
        """Return the codes of items that are sold out, here or everywhere, or banned; int64."""
        parts = [self._numbers[kind].excluded(at, store_id) for kind in ("stock", "ban")]
        return np.concatenate([EMPTY.codes, *parts[0], *parts[1]])

    def excluded_because(self, code: int, at: float, store_id: str | None) -> str:
        """Return why an item must not be offered, "" if it may be."""
        for kind, why in (("stock", "sold out"), ("ban", "banned by a fact")):
            if any(code in codes for codes in self._numbers[kind].excluded(at, store_id)):
                return why
        return ""

    def hidden(self, at: float, store_id: str | None, plan: Plan) -> np.ndarray:
        """Return the codes that facts or a rule's ban exclude, int64."""
        excluded = self.excluded(at, store_id)
        return np.concatenate([excluded, plan.banned]) if len(plan.banned) else excluded

    def below_minimum(self, codes: np.ndarray, at: float, store_id: str | None, plan: Plan) -> np.ndarray:
        """Return which items are known to be below a minimum of the plan, (n,) bool."""
        low = np.zeros(len(codes), bool)
        for minimum in plan.minimums:
            # An unknown stock or margin is NaN, and no NaN is less than the minimum.
            low |= self._amount(minimum, codes, at, store_id) < minimum.of(codes)
        return low

    def minimum_missed(self, code: int, at: float, store_id: str | None, plan: Plan) -> str:
        """Return the name of the rule whose minimum an item is known to miss, "" if there is no such rule."""
        codes = np.array([code], np.int64)
        for minimum in plan.minimums:
            if self._amount(minimum, codes, at, store_id)[0] < minimum.of(codes)[0]:
                return minimum.because(code)
        return ""

    def _amount(self, minimum: Minimum, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        return (self.stock if minimum.kind == "minimum_stock" else self.margin)(codes, at, store_id)

    def price(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return the price of one unit of each item, float64; NaN if unknown."""
        return self._numbers["price"].look_up(codes, at, store_id)

    def promotion(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return each item's discount as a share of its price, float64; NaN if unknown."""
        return self._numbers["promotion"].look_up(codes, at, store_id)

    def stock(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return the units of each item in stock, float64; NaN if unknown."""
        return self._numbers["stock"].look_up(codes, at, store_id)

    def margin(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return each item's margin, as a share of the price after promotion, float64.

        NaN where the price or the cost is unknown, or both are 0; -inf of an item that costs and is free.
        """
        off = self.promotion(codes, at, store_id)
        paid = self.price(codes, at, store_id) * (1.0 - np.where(off == off, off, 0.0))
        cost = self._numbers["cost"].look_up(codes, at, store_id)
        spent = np.divide(cost, paid, out=np.full(len(codes), np.nan), where=paid > 0)
        spent[(paid == 0) & (cost > 0)] = np.inf
        return 1.0 - spent

    def coupons(
        self, codes: np.ndarray, at: float, user_id: str | None, store_id: str | None
    ) -> list[str | None]:
        """Return the code of the valid coupon for each item, this shopper and this store."""
        return self._coupons.look_up(codes, at, user_id, store_id)

    def close(self) -> None:
        """Stop watching and close the store's connections; the facts read so far stay."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._store is not None:
            self._store.close()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                while not self._closing.is_set() and self._poll(BREATH_S):
                    pass
            except Exception:  # noqa: BLE001 - the thread must survive any fault while requests come
                FACT_READS.labels("failed").inc()
                _log.exception("facts could not be taken in")

    def _poll(self, pause_s: float) -> bool:
        """Look at the rules, and take in the changed facts of POLL_S; return whether more wait."""
        if self._rules_file is not None:
            self._look_at_rules(self._rules_file)
        if self._store is None:
            return False
        try:
            facts, sequence, is_last = self._changes(self._store, pause_s)
        except FactsUnavailable as error:
            FACT_READS.labels("failed").inc()
            if not self._broken:
                _log.warning("prices, stock, promotions and coupons stay as last read: %s", error)
            self._broken = str(error)
            return False
        if facts:
            self._take(facts)
        if sequence != self._sequence:
            self._nonempty.add("fact store")
            self._sequence = sequence
        if not is_last:
            return True
        self._unread.discard("fact store")
        FACT_READS.labels("ok").inc()
        FACTS_READ_AT.set(time.time())
        for kind, numbers in self._numbers.items():
            FACTS_KNOWN.labels(kind).set(len(numbers) or kind in self._elsewhere)
        # Redis may refuse this user the command: then no stream is seen.
        with contextlib.suppress(FactsUnavailable):
            FACTS_COMPLETE_UNTIL.set(complete_until(self._store))
        if self._broken:
            _log.warning("prices, stock, promotions and coupons are read again")
            self._broken = ""
        return False

    def _changes(self, store: FactStore, pause_s: float) -> tuple[list[Fact], int, bool]:
        """Return the changed facts of some pages, the sequence behind them, and whether they are the last.

        Each call of `_take` copies whole tables: so it gets many pages at once.
        """
        facts, after = list[Fact](), self._sequence
        end = time.monotonic() + POLL_S
        while not self._closing.is_set() and time.monotonic() < end:
            try:
                page, sequence = store.changed_since(after)
            except FactsUnavailable:
                if after == self._sequence:
                    raise
                return facts, after, False  # the facts read so far count; the next call fails
            if sequence == after:
                return facts, after, True
            facts += page
            after = sequence
            self._closing.wait(pause_s)
        return facts, after, False

    def _look_at_rules(self, file: RulesFile) -> None:
        if (rules := file.changed()) is not None:
            self.rules = rules
            (self._nonempty.add if rules else self._nonempty.discard)("rules file")
        if file.settled and not file.broken:
            self._unread.discard("rules file")
        RULES_BROKEN.set(bool(file.broken))
        self.rules.make_plans(time.time() + AHEAD_S)

    def _take(self, facts: list[Fact]) -> None:
        coded: dict[str, list[tuple[int, Fact]]] = {}
        codes = self._statistics.each_code([fact.item_id for fact in facts]).tolist()
        for code, fact in zip(codes, facts, strict=True):
            if code != NO_ITEM:
                coded.setdefault(fact.fact, []).append((code, fact))
            else:
                self._elsewhere.add(fact.fact)
        # Exclusions come first, so that no item is shown meanwhile.
        for kind in ("stock", "ban", "price", "promotion", "cost"):
            if kind in coded:
                self._numbers[kind].add(coded[kind])
        self._coupons.add(coded.get("coupon", []))


# -------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True)
class Table:
    """The values of one kind of fact, one row for each item; NaN where the fact is withdrawn.

    A table is replaced as a whole when it changes: a request keeps reading the version that it began with.
    """

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
        """Write the values of `codes` at a time into an array, NaN before they begin; others keep theirs."""
        last = len(self.codes) - 1
        # Codes are sorted and distinct: if the last one equals its row number, each of them does.
        in_rows = self.codes[-1] == last
        place = np.minimum(codes if in_rows else self.codes.searchsorted(codes), last)
        value = self.value[place]
        known = (self.codes[place] == codes) & (value == value)  # and not withdrawn
        ahead = at < self.valid_from[place]
        np.copyto(into, value, where=known & ~ahead & (at < self.valid_until[place]))
        into[known & ahead] = np.nan  # it replaced the value of before: until it begins, nothing is known


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
        self.tables: dict[str | None, Table] = {}  # by store, None for all stores
        # Store -> codes excluded without dates, and the rows that exclude for a time.
        self._excluded: dict[str | None, tuple[np.ndarray, Table]] = {}

    def __len__(self) -> int:
        """Return how many facts are known."""
        return sum(len(table.codes) for table in self.tables.values())

    def add(self, facts: list[tuple[int, Fact]]) -> None:
        """Take facts in, each with its item's code."""
        by_store: dict[str | None, list[tuple[int, Fact]]] = {}
        for code, fact in facts:
            by_store.setdefault(fact.store_id, []).append((code, fact))
        for store_id, group in by_store.items():
            table = self.tables.get(store_id, EMPTY).with_rows(table_of(group))
            self.tables[store_id] = table
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
            if (table := self.tables.get(store)) is not None and len(table.codes):
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
        changed: dict[tuple[str | None, str | None, int], list[Fact]] = {}
        for code, fact in facts:
            changed.setdefault((fact.store_id, fact.user_id, code), []).append(fact)
        for (store_id, user_id, code), group in changed.items():
            scope = self._offers.setdefault((store_id, user_id), {})
            offers = {offer.coupon: offer for offer in scope.get(code, ())}
            for fact in group:
                coupon = fact.value if isinstance(fact.value, str) else None
                starts, ends = _or(fact.valid_from, -np.inf), _or(fact.valid_until, np.inf)
                if coupon not in offers or offers[coupon].at <= fact.at:
                    offers[coupon] = Offer(fact.at, fact.fact_id, coupon, starts, ends)
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
