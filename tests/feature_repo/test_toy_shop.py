"""The toy shop has the properties that its docstring lists."""

import pandas as pd

from feature_repo.toy_shop import favourite_items, held_out, item_name, request_basket, toy_dataset, user_name


def test_even_shoppers_buy_even_items() -> None:
    events = toy_dataset(users=10, weeks=8).events
    user, item = (events[name].str.split("-").str[1].astype(int) for name in ("user_id", "item_id"))
    assert ((user - item) % 2 == 0).all()


def test_the_same_seed_gives_the_same_shop() -> None:
    pd.testing.assert_frame_equal(toy_dataset(users=5, weeks=3).events, toy_dataset(users=5, weeks=3).events)
    assert len(toy_dataset(users=5, weeks=3, seed=1).events) != 0


def test_the_held_out_item_is_a_favourite_not_seen_in_the_test_weeks_and_not_in_the_request() -> None:
    shop = toy_dataset()
    cut = shop.events["at"].max().normalize() + pd.Timedelta(days=1) - pd.Timedelta(days=35)
    for user in range(60):
        assert held_out(user) == item_name(favourite_items(user, 80)[0])
        assert held_out(user) not in request_basket(user)
        own = shop.events[
            (shop.events["user_id"] == user_name(user)) & (shop.events["item_id"] == held_out(user))
        ]
        before = (own["at"] < cut).sum()
        assert before > 35
        assert (own["at"] >= cut).sum() < before / 4
