"""What is hidden, and that the retriever learns the toy shop."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.retriever.train_retriever import LEAST_STEPS, _hide, train_retriever
from feature_repo.aggregates import no_events
from serving.release.bundle import load_bundle
from serving.stages.item_index import FaissTower
from serving.stages.retrieval import build_query


@given(st.lists(st.integers(2, 64), min_size=1, max_size=20), st.integers(0, 1_000))
def test_hidden_and_seen_items_are_a_split_of_the_basket(sizes: list[int], seed: int) -> None:
    basket = np.zeros((len(sizes), 64), np.int32)
    for row, size in enumerate(sizes):
        basket[row, :size] = np.arange(1, size + 1)
    seen, asked = _hide(basket, 3, np.random.default_rng(seed))
    for row in range(len(sizes)):
        visible, targets = set(seen[row].tolist()) - {0}, set(asked[row].tolist()) - {0}
        assert targets
        assert not visible & targets
        assert visible | targets <= set(basket[row].tolist())
        assert seen[row, : len(visible)].all()  # padding stands behind the items


@pytest.mark.slow
def test_neighbours_of_an_even_basket_are_even(toy_line: Path) -> None:
    bundle = load_bundle(toy_line / "bundle")
    tower = FaissTower(bundle.query_tower, bundle.index)
    query = build_query(bundle.statistics, ("item-002", "item-004"), no_events(), 1_718_000_000.0)
    even = [int(bundle.statistics.item_ids[code][5:]) % 2 == 0 for code in tower.search(query, 20)]
    assert np.mean(even) >= 0.8


@pytest.mark.slow
def test_a_small_shop_s_baskets_are_passed_until_the_towers_have_learnt(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step of one epoch the rate is that of the schedule's end: nothing is learnt."""
    steps = LEAST_STEPS // 4  # each passes all baskets
    monkeypatch.setattr("components.retriever.train_retriever.LEAST_STEPS", steps)
    params = {"epochs": 1, "batch_size": 100_000, "negatives": 64, "hidden": 8}
    report = train_retriever(toy_line / "examples", toy_line / "statistics", tmp_path / "made", params)
    losses = [epoch["loss"] for epoch in report["curve"]]
    assert len(losses) == steps
    assert losses[-1] < losses[0]
