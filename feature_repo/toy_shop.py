"""A seed -> a small synthetic shop whose right recommendation is known: tests, demos and load.

Items are numbered. Even shoppers buy even items and odd shoppers odd ones. Each shopper has a handful of
favourites, which nearly every trip includes. Items form pairs: a basket with the first of a pair mostly holds
the second too. One favourite per shopper is held out of every basket of the test weeks. For a request with
the other favourites the right recommender puts it first: the shopper bought it on nearly every earlier trip,
and it goes with the basket.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from feature_repo.events import Dataset

START = pd.Timestamp("2024-01-01", tz="UTC")  # a Monday
FAVOURITES = 6
TEST_WEEKS = 5
# What an item is, by the number of its id. Even ones are food, odd ones are not.
TYPES = ("apples", "batteries", "bread", "candles", "grapes", "light bulbs", "rolls", "soap")
CATEGORIES = ("fruit", "lighting and power", "oven-fresh", "wellness")


def toy_dataset(users: int = 60, items: int = 80, weeks: int = 28, seed: int = 0) -> Dataset:
    """Return the shop's purchases: two trips a week for each shopper.

    Args:
        users: number of shoppers, `user-000` and on.
        items: number of items, `item-000` and on; half of them even.
        weeks: length of the history; the last five are the test.
        seed: the same seed gives the same shop.
    """
    lines = _lines(users, items, weeks, seed)
    user_code, item_code, hours, basket_code = map(np.array, zip(*lines, strict=True))
    events = pd.DataFrame(
        {
            "event_id": [f"event-{i}" for i in range(len(lines))],
            "event_type": "purchase",
            "user_id": [user_name(code) for code in user_code.tolist()],
            "basket_id": [f"basket-{code}" for code in basket_code],
            "item_id": [item_name(code) for code in item_code.tolist()],
            "at": START + pd.to_timedelta((hours * 3600).astype(int), unit="s"),
            "quantity": 1,
            "price": 1.0 + item_code % 7,
            "discount": np.where(item_code % 10 == 0, 0.5, 0.0),
            "store_id": [f"store-{code % 3}" for code in user_code],
        }
    )
    return Dataset(events, _item_table(items), {"name": "toy", "timezone": "UTC"})


def _lines(users: int, items: int, weeks: int, seed: int) -> list[tuple[int, int, float, int]]:
    """Return user, item, hour and basket of each purchased line."""
    rng = np.random.default_rng(seed)
    favourites = [favourite_items(user, items) for user in range(users)]
    lines: list[tuple[int, int, float, int]] = []
    basket = 0
    for week in range(weeks):
        for user in range(users):
            for _ in range(2):
                hour = week * 168 + rng.uniform(0, 168)
                # The first favourite is held out of the test weeks.
                candidates = favourites[user][week >= weeks - TEST_WEEKS :]
                bought = {item for item in candidates if rng.random() < 0.9}
                start = int(rng.integers(items // 4)) * 4 + user % 2
                bought |= {start % items, (start + 2) % items} if rng.random() < 0.9 else {start % items}
                lines += [(user, item, hour, basket) for item in sorted(bought)]
                basket += 1
    return lines


def _item_table(items: int) -> pd.DataFrame:
    codes = np.arange(items)
    return pd.DataFrame(
        {
            "item_id": [item_name(code) for code in range(items)],
            "department": np.where(codes % 2 == 0, "even", "odd"),
            "category": [CATEGORIES[code % len(CATEGORIES)] for code in codes],
            "type": [TYPES[code % len(TYPES)] for code in codes],
            "brand": np.where(codes % 5 == 0, "private", "national"),
            "manufacturer": [f"maker {code % 6}" for code in codes],
        }
    )


def user_name(user: int) -> str:
    """Return the id of a shopper."""
    return f"user-{user:03d}"


def item_name(item: int) -> str:
    """Return the id of an item."""
    return f"item-{item:03d}"


def favourite_items(user: int, items: int) -> list[int]:
    """Return the shopper's favourites, all of the shopper's parity; the first is held out."""
    step = np.random.default_rng([17, user]).permutation(items // 2)[:FAVOURITES]
    return [int(2 * s + user % 2) for s in step]


def held_out(user: int, items: int = 80) -> str:
    """Return the item that the right recommender puts first for `request_basket`."""
    return item_name(favourite_items(user, items)[0])


def request_basket(user: int, items: int = 80) -> list[str]:
    """Return the basket of a request: the shopper's other favourites."""
    return [item_name(item) for item in favourite_items(user, items)[1:]]
