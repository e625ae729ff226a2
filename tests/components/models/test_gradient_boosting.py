"""The exported trees compare as LightGBM does, and are calibrated inside the graph."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from components.data.examples import RankerExamples
from components.models.gradient_boosting import GradientBoosting
from components.models.ranker import Shape
from components.ranker.scoring import OnnxRanker
from feature_repo.schema import DENSE_NAMES

SHAPE = Shape(len(DENSE_NAMES), (61, 10, 6, 4))


@pytest.fixture
def data(plant: Callable[..., RankerExamples]) -> RankerExamples:
    return plant(200, 20, seed=5, always=True)


@pytest.fixture
def trees(data: RankerExamples) -> GradientBoosting:
    made = GradientBoosting(SHAPE, trees=12, leaves=15)
    made.fit(data, seed=0, threads=1)
    return made


def test_the_graph_is_the_trees_and_the_calibration(
    trees: GradientBoosting, data: RankerExamples, tmp_path: Path
) -> None:
    trees.calibrate(2.0, -1.5)
    trees.export(tmp_path / "ranker.onnx")
    z = trees.logits_of(data).astype(np.float64)
    found = OnnxRanker(tmp_path / "ranker.onnx").scores(data)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-(2 * z - 1.5))), atol=1e-6)


def test_a_value_at_a_threshold_takes_the_same_branch(
    trees: GradientBoosting, data: RankerExamples, tmp_path: Path
) -> None:
    """The nearest float32 to a threshold, and its neighbours on both sides."""
    trees.export(tmp_path / "ranker.onnx")
    made = trees.booster.trees_to_dataframe()
    splits = made[made["threshold"].notna() & made["split_feature"].notna()]
    columns = splits["split_feature"].str.removeprefix("Column_").astype(int).to_numpy()
    values = splits["threshold"].to_numpy(np.float64).astype(np.float32)
    chosen = columns < len(DENSE_NAMES)
    columns, values = columns[chosen], values[chosen]
    near = np.stack([np.nextafter(values, np.float32(-1)), values, np.nextafter(values, np.float32(1e9))], 1)
    rows = len(columns) * 3
    dense = np.resize(data.dense, (rows, len(DENSE_NAMES))).copy()
    dense[np.arange(rows), np.repeat(columns, 3)] = near.ravel()
    on_edge = RankerExamples(
        dense,
        np.resize(data.categorical, (rows, 4)),
        np.zeros(rows, np.int8),
        np.array([0, rows]),
        data.history[:1],
        data.history_weight[:1],
        data.basket[:1],
    )
    z = trees.logits_of(on_edge).astype(np.float64)
    found = OnnxRanker(tmp_path / "ranker.onnx").scores(on_edge)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-z)), atol=1e-6)


def test_item_ids_are_not_looked_at(trees: GradientBoosting, data: RankerExamples) -> None:
    before = trees.logits_of(data)
    data.categorical[:, 0] = 0
    np.testing.assert_array_equal(trees.logits_of(data), before)


def test_the_trees_are_written_for_people(
    trees: GradientBoosting, data: RankerExamples, tmp_path: Path
) -> None:
    import lightgbm  # here: it loads scikit-learn, a second of each test worker

    trees.save(tmp_path)
    again = lightgbm.Booster(model_file=tmp_path / "trees.txt")
    rows = np.concatenate([data.dense, data.categorical[:, 1:]], axis=1)
    np.testing.assert_allclose(again.predict(rows, raw_score=True), trees.logits_of(data), rtol=1e-5)
