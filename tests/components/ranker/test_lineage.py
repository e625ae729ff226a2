"""A child is held against its parent on the same lists; its manifest is the parent's but for what changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from components.data.examples import RankerExamples
from components.ranker.certificate import check
from components.ranker.lineage import Parent
from components.ranker.ranker_artefact import Cost, RankerArtefact, finish_ranker, graph_id, read_ranker
from components.ranker.scoring import OnnxRanker
from tests.components.conftest import SIGNAL, write_opinion

COST = {"seconds": 1.0, "cpu_seconds": 2.0, "total_cpu_seconds": 3.0}


def parent_of(path: Path, lists: RankerExamples) -> Parent:
    """Write a finished ranker with one certificate and return it as a parent."""
    write_opinion(path / "ranker.onnx", SIGNAL, 0.5)
    fields = {"model": "dlrm", "step": "train_ranker", "parents": [], "params": {"epochs": 2}, "cost": COST}
    finish_ranker(path, [{"step": "train_ranker"}], **fields)
    return Parent(read_ranker(path), lists)


def test_a_copy_is_its_parent_and_another_graph_is_not(
    tmp_path: Path, plant: Callable[..., RankerExamples]
) -> None:
    lists = plant(20, 10, seed=3, always=True)
    parent = parent_of(tmp_path / "parent", lists)
    np.testing.assert_array_equal(parent.scores, OnnxRanker(parent.artefact.graph).scores(lists))
    found = []
    for name, factor in (("same", 0.5), ("reversed", -0.5)):
        write_opinion(tmp_path / name / "ranker.onnx", SIGNAL, factor)
        found.append(parent.certify("prune_ranker", "prune", tmp_path / name, note=name))
    same, reversed_ = found
    assert same["parents"] == reversed_["parents"] == [parent.artefact.id]
    assert same["note"] == "same"
    assert same["bytes"] == same["parent_bytes"] == parent.artefact.graph.stat().st_size
    assert set(same["latency_ms"]) == set(same["parent_latency_ms"])
    assert check(same) == []
    assert check(reversed_)


def test_a_child_keeps_the_files_that_its_step_did_not_change(
    tmp_path: Path, plant: Callable[..., RankerExamples]
) -> None:
    parent = parent_of(tmp_path / "parent", plant(5, 5, seed=3))
    child = tmp_path / "child"
    shutil.copytree(parent.artefact.path, child)
    cost = Cost([parent.artefact])
    parent.finish(child, {"step": "prune_ranker"}, cost, {"prune_ranker": {"ratios": [0.5]}}, note="new")
    made: RankerArtefact = read_ranker(child)
    assert [certificate["step"] for certificate in made.certificates] == ["train_ranker", "prune_ranker"]
    assert made.id == graph_id(child / "ranker.onnx")
    assert {name: made.manifest[name] for name in ("kind", "model", "step", "parents", "params", "note")} == {
        "kind": "ranker",
        "model": "dlrm",
        "step": "prune_ranker",
        "parents": [parent.artefact.id],
        "params": {"epochs": 2, "prune_ranker": {"ratios": [0.5]}},
        "note": "new",
    }
    assert made.manifest["cost"]["total_cpu_seconds"] >= COST["total_cpu_seconds"]
    assert json.loads((parent.artefact.path / "manifest.json").read_bytes())["step"] == "train_ranker"
