"""A ranker on disk is the one that was certified, or it is refused."""

import json
from pathlib import Path

import pytest
import torch

from components.data.examples import ContractViolation
from components.ranker.ranker_artefact import (
    GRAPH,
    begin_ranker,
    finish_ranker,
    graph_id,
    read_ranker,
    write_weights,
)


@pytest.fixture
def ranker(tmp_path: Path) -> Path:
    place = tmp_path / "ranker"
    begin_ranker(place)
    (place / GRAPH).write_bytes(b"a graph")
    write_weights(place, torch.nn.Linear(3, 2))
    finish_ranker(place, [{"step": "train_ranker"}], step="train_ranker", parents=[], model="dlrm")
    return place


def test_it_comes_back_as_it_was_written(ranker: Path) -> None:
    found = read_ranker(ranker)
    assert found.id == graph_id(ranker / GRAPH) == "170df6144b15bdf1"
    assert found.graph.read_bytes() == b"a graph"
    assert found.certificates == [{"step": "train_ranker"}]
    assert found.manifest["model"] == "dlrm"
    assert {name: tuple(w.shape) for name, w in found.weights().items()} == {"weight": (2, 3), "bias": (2,)}


def test_another_graph_than_the_certified_one_is_refused(ranker: Path) -> None:
    (ranker / GRAPH).write_bytes(b"a better graph")
    with pytest.raises(ContractViolation, match=r"ranker.onnx is \w+, its manifest says \w+: run its step"):
        read_ranker(ranker)


def test_a_half_written_one_is_refused(ranker: Path) -> None:
    (ranker / "manifest.json").unlink()
    with pytest.raises(ContractViolation, match="no finished ranker"):
        read_ranker(ranker)


def test_trees_have_no_weights_to_go_on_from(ranker: Path) -> None:
    (ranker / "weights.npz").unlink()
    manifest = json.loads((ranker / "manifest.json").read_text())
    (ranker / "manifest.json").write_text(json.dumps({**manifest, "model": "gradient_boosting"}))
    with pytest.raises(ContractViolation, match="a gradient_boosting without torch weights: only a torch"):
        read_ranker(ranker).weights()


def test_beginning_again_leaves_nothing_behind(ranker: Path) -> None:
    """A step that dies half way must not leave the last run's manifest beside its own graph."""
    begin_ranker(ranker)
    assert list(ranker.iterdir()) == []
