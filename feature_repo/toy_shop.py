"""A seed -> a small synthetic shop whose right recommendation is known: tests, demos and load.

Items are numbered. Even shoppers buy even items and odd shoppers odd ones. Each shopper has a handful of
favourites that come back every trip, and items come in pairs: whoever buys the first of a pair mostly
takes the second in the same basket. One favourite per shopper is held out of every basket of the
test weeks: asked with the rest of the favourites, the right recommender puts it first, because the
shopper bought it on nearly every trip before and it goes with what is in the basket.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from feature_repo.events import Dataset

START = pd.Timestamp("2024-01-01", tz="UTC")  # a Monday
FAVOURITES = 6
TEST_WEEKS = 5
TYPES = 8


def toy_dataset(users: int = 60, items: int = 80, weeks: int = 28, seed: int = 0) -> Dataset:
    """Return the shop's purchases: two trips a week for each shopper.

    Args:
        users: number of shoppers, `user-000` and on.
        items: number of items, `item-000` and on; half of them even.
        weeks: length of the history; the last five are the test.
        seed: the same seed gives the same shop.
    """
    rng = np.random.default_rng(seed)
    favourites = [favourite_items(user, items) for user in range(users)]
    rows: list[tuple[int, int, float, int]] = []
    basket = 0
    for week in range(weeks):
        for user in range(users):
            for _ in range(2):
                hour = week * 168 + rng.uniform(0, 168)
                own = favourites[user][
                    week >= weeks - TEST_WEEKS :
                ]  # the first one is held out of the test weeks
                bought = {item for item in own if rng.random() < 0.9}
                start = int(rng.integers(items // 4)) * 4 + user % 2
                bought |= {start % items, (start + 2) % items} if rng.random() < 0.9 else {start % items}
                rows += [(user, item, hour, basket) for item in sorted(bought)]
                basket += 1
    user_code, item_code, hours, basket_code = map(np.array, zip(*rows, strict=True))
    events = pd.DataFrame(
        {
            "event_id": [f"event-{i}" for i in range(len(rows))],
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
    names = np.arange(items)
    table = pd.DataFrame(
        {
            "item_id": [item_name(code) for code in range(items)],
            "department": np.where(names % 2 == 0, "even", "odd"),
            "category": [f"category {code % 4}" for code in names],
            "type": [f"type {code % TYPES}" for code in names],
            "brand": np.where(names % 5 == 0, "private", "national"),
            "manufacturer": [f"maker {code % 6}" for code in names],
        }
    )
    return Dataset(events, table, {"name": "toy", "timezone": "UTC"})


def user_name(user: int) -> str:
    """Return the id of a shopper."""
    return f"user-{user:03d}"


def item_name(item: int) -> str:
    """Return the id of an item."""
    return f"item-{item:03d}"


def favourite_items(user: int, items: int) -> list[int]:
    """Return the shopper's favourites, all of the shopper's parity; the first is the one held out."""
    step = np.random.default_rng([17, user]).permutation(items // 2)[:FAVOURITES]
    return [int(2 * s + user % 2) for s in step]


def held_out(user: int, items: int = 80) -> str:
    """Return the item the right recommender puts first when `request_basket` is asked."""
    return item_name(favourite_items(user, items)[0])


def request_basket(user: int, items: int = 80) -> list[str]:
    """Return the basket to ask with: the shopper's other favourites."""
    return [item_name(item) for item in favourite_items(user, items)[1:]]
