"""The test baskets of the protocol on a shop of four baskets, by hand."""

import numpy as np
import pandas as pd
import pytest

from components.data.fit_statistics import Purchases, fit, fit_vocabulary, purchases_of
from components.evaluation.evaluate_bundle import window_s
from components.evaluation.protocol import Tasks, last_baskets, protocol_rng, purchases_in, read_tasks
from feature_repo.aggregates import summary_of
from feature_repo.statistics import Statistics

DAY = 86_400


def bought(*baskets: tuple[str, str, int, str], kind: str = "purchase") -> pd.DataFrame:
    """Events of baskets: user, basket, day and a letter for each item."""
    lines = [(user, basket, day, item) for user, basket, day, items in baskets for item in items]
    events = pd.DataFrame(lines, columns=["user_id", "basket_id", "at", "item_id"])
    events["at"] = pd.to_datetime(events["at"] * DAY, unit="s", utc=True)
    return events.assign(event_type=kind, store_id="s", price=2.0, discount=0.0, quantity=1.0)


@pytest.fixture(scope="module")
def purchases() -> Purchases:
    """Ann buys five things on day 1 and on day 3, two on day 4; Bob one thing never seen before on day 4."""
    ann = ("ann", "b1", 1, "abcde"), ("ann", "b2", 3, "bcdez"), ("ann", "b3", 4, "ab")
    return purchases_of(bought(*ann, ("bob", "b4", 4, "y")))


def fit_at(purchases: Purchases, cut: pd.Timestamp, known: str = "abcde") -> Statistics:
    seen = purchases.before(cut)
    items = pd.DataFrame(index=pd.Index(list("abcdeyz"), name="item_id"))
    return fit(seen, items, fit_vocabulary(seen, items), cut, np.array(list(known)))


@pytest.fixture(scope="module")
def tasks(purchases: Purchases) -> Tasks:
    statistics = fit_at(purchases, pd.Timestamp(2 * DAY, unit="s", tz="UTC"))
    return read_tasks(purchases, statistics, 2 * DAY, 10 * DAY)


def test_only_baskets_of_four_known_items_are_asked(tasks: Tasks) -> None:
    """b1 is before the window, b3 and b4 are too small; b2 holds four known items and one unknown."""
    [task] = tasks.hidden
    assert task.basket_id == "b2"
    assert len(task.hidden) == 1
    assert set(task.visible) | {"abcde"[code] for code in task.hidden} == set("bcdez")
    assert task.bought_before.tolist() == [True]
    assert task.history.distinct().tolist() == list("abcde")
    assert tasks.out_of_catalogue_ratio == round(2 / 8, 4)  # z and y of b, c, d, e, z, a, b, y


def test_the_drift_reference_holds_every_basket_whole(tasks: Tasks) -> None:
    assert {task.basket_id: set(task.visible) for task in tasks.whole} == {
        "b2": set("bcdez"),
        "b3": set("ab"),
        "b4": {"y"},
    }
    assert [task.at for task in tasks.whole] == [3 * DAY, 4 * DAY, 4 * DAY]


def test_histories_frozen_at_the_cut_hold_earlier_events_only(tasks: Tasks) -> None:
    """Ann's third basket is asked with the history of day 2, her first basket; Bob was unknown then."""
    frozen = {task.basket_id: summary_of(task.history.before(2 * DAY), task.at) for task in tasks.whole}
    assert frozen["b3"][0].items.tolist() == list("abcde")
    assert frozen["b3"][1].baskets == 1
    assert frozen["b4"][1].baskets == 0


def test_histories_are_streamed(tasks: Tasks) -> None:
    """Ann's third basket knows both of her others, in whole and with the time they were bought at."""
    history = {task.basket_id: task.history for task in tasks.whole}["b3"]
    assert history.distinct().tolist() == list("abcdez")
    known, totals = summary_of(history, 4 * DAY)
    assert known.count.tolist() == [1, 2, 2, 2, 2, 1]
    assert (totals.first_basket_at, totals.last_basket_at, totals.spend) == (DAY, 3 * DAY, 20.0)


def test_a_basket_just_before_the_cut_is_not_tested(purchases: Purchases) -> None:
    """A cut may lie within a second: earlier events of that second belong to training."""
    statistics = fit_at(purchases, pd.Timestamp(3 * DAY, unit="s", tz="UTC") + pd.Timedelta("0.5s"))
    assert statistics.total_baskets == 2, "the second basket was seen"
    cut = pd.Timestamp(3 * DAY, unit="s", tz="UTC")
    for after, asked in ((pd.Timedelta(0), {"b2", "b3", "b4"}), (pd.Timedelta("0.5s"), {"b3", "b4"})):
        found = read_tasks(purchases, statistics, *window_s(cut + after))
        assert {task.basket_id for task in found.whole} == asked


def test_the_last_basket_alone_is_a_history_of_one(tasks: Tasks) -> None:
    third = tasks.whole[[task.basket_id for task in tasks.whole].index("b3")]
    history = last_baskets(third.history, 1)
    assert history.distinct().tolist() == list("bcdez")
    assert summary_of(history, third.at)[1].baskets == 1
    for enough in (2, 3):
        assert len(last_baskets(third.history, enough)) == len(third.history) == 10
    nobody = tasks.whole[[task.basket_id for task in tasks.whole].index("b4")]
    assert len(last_baskets(nobody.history, 1)) == 0


@pytest.mark.parametrize("basket_id", ["31198570044", "basket-1", "²", "12³", "①", "٣"])
def test_the_split_is_a_function_of_the_basket_id(basket_id: str) -> None:
    """It may hold digits of any kind."""
    assert protocol_rng(basket_id).random() == protocol_rng(basket_id).random()
    assert protocol_rng(basket_id).random() != protocol_rng("basket-2").random()


def test_items_that_were_only_shown_are_no_purchases() -> None:
    """On day 1 two things are bought and z is shown; on day 2 z is shown again; on day 3 it is bought."""
    paid = bought(("ann", "b1", 1, "ab"), ("ann", "b2", 3, "abcz"))
    shown = bought(("ann", "shown-1", 1, "z"), ("ann", "shown-2", 2, "z"), kind="impression")
    purchases = purchases_of(pd.concat([paid, shown]).sort_values("at", kind="stable", ignore_index=True))
    statistics = fit_at(purchases, pd.Timestamp(1.5 * DAY, unit="s", tz="UTC"), "abcz")
    [task] = read_tasks(purchases, statistics, 1.5 * DAY, 10 * DAY).hidden
    before = {str(statistics.item_ids[c]): b for c, b in zip(task.hidden, task.bought_before, strict=True)}
    assert before == {item: item in "ab" for item in before}
    assert purchases_in(task.history).baskets == 1 < task.history.baskets
    assert set(purchases_in(last_baskets(task.history, 1)).distinct()) == {"a", "b"}
