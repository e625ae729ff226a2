"""A watched rules file and a request -> the `Plan` for that request, over one catalogue's codes.

Bans, and minimums of stock and margin, keep items out of every answer. Boosts, pins and reserved slots
arrange the candidates of the models; `Plan.digest` identifies them, so that a ranked list can be cached.
A request costs one lookup. A plan is made once for each set of stores under the same rules, and for each
period between two dates of the file. The thread that reads the file makes it, shortly before the period.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from feature_repo.ids import did_you_mean
from feature_repo.schema import LEVELS
from feature_repo.statistics import NO_ITEM, Statistics
from serving.shop.rules_file import Rule, RuleProblem, read_rules
from serving.shop.watched_file import WatchedFile
from serving.stages.reranking import ANY, NEW, NOVEL, PINNED, REPEAT, RESERVED

MAX_PLANS = 256  # kept; a file with more sets of stores makes plans again
_NOWHERE: frozenset[int] = frozenset()  # the rules that name a store, for a store that no rule names
_NOTHING = np.empty(0, np.int64)
_MOST_LOGGED = 10  # problems of one file in the log
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Minimum:
    """A required stock or margin: items known to have less are not offered. The strictest rule counts."""

    kind: str  # minimum_stock or minimum_margin
    number: float  # for every item; -inf if no rule is for all items
    name: str  # of the rule with that number
    codes: np.ndarray  # (m,) items with a stricter minimum, sorted
    numbers: np.ndarray  # (m,) float64
    names: tuple[str, ...]  # (m,)

    def of(self, codes: np.ndarray) -> np.ndarray:
        """Return the minimum of each item, (n,) float64; -inf where there is no minimum."""
        return _value_at(self.codes, self.numbers, codes, self.number)

    def because(self, code: int) -> str:
        """Return the name of the rule with an item's strictest minimum."""
        return _name_at(self.codes, self.names, code) or self.name


@dataclass(frozen=True, slots=True)
class Plan:
    """The rules for one request, bound to codes."""

    digest: bytes = b""  # of boosts, pins and reserved slots; empty without any
    banned: np.ndarray = field(default_factory=lambda: _NOTHING)  # (b,) codes, sorted
    banned_by: tuple[str, ...] = ()
    minimums: tuple[Minimum, ...] = ()
    weighed: np.ndarray = field(default_factory=lambda: _NOTHING)  # (w,) codes with a factor, sorted
    factors: np.ndarray = field(default_factory=lambda: np.empty(0))  # (w,) float64
    raised_by: tuple[str, ...] = ()  # (w,) the rule that raises it most; "" if its factor is at most 1
    # (s,) the pinned code of each slot, NO_ITEM for the other slots
    pins: np.ndarray = field(default_factory=lambda: _NOTHING)
    pinned_by: tuple[str, ...] = ()  # (s,)
    reserved: np.ndarray = field(default_factory=lambda: np.empty(0, np.int8))  # (r,) ANY, REPEAT or NEW
    reserved_by: tuple[str, ...] = ()  # (r,)

    @property
    def pinned(self) -> np.ndarray:
        """The codes that are pinned, in the order of their slots."""
        return self.pins[self.pins != NO_ITEM]

    def weigh(self, codes: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return values times the factors of their items, float64."""
        return values * _value_at(self.weighed, self.factors, codes, 1.0) if len(self.weighed) else values

    def banned_because(self, code: int) -> str:
        """Return the name of the rule that bans an item, "" if none does."""
        return _name_at(self.banned, self.banned_by, code)

    def pinned_because(self, code: int) -> str:
        """Return the reason for an item in the slot it is pinned to, "" for any other item."""
        slots = np.flatnonzero(self.pins == code)
        return f"pinned by {self.pinned_by[slots[0]]}" if len(slots) else ""

    def explain(self, reasons: list[str], codes: np.ndarray, why: np.ndarray) -> list[str]:
        """Return the reasons of an answer's items, completed by the effect of the rules.

        Args:
            reasons: why the models chose each item, in the order of the answer.
            codes: (k,) of the items.
            why: (k,) kinds of slot from `serving.stages.reranking.fill_slots`.
        """
        explained = []
        for slot, (reason, code, kind) in enumerate(zip(reasons, codes.tolist(), why.tolist(), strict=True)):
            if kind == PINNED:
                explained.append(self.pinned_because(code))
                continue
            if kind == RESERVED:
                what = "what was bought before" if self.reserved[slot] == REPEAT else "something new"
                reason = f"{reason}; {self.reserved_by[slot]} reserves this place for {what}"
            if kind == NOVEL:
                reason = f"{reason}; a place for what is seldom bought"
            if name := _name_at(self.weighed, self.raised_by, code):
                reason = f"{reason}; raised by {name}"
            explained.append(reason)
        return explained


NO_PLAN = Plan()


def _value_at(known: np.ndarray, values: np.ndarray, codes: np.ndarray, default: float) -> np.ndarray:
    """Return the value of each code, (n,) float64; the default for those that are not known."""
    if not len(known):
        return np.full(len(codes), default)
    place = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[place] == codes, values[place], default)


def _name_at(codes: np.ndarray, names: tuple[str, ...], code: int) -> str:
    if not names:
        return ""
    place = int(np.searchsorted(codes, code))
    return names[place] if place < len(codes) and codes[place] == code else ""


class Rules:
    """The rules of a file over the codes of one catalogue."""

    def __init__(self, rules: Sequence[Rule] = (), codes: Sequence[np.ndarray | None] = ()) -> None:
        """Take the rules, and the codes that each rule is for; None: every item."""
        self.rules = rules
        self._codes = codes
        self._plans: dict[tuple[frozenset[int], int], Plan] = {}
        dates = {date for rule in rules for date in (rule.starts, rule.ends)}
        self._dates = sorted(date for date in dates if math.isfinite(date))
        named: dict[str, set[int]] = {}
        for number, rule in enumerate(rules):
            for store in rule.stores:
                named.setdefault(store, set()).add(number)
        distinct: dict[frozenset[int], frozenset[int]] = {}
        # Store -> the numbers of the rules that name it; equal sets share one object.
        self._named = {
            store: distinct.setdefault(key := frozenset(numbers), key) for store, numbers in named.items()
        }
        self._sets = [_NOWHERE, *distinct]

    def __len__(self) -> int:
        """Return the number of rules."""
        return len(self.rules)

    def plan(self, at: float, store_id: str | None) -> Plan:
        """Return the plan for a time and a store; without a store, only rules for all stores hold."""
        if not self.rules:
            return NO_PLAN
        named = _NOWHERE if store_id is None else self._named.get(store_id, _NOWHERE)
        return self._plan(at, named)

    def make_plans(self, at: float) -> None:
        """Make the plans for a time, so that no request of that time has to."""
        for named in self._sets[: MAX_PLANS // 2]:  # plans from before and after a date are kept together
            self._plan(at, named)

    def _plan(self, at: float, named: frozenset[int]) -> Plan:
        key = (named, bisect_right(self._dates, at))
        if (plan := self._plans.get(key)) is None:
            plan = self._make(at, named)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _make(self, at: float, named: frozenset[int]) -> Plan:
        here = [
            number
            for number, rule in enumerate(self.rules)
            if rule.starts <= at < rule.ends and (not rule.stores or number in named)
        ]
        of: dict[str, list[int]] = {}
        for number in here:
            of.setdefault(self.rules[number].kind, []).append(number)
        banned, by = self._spread(of.get("ban", []))
        banned, first = np.unique(banned, return_index=True)
        weighed, factors, raised_by = self._weights(of.get("boost", []) + of.get("bury", []))
        pins, pinned_by = self._pins(of.get("pin", []))
        reserved, reserved_by = self._reserved(of.get("slots", []))
        plan = Plan(
            banned=banned,
            banned_by=tuple(self.rules[number].name for number in by[first].tolist()),
            minimums=tuple(
                self._minimum(kind, of[kind]) for kind in ("minimum_stock", "minimum_margin") if kind in of
            ),
            weighed=weighed,
            factors=factors,
            raised_by=raised_by,
            pins=pins,
            pinned_by=pinned_by,
            reserved=reserved,
            reserved_by=reserved_by,
        )
        return replace(plan, digest=_digest(plan))

    def _spread(self, numbers: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes of some rules in one array, and the rule's number for each code."""
        codes = [_listed(self._codes[number]) for number in numbers]
        if not codes:
            return _NOTHING, _NOTHING
        return np.concatenate(codes), np.repeat(numbers, [len(part) for part in codes])

    def _minimum(self, kind: str, numbers: list[int]) -> Minimum:
        required = np.array([rule.number for rule in self.rules])
        for_all = [number for number in numbers if self._codes[number] is None]
        strictest = max(for_all, key=lambda number: self.rules[number].number, default=None)
        name, least = "", -math.inf
        if strictest is not None:
            name, least = self.rules[strictest].name, required[strictest]
        codes, by = self._spread(numbers)
        more = required[by] > least
        codes, by = codes[more], by[more]
        order = np.lexsort((-required[by], codes))  # the strictest rule of each code first
        codes, first = np.unique(codes[order], return_index=True)
        by = by[order][first]
        names = tuple(self.rules[number].name for number in by.tolist())
        return Minimum(kind, float(least), name, codes, required[by], names)

    def _weights(self, numbers: list[int]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
        codes, by = self._spread(numbers)
        weighed, place = np.unique(codes, return_inverse=True)
        given = np.array([rule.number for rule in self.rules])[by]
        factors = np.ones(len(weighed))
        np.multiply.at(factors, place, given)
        order = np.argsort(given, kind="stable")
        largest = np.empty(len(weighed), np.int64)
        largest[place[order]] = order  # the last value written belongs to the largest factor
        # An item whose factors multiply to at most 1, because another rule buries it, is not raised.
        names = [
            self.rules[number].name if factor > 1 else ""
            for number, factor in zip(by[largest].tolist(), factors.tolist(), strict=True)
        ]
        return weighed, factors, tuple(names)

    def _pins(self, numbers: list[int]) -> tuple[np.ndarray, tuple[str, ...]]:
        pins = {
            self.rules[n].slot: (int(codes[0]), self.rules[n].name)
            for n in numbers
            if len(codes := _listed(self._codes[n]))
        }
        held = [pins.get(slot, (NO_ITEM, "")) for slot in range(1, max(pins, default=0) + 1)]
        return np.array([code for code, _ in held], np.int64), tuple(name for _, name in held)

    def _reserved(self, numbers: list[int]) -> tuple[np.ndarray, tuple[str, ...]]:
        reserved: dict[int, tuple[int, str]] = {}
        for rule in (self.rules[number] for number in numbers):
            reserved |= {slot: (REPEAT, rule.name) for slot in rule.repeat}
            reserved |= {slot: (NEW, rule.name) for slot in rule.new}
        held = [reserved.get(slot, (ANY, "")) for slot in range(1, max(reserved, default=0) + 1)]
        return np.array([kind for kind, _ in held], np.int8), tuple(name for _, name in held)


NO_RULES = Rules()


def _listed(codes: np.ndarray | None) -> np.ndarray:
    """Return the codes that a rule lists; a rule for every item (None) lists none."""
    return _NOTHING if codes is None else codes


def _digest(plan: Plan) -> bytes:
    """Return a hash of the parts of a plan that arrange a list; empty if it has no such part."""
    arrays = (plan.weighed, plan.factors, plan.pins, plan.reserved)
    if not any(map(len, arrays)):
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little") + array.tobytes())
    return digest.digest()


# ------------------------------------------------------------------------------------- the catalogue


class Catalogue:
    """A bundle's items by each selector of the rules."""

    def __init__(self, statistics: Statistics, vocabulary: Mapping[str, list[str]]) -> None:
        self._statistics, self._vocabulary = statistics, vocabulary

    def bind(self, rules: Sequence[Rule], hints: float = math.inf) -> tuple[Rules, list[RuleProblem]]:
        """Return rules over this catalogue's codes, and the problems with names that it lacks.

        Args:
            rules: of a file.
            hints: of the first so many problems, say which name was meant: each takes some 50 ms.
        """
        problems: list[RuleProblem] = []
        codes: list[np.ndarray | None] = []
        for rule in rules:
            chosen, missing = self._choose(rule, len(problems) < hints)
            codes.append(chosen)
            problems += missing + self._stores(rule)
        problems += _pinned_and_banned(rules, codes)
        return Rules(rules, codes), sorted(problems)

    def _stores(self, rule: Rule) -> list[RuleProblem]:
        """Return a warning about stores without sales before the cut: new stores, or misspelled ones."""
        missing = sorted(rule.stores - self._statistics.store_row.keys())
        if not missing:
            return []
        text = _unknown(len(rule.stores), "stores", missing)
        return [
            RuleProblem(rule.line, f"{text}; the rule holds there all the same, check the spelling", False)
        ]

    def _choose(self, rule: Rule, hints: bool) -> tuple[np.ndarray | None, list[RuleProblem]]:
        """Return the codes of a rule's items: a match with any value of a selector, for all selectors."""
        problems = []
        chosen: np.ndarray | None = None
        wanted = {"items": (rule.item,)} if rule.kind == "pin" else rule.chosen
        for selector, values in wanted.items():
            codes, missing = self._of(selector, values)
            chosen = codes if chosen is None else np.intersect1d(chosen, codes)
            if missing:
                text = _unknown(len(values), selector, missing)
                hint = "check the spelling"
                if hints and selector != "items":
                    hint = did_you_mean(missing[0].casefold(), self._columns[selector][0]) or hint
                problems.append(RuleProblem(rule.line, f"{text}; passed over, {hint}", False))
        if chosen is not None and not len(chosen) and not problems:
            problems.append(RuleProblem(rule.line, "no item is chosen by all of its selectors", False))
        return chosen, problems

    def _of(self, selector: str, values: tuple[str, ...]) -> tuple[np.ndarray, list[str]]:
        """Return the sorted codes that match a selector's values, and the values without a match."""
        statistics = self._statistics
        if selector == "items":
            codes = statistics.each_code(values)
            missing = [item for item, code in zip(values, codes.tolist(), strict=True) if code == NO_ITEM]
            return np.unique(codes[codes != NO_ITEM]), missing
        if selector == "own_brand":
            return np.flatnonzero(statistics.is_private == (values[0] == "true")), []
        names, column = self._columns[selector]
        missing = [value for value in values if value.casefold() not in names]
        wanted = [code for value in values for code in names.get(value.casefold(), ())]
        return np.flatnonzero(np.isin(column, wanted)), missing

    @cached_property
    def _columns(self) -> dict[str, tuple[dict[str, list[int]], np.ndarray]]:
        """Selector -> the codes of each name in lower case, and the column that holds them."""
        columns = {level: self._statistics.categorical[:, n] for n, level in enumerate(LEVELS)}
        columns["manufacturer"] = self._statistics.manufacturer
        plural = {"type": "types", "category": "categories", "department": "departments"}
        by_selector = {}
        for level, column in columns.items():
            names: dict[str, list[int]] = {}
            for code, name in enumerate(self._vocabulary.get(level, [])):
                if name:
                    names.setdefault(name.casefold(), []).append(code)
            by_selector[plural.get(level, "manufacturers")] = names, column
        return by_selector


def _unknown(count: int, what: str, missing: list[str]) -> str:
    some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    return f"of {count} {what}, {len(missing)} not in this catalogue: {some}"


def _pinned_and_banned(rules: Sequence[Rule], codes: Sequence[np.ndarray | None]) -> Iterable[RuleProblem]:
    """Yield a warning for each pin that a ban overrides."""
    pins: dict[int, list[Rule]] = {}
    for rule, chosen in zip(rules, codes, strict=True):
        if rule.kind == "pin" and chosen is not None and len(chosen):
            pins.setdefault(int(chosen[0]), []).append(rule)
    if not pins:
        return
    for ban, chosen in zip(rules, codes, strict=True):
        if ban.kind != "ban" or chosen is None:
            continue
        for code in pins.keys() & set(chosen.tolist()):
            for pin in filter(ban.overlaps, pins[code]):
                text = f"{pin.item} is pinned here and banned by {ban.name!r} (line {ban.line})"
                yield RuleProblem(pin.line, f"{text}: the ban wins, take the pin out", False)


class RulesFile(WatchedFile[Rules]):
    """The rules file of a home, which need not exist, over one catalogue's codes."""

    def __init__(self, file: Path, statistics: Statistics, vocabulary: Mapping[str, list[str]]) -> None:
        catalogue = Catalogue(statistics, vocabulary)

        def read(place: Path) -> Rules:
            rules, warnings = read_rules(place)
            bound, missing = catalogue.bind(rules, _MOST_LOGGED)
            problems = [f"line {one.line}: {one.text}" for one in (warnings + missing)[:_MOST_LOGGED]]
            if problems:  # in one line: the log shows one a second from each place
                _log.warning("%s: %s", place, "; ".join(problems))
            bound.make_plans(time.time())
            return bound

        super().__init__(file, read, NO_RULES)
