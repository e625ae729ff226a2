"""Scores -> the list that is shown: pins, reserved slots, diversity, and weights for what is seldom shown.

An item is worth its purchase probability, times a weight of its own (`exposure_weights`), times the factors
of a merchandiser's rules. The slots are filled one after the other with what is worth most then: each item
shown makes others of its type worth a little less. In the few novel slots the rare is worth more.
"""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled
from feature_repo.statistics import Statistics

POOL = 4  # times k candidates take part; the rest are too far down to come up
NEW_DAYS = 91  # a manufacturer is new as long as its first sale is not longer ago
ANY, REPEAT, NEW = range(3)  # what a slot is reserved for
CHOSEN, PINNED, RESERVED, NOVEL = range(4)  # why an item stands in its slot
_TAKEN = -1.0
NO_SLOTS, NO_KINDS = np.empty(0, np.int64), np.empty(0, np.int8)
_NO_ROWS, NO_RARITY = np.empty(0, np.bool_), np.empty(0)


def rerank(
    worth: np.ndarray,
    types: np.ndarray,
    k: int,
    type_penalty: float,
    rarity: np.ndarray = NO_RARITY,
    novel: np.ndarray = NO_SLOTS,
) -> np.ndarray:
    """Return the rows of the k items to show where no rule speaks, int64; see `fill_slots`."""
    found = fill_slots(
        worth.astype(np.float64), rarity, types, k, type_penalty, NO_SLOTS, _NO_ROWS, NO_KINDS, novel
    )
    rows: np.ndarray = found[0]
    return rows


@compiled
def fill_slots(
    worth: np.ndarray,
    rarity: np.ndarray,
    types: np.ndarray,
    k: int,
    type_penalty: float,
    pinned: np.ndarray,
    before: np.ndarray,
    reserved: np.ndarray,
    novel: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the k items to show, int64, and why each stands where it does, int8.

    Greedy: each item already chosen of a type multiplies what the others of that type are worth by
    `type_penalty`. 1 changes nothing; a hard "one of each type" (0) costs a sixth of the recall on
    grocery baskets, where shoppers do buy two yogurts.

    A pinned row stands in its slot or not at all, so that a shorter list is the beginning of a longer one;
    only where all others are used up does it move forward. A reserved slot takes the best of its kind, and
    the best of all where there is none. A novel slot takes what is best when the rare is worth more.

    Args:
        worth: (n,) float64, what each candidate is worth, 0 or more.
        rarity: (n,) float64, what that is multiplied with in a novel slot; empty where there is none.
        types: (n,) type codes; 0 is unknown and never penalised.
        k: how many to show.
        type_penalty: in (0, 1].
        pinned: (s,) int64, the row that is pinned to each slot, below 0 where none is.
        before: (n,) bool, whether the user has bought it before; empty where no slot is reserved.
        reserved: (r,) int8, ANY, REPEAT or NEW for each slot.
        novel: (m,) int64 slots, counted from 0.
    """
    n = len(worth)
    order = np.argsort(-worth, kind="mergesort")
    left = worth[order]
    place_of = np.full(n, -1)
    for place in range(n):
        place_of[order[place]] = place
    for row in pinned:
        if row >= 0:
            left[place_of[row]] = _TAKEN
    near = _best_left(left, np.ones(n), POOL * k)
    boost, far = near.astype(np.float64), near
    if len(rarity) and len(novel):
        boost = rarity[order]
        far = _best_left(left, boost, rare_pool(novel))
    waiting = pinned.copy()
    rows, why = np.empty(min(k, n), np.int64), np.zeros(min(k, n), np.int8)
    for slot in range(len(rows)):
        chosen = -1
        if slot < len(waiting) and waiting[slot] >= 0:
            chosen = place_of[waiting[slot]]
            waiting[slot] = -1
            why[slot] = PINNED
        else:
            for place in range(n):
                if near[place] and left[place] != _TAKEN and (chosen < 0 or left[place] > left[chosen]):
                    chosen = place
            if len(rarity) and (novel == slot).any():
                usual = chosen
                for place in range(n):
                    fits = far[place] and left[place] != _TAKEN
                    if fits and (chosen < 0 or left[place] * boost[place] > left[chosen] * boost[chosen]):
                        chosen = place
                why[slot] = CHOSEN if chosen == usual else NOVEL
            wanted = reserved[slot] if slot < len(reserved) else ANY
            if wanted != ANY and chosen >= 0 and before[order[chosen]] != (wanted == REPEAT):
                best = -1
                for place in range(n):
                    fits = left[place] != _TAKEN and before[order[place]] == (wanted == REPEAT)
                    if fits and (best < 0 or left[place] > left[best]):
                        best = place
                if best >= 0:
                    chosen = best
                    why[slot] = RESERVED
            if chosen < 0:  # all others are shown: the next pin moves forward
                for later in range(len(waiting)):
                    if chosen < 0 and waiting[later] >= 0:
                        chosen = place_of[waiting[later]]
                        waiting[later] = -1
                why[slot] = PINNED
        rows[slot] = order[chosen]
        left[chosen] = _TAKEN
        kind = types[order[chosen]]
        if kind:
            for place in range(n):
                if left[place] > 0 and types[order[place]] == kind:
                    left[place] *= type_penalty
    return rows, why


@compiled
def _best_left(left: np.ndarray, boost: np.ndarray, most: int) -> np.ndarray:
    """Return which places hold the best of what is left, (n,) bool, so many of them at most."""
    marks = np.zeros(len(left), np.bool_)
    found = 0
    for place in np.argsort(-left * boost, kind="mergesort"):
        if found < most and left[place] != _TAKEN:
            marks[place] = True
            found += 1
    return marks


@compiled
def rare_pool(novel: np.ndarray) -> int:
    """Return how many candidates take part in the novel slots, (m,): earlier slots take some of them."""
    return POOL * len(novel) + novel.max() + 1 if len(novel) else 0


def exposure_weights(statistics: Statistics, exposure: float) -> np.ndarray | None:
    """Return what each item's score is multiplied with, (n,) float64; None where nothing changes.

    Args:
        statistics: the item table.
        exposure: what an item gains whose manufacturer is new: 0.5 makes it worth half as much again.
    """
    return 1.0 + exposure * of_new_manufacturers(statistics) if exposure else None


def of_new_manufacturers(statistics: Statistics) -> np.ndarray:
    """Return which items come from a manufacturer that is new, (n,) bool; an unknown one is not."""
    if not len(statistics.manufacturer):
        return np.zeros(len(statistics.item_ids), bool)
    codes = statistics.manufacturer.astype(np.int64)
    oldest = np.zeros(int(codes.max(initial=0)) + 1)
    np.maximum.at(oldest, codes, statistics.age_days)
    return (codes > 0) & (oldest[codes] <= NEW_DAYS)


def item_rarity(statistics: Statistics, novelty: float) -> np.ndarray | None:
    """Return what each item's worth is multiplied with in a novel slot, (n,) float64; None without novelty.

    Args:
        statistics: the item table.
        novelty: the power of one over an item's share of baskets. 0.3 makes an item that is in a tenth as
            many baskets worth twice as much.
    """
    if not novelty:
        return None
    share = np.maximum(statistics.basket_count, 1.0) / max(float(statistics.total_baskets), 1.0)
    return np.asarray(share, np.float64) ** -novelty
