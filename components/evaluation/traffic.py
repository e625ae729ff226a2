"""Purchases -> the requests that the checkout would have received as those baskets grew, sorted by time.

No data set of purchases says when an item was put into its basket. Here the items come in random order, one
every half minute until the basket is paid. The shop asks after each of the first five and for the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from components.data.fit_statistics import Purchases
from components.evaluation.protocol import protocol_rng
from serving.schemas import DEFAULT_K, Request

FIRST_ITEMS = 5
ITEM_S = 30.0  # between two items
ANONYMOUS_RATIO = 0.7  # of the shoppers, by default
AGAIN_RATIO = 0.1  # of the requests are sent once more
AGAIN_S = 60.0  # until the page is loaded again


@dataclass(frozen=True, slots=True)
class Ask:
    """The part of a request that is the same for a known and for an anonymous shopper."""

    at: float  # seconds since the epoch
    user: int  # code in the purchases
    basket: int  # code in the purchases
    items: tuple[str, ...]
    store_id: str

    def request(self, user_id: str | None = None) -> Request:
        """Return the request that the checkout sends; without a user, of an anonymous shopper."""
        return Request(self.items, self.at, user_id, self.store_id or None, DEFAULT_K, "ask")


def asks_of(purchases: Purchases, start: float, end: float, again_ratio: float = 0.0) -> list[Ask]:
    """Return the requests of all baskets that were paid in a span of time, sorted by time.

    Args:
        purchases: of a data set.
        start: seconds since the epoch.
        end: seconds since the epoch, not included.
        again_ratio: share of the requests that are sent once more a minute later, with the same basket.
    """
    rows = np.flatnonzero((purchases.at >= start) & (purchases.at < end))
    rows = rows[np.argsort(purchases.basket[rows], kind="stable")]
    asks: list[Ask] = []
    for lines in np.split(rows, np.flatnonzero(np.diff(purchases.basket[rows])) + 1) if len(rows) else []:
        first = int(lines[0])
        rng = protocol_rng(str(purchases.basket_ids[purchases.basket[first]]))
        items = tuple(purchases.item_ids[rng.permutation(np.unique(purchases.item[lines]))].tolist())
        store = str(purchases.store_ids[purchases.store[first]])
        for size in sorted({*range(1, min(FIRST_ITEMS, len(items)) + 1), len(items)}):
            at = float(purchases.at[first]) - ITEM_S * (len(items) - size)
            ask = Ask(at, int(purchases.user[first]), int(purchases.basket[first]), items[:size], store)
            asks.append(ask)
            if rng.random() < again_ratio:
                asks.append(Ask(at + AGAIN_S, ask.user, ask.basket, ask.items, store))
    asks.sort(key=lambda ask: (ask.at, ask.basket, len(ask.items)))
    return asks


def anonymous_users(users: int, ratio: float) -> np.ndarray:
    """Return which of the users are always anonymous, (users,) bool; a larger ratio adds users to them."""
    return np.random.default_rng(0).random(users) < ratio
