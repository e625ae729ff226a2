"""A profile passes the right items; an invalid profile is refused."""

from pathlib import Path

import numpy as np
import pytest

from feature_repo.statistics import read_statistics
from serving.stages.profiles import ItemFilter, Profile, read_profile
from serving.stages.retrieval import Quotas


def test_the_filter_passes_items_above_the_quantile(toy_bundle: Path) -> None:
    statistics = read_statistics(toy_bundle / "statistics")
    dear = ItemFilter("price", 0.8).allowed(statistics)
    assert dear.sum() == len(dear) // 5
    assert statistics.price[dear].min() > statistics.price[~dear].max()


def test_equal_values_stay_together_and_an_unknown_one_does_not_pass(toy_bundle: Path) -> None:
    from dataclasses import replace

    statistics = read_statistics(toy_bundle / "statistics")
    items = len(statistics.item_ids)
    ratio = np.zeros(items, np.float32)
    ratio[:5], ratio[5] = 0.5, np.nan
    passes = ItemFilter("discount_ratio", 0.5).allowed(replace(statistics, discount_ratio=ratio))
    assert np.flatnonzero(passes).tolist() == [0, 1, 2, 3, 4]
    nothing = replace(statistics, discount_ratio=np.full(items, np.nan, np.float32))
    assert not ItemFilter("discount_ratio", 0.5).allowed(nothing).any()


@pytest.mark.parametrize(("column", "quantile"), [("colour", 0.5), ("price", 1.0), ("price", -0.1)])
def test_an_invalid_filter_is_refused(column: str, quantile: float) -> None:
    with pytest.raises(ValueError, match="expected one of price, discount_ratio"):
        ItemFilter(column, quantile)


def test_a_profile_round_trips_through_the_manifest() -> None:
    from dataclasses import asdict

    profile = Profile(Quotas(tower=300), {"nprobe": 8}, ItemFilter("price", 0.8))
    assert read_profile(asdict(profile)) == profile
    assert read_profile(asdict(Profile(Quotas()))) == Profile(Quotas())
    with pytest.raises(TypeError):
        read_profile({"quotas": {"tower": 1, "shop": 2}, "search": {}, "items": None})
