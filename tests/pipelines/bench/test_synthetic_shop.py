"""The large shop is the world its docstring promises, at a size that a test can count."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from pipelines.bench.synthetic_shop import FIRST_S, WEEKS, write_synthetic_shop


@pytest.fixture
def events(tmp_path: Path) -> pd.DataFrame:
    assert write_synthetic_shop(tmp_path, items=400, users=200) == 3_000
    return pq.read_table(tmp_path / "events.parquet").to_pandas()


def test_every_shopper_buys_a_favourite_and_two_pairs_on_three_visits(events: pd.DataFrame) -> None:
    assert len(events) == 200 * 3 * 5
    assert (events.groupby("user_id", observed=True)["basket_id"].nunique() == 3).all()
    code = events["item_id"].str.removeprefix("item-").astype(int).to_numpy().reshape(-1, 5)
    first, second = code[:, 1::2].ravel(), code[:, 2::2].ravel()
    assert (first // 4 == second // 4).all()
    assert (first != second).all()
    trips = pd.DataFrame({"user": events["user_id"].astype(str).to_numpy()[::5], "favourite": code[:, 0]})
    favourites = trips.groupby("user")["favourite"].agg(list)
    assert len(favourites) == 200
    assert all(first == third for first, _, third in favourites)
    assert events["event_id"].is_unique


def test_every_item_is_bought_often_enough_before_the_window_of_the_examples(events: pd.DataFrame) -> None:
    base = pd.Timestamp(FIRST_S, unit="s", tz="UTC") + pd.Timedelta(weeks=35)
    early = events[events["at"] < base]
    count = early.groupby("item_id", observed=True)["basket_id"].nunique()
    assert len(count) == 400
    assert count.min() >= 5
    assert events["at"].is_monotonic_increasing
    assert events["at"].max() < base + pd.Timedelta(weeks=WEEKS - 35)


def test_each_four_items_pair_off_mostly_in_one_way(tmp_path: Path) -> None:
    write_synthetic_shop(tmp_path, items=4_000, users=2_000)
    events = pq.read_table(tmp_path / "events.parquet").to_pandas()
    code = events["item_id"].str.removeprefix("item-").astype(int).to_numpy().reshape(-1, 5)
    first, second = code[:, 1::2].ravel(), code[:, 2::2].ravel()
    way = (
        first ^ second
    ) % 4 - 1  # 01 and 23 differ in the last bit, 02 and 13 in the other, 03 and 12 in both
    count = np.zeros((1_000, 3), int)
    np.add.at(count, (first // 4, way), 1)
    assert (count.sum(1) == 12).all()
    assert (count % 2 == 0).all()  # both pairs of a way, always
    # Of six draws the likely way has 3.6; the most frequent of three has a little more.
    assert 3.6 < count.max(1).mean() / 2 < 4.1


def test_the_items_of_each_group_of_four_share_a_type(tmp_path: Path) -> None:
    write_synthetic_shop(tmp_path, items=12, users=6)
    items = pq.read_table(tmp_path / "items.parquet").to_pandas()
    assert items["item_id"].tolist() == [f"item-{i:02d}" for i in range(12)]
    assert items["type"].tolist() == [f"type-{i:03d}" for i in np.repeat([0, 1, 2], 4)]


def test_a_size_has_one_shop(tmp_path: Path) -> None:
    for name in "ab":
        write_synthetic_shop(tmp_path / name, 40, 20)
    a, b = (pq.read_table(tmp_path / name / "events.parquet") for name in "ab")
    assert a.equals(b)


@pytest.mark.parametrize("items", [0, 6, 44])
def test_sizes_that_do_not_fit_are_refused(items: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{items} items for 20 users: expected a multiple of four"):
        write_synthetic_shop(tmp_path, items, 20)
    assert not list(tmp_path.iterdir())
