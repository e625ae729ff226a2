"""The items of baskets or lists over some windows -> the items whose share jumped in the last one.

Drift looks at levels, and one item of thousands moves none. An item that accounts push, by buying it say,
shows here: its count is compared with its own past. Where counts vary as Poisson's do, this is the exact test
of two of them. Real ones vary more: their variance is m + c * m**2, and c is measured in the past.

Of baskets, small ones alone count. Promotions and seasons raise items in large baskets. An account that
pushes an item buys little else, or pays for that, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import betainc

from feature_repo.events import read_dataset
from monitoring.reports import show_numbers
from monitoring.windows import WEEK, known_until

FALSE_ALARMS = 0.001  # of a window in which nothing changed, over all of its items
WINDOWS, LEAST_WINDOWS = 8, 4  # before the last one
LEAST_UNITS = 100  # baskets or lists in a window; one with fewer is left out
SMALL = 2  # distinct items of a basket at most
RISE = 2.0  # a share that grew by less needs no action
OWN = 0.5  # the weight of an item's own past where it varied more than that of all items


@dataclass(frozen=True)
class Jump:
    """An item with its share of the baskets or lists, in the windows before and in the last one."""

    item_id: str
    before: float
    now: float

    def __str__(self) -> str:
        return f"{self.item_id} {self.before:.2%} -> {self.now:.2%}"


def find_jumps(
    lines: pd.DataFrame, until: pd.Timestamp, window: pd.Timedelta, most: int | None = None
) -> list[Jump] | None:
    """Return the items that jumped, the largest share first; None: too little data to know.

    Args:
        lines: `unit` (a basket or a list), `item_id` and `at`.
        until: the end of the last window.
        window: its length; the windows before have the same.
        most: the items of units with more distinct ones do not count; None: all count.
    """
    age = (until - lines["at"]) // window
    lines = lines[["unit", "item_id"]].assign(age=age)[age.between(0, WINDOWS)].drop_duplicates()
    units = np.bincount(lines.drop_duplicates("unit")["age"], minlength=WINDOWS + 1)
    used = units >= LEAST_UNITS
    if not used[0] or used[1:].sum() < LEAST_WINDOWS:
        return None
    if most is not None:
        lines = lines[lines.groupby("unit")["unit"].transform("size") <= most]
    code, items = pd.factorize(lines["item_id"])
    if not len(items):
        return []
    cells = lines["age"].to_numpy() * len(items) + code
    counts = np.bincount(cells, minlength=(WINDOWS + 1) * len(items)).reshape(-1, len(items))[used]
    now, past, size = counts[0], counts[1:], units[used]
    before, part = past.sum(0) / size[1:].sum(), size[0] / size[1:].sum()
    expected, spread = (past.sum(0) + 1) * part, _spread(past, size[1:, None])
    # A negative binomial count, with a mean that is known as well as the past shows it.
    shape = 1 / (spread + (1 / expected + spread) * part)
    chance = np.where(now > 0, betainc(np.maximum(now, 1), shape, expected / (expected + shape)), 1.0)
    jumped = (chance < FALSE_ALARMS / len(items)) & (now / size[0] >= RISE * before)
    order = np.flatnonzero(jumped)[np.argsort(-now[jumped], kind="stable")]
    return [Jump(str(items[i]), float(before[i]), float(now[i] / size[0])) for i in order]


def show_jumps(dataset: Path, numbers: Any, page: Path) -> int:
    """Show the items that jumped in the last week of a data set's small baskets in Kubeflow; count them.

    `numbers` is KFP's artifact `Metrics`, `page` the Markdown file to write.
    """
    events = read_dataset(dataset).events
    bought = events[events["event_type"] == "purchase"].rename(columns={"basket_id": "unit"})
    jumps = find_jumps(bought, known_until(bought["at"]), WEEK, SMALL)
    rows = [f"| {jump.item_id} | {jump.before:.2%} | {jump.now:.2%} |" for jump in jumps or ()]
    head = ["| item | share of baskets before | now |", "|---|---|---|"]
    text = "\n".join(head + rows) if rows else "No item jumped."
    page.write_text("There are too few baskets to know." if jumps is None else text, encoding="utf-8")
    show_numbers({"items_raised": len(rows)}, numbers)
    return len(rows)


def _spread(past: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Return c of each item: that of all items, or more where its own past says so; (items,)."""
    expected = units * past.sum(0) / units.sum()
    mean = np.maximum(expected.mean(0), 1e-9)
    own = (((past - expected) ** 2 / np.maximum(expected, 1e-9)).sum(0) / (len(past) - 1) - 1) / mean
    weight = (mean / (1 + mean)) ** 2  # the counts of a rare item say little about c
    of_all = max(0.0, float((own * weight).sum() / weight.sum()))
    return of_all + np.maximum(0.0, own - of_all) * weight * OWN
