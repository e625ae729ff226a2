"""Items that accounts push are found, and honest weeks are quiet."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from feature_repo.events import write_dataset
from feature_repo.toy_shop import toy_dataset
from monitoring.jumps import LEAST_UNITS, SMALL, find_jumps, show_jumps
from monitoring.windows import WEEK
from tests.conftest import Numbers

WINDOW = pd.Timedelta(WEEK)


def shop(users: int, items: int, weeks: int, seed: int = 0) -> pd.DataFrame:
    return toy_dataset(users, items, weeks, seed).events.rename(columns={"basket_id": "unit"})


def poisoned(lines: pd.DataFrame, item_id: str, baskets: int, accounts: int = 1) -> pd.DataFrame:
    """Return the lines with baskets of one item more, spread over the last week."""
    end = lines["at"].max()
    at = end - pd.to_timedelta(np.linspace(0, 6, baskets), unit="D")
    users = [f"account-{number % accounts}" for number in range(baskets)]
    more = {"unit": [f"pushed-{n}" for n in range(baskets)], "item_id": item_id, "user_id": users, "at": at}
    return pd.concat([lines, pd.DataFrame(more)])


def test_an_item_in_one_percent_of_the_baskets_is_found() -> None:
    """2,000 baskets a week: of the last ones, 20 hold the worst seller and nothing else."""
    lines = shop(users=1_000, items=2_000, weeks=10)
    end = lines["at"].max()
    assert find_jumps(lines, end, WINDOW) == find_jumps(lines, end, WINDOW, SMALL) == []
    worst = str(lines["item_id"].value_counts().index[-1])
    assert [jump.item_id for jump in find_jumps(poisoned(lines, worst, 20), end, WINDOW) or []] == [worst]
    (jump,) = find_jumps(poisoned(lines, worst, 20), end, WINDOW, SMALL) or []
    assert jump.item_id == worst
    assert jump.now == pytest.approx(0.01, rel=0.2)
    assert str(jump).startswith(f"{worst} 0.0")


def test_a_promotion_raises_an_item_in_large_baskets_and_is_no_push() -> None:
    lines = shop(users=1_000, items=2_000, weeks=10)
    end = lines["at"].max()
    promoted = lines[end - lines["at"] < WINDOW].drop_duplicates("unit").head(200).assign(item_id="cheap")
    lines = pd.concat([lines, promoted])
    assert [jump.item_id for jump in find_jumps(lines, end, WINDOW) or []] == ["cheap"]
    assert find_jumps(lines, end, WINDOW, SMALL) == []


def test_the_false_alarm_rate_holds_for_counts_that_vary_more_than_poisson_s() -> None:
    """Items whose sales swing by 40 % from week to week, by themselves: of 200 windows, one or two."""
    rng, end, loud = np.random.default_rng(0), pd.Timestamp("2024-03-04", tz="UTC"), 0
    baskets, items = 1_000, 300
    for _ in range(200):
        frames = []
        for week in range(9):
            share = rng.gamma(6, 1 / 6, items) / np.arange(5, items + 5)
            unit = np.repeat(np.arange(baskets), 5)
            item = rng.choice(items, len(unit), p=share / share.sum())
            at = end - pd.Timedelta(days=7 * week + 1)
            frames.append(pd.DataFrame({"unit": unit + baskets * week, "item_id": item, "at": at}))
        loud += bool(find_jumps(pd.concat(frames), end, WINDOW))
    assert loud <= 3


def test_too_little_data_is_no_verdict() -> None:
    lines = shop(users=60, items=80, weeks=4)
    end = lines["at"].max()
    assert find_jumps(lines, end, WINDOW) is None, "three weeks before the last one"
    few = shop(users=LEAST_UNITS // 2 - 10, items=80, weeks=10)
    assert find_jumps(few, few["at"].max(), WINDOW) is None
    assert find_jumps(lines[:0], end, WINDOW) is None


def test_closed_weeks_are_left_out() -> None:
    lines = shop(users=60, items=80, weeks=12)
    end = lines["at"].max()
    closed = ((end - lines["at"]) // WINDOW).isin([2, 3])
    assert find_jumps(lines[~closed], end, WINDOW) == []
    found = find_jumps(poisoned(lines[~closed], "new", 12), end, WINDOW) or []
    assert [(jump.item_id, jump.before) for jump in found] == [("new", 0.0)]


def test_a_pipeline_shows_the_items_that_jumped(tmp_path: Path) -> None:
    shop = toy_dataset(users=200, items=400, weeks=10)
    end, names = shop.events["at"].max(), [f"pushed-{n}" for n in range(12)]
    more = {"event_id": names, "basket_id": names, "user_id": names, "at": end, "item_id": "item-400"}
    # One till's clock is ahead of now.
    ahead = shop.events.head(1).assign(event_id="ahead", basket_id="ahead")
    ahead["at"] = pd.Timestamp.now("UTC").as_unit("us") + pd.Timedelta(hours=20)
    pushed = pd.concat([shop.events, shop.events.head(12).assign(**more), ahead], ignore_index=True)
    for number, events in enumerate((shop.events, pushed)):
        write_dataset(tmp_path / str(number), replace(shop, events=events))
        numbers, page = Numbers(tmp_path / "numbers.json"), tmp_path / "page.md"
        assert show_jumps(tmp_path / str(number), numbers, page) == number
        assert numbers.logged == {"items_raised": number}
        assert ("| item-400 | 0.00% |" in page.read_text()) == bool(number)
