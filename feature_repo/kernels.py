"""Loops that numpy has no words for, compiled by numba: arrays in, arrays out.

Each is what its docstring says, once per request, over what memory holds anyway. They are compiled at their
first call and kept on disk (`__pycache__`, or NUMBA_CACHE_DIR where that cannot be written).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., Any])
SEEDS = (np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3))  # FNV-1a's, 64 bit


def compiled(loop: Loop) -> Loop:
    """Compile a function at its first call, without holding the interpreter while it runs."""
    try:
        made: Any = njit(cache=True, nogil=True)(loop)
    except (
        RuntimeError
    ):  # nowhere to keep it: a read-only image without NUMBA_CACHE_DIR compiles at each start
        made = njit(nogil=True)(loop)
    return cast(Loop, made)


@compiled
def count_items(
    at: np.ndarray, item: np.ndarray, now: float, decay_s: float, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return how often each item occurs, (size,), and what a history holds of it, (5, size).

    The five: lines weighted by exp(-age / decay) for an eighth, half and the whole of `decay_s`, the first
    and the last time. Of items that do not occur all are 0.

    Args:
        at: (n,) times in order.
        item: (n,) places of the items.
        now: the time from which ages count.
        decay_s: the longest decay.
        size: how many items there are.
    """
    count = np.zeros(size, np.float32)
    values = np.zeros((5, size))
    for line in range(len(at)):
        place = item[line]
        if count[place] == 0:
            values[3, place] = at[line]
        values[4, place] = at[line]
        count[place] += 1
        weight = np.exp((at[line] - now) / decay_s)
        values[2, place] += weight
        weight *= weight
        values[1, place] += weight
        weight *= weight
        values[0, place] += weight * weight
    return count, values


@compiled
def count_baskets(at: np.ndarray, basket: np.ndarray) -> int:
    """Return how many baskets lines in order belong to: each is of one moment and has one number there."""
    count = 0
    for line in range(len(at)):
        if line == 0 or at[line] != at[line - 1] or basket[line] != basket[line - 1]:
            count += 1
    return count


@compiled
def repeats(at: np.ndarray, basket: np.ndarray, item: np.ndarray) -> bool:
    """Say whether a line has the moment, the basket and the item of the line before it."""
    for line in range(1, len(at)):
        if item[line] == item[line - 1] and basket[line] == basket[line - 1] and at[line] == at[line - 1]:
            return True
    return False


@compiled
def last_distinct(item: np.ndarray, lines: int, most: int) -> np.ndarray:
    """Return the distinct values among the last so many lines, the last first, at most so many, int64."""
    found = np.empty(most, np.int64)
    count = 0
    for line in range(len(item) - 1, max(len(item) - lines, 0) - 1, -1):
        new = True
        for known in found[:count]:
            new = new and known != item[line]
        if new:
            found[count] = item[line]
            count += 1
            if count == most:
                break
    return found[:count]


@compiled
def link(
    items: np.ndarray,
    neighbours: np.ndarray,
    together: np.ndarray,
    weights: np.ndarray,
    marks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the partners of a set of items, in the order in which they come, and how strong the links are.

    Args:
        items: (b,) codes.
        neighbours: (n, K) codes of each item's partners, below 0 behind the last.
        together: (n, K) baskets that hold both.
        weights: (6, n), what a count is multiplied by: three of where a link begins, three of where it ends.
        marks: (n,) zeros, which they are again afterwards.

    Returns:
        Codes, (t,); sums and largest strengths, (3, t) float32; links, (t,) int64.
    """
    most = len(items) * neighbours.shape[1]
    codes = np.empty(most, np.int64)
    sums = np.empty((3, most), np.float32)
    largest = np.empty((3, most), np.float32)
    links = np.empty(most, np.int64)
    found = 0
    for source in items:
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            at = marks[partner] - 1
            if at < 0:
                at = found
                found += 1
                marks[partner] = found
                codes[at] = partner
                links[at] = 0
                sums[:, at] = 0
                largest[:, at] = 0
            links[at] += 1
            for kind in range(3):
                strength = together[source, place] * weights[kind, source]
                sums[kind, at] += strength
                largest[kind, at] = max(largest[kind, at], strength)
    for at in range(found):
        marks[codes[at]] = 0
        for kind in range(3):
            sums[kind, at] *= weights[3 + kind, codes[at]]
            largest[kind, at] *= weights[3 + kind, codes[at]]
    return codes[:found], sums[:, :found], largest[:, :found], links[:found]


@compiled
def link_to(
    wanted: np.ndarray,
    items: np.ndarray,
    scale: np.ndarray,
    neighbours: np.ndarray,
    together: np.ndarray,
    marks: np.ndarray,
) -> np.ndarray:
    """Return for each wanted code the sum of its links' counts with a set of items, (n,).

    Args:
        wanted: (n,) distinct codes.
        items: (b,) codes.
        scale: (b,) by which the counts of each item are multiplied.
        neighbours: as in `link`.
        together: as in `link`.
        marks: as in `link`.
    """
    sums = np.zeros(len(wanted))
    for at in range(len(wanted)):
        marks[wanted[at]] = at + 1
    for number in range(len(items)):
        source = items[number]
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            at = marks[partner] - 1
            if at >= 0:
                sums[at] += together[source, place] * scale[number]
    for code in wanted:
        marks[code] = 0
    return sums


@compiled
def strongest_link(
    code: int, items: np.ndarray, neighbours: np.ndarray, together: np.ndarray, weights: np.ndarray
) -> int:
    """Return which of some items has the strongest link to a code by the first strength, -1 if none has one.

    Args:
        code: of the partner.
        items: (b,) codes.
        neighbours: as in `link`.
        together: as in `link`.
        weights: as in `link`.
    """
    best, found = 0.0, -1
    for source in items:
        for place in range(neighbours.shape[1]):
            if neighbours[source, place] == code:
                strength = together[source, place] * weights[0, source]
                if strength > best:
                    best, found = strength, source
                break
    return found


@compiled
def find(codes: np.ndarray, wanted: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return where each wanted code stands among distinct codes, int64; -1 where it does not, or is below 0.

    Args:
        codes: (m,) codes of the catalogue.
        wanted: (n,) such codes, or numbers below 0.
        marks: as in `link`.
    """
    places = np.empty(len(wanted), np.int64)
    for at in range(len(codes)):
        marks[codes[at]] = at + 1
    for at in range(len(wanted)):
        places[at] = marks[wanted[at]] - 1 if wanted[at] >= 0 else -1
    for code in codes:
        marks[code] = 0
    return places


@compiled
def fill_rows(rows: np.ndarray, first: int, table: np.ndarray, places: np.ndarray) -> None:
    """Write into columns of rows, from `first` on, what a table holds at their places, -1 being its last.

    Args:
        rows: (n, columns), written to.
        first: the first column.
        table: (m, k); value by value it becomes what `rows` holds.
        places: (n,) rows of the table.
    """
    for row in range(len(places)):
        place = places[row]
        for column in range(table.shape[1]):
            rows[row, first + column] = table[place, column]


@compiled
def first_of(codes: np.ndarray, barred: int, most: int, marks: np.ndarray) -> np.ndarray:
    """Return the places of codes that come for the first time, in order, at most so many.

    Args:
        codes: (m,) codes, the first `barred` of which, and all like them, are left out.
        barred: how many.
        most: how many places to return at most.
        marks: as in `link`.
    """
    places = np.empty(min(most, len(codes)), np.int64)
    found, seen = 0, 0
    while seen < len(codes) and (found < most or seen < barred):
        if marks[codes[seen]] == 0:
            marks[codes[seen]] = 1
            if seen >= barred:
                places[found] = seen
                found += 1
        seen += 1
    for at in range(seen):
        marks[codes[at]] = 0
    return places[:found]


@compiled
def best(values: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the k largest values, the largest first, of equal ones the earlier; NaN is least.

    Args:
        values: (n,) floats.
        k: how many places to return at most.
    """
    most = min(k, len(values))
    places, kept = np.empty(most, np.int64), np.empty(most)
    count = 0
    for place in range(len(values)):
        value = values[place] if values[place] == values[place] else -np.inf
        if count == most:
            if most == 0 or value <= kept[most - 1]:
                continue
            count -= 1
        at = count
        while at > 0 and value > kept[at - 1]:
            places[at], kept[at] = places[at - 1], kept[at - 1]
            at -= 1
        places[at], kept[at] = place, value
        count += 1
    return places


@compiled
def index_ids(text: np.ndarray, ends: np.ndarray, slots: np.ndarray) -> None:
    """Fill a hash table of ids: each slot the code of the id that hashes there, -1 where none does.

    Args:
        text: the UTF-8 bytes of all ids, one after the other.
        ends: (n,) where each ends.
        slots: (s,) to fill; s is a power of two above n.
    """
    slots[:] = -1
    begin = 0
    for code in range(len(ends)):
        slot = _hash(text, begin, ends[code]) & np.uint64(len(slots) - 1)
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & np.uint64(len(slots) - 1)
        slots[slot] = code
        begin = ends[code]


@compiled
def codes_of(
    ids: np.ndarray, count: int, text: np.ndarray, ends: np.ndarray, slots: np.ndarray
) -> np.ndarray:
    """Return the codes of ids that stand in one text, each on a line, (count,) int64; -1 for an unknown one.

    Args:
        ids: the text's UTF-8 bytes.
        count: how many ids there are; a text with another number gives an empty array.
        text: what `index_ids` took, as the others.
        ends: likewise.
        slots: what it filled.
    """
    codes = np.full(count, -1, np.int64)
    begin, found = 0, 0
    for at in range(len(ids) + 1):
        if at < len(ids) and ids[at] != 10:
            continue
        if found == count:
            return codes[:0]
        slot = _hash(ids, begin, at) & np.uint64(len(slots) - 1)
        while slots[slot] >= 0:
            code = slots[slot]
            start = ends[code - 1] if code else 0
            if ends[code] - start == at - begin and _same(text, start, ids, begin, at - begin):
                codes[found] = code
                break
            slot = (slot + np.uint64(1)) & np.uint64(len(slots) - 1)
        found += 1
        begin = at + 1
    return codes if found == count else codes[:0]


@compiled
def _hash(text: np.ndarray, begin: int, end: int) -> np.uint64:
    """Return FNV-1a of some bytes (Fowler, Noll and Vo), mixed once more: only its low bits are used."""
    found = SEEDS[0]
    for at in range(begin, end):
        found = (found ^ np.uint64(text[at])) * SEEDS[1]
    return found ^ (found >> np.uint64(32))


@compiled
def _same(one: np.ndarray, start: int, other: np.ndarray, begin: int, length: int) -> bool:
    for at in range(length):  # noqa: SIM110 - numba has no generators in `all`
        if one[start + at] != other[begin + at]:
            return False
    return True
