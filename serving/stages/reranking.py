"""Scores -> the best candidates (`Ranked`) -> the list that is shown.

An item is worth its purchase probability, times a weight of its own (`exposure_weights`), times the bundle's
`new_gain` if it is new to the shopper, times the factors of a merchandiser's rules. The slots are filled one
after the other, each with the item worth most at that moment: each shown item makes others of its type worth
a little less, but for those new to the shopper. Pins and reserved slots follow rules. In the few novel
slots, rare items that are worth nearly as much come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from feature_repo.kernels.candidates import best
from feature_repo.kernels.compiled import compiled
from feature_repo.queries import Query
from feature_repo.statistics import Statistics
from serving.stages.retrieval import Candidates

POOL = 4  # times k candidates take part; the rest are too far down to come up
NEW_DAYS = 91  # a manufacturer is new until this long after its first sale
ANY, REPEAT, NEW = range(3)  # the kind of item that a slot is reserved for
CHOSEN, PINNED, RESERVED, NOVEL = range(4)  # why an item stands in its slot
KEPT = 60  # candidates; re-ranking to ten looks at 40, so 20 of them may be sold out by then
OBJECTS_BYTES = 1_040  # measured: of a cached list, beside the data of its columns
UNBOUNDED = 1e9  # more than any worth
_TAKEN = -1.0
_NO_PLACE = -1
NO_SLOTS, NO_KINDS = np.empty(0, np.int64), np.empty(0, np.int8)
NO_BOUGHT, NO_RARITY = np.empty(0, np.bool_), np.empty(0)


class WeighedCandidates(NamedTuple):
    """The candidates of one list, (n,) each."""

    worth: np.ndarray  # float64, 0 or more
    types: np.ndarray  # type codes; 0 is unknown and never penalised
    rarity: np.ndarray = NO_RARITY  # float64, factor of the worth in a novel slot; may be empty
    bought: np.ndarray = NO_BOUGHT  # bool, by this user, ever; empty where no rule reads it


class SlotRules(NamedTuple):
    """The slots of one list that are not filled by worth alone."""

    pinned: np.ndarray = NO_SLOTS  # (s,) int64, the row that is pinned to each slot, below 0 where none is
    reserved: np.ndarray = NO_KINDS  # (r,) int8, ANY, REPEAT or NEW for each slot
    novel: np.ndarray = NO_SLOTS  # (m,) int64 slots, counted from 0
    novel_loss: float = UNBOUNDED  # worth that a novel slot may lose against the usual choice
    spares_new: bool = False  # items new to the shopper pay no type penalty


def fill_slots(
    pool: WeighedCandidates, slots: SlotRules, k: int, type_penalty: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the k items to show, int64, and why each stands in its slot, int8.

    Greedy: each chosen item of a type multiplies the worth of the others of that type by `type_penalty`. New
    items may be spared, if the shopper has bought any of the best candidates: of a stranger all are new.
    A penalty of 1 changes nothing. A penalty of 0, one item of each type, costs a sixth of the recall on
    grocery baskets: shoppers do buy two yogurts.

    Args:
        pool: the candidates.
        slots: the slots with a rule of their own. A pin comes first, then a novel slot, and a reserved slot
            has the last word.
        k: how many to show.
        type_penalty: in (0, 1].
    """
    places, how = (slots.pinned, slots.reserved, slots.novel), (slots.novel_loss, slots.spares_new)
    return _fill(*pool, *places, *how, k, type_penalty)  # compiled code takes arrays 1 us faster than tuples


@compiled
def _fill(
    worth: np.ndarray,
    types: np.ndarray,
    rarity: np.ndarray,
    bought: np.ndarray,
    pinned: np.ndarray,
    reserved: np.ndarray,
    novel: np.ndarray,
    novel_loss: float,
    spares_new: bool,
    k: int,
    type_penalty: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Fill one slot after the other; the arguments are the fields of `fill_slots`' `pool` and `slots`."""
    n = len(worth)
    order = np.argsort(-worth, kind="mergesort")  # from here on, a place in this order names a candidate
    left, types = worth[order], types[order]
    pins = _take_pins(pinned, order, left)
    near = _first_left(np.arange(n), left, POOL * k)
    pays = np.ones(n, np.bool_)
    if spares_new and len(bought) and (bought[order] & near).any():
        pays = bought[order]
    boost, far = left, near
    if len(rarity) and len(novel):
        boost = rarity[order]
        far = _first_left(np.argsort(-left * boost, kind="mergesort"), left, rare_pool(novel))
    rows, why = np.empty(min(k, n), np.int64), np.zeros(min(k, n), np.int8)
    for slot in range(len(rows)):
        place = _pin_of(slot, pins)
        why[slot] = PINNED
        if place < 0:
            place, why[slot] = _best_place(left, left, near), CHOSEN
            if len(rarity) and (novel == slot).any():
                place, why[slot] = _novel_or(place, left, boost, far, novel_loss)
            if slot < len(reserved) and reserved[slot] != ANY:
                is_kind = bought[order] == (reserved[slot] == REPEAT)
                place, why[slot] = _of_kind_or(place, why[slot], left, is_kind)
        if place < 0:
            place, why[slot] = _next_pin(pins), PINNED
        rows[slot] = order[place]
        left[place] = _TAKEN
        _penalise(types[place], types, left, pays, type_penalty)
    return rows, why


@compiled
def _take_pins(pinned: np.ndarray, order: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Mark the pinned places as taken; return each slot's pin, (s,) int64, _NO_PLACE where none is."""
    pins = np.full(len(pinned), _NO_PLACE)
    if len(pinned):
        place_of = np.empty(len(order), np.int64)
        place_of[order] = np.arange(len(order))
        for slot, row in enumerate(pinned):
            if row >= 0:
                pins[slot] = place_of[row]
                left[place_of[row]] = _TAKEN
    return pins


@compiled
def _first_left(places: np.ndarray, left: np.ndarray, most: int) -> np.ndarray:
    """Return which places are the first that are not taken, (n,) bool, at most so many."""
    marks = np.zeros(len(left), np.bool_)
    marked = 0
    for place in places:
        if marked < most and left[place] != _TAKEN:
            marks[place] = True
            marked += 1
    return marks


@compiled
def _best_place(worth: np.ndarray, left: np.ndarray, may: np.ndarray) -> int:
    """Return the place of most worth that is left and may be taken, _NO_PLACE without any."""
    best = _NO_PLACE
    for place in range(len(left)):
        if may[place] and left[place] != _TAKEN and (best < 0 or worth[place] > worth[best]):
            best = place
    return best


@compiled
def _pin_of(slot: int, pins: np.ndarray) -> int:
    """Take the pin of a slot, _NO_PLACE without any.

    A pinned item stands in its slot or not at all, so that a shorter list is the beginning of a longer one;
    see `_next_pin` for the exception.
    """
    if slot >= len(pins):
        return _NO_PLACE
    place = pins[slot]
    pins[slot] = _NO_PLACE
    return place


@compiled
def _next_pin(pins: np.ndarray) -> int:
    """Take the first pin that waits: where all other items are shown, it moves forward."""
    for slot in range(len(pins)):
        if pins[slot] >= 0:
            return _pin_of(slot, pins)
    return _NO_PLACE


@compiled
def _novel_or(
    usual: int, left: np.ndarray, boost: np.ndarray, far: np.ndarray, most_lost: float
) -> tuple[int, int]:
    """Return the place of most worth when rare items are worth more, and why; of equal ones the usual."""
    boosted = left * boost
    may = far if usual < 0 else far & (left >= left[usual] - most_lost)
    rare = _best_place(boosted, left, may)
    if rare >= 0 and (usual < 0 or boosted[rare] > boosted[usual]):
        return rare, NOVEL
    return usual, CHOSEN


@compiled
def _of_kind_or(usual: int, why: int, left: np.ndarray, is_kind: np.ndarray) -> tuple[int, int]:
    """Return the best place of a kind, and why; the usual one if it is of that kind or no place is."""
    if usual >= 0 and not is_kind[usual]:
        best = _best_place(left, left, is_kind)
        if best >= 0:
            return best, RESERVED
    return usual, why


@compiled
def _penalise(kind: int, types: np.ndarray, left: np.ndarray, pays: np.ndarray, type_penalty: float) -> None:
    """Lower the worth of the remaining candidates of a type, of those that pay; 0 is unknown and stays."""
    if kind:
        for place in range(len(left)):
            if left[place] > 0 and types[place] == kind and pays[place]:
                left[place] *= type_penalty


@compiled
def rare_pool(novel: np.ndarray) -> int:
    """Return how many candidates take part in the novel slots, (m,): earlier slots take some of them."""
    return POOL * len(novel) + novel.max() + 1 if len(novel) else 0


def exposure_weights(statistics: Statistics, exposure: float) -> np.ndarray | None:
    """Return a factor for the score of each item, (n,) float64; None if it is 1 for all.

    Args:
        statistics: the item table.
        exposure: gain of an item whose manufacturer is new: 0.5 makes it worth half as much again.
    """
    return 1.0 + exposure * of_new_manufacturers(statistics) if exposure else None


def weigh(
    statistics: Statistics,
    codes: np.ndarray,
    scores: np.ndarray,
    weights: np.ndarray | None,
    new_gain: float,
    history: np.ndarray,
) -> np.ndarray:
    """Return the scores of candidates times all weights of the bundle, (n,) float64.

    Args:
        statistics: the item table.
        codes: (n,) distinct.
        scores: (n,) probabilities.
        weights: see `exposure_weights`.
        new_gain: factor for items that the shopper has not bought.
        history: codes of all items that the shopper has bought; to a stranger all is new, and nothing gains.
    """
    worth = scores.astype(np.float64) if weights is None else scores * weights[codes]
    if new_gain != 1.0 and len(history):
        worth[statistics.find(history, codes) < 0] *= new_gain
    return worth


def of_new_manufacturers(statistics: Statistics) -> np.ndarray:
    """Return which items are of a new manufacturer, (n,) bool; an unknown manufacturer is not new."""
    codes = statistics.manufacturer.astype(np.int64)
    oldest = np.zeros(int(codes.max(initial=0)) + 1)
    np.maximum.at(oldest, codes, statistics.age_days)
    return (codes > 0) & (oldest[codes] <= NEW_DAYS)


def item_rarity(statistics: Statistics, novelty: float) -> np.ndarray | None:
    """Return a factor for the worth of each item in a novel slot, (n,) float64; None without novelty.

    Args:
        statistics: the item table.
        novelty: the power of one over an item's share of baskets. 0.3 makes an item that is in a tenth as
            many baskets worth twice as much.
    """
    if not novelty:
        return None
    share = np.maximum(statistics.basket_count, 1.0) / max(float(statistics.total_baskets), 1.0)
    return np.asarray(share, np.float64) ** -novelty


# ------------------------------------------------------------------------------- the best candidates


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best candidates of one request: the list that is cached.

    The first `best` of them are worth most, best first. Behind them come candidates that only pins, reserved
    slots and novel slots may need. The list holds costly and lasting results, never facts of the moment:
    price, stock, promotion and coupon are looked up for each answer, and so are the words of the reasons.

    `times` and `last_at` say how often and when last the user bought a candidate. The reason of a candidate
    from the history is made of them at the time of the answer. Other reasons follow from basket and source.
    """

    codes: np.ndarray  # (m,) int32
    scores: np.ndarray  # (m,) float32 purchase probabilities
    source: np.ndarray  # (m,) int8, index of SOURCES
    times: np.ndarray  # (m,) uint16, 0 where the user never did
    last_at: np.ndarray  # (m,) float64 seconds since the epoch, 0 where the user never did
    worth: np.ndarray  # (m,) float64, the scores with all weights of bundle and rules
    best: int
    whole: bool  # these are all the candidates: none was left out

    def without(self, barred: np.ndarray) -> Ranked:
        """Return the list without codes that must not be shown: not whole, best sellers would fill it up."""
        stays = ~np.isin(self.codes, barred)
        if stays.all():
            return self
        return Ranked(
            self.codes[stays],
            self.scores[stays],
            self.source[stays],
            self.times[stays],
            self.last_at[stays],
            self.worth[stays],
            best=int(np.count_nonzero(stays[: self.best])),
            whole=False,
        )

    def suffices(self, k: int) -> bool:
        """Say whether the k items shown are those that all candidates would give, see `fill_slots`."""
        return self.whole or self.best >= POOL * k

    @property
    def size_bytes(self) -> int:
        """What the list takes in a cache, with its key and the cache's own objects."""
        columns = (self.codes, self.scores, self.source, self.times, self.last_at, self.worth)
        return sum(column.nbytes for column in columns) + OBJECTS_BYTES

    def holds_probabilities(self) -> bool:
        """Say whether each score is between 0 and 1; NaN is not."""
        return bool(((self.scores >= 0) & (self.scores <= 1)).all())


def best_of(
    query: Query,
    candidates: Candidates,
    scores: np.ndarray,
    most: int = KEPT,
    worth: np.ndarray | None = None,
    pinned: np.ndarray = NO_SLOTS,
    reserved: np.ndarray = NO_KINDS,
    rarity: np.ndarray = NO_RARITY,
    novel: np.ndarray = NO_SLOTS,
) -> Ranked:
    """Return the candidates of most worth, equal ones in the order they were retrieved.

    Args:
        query: the request; only its history is read.
        candidates: those retrieved for it.
        scores: one purchase probability per candidate, (n,) float32.
        most: how many to take at most, beside those that rules and novel slots may need.
        worth: of each candidate, (n,) 0 or more; None: its score.
        pinned: codes that rules pin: such candidates are always taken.
        reserved: see `SlotRules`; enough candidates of each reserved kind are taken.
        rarity: see `WeighedCandidates`.
        novel: see `SlotRules`.
    """
    worth = weighed = scores.astype(np.float64) if worth is None else worth
    others = []
    if len(pinned):
        rows = query.statistics.find(candidates.codes, pinned)
        others.append(rows[rows >= 0])
        worth = worth.copy()
        worth[others[0]] = -1.0  # they take no place among the best
    places = best(worth, most)
    if len(pinned):
        places = places[worth[places] >= 0]  # of few candidates all are among the best
    if reserved.any():
        others += _of_kinds(query, candidates.codes, worth, places, reserved)
    if len(rarity) and len(novel):
        others.append(best(worth * rarity, 2 * rare_pool(novel)))  # some of them may be sold out
    first = len(places)
    if others:
        more = np.zeros(len(worth), bool)
        more[np.concatenate(others)] = True
        more[places] = False
        places = np.concatenate([places, np.flatnonzero(more)])
    history = query.history
    own = query.statistics.find(history.items, candidates.codes[places])
    bought, times, at = own >= 0, np.zeros(len(places), np.uint16), np.zeros(len(places))
    times[bought] = np.minimum(history.count[own[bought]], 65_535)
    at[bought] = history.last_at[own[bought]]
    return Ranked(
        candidates.codes[places].astype(np.int32),
        scores[places],
        candidates.source[places],
        times,
        at,
        weighed[places],
        best=first,
        whole=len(places) >= len(candidates.codes),
    )


def _of_kinds(
    query: Query, codes: np.ndarray, worth: np.ndarray, places: np.ndarray, reserved: np.ndarray
) -> list[np.ndarray]:
    """Return the places of the best candidates beyond some, of each kind POOL times as many as its slots.

    The list may be cached, and some of them be sold out or banned by then.
    """
    bought = query.statistics.find(query.history.items, codes) >= 0
    order = np.argsort(-worth, kind="stable")
    free = np.ones(len(worth), bool)
    free[places] = False
    rest = order[free[order]]
    most = [POOL * int(np.count_nonzero(reserved == kind)) for kind in (REPEAT, NEW)]
    return [rest[bought[rest]][: most[0]], rest[~bought[rest]][: most[1]]]
