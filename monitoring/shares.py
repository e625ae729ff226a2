"""A column of levels in two windows -> the levels whose share changed by more than it does from week to week.

PSI adds up all levels: one store that doubles moves it by 0.01. Here each level is tested on its own, against
its own noise: how far its share may lie off in a window of this size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from monitoring.psi import Codes

FALSE_ALARMS = 0.002  # of a column in a window in which nothing changed
LEAST_WEEKS = 4  # of the reference that hold a value: fewer do not show how much weeks differ
LEAST_ROWS = 20  # of a level that are expected in the window; of rarer ones chance decides
ODDS = 1.2  # a smaller change of the odds is true perhaps, but needs no action
PRIOR_WEEKS = 8  # the weight of all levels in the noise of one: nine weeks say little about one level


@dataclass(frozen=True)
class ShareChange:
    """A level's share in the reference and in the window, and the distance in standard deviations."""

    label: str
    reference: float
    current: float
    spreads: float
    limit: float

    def __str__(self) -> str:
        return (
            f"share of '{self.label}' {self.reference:.2%} -> {self.current:.2%}, "
            f"{abs(self.spreads):.1f} times its noise (line {self.limit:.1f})"
        )


def changed_shares(
    codes: Codes, unit: np.ndarray, week: np.ndarray, window_units: int
) -> tuple[ShareChange, ...]:
    """Return the levels past their line, the furthest first.

    The variance of a share is that of drawing whole units (baskets, requests), times how much more the weeks
    of the reference differ than such draws do. The line allows FALSE_ALARMS for all levels of the column.

    Args:
        codes: the column in both windows.
        unit: (rows of the reference,) the unit of each row.
        week: (rows of the reference,) the number of each row's week.
        window_units: in the window under test.
    """
    known, bins = codes.reference >= 0, len(codes.labels)
    rows_now = np.bincount(codes.current[codes.current >= 0], minlength=bins)
    weeks, week = np.unique(week[known], return_inverse=True)
    if len(weeks) < LEAST_WEEKS or not rows_now.any():
        return ()
    code, unit = codes.reference[known].astype(np.int64), unit[known]
    by_week = np.bincount(week * bins + code, minlength=len(weeks) * bins).reshape(-1, bins)
    expected, found = by_week.sum(0) / by_week.sum(), rows_now / rows_now.sum()
    of_unit = np.bincount(unit).astype(float)  # (units,) rows
    cells, count = np.unique(unit * bins + code, return_counts=True)
    with_level = np.bincount(cells % bins, count * of_unit[cells // bins], bins)
    squares = np.bincount(cells % bins, count.astype(float) ** 2, bins)
    units = np.count_nonzero(of_unit)
    # Of one unit: the mean square of its rows of a level, less the rows that its size leads to expect.
    variance = (squares - 2 * expected * with_level + expected**2 * (of_unit**2).sum()) / units
    tested = (expected * rows_now.sum() >= LEAST_ROWS) & (variance > 0)
    if not tested.any():
        return ()
    rows = by_week.sum(1, keepdims=True)
    # The variance of a week's share if whole units are drawn, (weeks, tested).
    drawn = variance[tested] * (units * rows / rows.sum()) / rows**2
    own = len(by_week) - 1
    excess = ((by_week / rows - expected)[:, tested] ** 2 / drawn).sum(0) / own
    excess = (PRIOR_WEEKS * max(float(np.median(excess)), 1.0) + own * excess) / (PRIOR_WEEKS + own)
    spread = np.sqrt(
        variance[tested]
        * window_units
        / rows_now.sum() ** 2
        * (1 + window_units / units)
        * np.maximum(excess, 1.0)
    )
    limit = _limit(FALSE_ALARMS / int(tested.sum()), PRIOR_WEEKS + own)
    changes = [
        ShareChange(codes.labels[i], float(expected[i]), float(found[i]), float(z), limit)
        for i, z in zip(np.flatnonzero(tested), (found - expected)[tested] / spread, strict=True)
        if abs(z) >= limit and abs(_log_odds(found[i]) - _log_odds(expected[i])) >= math.log(ODDS)
    ]
    return tuple(sorted(changes, key=lambda change: -abs(change.spreads)))


def _limit(chance: float, weeks: int) -> float:
    """Return the distance, in either direction, that Student's t passes with a chance.

    A normal distribution would take the noise for known, where it is measured in some weeks.
    """
    z = NormalDist().inv_cdf(1 - chance / 2)
    return z + (z**3 + z) / (4 * weeks)


def _log_odds(share: float) -> float:
    share = min(max(share, 1e-9), 1 - 1e-9)
    return math.log(share / (1 - share))
