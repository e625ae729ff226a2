"""The lists that rankers are judged on are those that the served path ranks."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from components.data.fit_statistics import purchases_of
from components.evaluation.metrics import summary
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
    for i in (0, len(lists.tasks) // 2, len(lists.tasks) - 1):
        rows = slice(examples.start[i], examples.start[i + 1])
        codes = examples.categorical[rows, 0] - 1
        assert np.array_equal(examples.label[rows].astype(bool), np.isin(codes, lists.tasks[i].hidden))
    perfect = lists.judge(examples.label.astype(np.float32))
    assert np.array(perfect.rows)[:, 1].mean() > 0.95  # the first retrieved item ranks first
