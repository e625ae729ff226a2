"""Scores stay with their rows, whatever the lists' lengths; a graph names its own inputs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from components.data.examples import RankerExamples
from components.hyper_parameters import SIZES
from components.ranker.scoring import OnnxRanker, batches, logit, measure, measure_calls
from feature_repo.schema import DENSE_NAMES
from serving.errors import BundleInvalid


def first_feature(file: Path, flat: bool) -> Path:
    """Write a graph whose score is the first feature, for rows or for lists."""
    shape: list[str | int | None] = ["rows", len(DENSE_NAMES)] if flat else ["q", "m", len(DENSE_NAMES)]
    nodes = [helper.make_node("Gather", ["dense", "zero"], ["score"], axis=len(shape) - 1)]
    graph = helper.make_graph(
        nodes,
        "first",
        [helper.make_tensor_value_info("dense", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, shape[:-1])],
        [helper.make_tensor("zero", TensorProto.INT64, [], [0])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), file)
    return file


@pytest.mark.parametrize("flat", [True, False])
def test_each_score_lies_where_its_row_is(
    plant: Callable[..., RankerExamples], tmp_path: Path, flat: bool
) -> None:
    data = replace(plant(4, 5, seed=0), start=np.array([0, 3, 3, 13, 20]))
    ranker = OnnxRanker(first_feature(tmp_path / "ranker.onnx", flat))
    assert ranker.is_flat is flat
    assert ranker.uses == ["dense"]
    np.testing.assert_array_equal(ranker.scores(data), data.dense[:, 0])


def test_a_broken_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ranker.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleInvalid):
        OnnxRanker(tmp_path / "ranker.onnx")


def test_batches_hold_each_list_with_candidates_once() -> None:
    lengths = np.array([0, 5_000, 4_000, 0, 3_000, 9_000, 1])
    found = batches(np.cumsum([0, *lengths]))
    assert np.concatenate(found).tolist() == [1, 2, 4, 5, 6]
    assert len(found) > 1
    assert batches(np.zeros(1, np.int64)) == []
    assert batches(np.zeros(4, np.int64)) == []


def test_logit_turns_probabilities_back_and_stays_finite() -> None:
    z = np.array([-5.0, 0.0, 3.0])
    np.testing.assert_allclose(logit(1 / (1 + np.exp(-z))), z, rtol=1e-5)
    assert np.isfinite(logit(np.array([0.0, 1.0], np.float32))).all()


def test_calls_take_turns_in_changing_order(plant: Callable[..., RankerExamples], few_repeats: None) -> None:
    def order() -> list[int]:
        came: list[int] = []
        calls = [lambda _, number=number: came.append(number) for number in range(3)]
        measure_calls(calls, [lambda *_: None] * 3, plant(3, 5, seed=0))
        return came

    turns = np.reshape(order(), (-1, 3))
    assert (np.sort(turns) == [0, 1, 2]).all(), "each call once in each turn"
    assert set(turns[:, 0].tolist()) == {0, 1, 2}
    assert order() == turns.ravel().tolist(), "from a seed"


def test_every_size_is_measured(
    plant: Callable[..., RankerExamples], tmp_path: Path, few_repeats: None
) -> None:
    ranker = OnnxRanker(first_feature(tmp_path / "ranker.onnx", True))
    (found,) = measure([ranker], plant(3, 5, seed=0))
    assert list(found) == [str(size) for size in SIZES]
    for latency in found.values():
        assert 0 < latency["p50"] <= latency["p99"]
