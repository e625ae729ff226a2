"""Each baseline ranks the toy shop as its one signal says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from components.evaluation.baselines import BASELINES
from feature_repo.aggregates import UserEvents
from feature_repo.statistics import SOLD_28D
from serving.release.bundle import load_bundle
from serving.stages.item_index import FaissTower
from serving.stages.retrieval import build_query

pytestmark = pytest.mark.slow


def test_signals(toy_line: Path, row_of: Callable[..., UserEvents]) -> None:
    bundle = load_bundle(toy_line / "bundle")
    fresh = bundle.statistics.fresh.copy()
    fresh[70, SOLD_28D] = 1_000
    statistics = bundle.statistics.as_of(fresh)
    row = row_of(
        [
            (1_700_000_000, ["item-006", "item-008"], 1.0, 0.0),
            (1_700_600_000, ["item-006"], 1.0, 0.0),
        ]
    )
    query = build_query(statistics, ("item-010",), row, 1_701_000_000.0)
    tower = FaissTower(bundle.query_tower, bundle.index)
    store = statistics.store_popular[0]
    best = {name: int(np.argmax(baseline(query, store, tower))) for name, baseline in BASELINES.items()}
    code = statistics.code_of
    assert best["popularity"] == 70, "sales after the cut count, as they do for the ranker"
    assert best["store_popularity"] == int(store[0])
    chain = BASELINES["store_popularity"](query, None, tower)
    assert int(np.argmax(chain)) == 70
    assert best["personal"] == code["item-006"]
    assert best["together"] == int(query.together.codes[np.argmax(query.together.sums[0])])
    assert best["two_tower"] == int(tower.search(query, 1)[0])
    scores = BASELINES["blend"](query, store, tower)
    assert scores[code["item-006"]] >= 1
    assert scores[best["together"]] >= 1
