"""Statistics of eight baskets, counted by hand."""

import tracemalloc

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from components.data.fit_statistics import (
    MOST_REPEATS,
    _type_lift,
    fit,
    fit_vocabulary,
    fresh_by_day,
    purchases_of,
)
from feature_repo.item_days import DAY_S
from feature_repo.statistics import Statistics
from feature_repo.toy_shop import toy_dataset

CUT = pd.Timestamp("2024-06-01", tz="UTC")


def events(rows: list[tuple[str, str, str, int]]) -> pd.DataFrame:
    """Rows of basket, user, item and days before the cut."""
    frame = pd.DataFrame(rows, columns=["basket_id", "user_id", "item_id", "days"])
    return frame.assign(
        event_type="purchase",
        at=CUT - pd.to_timedelta(frame["days"], unit="D"),
        quantity=2,
        price=3.0,
        discount=np.where(frame["item_id"] == "bread", 0.5, 0.0),
        store_id=np.where(frame["user_id"] == "ann", "north", ""),
    )


ITEMS = pd.DataFrame(
    {
        "item_id": ["bread", "butter", "rare"],
        "department": ["food", "food", "food"],
        "category": ["bakery", "dairy", "dairy"],
        "type": ["loaf", "butter", ""],
        "brand": ["national", "private", ""],
        "manufacturer": ["mill", "dairy", "dairy"],
    }
).set_index("item_id")


@pytest.fixture
def fitted() -> Statistics:
    """Ann buys bread six times, 10 days apart, thrice with butter; Bob buys butter twice, rare once."""
    rows = [(f"a{n}", "ann", "bread", 60 - 10 * n) for n in range(6)]
    rows += [(f"a{n}", "ann", "butter", 60 - 10 * n) for n in range(3)]
    rows += [("b1", "bob", "butter", 20), ("b2", "bob", "butter", 5), ("b2", "bob", "rare", 5)]
    seen = purchases_of(events(rows)).before(CUT)
    return fit(seen, ITEMS, fit_vocabulary(seen, ITEMS), CUT)


def test_an_item_scanned_twice_is_one_line_of_its_basket() -> None:
    frame = events([("a", "ann", "bread", 2), ("a", "ann", "butter", 2), ("a", "ann", "bread", 2)])
    found = purchases_of(frame.assign(price=[3.0, 1.0, np.nan]))
    assert found.item_ids[found.item].tolist() == ["bread", "butter"]
    assert (found.paid.tolist(), found.discount.tolist()) == ([6.0, 2.0], [1.0, 0.0])
    assert found.quantity.tolist() == [2, 2], "units whose price is known"


def test_a_long_id_takes_its_memory_once() -> None:
    """Not once for each line: 128 letters take half a kilobyte there."""
    narrow = events([("a", "ann", "bread", 2)] * 20_000)
    wide = narrow.assign(
        user_id=["u" * 128, *narrow["user_id"][1:]], item_id=["i" * 128, *narrow["item_id"][1:]]
    )
    peaks = []
    for frame in (narrow, wide):
        tracemalloc.start()
        purchases_of(frame)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_catalogue_and_counts(fitted: Statistics) -> None:
    assert fitted.item_ids.tolist() == ["bread", "butter"]  # rare was bought once: out of the catalogue
    assert fitted.basket_count.tolist() == [6, 5]
    assert fitted.total_baskets == 8
    assert fitted.purchases_4w.tolist() == [2, 2]
    assert fitted.buyer_count.tolist() == [1, 2]
    assert fitted.repeat_ratio.tolist() == [1, 1]
    assert fitted.age_days.tolist() == [60, 60]
    assert fitted.price.tolist() == [3, 3]
    assert fitted.discount_ratio.tolist() == [1, 0]
    assert fitted.is_private.tolist() == [0, 1]
    assert fitted.manufacturer.tolist() == [2, 1]  # of "", dairy, mill


def test_intervals_lean_on_the_mean_of_the_catalogue(fitted: Statistics) -> None:
    # Bread: 5 gaps over 50 days; butter: 2 gaps over 20 (Ann) and 1 over 15 (Bob). Mean of all: 85 / 8.
    mean = 85 / 8
    np.testing.assert_allclose(fitted.interval_days, [(50 + 3 * mean) / 8, (35 + 3 * mean) / 6], rtol=1e-6)


def test_bought_together(fitted: Statistics) -> None:
    assert fitted.neighbours.tolist() == [[1], [0]]
    assert fitted.together_count.tolist() == [[3], [3]]
    # Expected pairs if independent: 6 * 5 / 8.
    types = fitted.categorical[:, 0]
    assert fitted.type_lift[types[0], types[1]] == pytest.approx(np.log((3 + 5) / (30 / 8 + 5)), rel=1e-3)


def test_stores_without_a_name_have_no_best_sellers(fitted: Statistics) -> None:
    assert fitted.store_ids.tolist() == ["north"]
    assert sorted(fitted.store_popular[0].tolist()) == [0, 1]
    assert fitted.store_popular[0].tolist()[0] == 0  # Ann's store sells more bread


def test_nothing_at_or_after_the_cut_counts() -> None:
    rows = [(f"a{n}", "ann", "bread", 60 - 10 * n) for n in range(6)] + [("late", "ann", "bread", 0)]
    seen = purchases_of(events(rows)).before(CUT)
    assert fit(seen, ITEMS, fit_vocabulary(seen, ITEMS), CUT).basket_count.tolist() == [6]


def test_the_lift_of_many_types_is_that_of_the_whole_matrix() -> None:
    rng = np.random.default_rng(0)
    types, baskets = 700, 3_000
    item_type = rng.integers(0, types, 2_000)
    presence = sparse.random(baskets, 2_000, 0.01, "csr", np.float32, rng)
    presence.data[:] = 1.0
    fold = np.zeros((2_000, types), np.float32)
    fold[np.arange(2_000), item_type] = 1.0
    has = (presence.toarray() @ fold > 0).astype(np.float32)
    observed = has.T @ has
    count = np.diag(observed).astype(np.float64)
    expected = np.log((observed + 5.0) / (np.maximum(np.outer(count, count) / baskets, 1e-3) + 5.0))
    expected[0, :] = expected[:, 0] = 0.0
    np.testing.assert_array_equal(_type_lift(presence, item_type, types), expected.astype(np.float16))


def test_an_empty_catalogue_names_the_remedy() -> None:
    seen = purchases_of(events([("a", "ann", "bread", 3)])).before(CUT)
    with pytest.raises(ValueError, match="no item has 5 purchases"):
        fit(seen, ITEMS, fit_vocabulary(seen, ITEMS), CUT)


def test_a_steady_buyer_counts_ten_times_in_any_four_weeks() -> None:
    """A purchase every two days for a year: days 0 to 18 count, then 28 to 46, and so on."""
    day = pd.Timestamp("2024-01-01T12:00Z")
    days = np.arange(0, 366, 2)
    baskets = [f"b{number:03d}" for number in range(len(days))]
    bought = events([(basket, "ann", "bread", 1) for basket in baskets])
    bought["at"] = day + pd.to_timedelta(days, unit="D")
    np.testing.assert_array_equal(days[purchases_of(bought).counts], days[days % 28 < 20])


SHOP = toy_dataset(users=600, weeks=12)
RAISED = "item-034"  # sells worst


def poisoned(accounts: int) -> pd.DataFrame:
    """Return the shop with one basket more in a hundred, all in its last four weeks.

    Each holds the item that sells worst and the five best sellers.
    """
    shop, rng = SHOP.events, np.random.default_rng(0)
    baskets, best = shop["basket_id"].nunique() // 100, shop["item_id"].value_counts().index[:5]
    at = shop["at"].max() - pd.to_timedelta(rng.integers(0, 27 * 86_400, baskets), unit="s")
    made = pd.DataFrame(
        {
            "basket_id": np.repeat([f"poison-{n}" for n in range(baskets)], 6),
            "user_id": np.repeat([f"account-{n % accounts}" for n in range(baskets)], 6),
            "item_id": np.tile([RAISED, *best], baskets),
            "at": np.repeat(at, 6),
        }
    )
    constant = {"event_type": "purchase", "quantity": 1, "price": 1.0, "discount": 0.0, "store_id": "store-0"}
    return pd.concat([shop, made.assign(**constant)], ignore_index=True)


def raised(shop: pd.DataFrame) -> tuple[int, float, float]:
    """Return the item's rank among best sellers, its baskets of four weeks, those with the best seller."""
    seen, items = purchases_of(shop), SHOP.items.set_index("item_id")
    end = SHOP.events["at"].max() + pd.Timedelta(seconds=1)
    fitted = fit(seen, items, fit_vocabulary(seen, items), end)
    code, best = fitted.code_of[RAISED], fitted.code_of[SHOP.events["item_id"].mode()[0]]
    together = fitted.together_count[code][fitted.neighbours[code] == best].sum()
    rank = fitted.popular.tolist().index(code) + 1
    return rank, float(fitted.purchases_4w[code]), float(together)


def test_one_account_with_a_hundredth_of_the_baskets_makes_no_best_seller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after, crowd = (raised(shop) for shop in (SHOP.events, poisoned(1), poisoned(36)))
    assert (before[0], after[0]) == (80, 80)
    assert 0 < after[1] - before[1] <= MOST_REPEATS
    assert 0 < after[2] - before[2] <= MOST_REPEATS
    assert crowd[0] == 14, "the cap is for each account: many accounts are no single one"
    monkeypatch.setattr("components.data.fit_statistics.MOST_REPEATS", 1_000_000)
    assert raised(poisoned(1))[0] == 14, "without the cap"


def test_the_counts_of_a_large_catalogue_take_memory_for_some_of_its_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two million items, 92 days of four sums are 6 GB."""
    seen, rng = purchases_of(SHOP.events), np.random.default_rng(0)
    unsold = np.array([f"unsold {number}" for number in range(20_000)])
    item_ids = rng.permutation(np.concatenate([seen.item_ids, unsold]))
    types = np.where(np.isin(item_ids, unsold), 0, rng.integers(0, 9, len(item_ids)))
    values, peaks = [], []
    for rows in (len(item_ids), 300, 1_000):
        monkeypatch.setattr("components.data.fit_statistics.FRESH_ROWS", rows)
        tracemalloc.start()
        values.append(fresh_by_day(seen, item_ids, types, seen.at[-1] - DAY_S, 2))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert values[0].any()
    np.testing.assert_array_equal(values[1], values[0])
    np.testing.assert_array_equal(values[2], values[0])
    assert peaks[2] < peaks[0] / 4
