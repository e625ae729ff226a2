"""Sources and scores -> the candidates of a request, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled


@compiled
def choose(
    basket: np.ndarray,
    barred: np.ndarray,
    offers: np.ndarray,
    bought: np.ndarray,
    favourites: np.ndarray,
    partners: np.ndarray,
    strengths: np.ndarray,
    most_partners: int,
    week: np.ndarray,
    near: np.ndarray,
    store: np.ndarray,
    popular: np.ndarray,
    most: int,
    marks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct codes of six sources, source by source, and the number of each code's source.

    Args:
        basket: codes that are left out.
        barred: codes that are left out, too.
        offers: (n,) whether an item may be returned; empty: every item may.
        bought: (h,) codes of the history, the source 0.
        favourites: places in the history that come first.
        partners: (t,) codes of the basket's partners, the source 1.
        strengths: (t,) of the partners; the largest come first.
        most_partners: how many partners come before the other sources; more follow while there is room.
        week: codes, the source 6.
        near: codes, the source 2.
        store: codes, the source 3.
        popular: codes, the source 4.
        most: how many to return at most.
        marks: as in `link`.

    Returns:
        Codes, (n,) int64, and sources, (n,) int8.
    """
    codes, sources = np.empty(most, np.int64), np.empty(most, np.int8)
    _mark(marks, basket, 1)
    _mark(marks, barred, 1)
    found = _take(bought[favourites], 0, codes, sources, 0, marks, offers)
    found = _take(partners[best(strengths, most_partners)], 1, codes, sources, found, marks, offers)
    found = _take(week, 6, codes, sources, found, marks, offers)
    found = _take(near, 2, codes, sources, found, marks, offers)
    found = _take(store, 3, codes, sources, found, marks, offers)
    if found < most:
        left = np.flatnonzero(marks[partners] == 0)
        if len(offers):
            left = left[offers[partners[left]]]
        more = left[best(strengths[left], most - found)]
        found = _take(partners[more], 1, codes, sources, found, marks, offers)
    found = _take(popular, 4, codes, sources, found, marks, offers)
    _mark(marks, basket, 0)
    _mark(marks, barred, 0)
    _mark(marks, codes[:found], 0)
    return codes[:found], sources[:found]


@compiled
def _mark(marks: np.ndarray, codes: np.ndarray, mark: int) -> None:
    """Write a mark at each code."""
    for code in codes:
        marks[code] = mark


@compiled
def _take(
    wanted: np.ndarray,
    source: int,
    codes: np.ndarray,
    sources: np.ndarray,
    found: int,
    marks: np.ndarray,
    offers: np.ndarray,
) -> int:
    """Append the codes that are not marked and may be returned, while there is room; return their number."""
    for code in wanted:
        if found == len(codes):
            break
        if marks[code] == 0 and (len(offers) == 0 or offers[code]):
            marks[code] = 1
            codes[found], sources[found] = code, source
            found += 1
    return found


@compiled
def tower_rows(
    items: np.ndarray,
    decayed: np.ndarray,
    last_at: np.ndarray,
    lately: np.ndarray,
    bought: np.ndarray,
    known: int,
    basket: np.ndarray,
    weights: np.ndarray,
    last: np.ndarray,
) -> None:
    """Write the query tower's inputs for one request; codes are shifted by one, 0 is an unknown item.

    Args:
        items: (h,) codes of the history.
        decayed: (h,) decayed counts of the history.
        last_at: (h,) when each item was bought last.
        lately: (r,) places in the history; at most `length`.
        bought: (1, length) zeros, written to: the items at these places, the latest first.
        known: how many items the tower knows.
        basket: (m,) codes.
        weights: (1, length) zeros, written to: the logarithms of one plus the decayed counts.
        last: (1, length) zeros, written to: the basket's last items.
    """
    for at, number in enumerate(np.argsort(-last_at[lately], kind="mergesort")):
        place = lately[number]
        if items[place] < known:
            bought[0, at] = items[place] + 1
            weights[0, at] = np.log1p(decayed[place])
    first = max(len(basket) - last.shape[1], 0)
    for at in range(first, len(basket)):
        last[0, at - first] = basket[at] + 1 if basket[at] < known else 0


@compiled
def best(values: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the k largest values, the largest first; NaN is least. Ties go to the earlier.

    The loop keeps a heap of the k best so far, the least on top, and sorts it in the end.

    Args:
        values: (n,) floats.
        k: how many places to return at most.
    """
    most = min(k, len(values))
    places, kept = np.empty(most, np.int64), np.empty(most)
    for place in range(len(values)):
        value = values[place] if values[place] == values[place] else -np.inf
        if place < most:
            at = place
            while at > 0 and value <= kept[(at - 1) // 2]:  # of equal values the later is less
                places[at], kept[at] = places[(at - 1) // 2], kept[(at - 1) // 2]
                at = (at - 1) // 2
            places[at], kept[at] = place, value
        elif most > 0 and value > kept[0]:
            _sink(places, kept, place, value, most)
    for end in range(most - 1, 0, -1):
        place, value = places[end], kept[end]
        places[end], kept[end] = places[0], kept[0]
        _sink(places, kept, place, value, end)
    return places


@compiled
def _sink(places: np.ndarray, kept: np.ndarray, place: int, value: float, size: int) -> None:
    """Replace the top of a heap by an entry, and let it sink to its place."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        other = child + 1
        if other < size and (
            kept[other] < kept[child] or (kept[other] == kept[child] and places[other] > places[child])
        ):
            child = other
        if value < kept[child] or (value == kept[child] and place > places[child]):
            break
        places[at], kept[at] = places[child], kept[child]
        at = child
    places[at], kept[at] = place, value
