"""The fact store, the availability file and the rules file -> the facts about a request's items.

A thread polls for changes four times a second; no request waits for it. A fact's dates are compared with the
request's time: a coupon ends to the second, without an event.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TypeVar

import numpy as np

from feature_repo.facts import Fact
from feature_repo.statistics import Statistics
from serving.errors import FactsUnavailable
from serving.metrics import FACT_READS, FACTS_READ_AT, RULES_BROKEN
from serving.shop.availability import AvailabilityFile
from serving.shop.fact_store import FactStore
from serving.shop.fact_tables import Coupons, Numbers
from serving.shop.rules import NO_RULES, Minimum, Plan, RulesFile
from serving.shop.watched_file import WatchedFile

POLL_S = 0.25
AHEAD_S = 1.0  # plans are made so long before a rule begins or ends
BREATH_S = 0.005  # pause between two pages of facts, which leaves the interpreter to requests
SETTLING = 8  # looks at a file that is being written when the process starts
Content = TypeVar("Content")
_log = logging.getLogger(__name__)


class LiveFacts:
    """The current facts, over the codes of one catalogue.

    If a store or a file can't be read, the facts last read stay: a sold-out item must not come back because
    of a typo or a dead server. Items outside the catalogue are left out.
    """

    def __init__(
        self,
        statistics: Statistics,
        store: FactStore | None = None,
        file: AvailabilityFile | None = None,
        rules_file: RulesFile | None = None,
    ) -> None:
        """Read all facts, then watch for changes until `close`."""
        self._code_of = statistics.code_of
        self._statistics = statistics
        self._store = store
        self._file, self._rules_file = file, rules_file
        self._files = [watched for watched in (file, rules_file) if watched is not None]
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
        self._listed = np.empty(0, np.int64)  # codes that the availability file excludes
        self._broken = ""
        # Sources that are not read completely yet.
        self._unread = {"fact store", "availability file", "rules file"}
        self._nonempty: set[str] = set()  # sources that have given any fact or rule
        self._closing = threading.Event()
        self._poll(pause_s=0.0)
        for _ in range(SETTLING):
            if all(watched.settled for watched in self._files):
                break
            time.sleep(POLL_S)
            self._look_at_files()
        # A thread that never starts would keep this object and its catalogue until a full garbage collection.
        self._thread = None
        if store is not None or self._files:
            self._thread = threading.Thread(target=self._watch, name="facts", daemon=True)
            self._thread.start()

    @property
    def state(self) -> str:
        """Return "ready" if the latest read of the store and of each file succeeded, else "unavailable"."""
        return "unavailable" if self._broken or any(file.broken for file in self._files) else "ready"

    def lacks(self, before: LiveFacts) -> list[str]:
        """Return the sources that are unread here and gave facts to `before`: those facts would be lost."""
        return sorted(self._unread & before._nonempty)

    def excluded(self, at: float, store_id: str | None) -> np.ndarray:
        """Return the codes of items that are sold out, here or everywhere, or banned; int64."""
        parts = [self._numbers[kind].excluded(at, store_id) for kind in ("stock", "ban")]
        return np.concatenate([self._listed, *parts[0], *parts[1]])

    def excluded_because(self, code: int, at: float, store_id: str | None) -> str:
        """Return why an item must not be offered, "" if it may be."""
        if code in self._listed:
            return "the availability file excludes it"
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

        NaN where the price or the cost is unknown, or the price after promotion is 0.
        """
        off = self.promotion(codes, at, store_id)
        paid = self.price(codes, at, store_id) * (1.0 - np.where(off == off, off, 0.0))
        cost = self._numbers["cost"].look_up(codes, at, store_id)
        return np.subtract(1.0, np.divide(cost, paid, out=np.full(len(codes), np.nan), where=paid > 0))

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
                self._poll(BREATH_S)
            except Exception:  # noqa: BLE001 - the thread must survive any fault while requests come
                FACT_READS.labels("failed").inc()
                _log.exception("facts could not be taken in")

    def _poll(self, pause_s: float) -> None:
        self._look_at_files()
        if self._store is None:
            return
        try:
            while not self._closing.is_set():
                facts, sequence = self._store.changed_since(self._sequence)
                if sequence == self._sequence:
                    self._unread.discard("fact store")
                    break
                self._nonempty.add("fact store")
                self._take(facts)
                self._sequence = sequence
                self._closing.wait(pause_s)
        except FactsUnavailable as error:
            FACT_READS.labels("failed").inc()
            if not self._broken:
                _log.warning("prices, stock, promotions and coupons stay as last read: %s", error)
            self._broken = str(error)
            return
        FACT_READS.labels("ok").inc()
        FACTS_READ_AT.set(time.time())
        if self._broken:
            _log.warning("prices, stock, promotions and coupons are read again")
            self._broken = ""

    def _look_at_files(self) -> None:
        if self._file is not None and (ids := self._look(self._file)) is not None:
            self._listed = self._statistics.codes(ids)
        if self._rules_file is not None:
            if (rules := self._look(self._rules_file)) is not None:
                self.rules = rules
            RULES_BROKEN.set(bool(self._rules_file.broken))
            self.rules.make_plans(time.time() + AHEAD_S)

    def _look(self, file: WatchedFile[Content]) -> Content | None:
        if (content := file.changed()) is not None:
            (self._nonempty.add if content else self._nonempty.discard)(file.name)
        if file.settled and not file.broken:
            self._unread.discard(file.name)
        return content

    def _take(self, facts: list[Fact]) -> None:
        coded: dict[str, list[tuple[int, Fact]]] = {}
        for fact in facts:
            if (code := self._code_of.get(fact.item_id)) is not None:
                coded.setdefault(fact.fact, []).append((code, fact))
        # Exclusions come first, so that no item is shown meanwhile.
        for kind in ("stock", "ban", "price", "promotion", "cost"):
            if kind in coded:
                self._numbers[kind].add(coded[kind])
        self._coupons.add(coded.get("coupon", []))
