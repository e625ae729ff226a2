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
DAY_S = 86_400
FLOAT16_SCALE = np.float32(2.0**112)  # a float16 whose bits stand where a float32's do, times this, is itself
SEEDS = (np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3))  # FNV-1a's, 64 bit


def compiled(loop: Loop) -> Loop:
    """Compile a function at its first call, without holding the interpreter while it runs.

    To divide by 0 gives what it gives in numpy: one broken price must not raise for a whole request.
    """
    try:
        made: Any = njit(cache=True, nogil=True, error_model="numpy")(loop)
    except (
        RuntimeError
    ):  # nowhere to keep it: a read-only image without NUMBA_CACHE_DIR compiles at each start
        made = njit(nogil=True, error_model="numpy")(loop)
    return cast(Loop, made)


@compiled
def summarise(
    at: np.ndarray,
    basket: np.ndarray,
    item: np.ndarray,
    kind: np.ndarray,
    paid: np.ndarray,
    discount: np.ndarray,
    size: int,
    now: float,
    decay_s: float,
    pause_s: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what one user's events before a moment come to: of each item, and of all.

    A purchase of the moment, basket and item of the one before it is the same line, scanned twice: what was
    paid is added up (and rounded to float32, as the line has it where it was merged before), and it counts
    once.

    Args:
        at: (n,) times in order.
        basket: (n,) numbers of the baskets, see `count_baskets`.
        item: (n,) places of the items.
        kind: (n,) 0 a purchase, 1 an impression, 2 a click.
        paid: (n,) money.
        discount: (n,) money.
        size: how many items there are.
        now: the time from which ages count.
        decay_s: the longest decay.
        pause_s: a session ends after so long without a purchase or click.

    Returns:
        How often each item was bought, (size,) float32; for each, (5, size), its lines weighted by
        exp(-age / decay) for an eighth, half and the whole of `decay_s`, the first and the last time, all 0
        where it was not; and the totals, in the order of `aggregates.Totals`.
    """
    count = np.zeros(size, np.float32)
    values = np.zeros((5, size))
    seen = np.zeros(size, np.bool_)
    baskets, lines, first_at, last_at, spend, saved = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    hour, week, week_spend, months, months_spend, months_items = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    impressions, clicks, late_clicks = 0.0, 0.0, 0.0
    line_paid, line_saved = 0.0, 0.0  # of the purchase before this line, with all that was scanned of it
    acts, session_at, act_at = 0.0, 0.0, -np.inf
    before = -1  # the purchase before this line
    for line in range(len(at)):
        time, place = at[line], item[line]
        if kind[line] == 1:
            impressions += 1
            continue
        if kind[line] == 0:
            begins = before < 0 or time != at[before] or basket[line] != basket[before]
            again = not begins and place == item[before]
            before = line
            own, own_saved = (line_paid, line_saved) if again else (0.0, 0.0)
            line_paid, line_saved = own + paid[line], own_saved + discount[line]
            more = np.float64(np.float32(line_paid)) - np.float64(np.float32(own))
            spend += more
            saved += np.float64(np.float32(line_saved)) - np.float64(np.float32(own_saved))
            if time >= now - 7 * DAY_S:
                week_spend += more
            if time >= now - 60 * DAY_S:
                months_spend += more
            if again:
                continue
            lines += 1
            last_at = time
            if begins:
                if baskets == 0:
                    first_at = time
                baskets += 1
                hour += time >= now - 3_600
                week += time >= now - 7 * DAY_S
                months += time >= now - 60 * DAY_S
            if time >= now - 60 * DAY_S and not seen[place]:
                seen[place] = True
                months_items += 1
            if count[place] == 0:
                values[3, place] = time
            values[4, place] = time
            count[place] += 1
            weight = np.exp((time - now) / decay_s)
            values[2, place] += weight
            weight *= weight
            values[1, place] += weight
            weight *= weight
            values[0, place] += weight * weight
        else:
            clicks += 1
            late_clicks += time >= now - 600
        if time - act_at > pause_s:
            acts, session_at = 0.0, time
        acts += 1
        act_at = time
    if now - act_at > pause_s:
        acts, session_at = 0.0, 0.0
    totals = np.array(
        [
            baskets,
            lines,
            first_at,
            last_at,
            spend,
            saved,
            hour,
            week,
            week_spend,
            months,
            months_spend,
            months_items,
            impressions,
            clicks,
            late_clicks,
            acts,
            session_at,
        ]
    )
    return count, values, totals


@compiled
def count_baskets(at: np.ndarray, basket: np.ndarray) -> int:
    """Return how many baskets lines in order belong to: each is of one moment and has one number there."""
    count = 0
    for line in range(len(at)):
        if line == 0 or at[line] != at[line - 1] or basket[line] != basket[line - 1]:
            count += 1
    return count


@compiled
def totals_of(
    at: np.ndarray, basket: np.ndarray, item: np.ndarray, paid: np.ndarray, size: int
) -> tuple[int, int, float]:
    """Return how many baskets and how many distinct items lines in order hold, and what was paid for them.

    Args:
        at: (n,) times.
        basket: (n,) numbers of the baskets, see `count_baskets`.
        item: (n,) places of the items.
        paid: (n,) money.
        size: how many items there are.
    """
    seen = np.zeros(size, np.bool_)
    items, spend = 0, 0.0
    for line in range(len(at)):
        if not seen[item[line]]:
            seen[item[line]] = True
            items += 1
        spend += paid[line]
    return count_baskets(at, basket), items, spend


@compiled
def rhythms(
    count: np.ndarray,
    first_at: np.ndarray,
    last_at: np.ndarray,
    codes: np.ndarray,
    usual_days: np.ndarray,
    now: float,
) -> np.ndarray:
    """Return how regularly items were bought, (4, h) float64.

    The four: days since the last time; mean days between two times, the usual ones where there was one time;
    the first over the second, at least 1 day; times per 30 days since the first one, at least 7 days ago.

    Args:
        count: (h,) how often each was bought.
        first_at: (h,) seconds.
        last_at: (h,) seconds.
        codes: (h,) of the items.
        usual_days: (n,) of the items of the catalogue.
        now: seconds.
    """
    found = np.empty((4, len(count)))
    for item in range(len(count)):
        since = (now - last_at[item]) / DAY_S
        if count[item] > 1:
            between = (last_at[item] - first_at[item]) / (DAY_S * np.float64(count[item] - 1))
        else:
            between = np.float64(usual_days[codes[item]])
        found[0, item] = since
        found[1, item] = between
        found[2, item] = since / max(between, 1.0)
        found[3, item] = 30 * np.float64(count[item]) / max((now - first_at[item]) / DAY_S, 7.0)
    return found


@compiled
def is_orderly(at: np.ndarray, kind: np.ndarray, paid: np.ndarray, discount: np.ndarray, kinds: int) -> bool:
    """Say whether lines follow each other in time since 1970, of known kinds and with finite amounts."""
    before = 0.0
    for line in range(len(at)):
        if not before <= at[line] < np.inf or kind[line] >= kinds:
            return False
        if not (np.isfinite(paid[line]) and np.isfinite(discount[line])):
            return False
        before = at[line]
    return True


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
        weights: (n, 6), what a count is multiplied by: three of where a link begins, three of where it ends.
        marks: (n,) zeros, which they are again afterwards.

    Returns:
        Codes, (t,); sums and largest strengths, (3, t) float32; links, (t,) int64.
    """
    most = len(items) * neighbours.shape[1]
    codes = np.empty(most, np.int64)
    strengths = np.empty((most, 6), np.float32)  # three sums and three largest ones: one line of the cache
    links = np.empty(most, np.int64)
    found = 0
    for source in items:
        first, second, third = weights[source, 0], weights[source, 1], weights[source, 2]
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            count = together[source, place]
            at = marks[partner] - 1
            if at < 0:
                at = found
                found += 1
                marks[partner] = found
                codes[at] = partner
                links[at] = 0
                for kind in range(6):
                    strengths[at, kind] = 0
            links[at] += 1
            own = strengths[at]
            own[0] += count * first
            own[1] += count * second
            own[2] += count * third
            own[3] = max(own[3], count * first)
            own[4] = max(own[4], count * second)
            own[5] = max(own[5], count * third)
    sums = np.empty((3, found), np.float32)
    largest = np.empty((3, found), np.float32)
    for at in range(found):
        marks[codes[at]] = 0
        for kind in range(3):
            weight = weights[codes[at], 3 + kind]
            sums[kind, at] = strengths[at, kind] * weight
            largest[kind, at] = strengths[at, 3 + kind] * weight
    return codes[:found], sums, largest, links[:found]


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
    sums = np.zeros(len(wanted) + 1)  # the first takes what nobody wants: to add is quicker than to ask
    for at in range(len(wanted)):
        marks[wanted[at]] = at + 1
    for number in range(len(items)):
        source = items[number]
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            sums[marks[partner]] += together[source, place] * scale[number]
    for code in wanted:
        marks[code] = 0
    return sums[1:]


@compiled
def strongest_links(
    codes: np.ndarray,
    items: np.ndarray,
    neighbours: np.ndarray,
    together: np.ndarray,
    weights: np.ndarray,
    marks: np.ndarray,
) -> np.ndarray:
    """Return which of some items has the strongest link to each code by the first strength, -1 if none has.

    Args:
        codes: (n,) distinct codes of partners.
        items: (b,) codes.
        neighbours: as in `link`.
        together: as in `link`.
        weights: as in `link`.
        marks: as in `link`.
    """
    largest, found = np.zeros(len(codes)), np.full(len(codes), -1)
    for at in range(len(codes)):
        marks[codes[at]] = at + 1
    for source in items:
        for place in range(neighbours.shape[1]):
            partner = neighbours[source, place]
            if partner < 0:
                break
            at = marks[partner] - 1
            if at >= 0 and together[source, place] * weights[source, 0] > largest[at]:
                largest[at], found[at] = together[source, place] * weights[source, 0], source
    for code in codes:
        marks[code] = 0
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
def find_few(codes: np.ndarray, wanted: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return what `find` does; the wanted codes are distinct and of the catalogue, and should be few."""
    places = np.full(len(wanted), -1)
    for at in range(len(wanted)):
        marks[wanted[at]] = at + 1
    for at in range(len(codes)):
        if marks[codes[at]]:
            places[marks[codes[at]] - 1] = at
    for code in wanted:
        marks[code] = 0
    return places


@compiled
def fill_rows(rows: np.ndarray, first: int, table: np.ndarray, places: np.ndarray) -> None:
    """Write into columns of rows, from `first` on, what a table holds at their places, -1 being its last.

    Args:
        rows: (n, columns), written to.
        first: the first column.
        table: (k, m), one row for each of k columns.
        places: (n,) columns of the table.
    """
    for row in range(len(places)):
        place = places[row]
        for column in range(table.shape[0]):
            rows[row, first + column] = table[column, place]


@compiled
def choose(
    basket: np.ndarray,
    barred: np.ndarray,
    bought: np.ndarray,
    favourites: np.ndarray,
    partners: np.ndarray,
    strengths: np.ndarray,
    most_partners: int,
    near: np.ndarray,
    store: np.ndarray,
    popular: np.ndarray,
    most: int,
    marks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return distinct codes of five sources, each after the one before, and the number of each one's source.

    Args:
        basket: codes that are left out.
        barred: likewise.
        bought: (h,) codes of the history, the source 0.
        favourites: places in it, those that come first.
        partners: (t,) codes of the basket's partners, the source 1.
        strengths: (t,) of which the largest come first.
        most_partners: how many of them come at most.
        near: codes, the source 2.
        store: codes, the source 3.
        popular: codes, the source 4.
        most: how many to return at most.
        marks: as in `link`.

    Returns:
        Codes, (n,) int64, and sources, (n,) int8.
    """
    codes, sources = np.empty(most, np.int64), np.empty(most, np.int8)
    for code in basket:
        marks[code] = 1
    for code in barred:
        marks[code] = 1
    found = _take(bought[favourites], 0, codes, sources, 0, marks)
    found = _take(partners[best(strengths, most_partners)], 1, codes, sources, found, marks)
    found = _take(near, 2, codes, sources, found, marks)
    found = _take(store, 3, codes, sources, found, marks)
    found = _take(popular, 4, codes, sources, found, marks)
    for code in basket:
        marks[code] = 0
    for code in barred:
        marks[code] = 0
    for code in codes[:found]:
        marks[code] = 0
    return codes[:found], sources[:found]


@compiled
def _take(
    wanted: np.ndarray, source: int, codes: np.ndarray, sources: np.ndarray, found: int, marks: np.ndarray
) -> int:
    """Put codes that are not marked behind those that were found, while there is room; return how many."""
    for code in wanted:
        if found == len(codes):
            break
        if marks[code] == 0:
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
    """Write what the query tower reads of one request; codes are shifted by one, and 0 for an item beyond.

    Args:
        items: (h,) codes of the history.
        decayed: (h,) its decayed counts.
        last_at: (h,) when each was bought last.
        lately: (r,) places in it; no more than there is room for.
        bought: (1, length) zeros, written to: their items, the latest first.
        known: how many items the tower knows.
        basket: (m,) codes.
        weights: (1, length) zeros, written to: the logarithms of one plus their counts.
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
    """Return the places of the k largest values, the largest first, of equal ones the earlier; NaN is least.

    A heap of the k best so far, the least on top; sorted in the end.

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
            while at > 0 and value <= kept[(at - 1) // 2]:  # of equal ones the later is the lesser
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
    """Put an entry in place of a heap's top, and let it sink to where it belongs."""
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


@compiled
def best_rows(
    places: np.ndarray,
    scores: np.ndarray,
    codes: np.ndarray,
    sources: np.ndarray,
    bought: np.ndarray,
    count: np.ndarray,
    last_at: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what is kept of some candidates.

    Args:
        places: (m,) of the candidates to keep, in their order.
        scores: (n,) float32 of the candidates.
        codes: (n,) of the candidates.
        sources: (n,) int8 of the candidates.
        bought: (h,) codes of the history, sorted.
        count: (h,) how often each was bought.
        last_at: (h,) when last.

    Returns:
        Codes, (m,) int32; scores, (m,) float32; sources, (m,) int8; and of those in the history how often,
        (m,) uint16, and when last they were bought, (m,) float64, 0 of the others.
    """
    found = len(places)
    own, shown = np.empty(found, np.int32), np.empty(found, np.float32)
    source, times, at = np.empty(found, np.int8), np.zeros(found, np.uint16), np.zeros(found)
    for number, place in enumerate(places):
        own[number], shown[number], source[number] = codes[place], scores[place], sources[place]
        item = np.searchsorted(bought, codes[place])
        if item < len(bought) and bought[item] == codes[place]:
            times[number] = min(count[item], 65_535)
            at[number] = last_at[item]
    return own, shown, source, times, at


@compiled
def index_ids(text: np.ndarray, ends: np.ndarray, slots: np.ndarray) -> int:
    """Fill a hash table of ids: each slot the hash and the code of the id that is there, code -1 where none.

    Returns the code of an id whose hash another one has as well, -1 if there is none: of two million ids two
    share one with a chance of one in ten million.

    Args:
        text: the UTF-8 bytes of all ids, one after the other.
        ends: (n,) where each ends.
        slots: (s, 2) int64 to fill; s is a power of two above n.
    """
    slots[:, 1] = -1
    begin = 0
    for code in range(len(ends)):
        hashed = SEEDS[0]
        for at in range(begin, ends[code]):
            hashed = (hashed ^ np.uint64(text[at])) * SEEDS[1]
        key = _mixed(hashed)
        slot = _slot(slots, key)
        if slots[slot, 1] >= 0:
            return code
        slots[slot, 0], slots[slot, 1] = key, code
        begin = ends[code]
    return -1


@compiled
def codes_of(ids: np.ndarray, count: int, slots: np.ndarray) -> np.ndarray:
    """Return the codes of ids that stand in one text, each on a line, (count,) int64; -1 for an unknown one.

    Ids are told apart by 64 bits of their hash, which takes one look into memory for each.

    Args:
        ids: the text's UTF-8 bytes.
        count: how many ids there are; a text with another number gives an empty array.
        slots: what `index_ids` filled.
    """
    codes = np.empty(count, np.int64)
    found, hashed = 0, SEEDS[0]
    for at in range(len(ids) + 1):
        if at < len(ids) and ids[at] != 10:
            hashed = (hashed ^ np.uint64(ids[at])) * SEEDS[1]
            continue
        if found == count:
            return codes[:0]
        codes[found] = slots[_slot(slots, _mixed(hashed)), 1]
        found += 1
        hashed = SEEDS[0]
    return codes if found == count else codes[:0]


@compiled
def _mixed(hashed: np.uint64) -> np.int64:
    """Return FNV-1a (Fowler, Noll and Vo) of some bytes, mixed once more: its low bits choose the slot."""
    return np.int64(hashed ^ (hashed >> np.uint64(32)))


@compiled
def _slot(slots: np.ndarray, key: np.int64) -> np.int64:
    """Return the slot in which a key stands, or the empty one in which it would."""
    last = len(slots) - 1
    slot = key & last
    while slots[slot, 1] >= 0 and slots[slot, 0] != key:
        slot = (slot + 1) & last
    return slot


@compiled
def lift(table: np.ndarray, basket: np.ndarray, types: np.ndarray) -> np.ndarray:
    """Return the mean and the largest lift of each type against those of a basket, (2, n) float32.

    Args:
        table: (T, T) uint16, the bits of finite float16.
        basket: (m,) types of its items, at least one.
        types: (n,) types; each is looked up once, however many candidates are of it.
    """
    place = np.zeros(len(table), np.int32)
    asked, count = np.empty(len(types), np.int64), 0
    for kind in types:
        if place[kind] == 0:
            asked[count] = kind
            count += 1
            place[kind] = count
    bits = np.empty(count, np.uint32)
    floats = bits.view(np.float32)
    sums, largest = np.zeros(count, np.float32), np.full(count, np.float32(-np.inf))
    for own in basket:
        row = table[own]
        for at in range(count):
            half = np.uint32(row[asked[at]])
            sign, rest = half & np.uint32(0x8000), half & np.uint32(0x7FFF)
            bits[at] = sign << np.uint32(16) | rest << np.uint32(13)
        for at in range(count):
            value = floats[at] * FLOAT16_SCALE
            sums[at] += value
            largest[at] = max(largest[at], value)
    found = np.empty((2, len(types)), np.float32)
    for at in range(len(types)):
        own = place[types[at]] - 1
        found[0, at], found[1, at] = sums[own] / np.float32(len(basket)), largest[own]
    return found


@compiled
def levels_of(categorical: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the columns of a table for some rows, each column contiguous, (columns, n) int64.

    Args:
        categorical: (m, columns) integers.
        codes: (n,) rows.
    """
    levels = np.empty((categorical.shape[1], len(codes)), np.int64)
    for at in range(len(codes)):
        for column in range(categorical.shape[1]):
            levels[column, at] = categorical[codes[at], column]
    return levels


@compiled
def sums_by_level(
    codes: np.ndarray, weights: np.ndarray, sizes: np.ndarray, wanted: np.ndarray
) -> np.ndarray:
    """Return for each wanted code the sums of its lines' weights, and their number, one level at a time.

    Code 0 is unknown: its sums are 0.

    Args:
        codes: (levels, k) of each line.
        weights: (w, k) of each line.
        sizes: (levels,) how many codes each level has.
        wanted: (levels, n) codes.

    Returns:
        (levels, w + 1, n) float64, the number of lines behind the sums.
    """
    kinds = len(weights) + 1
    found = np.empty((len(codes), kinds, wanted.shape[1]))
    for level in range(len(codes)):
        totals = np.zeros((sizes[level], kinds))
        for line in range(codes.shape[1]):
            own = totals[codes[level, line]]
            for kind in range(kinds - 1):
                own[kind] += weights[kind, line]
            own[kinds - 1] += 1
        totals[0] = 0
        for at in range(wanted.shape[1]):
            for kind in range(kinds):
                found[level, kind, at] = totals[wanted[level, at], kind]
    return found


PAIRS = 25  # rows of what `compare` returns
(
    HAS_ITEM,
    TYPE_120D,
    TYPE_15D,
    TYPE_ITEMS,
    TYPE_SHARE,
    CATEGORY_120D,
    DEPARTMENT_SHARE,
    PRIVATE_RATIO,
    CLICKS,
    IMPRESSIONS,
    LAST_RANK,
    SESSION_TYPE,
    BASKET_SIZE,
    BASKET_VALUE,
    BASKET_KNOWN,
    SAME_TYPE,
    SAME_CATEGORY,
    SAME_DEPARTMENT,
    LIFT_MEAN,
    LIFT_MAX,
    TOGETHER_IF_BOUGHT,
    TOGETHER_TIMES_DECAYED,
    HISTORY_TOGETHER,
    PRICE_TO_USER,
    PRICE_TO_BASKET,
) = range(PAIRS)


@compiled
def compare(
    candidates: np.ndarray,
    basket: np.ndarray,
    basket_size: int,
    bought: np.ndarray,
    decayed: np.ndarray,
    lately: np.ndarray,
    partners: np.ndarray,
    sums: np.ndarray,
    largest: np.ndarray,
    last: np.ndarray,
    session: np.ndarray,
    clicked: np.ndarray,
    shown: np.ndarray,
    spend_per_line: float,
    categorical: np.ndarray,
    sizes: np.ndarray,
    price: np.ndarray,
    log_price: np.ndarray,
    is_private: np.ndarray,
    type_lift: np.ndarray,
    neighbours: np.ndarray,
    together: np.ndarray,
    weights: np.ndarray,
    marks: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return what a query and each of its candidates have to do with each other.

    One loop for all, because a request has a few hundred candidates: a call for each feature would cost more
    than its numbers. What a row of the result means says the feature that is made of it, in `transforms`.

    Args:
        candidates: (n,) distinct codes.
        basket: (m,) codes.
        basket_size: lines of the basket, those outside the catalogue included.
        bought: (h,) distinct codes of the user's history.
        decayed: (3, h) its counts, decayed over 15, 60 and 120 days.
        lately: (r,) places in the history whose partners are looked up.
        partners: (t,) distinct codes of the basket's partners.
        sums: (3, t) float32, see `link`.
        largest: (3, t) float32, likewise.
        last: (l,) codes of what the user had to do with last, the latest first; -1 outside the catalogue.
        session: (s,) code of each event of the session, likewise.
        clicked: code of each click that counts, likewise.
        shown: code of each impression that counts, likewise.
        spend_per_line: what the user pays for a line.
        categorical: (N, 3) type, category and department of the catalogue's items; 0 is unknown.
        sizes: (3,) how many codes each of them has.
        price: (N,) of the items.
        log_price: (N,) logarithm of the price and a half.
        is_private: (N,) 1 for the shop's own brand.
        type_lift: see `lift`.
        neighbours: see `link`.
        together: see `link`.
        weights: see `link`.
        marks: see `link`.

    Returns:
        Places of the candidates in the history, (n,), and among the partners, (n,), -1 where they are not;
        their levels, (3, n); and the rows, (25, n) float32.
    """
    n, size = len(candidates), len(basket)
    rows = np.empty((PAIRS, n), np.float32)
    places, links = find_few(bought, candidates, marks), find_few(partners, candidates, marks)
    levels = levels_of(categorical, candidates)
    own_levels, basket_levels = levels_of(categorical, bought), levels_of(categorical, basket)
    by_history = sums_by_level(own_levels, decayed, sizes, levels)
    nothing = np.empty((0, 0))
    by_basket = sums_by_level(basket_levels, nothing, sizes, levels)
    told = session[session >= 0]
    by_session = sums_by_level(levels_of(categorical, told), nothing, sizes, levels)
    clicks, impressions = count_lines(candidates, clicked, marks), count_lines(candidates, shown, marks)
    ranks = np.full(n, 10.0)  # behind the last ten
    for at in range(len(last)):
        if last[at] >= 0:
            marks[last[at]] = at + 1
    for at in range(n):
        if marks[candidates[at]]:
            ranks[at] = marks[candidates[at]] - 1
    for code in last:
        if code >= 0:
            marks[code] = 0
    whole, private = 0.0, 0.0
    for item in range(len(bought)):
        whole += decayed[2, item]
        private += is_private[bought[item]] * decayed[2, item]
    whole = max(whole, 1e-6)
    value, known = 0.0, 0
    for code in basket:
        value += price[code]
    for place in find(bought, basket, marks):
        known += place >= 0
    lifts = np.zeros((2, n), np.float32)
    if size:
        lifts = lift(type_lift, basket_levels[0], levels[0])
    recent, scale = np.empty(len(lately), np.int64), np.empty(len(lately))
    for at in range(len(lately)):
        recent[at] = bought[lately[at]]
        scale[at] = np.log1p(decayed[1, lately[at]]) * weights[recent[at], 0]
    linked = link_to(candidates, recent, scale, neighbours, together, marks)
    log_spend, log_basket = np.log(spend_per_line + 0.5), np.log((value / size if size else 0.0) + 0.5)
    for at in range(n):
        place, partner = places[at], links[at]
        own = decayed[2, place] if place >= 0 else 0.0
        rows[HAS_ITEM, at] = place >= 0
        rows[TYPE_120D, at] = by_history[0, 2, at]
        rows[TYPE_15D, at] = by_history[0, 0, at]
        rows[TYPE_ITEMS, at] = by_history[0, 3, at]
        rows[TYPE_SHARE, at] = own / max(by_history[0, 2, at], 1e-6)
        rows[CATEGORY_120D, at] = by_history[1, 2, at]
        rows[DEPARTMENT_SHARE, at] = by_history[2, 2, at] / whole
        rows[PRIVATE_RATIO, at] = private / whole
        rows[CLICKS, at] = clicks[at]
        rows[IMPRESSIONS, at] = impressions[at]
        rows[LAST_RANK, at] = ranks[at]
        rows[SESSION_TYPE, at] = by_session[0, 0, at]
        rows[BASKET_SIZE, at] = basket_size
        rows[BASKET_VALUE, at] = value
        rows[BASKET_KNOWN, at] = known / max(size, 1)
        rows[SAME_TYPE, at] = by_basket[0, 0, at]
        rows[SAME_CATEGORY, at] = by_basket[1, 0, at]
        rows[SAME_DEPARTMENT, at] = by_basket[2, 0, at] / max(size, 1)
        rows[LIFT_MEAN, at] = lifts[0, at]
        rows[LIFT_MAX, at] = lifts[1, at]
        both = partner >= 0 and place >= 0
        rows[TOGETHER_IF_BOUGHT, at] = largest[0, partner] if both else 0.0
        rows[TOGETHER_TIMES_DECAYED, at] = sums[0, partner] * np.log1p(own) if both else 0.0
        rows[HISTORY_TOGETHER, at] = linked[at] * weights[candidates[at], 3]
        rows[PRICE_TO_USER, at] = log_price[candidates[at]] - log_spend
        rows[PRICE_TO_BASKET, at] = log_price[candidates[at]] - log_basket
    return places, links, levels, rows


@compiled
def count_lines(candidates: np.ndarray, codes: np.ndarray, marks: np.ndarray) -> np.ndarray:
    """Return for each candidate how many of some codes are it, (n,) int64; those below 0 are none.

    Args:
        candidates: (n,) distinct codes.
        codes: one for each line.
        marks: as in `link`.
    """
    counts = np.zeros(len(candidates), np.int64)
    if len(codes):
        for place in find(candidates, codes, marks):
            if place >= 0:
                counts[place] += 1
    return counts


@compiled
def categories(codes: np.ndarray, known: int, levels: np.ndarray) -> np.ndarray:
    """Return codes as the models take them, (n, 1 + levels) int64: shifted by one, and 0 for an item beyond.

    Args:
        codes: (n,) codes of the catalogue.
        known: how many items the models know.
        levels: (levels, n) what comes behind.
    """
    rows = np.empty((len(codes), 1 + levels.shape[0]), np.int64)
    for row in range(len(codes)):
        rows[row, 0] = codes[row] + 1 if codes[row] < known else 0
        for level in range(levels.shape[0]):
            rows[row, 1 + level] = levels[level, row]
    return rows


@compiled
def begin_rows(rows: np.ndarray, shared: np.ndarray, table: np.ndarray, places: np.ndarray) -> None:
    """Write into the first columns of rows what all share, and behind it what a table holds at their places.

    Args:
        rows: (n, columns), written to.
        shared: (s,).
        table: (m, k).
        places: (n,) rows of the table.
    """
    for row in range(len(places)):
        place = places[row]
        for column in range(len(shared)):
            rows[row, column] = shared[column]
        for column in range(table.shape[1]):
            rows[row, len(shared) + column] = table[place, column]


@compiled
def within(rows: np.ndarray, limit: float) -> bool:
    """Say whether all numbers of (n, columns) float32 are between -limit and limit; NaN is not."""
    # Without its sign a float's bits are an integer that grows with it, and NaN is above all: that is done
    # for many at once.
    most = np.uint32(0)
    for bits in rows.view(np.uint32).ravel():
        most = max(most, bits & np.uint32(0x7FFFFFFF))
    largest = np.empty(1, np.uint32)
    largest[0] = most
    return bool(largest.view(np.float32)[0] <= limit)


@compiled
def put_columns(rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
    """Write some columns of rows, row by row: column by column each would go through all of the memory.

    Args:
        rows: (n, columns), written to.
        columns: (k,) numbers of the columns; what has one below 0 is left out.
        values: (k, n).
    """
    for row in range(len(rows)):
        for number in range(len(columns)):
            if columns[number] >= 0:
                rows[row, columns[number]] = values[number, row]
