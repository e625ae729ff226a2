"""The lists that rankers are judged on are those that the served path ranks."""

from pathlib import Path

import numpy as np
import pytest

from components.evaluation.evaluate_bundle import evaluate
from components.evaluation.metrics import summary
from components.ranker.scoring import OnnxRanker
from feature_repo.events import read_dataset
from pipelines.bench.judged_lists import read_judged_lists
from serving.release.bundle import load_bundle

pytestmark = pytest.mark.slow


def test_the_served_ranker_is_judged_in_its_served_form(toy_line: Path, tmp_path: Path) -> None:
    bundle, data = load_bundle(toy_line / "bundle"), read_dataset(toy_line / "dataset")
    lists = read_judged_lists(bundle, data, tmp_path)
    tally = lists.judge(OnnxRanker(toy_line / "bundle" / "ranker.onnx").scores(lists.examples))
    found = summary(tally, lists.bootstrap, len(bundle.statistics.item_ids))
    served = evaluate(bundle, data)[0]["served"]
    assert found == served


def test_labels_are_the_hidden_items_that_were_retrieved(toy_line: Path, tmp_path: Path) -> None:
    lists = read_judged_lists(load_bundle(toy_line / "bundle"), read_dataset(toy_line / "dataset"), tmp_path)
    examples = lists.examples
    for i in (0, len(lists.tasks) // 2, len(lists.tasks) - 1):
        rows = slice(examples.start[i], examples.start[i + 1])
        codes = examples.categorical[rows, 0] - 1
        assert np.array_equal(examples.label[rows].astype(bool), np.isin(codes, lists.tasks[i].hidden))
    perfect = lists.judge(examples.label.astype(np.float32))
    assert np.array(perfect.rows)[:, 1].mean() > 0.95  # the first retrieved item ranks first
