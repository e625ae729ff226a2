"""Metrics by hand, the protocol, and that the numbers come from the served path."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from components.evaluate_bundle import Bootstrap, Tally, _auc, _protocol_rng, evaluate_bundle
from serving.bundle import read_manifest


def task(hidden: list[int], before: list[bool]) -> Any:
    return SimpleNamespace(hidden=np.array(hidden), bought_before=np.array(before))


def test_one_list_by_hand() -> None:
    tally = Tally.empty()
    ranked = np.arange(100, 130)  # items 101 and 112 are wanted: ranks 2 and 13
    tally.add(ranked, task([101, 112, 999], [True, True, False]))
    recall_10, recall_20, ndcg, hit_10, hit_3, mrr = tally.rows[0]
    assert recall_10 == pytest.approx(1 / 3)
    assert recall_20 == pytest.approx(2 / 3)
    ideal = 1 + 1 / np.log2(3) + 1 / np.log2(4)
    assert ndcg == pytest.approx((1 / np.log2(3)) / ideal)
    assert (hit_10, hit_3) == (1, 1)
    assert mrr == pytest.approx(1 / 2)
    assert tally.repeat == [(2, 2)]
    assert tally.new == [(0, 1)]


def test_an_empty_answer_scores_nothing() -> None:
    tally = Tally.empty()
    tally.add(np.empty(0, np.int64), task([1], [True]))
    assert tally.rows == [(0, 0, 0, 0, 0, 0)]


def test_auc_by_hand() -> None:
    assert _auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == pytest.approx(0.75)
    assert _auc(np.array([0.5, 0.5]), np.array([0, 1])) == 0.5
    assert _auc(np.array([0.5, 0.6]), np.array([1, 1])) == 0.5


def test_the_bootstrap_draws_users_not_baskets() -> None:
    # One user with 99 baskets of 1 and one with a single 0: whole users come and go.
    boot = Bootstrap(["a"] * 99 + ["b"])
    draws = np.unique(boot.means(np.array([1.0] * 99 + [0.0])))
    np.testing.assert_allclose(draws, [0, 0.99, 1])


def test_a_system_against_itself_has_ratio_one() -> None:
    values = np.random.default_rng(0).random(50)
    assert Bootstrap([str(i) for i in range(50)]).ratio_interval(values, values) == [1.0, 1.0]


def test_the_split_is_a_function_of_the_basket_id() -> None:
    assert (
        _protocol_rng("31198570044").permutation(9).tolist()
        == _protocol_rng("31198570044").permutation(9).tolist()
    )
    assert _protocol_rng("basket-1").random() != _protocol_rng("basket-2").random()


@pytest.mark.slow
def test_results_are_part_of_the_sealed_bundle(toy_line: Path) -> None:
    evaluated = toy_line / "evaluated"
    manifest = read_manifest(evaluated)
    assert {"evaluation.json", "reference_log.parquet", "reference_events.parquet"} <= set(manifest["files"])
    assert manifest["made_from"]["parent"] == read_manifest(toy_line / "bundle")["bundle_id"]
    results = json.loads((evaluated / "evaluation.json").read_text())
    assert results["served"]["recall_at_20"] > 0.9
    assert results["candidates"]["served"]["recall"] > 0.9
    assert (
        0
        < results["cold"]["no_history"]["recall_at_20"]
        <= results["cold"]["all_history"]["recall_at_20"] + 0.05
    )
    calibration = results["calibration"]
    assert calibration["mean_probability"] == pytest.approx(calibration["purchase_rate"], rel=0.5)


@pytest.mark.slow
def test_the_drift_reference_is_what_the_log_would_hold(toy_line: Path) -> None:
    reference = pq.read_table(toy_line / "evaluated" / "reference_log.parquet")
    assert reference.num_rows > 100
    assert set(np.diff(reference["item_ids"].combine_chunks().offsets.to_numpy())) == {10}


@pytest.mark.slow
def test_no_test_basket_says_what_to_do(toy_line: Path, tmp_path: Path) -> None:
    from feature_repo.events import Dataset, read_dataset, write_dataset

    data = read_dataset(toy_line / "dataset")
    early = data.events[data.events["at"] < "2024-06-01T00:00:00Z"]
    write_dataset(tmp_path / "dataset", Dataset(early, data.items, {"name": "early"}))
    with pytest.raises(ValueError, match="earlier --train-until"):
        evaluate_bundle(toy_line / "bundle", tmp_path / "dataset", tmp_path / "evaluated")
