"""The store of facts, the files of excluded items and of rules -> what a request must know of its items.

A thread looks four times a second for what changed; no request waits for it. A fact's time is checked
against the request's own: a coupon ends on its second, with no event to say so.
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
AHEAD_S = 1.0  # before a rule begins or ends the plans for it are made
BREATH_S = 0.005  # between two pages of facts: requests get the interpreter
SETTLING = 8  # looks, at the start, at a file that is being written
Content = TypeVar("Content")
_log = logging.getLogger(__name__)


class LiveFacts:
    """The facts that hold now, over the codes of one catalogue.

    A store or a file that can't be read keeps what was last read: an item known to be sold out must not
    come back because of a typo or a dead server. Items that the catalogue does not know are left out.
    """

    def __init__(
        self,
        statistics: Statistics,
        store: FactStore | None = None,
        file: AvailabilityFile | None = None,
        rules_file: RulesFile | None = None,
    ) -> None:
        """Read all there is, then watch for changes until `close`."""
        self._code_of = statistics.code_of
        self._statistics = statistics
        self._store = store
        self._file, self._rules_file = file, rules_file
        self._files = [one for one in (file, rules_file) if one is not None]
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
        self._listed = np.empty(0, np.int64)  # what the file excludes
        self._broken = ""
        # Of which of them not all that is there was read yet.
        self._unread = {"fact store", "availability file", "rules file"}
        self._said: set[str] = set()  # which of them have said something of an item
        self._closing = threading.Event()
        self._poll(pause_s=0.0)
        for _ in range(SETTLING):
            if all(one.settled for one in self._files):
                break
            time.sleep(POLL_S)
            self._look_at_files()
        # A thread that never starts would keep this, and the catalogue with it, until a full collection.
        self._thread = None
        if store is not None or self._files:
            self._thread = threading.Thread(target=self._watch, name="facts", daemon=True)
            self._thread.start()

    @property
    def state(self) -> str:
        """Say whether store and files could be read when they were last tried: ready or unavailable."""
        return "unavailable" if self._broken or any(file.broken for file in self._files) else "ready"

    def lacks(self, before: LiveFacts) -> list[str]:
        """Return what could not be read yet and has told `before` something: it would be forgotten."""
        return sorted(self._unread & before._said)

    def excluded(self, at: float, store_id: str | None) -> np.ndarray:
        """Return the codes that must not be offered: sold out here or everywhere, or banned; int64."""
        parts = [self._numbers[kind].excluded(at, store_id) for kind in ("stock", "ban")]
        return np.concatenate([self._listed, *parts[0], *parts[1]])

    def excluded_because(self, code: int, at: float, store_id: str | None) -> str:
        """Return why an item must not be offered, "" if it may."""
        if code in self._listed:
            return "the availability file excludes it"
        for kind, why in (("stock", "sold out"), ("ban", "banned by a fact")):
            if any(code in codes for codes in self._numbers[kind].excluded(at, store_id)):
                return why
        return ""

    def hidden(self, at: float, store_id: str | None, plan: Plan) -> np.ndarray:
        """Return the codes that must not be offered by facts or by a rule's ban, int64."""
        excluded = self.excluded(at, store_id)
        return np.concatenate([excluded, plan.banned]) if len(plan.banned) else excluded

    def below_minimum(self, codes: np.ndarray, at: float, store_id: str | None, plan: Plan) -> np.ndarray:
        """Return which items are known to miss one of the plan's minimums, (n,) bool."""
        low = np.zeros(len(codes), bool)
        for minimum in plan.minimums:
            # An unknown stock or margin is NaN, which is not less.
            low |= self._amount(minimum, codes, at, store_id) < minimum.of(codes)
        return low

    def minimum_missed(self, code: int, at: float, store_id: str | None, plan: Plan) -> str:
        """Return the name of the rule whose minimum an item is known to miss, "" if it misses none."""
        codes = np.array([code], np.int64)
        for minimum in plan.minimums:
            if self._amount(minimum, codes, at, store_id)[0] < minimum.of(codes)[0]:
                return minimum.because(code)
        return ""

    def _amount(self, minimum: Minimum, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        return (self.stock if minimum.kind == "minimum_stock" else self.margin)(codes, at, store_id)

    def price(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return what one unit of each item costs, float64; NaN where nothing is said."""
        return self._numbers["price"].look_up(codes, at, store_id)

    def promotion(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return each item's discount as a share of its price, float64; NaN where nothing is said."""
        return self._numbers["promotion"].look_up(codes, at, store_id)

    def stock(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return how many units of each item are left, float64; NaN where nothing is said."""
        return self._numbers["stock"].look_up(codes, at, store_id)

    def margin(self, codes: np.ndarray, at: float, store_id: str | None) -> np.ndarray:
        """Return what is left of each item's price after its promotion and its cost, as a share, float64.

        NaN where price or cost are not known, or nothing is paid.
        """
        off = self.promotion(codes, at, store_id)
        paid = self.price(codes, at, store_id) * (1.0 - np.where(off == off, off, 0.0))
        cost = self._numbers["cost"].look_up(codes, at, store_id)
        return np.subtract(1.0, np.divide(cost, paid, out=np.full(len(codes), np.nan), where=paid > 0))

    def coupons(
        self, codes: np.ndarray, at: float, user_id: str | None, store_id: str | None
    ) -> list[str | None]:
        """Return the code of the coupon that holds for each item, this shopper and this store."""
        return self._coupons.look_up(codes, at, user_id, store_id)

    def close(self) -> None:
        """Stop watching, and let go of the store's connections; what was read stays."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._store is not None:
            self._store.close()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                self._poll(BREATH_S)
            except Exception:  # noqa: BLE001 - the edge of the thread: it must not end while requests come
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
                self._said.add("fact store")
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
            (self._said.add if content else self._said.discard)(file.name)
        if file.settled and not file.broken:
            self._unread.discard(file.name)
        return content

    def _take(self, facts: list[Fact]) -> None:
        coded: dict[str, list[tuple[int, Fact]]] = {}
        for fact in facts:
            if (code := self._code_of.get(fact.item_id)) is not None:
                coded.setdefault(fact.fact, []).append((code, fact))
        # What keeps an item from being shown comes first.
        for kind in ("stock", "ban", "price", "promotion", "cost"):
            if kind in coded:
                self._numbers[kind].add(coded[kind])
        self._coupons.add(coded.get("coupon", []))
