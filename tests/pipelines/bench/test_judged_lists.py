"""The lists that rankers are judged on are those that the served path ranks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import serve
from components.evaluation.metrics import summary
from components.evaluation.nightly import Nightly
from components.ranker.scoring import OnnxRanker
from feature_repo.events import read_dataset
from pipelines.bench.judged_lists import JudgedLists, read_judged_lists
from serving.release.bundle import load_bundle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lists(toy_line: Path, tmp_path_factory: pytest.TempPathFactory) -> JudgedLists:
    bundle, purchases = (
        load_bundle(toy_line / "bundle"),
        purchases_of(read_dataset(toy_line / "dataset").events),
    )
    cut = pd.Timestamp(bundle.manifest["cut"])
    return read_judged_lists(bundle, purchases, tmp_path_factory.mktemp("lists"), cut)


def test_the_served_ranker_is_judged_in_its_served_form(toy_line: Path, lists: JudgedLists) -> None:
    tally = lists.judge(OnnxRanker(toy_line / "bundle" / "ranker.onnx").scores(lists.examples))
    items = len(load_bundle(toy_line / "bundle").statistics.item_ids)
    evaluation = json.loads((toy_line / "evaluated" / "evaluation.json").read_text())
    assert summary(tally, lists.bootstrap, items) == evaluation["served"]


def test_labels_are_the_hidden_items_that_were_retrieved(lists: JudgedLists) -> None:
    examples = lists.examples
    assert np.array_equal(lists.codes, examples.categorical[:, 0] - 1)
    for i in (0, len(lists.tasks) // 2, len(lists.tasks) - 1):
        rows = slice(examples.start[i], examples.start[i + 1])
        hidden = np.isin(lists.codes[rows], lists.tasks[i].hidden)
        assert np.array_equal(examples.label[rows].astype(bool), hidden)
    perfect = lists.judge(examples.label.astype(np.float32))
    assert np.array(perfect.rows)[:, 1].mean() > 0.95  # the first retrieved item ranks first


def test_items_that_joined_after_the_training_are_judged_as_themselves(
    toy_line: Path, tmp_path: Path
) -> None:
    """As of a champion that was refreshed each night: here half of the catalogue has joined."""
    bundle = load_bundle(toy_line / "evaluated")
    purchases = purchases_of(read_dataset(toy_line / "dataset").events)
    joined = replace(bundle, statistics=replace(bundle.statistics, new_items=40))
    lists = read_judged_lists(joined, purchases, tmp_path, pd.Timestamp(bundle.manifest["cut"]))
    tally = lists.judge(OnnxRanker(bundle.path / "ranker.onnx").scores(lists.examples))
    served, _ = serve(joined, lists.tasks, Nightly(joined, purchases))
    assert (tally.rows, tally.shown) == (served.rows, served.shown)
