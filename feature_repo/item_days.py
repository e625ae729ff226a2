"""What each item sold, day by day -> sums over the last days before a moment; features of an item read them.

A day ends where the statistics' own time ends: at the same hour as the cut, when the nightly job counts. A
sum over 7 days ends with the last whole day before the moment. So a request of today sees yesterday's sales,
in training as in the endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from feature_repo.kernels.history import DAY_S as DAY_S

SPAN = 91  # days that the longest sum needs
QUANTITIES = 4  # baskets, units, units sold at a discount, money paid


def count_daily(
    item: np.ndarray, at: np.ndarray, amounts: tuple[np.ndarray, ...], items: int, begin: float, days: int
) -> np.ndarray:
    """Return the sales before each of `days` days and behind the last, (QUANTITIES, days + 1, items) float64.

    Args:
        item: (lines,) codes of the items, one line for each basket and item.
        at: (lines,) seconds; lines before `begin` or behind the last day are left out.
        amounts: units, units sold at a discount and money paid of each line, (lines,) each.
        items: how many items there are.
        begin: seconds, when the first day begins.
        days: how many days there are.
    """
    day = np.floor((at - begin) / DAY_S).astype(np.int64)
    inside = np.flatnonzero((day >= 0) & (day < days))
    cell = day[inside] * items + item[inside]
    sums = np.zeros((QUANTITIES, days + 1, items))
    for quantity, weights in enumerate((None, *(amount[inside] for amount in amounts))):
        sums[quantity, 1:] = np.bincount(cell, weights, days * items).reshape(days, items).cumsum(0)
    return sums


@dataclass(frozen=True)
class ItemDays:
    """The sales before one day: the argument of an item's day-fresh features."""

    sales: np.ndarray  # as `count_daily` returns them
    day: int  # from 0 to the number of days: the sums end where it begins
    types: np.ndarray  # (n,) type of each item, 0 unknown

    def baskets(self, days: int) -> np.ndarray:
        """Return the baskets with each item in the last days, (n,)."""
        return self._last(0, days)

    def of_type(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an item's values over its type, (n,); 0 for an item of unknown type."""
        sums = np.bincount(self.types, values)
        sums[0] = 0
        return sums[self.types]

    def on_weekday(self, weeks: int) -> np.ndarray:
        """Return the baskets with each item on this day of the week in the last weeks, (n,)."""
        sums = self.sales[0]
        return sum(
            (
                sums[self.day - 7 * week + 1] - sums[self.day - 7 * week]
                for week in range(1, weeks + 1)
                if self.day >= 7 * week
            ),
            np.zeros(len(self.types)),
        )

    def discount_share(self, days: int) -> np.ndarray:
        """Return the share of units sold at a discount, (n,): few units lean on the share of SPAN days."""
        units, discounted = self._last(1, days), self._last(2, days)
        usual = self._last(2, SPAN) / np.maximum(self._last(1, SPAN), 1)
        return (discounted + 2 * usual) / (units + 2)

    def price(self, days: int) -> np.ndarray:
        """Return the mean price paid for a unit, (n,): few units lean on the price of SPAN days."""
        usual = self._last(3, SPAN) / np.maximum(self._last(1, SPAN), 1e-6)
        return (self._last(3, days) + 2 * usual) / (self._last(1, days) + 2)

    def _last(self, quantity: int, days: int) -> np.ndarray:
        sums = self.sales[quantity]
        found: np.ndarray = sums[self.day] - sums[max(self.day - days, 0)]
        return found
