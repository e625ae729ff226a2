"""A user's lines -> counts, sums and rhythms of the user's purchases, compiled by numba."""

from __future__ import annotations

import numpy as np

from feature_repo.kernels.compiled import compiled

DAY_S = 86_400


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

    A purchase with the moment, basket and item of the purchase before it is the same line, scanned twice. It
    counts once; its money is added up, and rounded to float32 as in a line that was merged before.

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
    count = np.zeros(size, np.float32)
    values = np.zeros((5, size))
    seen = np.zeros(size, np.bool_)
    baskets, lines, first_at, last_at, spend, saved = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    hour, week, week_spend, months, months_spend, months_items = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    impressions, clicks, late_clicks = 0.0, 0.0, 0.0
    line_paid, line_saved = 0.0, 0.0  # of the last purchase, with its repeated scans
    acts, session_at, act_at = 0.0, 0.0, -np.inf
    bought_at, bought_in, bought_item = np.nan, 0, 0  # of the last purchase; NaN differs from every time
    for line in range(len(at)):
        time, place = at[line], item[line]
        if kind[line] == 1:
            impressions += 1
            continue
        if kind[line] == 0:
            begins = time != bought_at or basket[line] != bought_in
            again = not begins and place == bought_item
            bought_at, bought_in, bought_item = time, basket[line], place
            paid_before, saved_before = (line_paid, line_saved) if again else (0.0, 0.0)
            line_paid, line_saved = paid_before + paid[line], saved_before + discount[line]
            more = np.float64(np.float32(line_paid)) - np.float64(np.float32(paid_before))
            spend += more
            saved += np.float64(np.float32(line_saved)) - np.float64(np.float32(saved_before))
            week_spend += more if time >= now - 7 * DAY_S else 0.0
            months_spend += more if time >= now - 60 * DAY_S else 0.0
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
def repeats(at: np.ndarray, basket: np.ndarray, item: np.ndarray) -> bool:
    """Say whether a line has the moment, the basket and the item of the line before it."""
    for line in range(1, len(at)):
        if item[line] == item[line - 1] and basket[line] == basket[line - 1] and at[line] == at[line - 1]:
            return True
    return False


@compiled
def last_distinct(item: np.ndarray, lines: int, most: int) -> np.ndarray:
    """Return up to `most` distinct values of the last `lines` lines, the last first, int64."""
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
