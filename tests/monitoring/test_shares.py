"""Weeks of a shop whose shoppers' baskets are alike: one share changes, or none does."""

import numpy as np
import pandas as pd
import pytest

from monitoring.drift import compare
from monitoring.psi import encode
from monitoring.shares import LEAST_WEEKS, changed_shares
from monitoring.verdict import RULES, judge
from monitoring.windows import TablePair

DEPARTMENTS = np.array([0.5, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02])
STORES = 20
BASKETS = 1_500  # a week


def week(number: int, rng: np.random.Generator, department: float = 1, store: float = 1) -> pd.DataFrame:
    """A week's lines; `department` and `store` multiply a share of each.

    The weeks differ by more than chance: each department's share moves by 3 %.
    """
    mix = DEPARTMENTS * rng.lognormal(0, 0.03, len(DEPARTMENTS))
    mix[1] *= department
    stores = np.ones(STORES)
    stores[2] *= store
    taste = rng.dirichlet(mix / mix.sum() * 20, BASKETS)  # lines of one basket are alike
    lines = rng.geometric(0.2, BASKETS)
    basket = np.repeat(np.arange(BASKETS), lines)
    drawn = (rng.random(len(basket))[:, None] > taste[basket].cumsum(1)).sum(1).clip(max=len(mix) - 1)
    at = rng.choice(STORES, BASKETS, p=stores / stores.sum())
    return pd.DataFrame(
        {
            "basket_id": number * BASKETS + basket,
            "department": [f"d{n}" for n in drawn],
            "store_id": [f"s{n}" for n in at[basket]],
            "week": number,
        }
    )


def verdict_of(reference: pd.DataFrame, window: pd.DataFrame) -> list[str]:
    """The columns that alarm."""
    first = [frame.drop_duplicates("basket_id").drop(columns="department") for frame in (window, reference)]
    tables = [
        TablePair(window.drop(columns="store_id"), reference.drop(columns="store_id"), "basket_id", "week"),
        TablePair(first[0], first[1], "basket_id", "week"),
    ]
    return [column.name for column in judge(compare(tables)).columns if column.status == "alarm"]


@pytest.fixture(scope="module")
def reference() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    return pd.concat([week(number, rng) for number in range(9)], ignore_index=True)


def test_one_share_that_grows_is_seen_in_one_window_and_no_other(reference: pd.DataFrame) -> None:
    rng = np.random.default_rng(2)
    for _ in range(6):
        assert verdict_of(reference, week(0, rng, department=1.3)) == ["department"]
        assert verdict_of(reference, week(0, rng, store=2)) == ["store_id"]


@pytest.mark.slow
def test_100_windows_without_a_change_raise_no_alarm(reference: pd.DataFrame) -> None:
    rng = np.random.default_rng(3)
    unit, of_week = reference["basket_id"].to_numpy(), reference["week"].to_numpy()
    first = ~reference["basket_id"].duplicated().to_numpy()
    for _ in range(100):
        window = week(0, rng)
        lines = encode(window["department"], reference["department"])
        stores = encode(window.drop_duplicates("basket_id")["store_id"], reference["store_id"][first])
        assert not changed_shares(lines, unit, of_week, BASKETS)
        assert not changed_shares(stores, unit[first], of_week[first], BASKETS)


def test_a_share_that_moves_each_week_needs_a_larger_change(reference: pd.DataFrame) -> None:
    """Nine weeks in which flowers come and go: a further such week is no news."""
    rng = np.random.default_rng(4)
    restless = pd.concat(
        [week(number, rng, department=1.5 if number % 2 else 0.7) for number in range(9)], ignore_index=True
    )
    assert verdict_of(reference, week(0, rng, department=1.5)) == ["department"]
    assert verdict_of(restless, week(0, rng, department=1.5)) == []


def test_the_change_is_named_with_its_noise(reference: pd.DataFrame) -> None:
    window = week(0, np.random.default_rng(5), department=1.4)
    codes = encode(window["department"], reference["department"])
    unit, of_week = (reference[name].to_numpy() for name in ("basket_id", "week"))
    [change] = changed_shares(codes, unit, of_week, BASKETS)
    assert change.label == "d1"
    assert change.current > 1.2 * change.reference
    assert change.spreads > change.limit
    assert str(change).startswith("share of 'd1' ")
    assert "times its noise" in str(change)
    assert RULES["department"].pages


def test_too_few_weeks_show_no_noise_and_are_not_tested(reference: pd.DataFrame) -> None:
    window = week(0, np.random.default_rng(5), department=1.4)
    numbers = reference["week"]
    for few in (reference[numbers < LEAST_WEEKS - 1], reference[numbers.isin([0, 8])]):
        codes = encode(window["department"], few["department"])
        assert changed_shares(codes, few["basket_id"].to_numpy(), few["week"].to_numpy(), BASKETS) == ()
