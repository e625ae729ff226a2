"""The toy shop's bundle after its cut: each day of the test window has the counts of the night before."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from components.data.fit_statistics import purchases_of
from components.data.ingest_events import TEST_WINDOW
from components.evaluation.nightly import Nightly
from feature_repo.events import read_dataset
from feature_repo.item_days import DAY_S
from feature_repo.statistics import SOLD_7D
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle
from serving.schemas import Request
from serving.stores.online_features import MemoryStore

pytestmark = pytest.mark.slow


def test_each_day_has_the_counts_of_the_night_before(toy_line: Path) -> None:
    bundle, data = load_bundle(toy_line / "evaluated"), read_dataset(toy_line / "dataset")
    cut = pd.Timestamp(bundle.manifest["cut"])
    served = Recommender(bundle, MemoryStore())
    nightly = Nightly(bundle, purchases_of(data.events))
    first = nightly.recommender(served, cut.timestamp())
    assert np.array_equal(first.bundle.statistics.fresh, bundle.statistics.fresh), (
        "the cut is the first night"
    )
    assert nightly.recommender(served, cut.timestamp() + DAY_S - 1) is first
    other = Recommender(bundle, MemoryStore())
    assert nightly.recommender(other, cut.timestamp()) is not first, "each has its own store of rows"
    later = nightly.recommender(served, cut.timestamp() + 9 * DAY_S)
    week = data.events[
        data.events["at"].between(cut + pd.Timedelta(days=2), cut + pd.Timedelta(days=9), "left")
    ]
    sold = week.groupby("item_id")["basket_id"].nunique().reindex(bundle.statistics.item_ids).fillna(0)
    assert later.bundle.statistics.fresh[:, SOLD_7D].tolist() == sold.tolist()
    assert later.bundle.statistics.best_of_week[0] == sold.to_numpy().argmax()
    assert later.bundle.ranker is bundle.ranker, "the models stay"
    request = Request(("item-002",), cut.timestamp(), k=5)
    assert first.recommend(request).items == served.recommend(request).items
    with pytest.raises(IndexError):
        nightly.recommender(served, cut.timestamp() + (TEST_WINDOW.days + 1) * DAY_S)
