"""That the numbers come from the served path and travel in the sealed bundle."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import as_known, evaluate_bundle
from components.evaluation.nightly import Nightly
from feature_repo.events import Dataset, read_dataset, write_dataset
from serving.answer.recommender import Recommender
from serving.prediction_log import Record
from serving.release.bundle import load_bundle
from serving.release.golden import read_golden
from serving.release.manifest import read_manifest
from serving.schemas import Request
from serving.stores.online_features import open_store


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
def test_a_user_who_was_forgotten_since_is_in_no_golden_request(toy_line: Path, tmp_path: Path) -> None:
    """And an item that no other user bought stays in the catalogue, without a purchase."""
    data = read_dataset(toy_line / "dataset")
    golden = read_golden(toy_line / "bundle")
    user = next(one.request["user_id"] for one in golden if one.request.get("user_id"))
    item = load_bundle(toy_line / "bundle").statistics.item_ids[3]
    events = data.events[(data.events["user_id"] != user) & (data.events["item_id"] != item)]
    write_dataset(tmp_path / "dataset", Dataset(events.reset_index(drop=True), data.items, data.manifest))
    evaluate_bundle(toy_line / "bundle", tmp_path / "dataset", tmp_path / "evaluated")
    asked = [one.request.get("user_id") for one in read_golden(tmp_path / "evaluated")]
    assert asked == [one.request.get("user_id") for one in golden if one.request.get("user_id") != user]


@pytest.mark.slow
def test_tables_of_another_moment_have_the_catalogue_of_the_bundle(toy_line: Path) -> None:
    """Item 3 is in no purchase, and the last two joined after the training."""
    bundle, data = load_bundle(toy_line / "evaluated"), read_dataset(toy_line / "dataset")
    ids, cut = bundle.statistics.item_ids, pd.Timestamp(bundle.manifest["cut"])
    purchases = purchases_of(data.events[data.events["item_id"] != ids[3]])
    joined = replace(bundle, statistics=replace(bundle.statistics, new_items=2))
    known = as_known(joined, data.items, purchases.before(cut), cut).statistics
    assert known.item_ids.tolist() == ids.tolist()
    assert known.known_items == len(ids) - 2
    expected = bundle.statistics.basket_count.copy()
    expected[3] = 0
    assert known.basket_count.tolist() == expected.tolist()


@pytest.mark.slow
def test_the_drift_reference_equals_a_prediction_log(toy_line: Path) -> None:
    """Each basket of the test weeks whole, asked at its own time for the default number of items.

    The online store holds all that came since as well; of it the endpoint takes what lies before the request.
    """
    reference = pq.read_table(toy_line / "evaluated" / "reference_log.parquet").to_pandas()
    results = json.loads((toy_line / "evaluated" / "evaluation.json").read_text())
    events = read_dataset(toy_line / "dataset").events
    window = results["test_window"]
    tested = events[(events["at"] >= window["from"]) & (events["at"] < window["until"])]
    bought = tested.groupby("basket_id")["item_id"].agg(set)
    asked = dict(zip(reference["request_id"], reference["basket"].map(set), strict=True))
    assert asked == bought.to_dict()
    assert set(reference["item_ids"].map(len)) == {10}
    assert set(reference["answered_at"]) == set(tested["at"])
    store = open_store(f"sqlite:///{toy_line / 'home' / 'online_store.db'}")
    served: list[Record] = []
    bundle = load_bundle(toy_line / "evaluated")
    recommender, counts = Recommender(bundle, store, served), Nightly(bundle, purchases_of(events))
    for row in reference.head(50).itertuples():
        counts.recommender(recommender, row.at.timestamp()).recommend(
            Request(tuple(row.basket), row.at.timestamp(), row.user_id, row.store_id, 10, "r")
        )
        assert [item.item_id for item in served[-1].response.items] == list(row.item_ids)
        np.testing.assert_array_equal(served[-1].features.ravel(), row.features)


@pytest.mark.slow
def test_without_test_baskets_the_error_names_the_remedy(toy_line: Path, tmp_path: Path) -> None:
    data = read_dataset(toy_line / "dataset")
    early = data.events[data.events["at"] < "2024-06-01T00:00:00Z"]
    write_dataset(tmp_path / "dataset", Dataset(early, data.items, {"name": "early"}))
    with pytest.raises(ValueError, match="earlier --train-until"):
        evaluate_bundle(toy_line / "bundle", tmp_path / "dataset", tmp_path / "evaluated")
