"""A user's lines -> counts, sums and rhythms of the user's purchases, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled

DAY_S = 86_400
# Where each sum lies in the totals: the order of `aggregates.Totals`.
BASKETS, LINES, FIRST_AT, LAST_AT, SPEND, DISCOUNT, BASKETS_1H, BASKETS_7D, SPEND_7D = range(9)
BASKETS_60D, SPEND_60D, ITEMS_60D, IMPRESSIONS, CLICKS, CLICKS_10M, SESSION_LINES, SESSION_AT = range(9, 17)


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
    """Return sums over one user's events before a moment: for each item, and for all.

    A repeated scan, see `repeated`, counts once; its money is added up, and rounded to float32 as in a line
    that was merged before. One pass: while an exponential is computed, the rest costs no time.

    Args:
        at: (n,) times in order.
        basket: (n,) numbers of the baskets; a basket is one number at one moment.
        item: (n,) places of the items.
        kind: (n,) 0 a purchase, 1 an impression, 2 a click.
        paid: (n,) money.
        discount: (n,) money.
        size: how many items there are.
        now: the time from which ages count.
        decay_s: the longest decay.
        pause_s: a session ends after so long without a purchase or click.

    Returns:
        How often each item was bought, (size,) float32. For each item, (5, size): its lines weighted by
        exp(-age / decay) for an eighth, half and the whole of `decay_s`, the first and the last time; all 0
        if it was not bought. The totals, in the order of `aggregates.Totals`.
    """
    count, values, totals = np.zeros(size, np.float32), np.zeros((5, size)), np.zeros(SESSION_AT + 1)
    lines, spend, saved, spend_7d, spend_60d = 0.0, 0.0, 0.0, 0.0, 0.0
    line_paid, line_saved = 0.0, 0.0  # of the last purchase, with its repeated scans
    acts, session_at, act_at = 0.0, 0.0, -np.inf
    bought_at, bought_in, bought_item = np.nan, 0, 0  # of the last purchase; NaN differs from every time
    for line in range(len(at)):
        time, place = at[line], item[line]
        if kind[line] == 1:
            totals[IMPRESSIONS] += 1
            continue
        if kind[line] == 0:
            in_60d = time >= now - 60 * DAY_S
            begins = time != bought_at or basket[line] != bought_in
            again = not begins and place == bought_item
            bought_at, bought_in, bought_item = time, basket[line], place
            paid_before, saved_before = (line_paid, line_saved) if again else (0.0, 0.0)
            line_paid, line_saved = paid_before + paid[line], saved_before + discount[line]
            more = np.float64(np.float32(line_paid)) - np.float64(np.float32(paid_before))
            spend += more
            saved += np.float64(np.float32(line_saved)) - np.float64(np.float32(saved_before))
            spend_7d += more if time >= now - 7 * DAY_S else 0.0
            spend_60d += more if in_60d else 0.0
            if again:
                continue
            if begins:
                totals[BASKETS] += 1
                totals[BASKETS_1H] += time >= now - 3_600
                totals[BASKETS_7D] += time >= now - 7 * DAY_S
                totals[BASKETS_60D] += in_60d
            if in_60d and (count[place] == 0 or values[4, place] < now - 60 * DAY_S):
                totals[ITEMS_60D] += 1
            if lines == 0:
                totals[FIRST_AT] = time
            lines += 1
            add_line(count, values, place, time, np.exp((time - now) / decay_s))
        else:
            totals[CLICKS] += 1
            totals[CLICKS_10M] += time >= now - 600
        if time - act_at > pause_s:
            acts, session_at = 0.0, time
        acts += 1
        act_at = time
    totals[LINES], totals[LAST_AT] = lines, bought_at if lines else 0.0
    totals[SPEND], totals[DISCOUNT], totals[SPEND_7D], totals[SPEND_60D] = spend, saved, spend_7d, spend_60d
    if now - act_at <= pause_s:
        totals[SESSION_LINES], totals[SESSION_AT] = acts, session_at
    return count, values, totals


@compiled
def add_line(count: np.ndarray, values: np.ndarray, place: int, time: float, weight: float) -> None:
    """Add a purchase with its weight by the longest decay to the sums of its item; see `summarise`."""
    if count[place] == 0:
        values[3, place] = time
    values[4, place] = time
    count[place] += 1
    values[2, place] += weight
    weight *= weight
    values[1, place] += weight
    weight *= weight
    values[0, place] += weight * weight


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

    The four rows:
        days since the last purchase;
        mean days between two purchases, `usual_days` after a single purchase;
        the first row over the second, the latter at least 1 day;
        purchases per 30 days since the first purchase, at least 7 days ago.

    Args:
        count: (h,) how often each item was bought.
        first_at: (h,) seconds.
        last_at: (h,) seconds.
        codes: (h,) of the items.
        usual_days: (n,) mean days between two purchases of each item of the catalogue.
        now: seconds.
    """
    rows = np.empty((4, len(count)))
    for item in range(len(count)):
        since = (now - last_at[item]) / DAY_S
        if count[item] > 1:
            between = (last_at[item] - first_at[item]) / (DAY_S * np.float64(count[item] - 1))
        else:
            between = np.float64(usual_days[codes[item]])
        rows[0, item] = since
        rows[1, item] = between
        rows[2, item] = since / max(between, 1.0)
        rows[3, item] = 30 * np.float64(count[item]) / max((now - first_at[item]) / DAY_S, 7.0)
    return rows


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
def repeated(at: np.ndarray, basket: np.ndarray, item: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Return which lines are repeated scans, (n,) bool.

    Such a line is a purchase with the moment, basket and item of the purchase before it.
    """
    again = np.zeros(len(at), np.bool_)
    before = -1
    for line in range(len(at)):
        if kind[line] == 0:
            if before >= 0 and item[line] == item[before] and basket[line] == basket[before]:
                again[line] = at[line] == at[before]
            before = line
    return again


@compiled
def last_distinct(item: np.ndarray, most: int) -> np.ndarray:
    """Return up to `most` distinct values, the last first, int64."""
    found = np.empty(most, np.int64)
    count = 0
    for line in range(len(item) - 1, -1, -1):
        new = True
        for known in found[:count]:
            new = new and known != item[line]
        if new:
            found[count] = item[line]
            count += 1
            if count == most:
                break
    return found[:count]
