"""A data set and a cut -> the test baskets of the protocol: visible items and hidden items.

A test basket holds four catalogue items or more; a seeded fifth of them is hidden, the rest is the
request. The user's history is streamed: every basket strictly before the request's time is in it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from components.data.build_examples import HIDDEN_RATIO, MIN_BASKET_ITEMS, Basket, replay
from components.data.fit_statistics import Purchases
from feature_repo.aggregates import PURCHASE, UserEvents
from feature_repo.statistics import Statistics
from serving.schemas import DEFAULT_K, DEFAULT_PROFILE, Request

PROTOCOL_SEED = 20171
CHECKOUTS = 4_000  # whole baskets at most: their answers are the reference of drift


@dataclass(frozen=True)
class Task:
    """One test basket: the items that the checkout sees, and the items that the shopper also bought."""

    user: int  # code in the purchases
    user_id: str
    basket_id: str
    store_id: str
    at: float  # seconds since the epoch
    visible: tuple[str, ...]
    hidden: np.ndarray  # catalogue codes
    bought_before: np.ndarray  # (hidden,) bool: a repeat purchase
    history: UserEvents  # with item ids, strictly before the request
    profile: str = DEFAULT_PROFILE

    def request(self, k: int = DEFAULT_K) -> Request:
        """Return the request that the checkout would send."""
        store = self.store_id or None
        return Request(self.visible, float(self.at), self.user_id, store, k, self.basket_id, self.profile)


@dataclass(frozen=True)
class Tasks:
    """The test baskets of a window in time order, and how much of it the catalogue knows."""

    hidden: list[Task]  # the protocol: a fifth of the basket is hidden
    whole: list[Task]  # as the checkout meets them: nothing hidden
    out_of_catalogue_ratio: float  # of the window's lines


def read_tasks(purchases: Purchases, statistics: Statistics, start: float, end: float) -> Tasks:
    """Return the test baskets from `start` to `end`, seconds since the epoch; at most CHECKOUTS whole ones.

    Args:
        purchases: the whole data set's.
        statistics: the catalogue that says which items count.
        start: the cut.
        end: where the window ends.
    """
    code = statistics.each_code(purchases.item_ids.tolist())
    window = (purchases.at >= start) & (purchases.at < end)
    users = np.unique(purchases.user[window])
    every = -(-len(np.unique(purchases.basket[window])) // CHECKOUTS)
    hidden, whole = [], []
    baskets = lines = known = 0
    for basket in replay(purchases.where(purchases.at < end), users, since=start):
        if basket.at < start:
            continue  # asked about before the window, and bought in it
        history = basket.history.named(purchases.item_ids)
        if baskets % every == 0:
            whole.append(_task(purchases, basket, basket.items, np.empty(0, np.int64), code, history))
        baskets += 1
        items = basket.items[code[basket.items] >= 0]
        lines += len(basket.items)
        known += len(items)
        if len(items) < MIN_BASKET_ITEMS:
            continue
        order = protocol_rng(str(purchases.basket_ids[basket.basket])).permutation(len(items))
        hide = max(1, round(HIDDEN_RATIO * len(items)))
        shown = np.concatenate([items[np.sort(order[hide:])], basket.items[code[basket.items] < 0]])
        hidden.append(_task(purchases, basket, shown, items[order[:hide]], code, history))
    for tasks in (hidden, whole):
        tasks.sort(key=lambda task: (task.at, task.basket_id))
    return Tasks(hidden, whole, round(1 - known / max(lines, 1), 4))


def _task(
    purchases: Purchases,
    basket: Basket,
    shown: np.ndarray,
    hidden: np.ndarray,
    code: np.ndarray,
    history: UserEvents,
) -> Task:
    return Task(
        user=basket.user,
        user_id=str(purchases.user_ids[basket.user]),
        basket_id=str(purchases.basket_ids[basket.basket]),
        store_id=str(purchases.store_ids[basket.store]),
        at=basket.at,
        visible=tuple(purchases.item_ids[shown].tolist()),
        hidden=code[hidden],
        bought_before=np.isin(hidden, purchases_in(basket.history).distinct(), assume_unique=True),
        history=history,
    )


def purchases_in(history: UserEvents) -> UserEvents:
    """Return a history without the items that were only shown or clicked."""
    return history.where(history.kind == PURCHASE)


def protocol_rng(basket_id: str) -> np.random.Generator:
    """Return the generator that hides a basket's items: a function of the basket's own id."""
    number = (
        int(basket_id)
        if basket_id.isascii() and basket_id.isdigit()
        else int(hashlib.sha256(basket_id.encode()).hexdigest()[:15], 16)
    )
    return np.random.default_rng([PROTOCOL_SEED, number % 2**31])


def last_baskets(history: UserEvents, count: int) -> UserEvents:
    """Return the history as if only its last `count` purchased baskets had been seen, with what follows."""
    baskets = np.flatnonzero(history.kind == PURCHASE)[purchases_in(history).begins()]
    return history.where(slice(int(baskets[-count]), None)) if len(baskets) > count else history
