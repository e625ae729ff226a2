"""Baskets of the toy shop as they grow."""

import itertools

import numpy as np
import pytest

from components.data.fit_statistics import Purchases, purchases_of
from components.evaluation.traffic import AGAIN_S, FIRST_ITEMS, ITEM_S, anonymous_users, asks_of
from feature_repo.toy_shop import toy_dataset


@pytest.fixture(scope="module")
def purchases() -> Purchases:
    return purchases_of(toy_dataset(users=8, weeks=8).events)


def test_each_basket_asks_as_it_grows_and_once_more_when_it_is_whole(purchases: Purchases) -> None:
    start, end = float(purchases.at[0]), float(purchases.at[-1])
    asks = asks_of(purchases, start, end + 1)
    assert [ask.at for ask in asks] == sorted(ask.at for ask in asks)
    baskets: dict[int, list] = {}
    for ask in asks:
        baskets.setdefault(ask.basket, []).append(ask)
    assert set(baskets) == set(purchases.basket.tolist())
    for basket, own in baskets.items():
        lines = purchases.basket == basket
        whole = set(purchases.item_ids[purchases.item[lines]].tolist())
        assert set(own[-1].items) == whole
        assert own[-1].at == purchases.at[lines][0]
        sizes = [len(ask.items) for ask in own]
        assert sizes == sorted({*range(1, min(FIRST_ITEMS, len(whole)) + 1), len(whole)})
        assert all(later.items[: len(ask.items)] == ask.items for ask, later in itertools.pairwise(own))
        assert own[-1].at - own[0].at == pytest.approx(ITEM_S * (len(whole) - 1))


def test_the_same_data_ask_the_same_and_a_share_of_it_again(purchases: Purchases) -> None:
    span = float(purchases.at[0]), float(purchases.at[-1])
    once = asks_of(purchases, *span)
    assert once == asks_of(purchases, *span)
    again = asks_of(purchases, *span, again_ratio=0.3)
    assert 0.2 < len(again) / len(once) - 1 < 0.4
    known = {(ask.at, ask.basket, ask.items) for ask in once}
    more = [ask for ask in again if (ask.at, ask.basket, ask.items) not in known]
    assert all((ask.at - AGAIN_S, ask.basket, ask.items) in known for ask in more)
    assert asks_of(purchases, 0.0, 1.0) == []


def test_a_request_names_the_shopper_only_if_that_is_known(purchases: Purchases) -> None:
    ask = asks_of(purchases, 0.0, 1e12)[0]
    assert ask.request().user_id is None
    request = ask.request("somebody")
    assert (request.user_id, request.basket, request.at) == ("somebody", ask.items, ask.at)


def test_an_anonymous_shopper_stays_anonymous_in_a_larger_share() -> None:
    few, many = anonymous_users(1_000, 0.3), anonymous_users(1_000, 0.7)
    assert 0.25 < few.mean() < 0.35
    assert not (few & ~many).any()
    assert not anonymous_users(10, 0.0).any()
    assert anonymous_users(10, 1.0).all()
    assert isinstance(few, np.ndarray)
