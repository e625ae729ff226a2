"""The assembled bundle holds its golden requests, and the same parts give the same id."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.hyper_parameters import BundleParams
from components.parameters import read_params
from components.release.assemble_bundle import assemble_bundle
from serving.answer.recommender import verify_golden
from serving.release.bundle import load_bundle, read_manifest

pytestmark = pytest.mark.slow


def test_golden_requests_cover_users_strangers_and_odd_baskets(toy_line: Path) -> None:
    golden = [json.loads(line) for line in (toy_line / "bundle" / "golden.jsonl").read_text().splitlines()]
    assert any("user_id" in g["request"] for g in golden)
    assert any("user_id" not in g["request"] for g in golden)
    assert any(g["request"]["basket"] == [] for g in golden)
    assert any(g["request"]["basket"] == ["no such item"] for g in golden)
    assert all(len(g["expected"]) == 10 for g in golden)
    assert verify_golden(load_bundle(toy_line / "bundle")) == len(golden)


def test_the_same_parts_give_the_same_bundle(toy_line: Path, tmp_path: Path) -> None:
    cut = (toy_line / "cut.txt").read_text()

    def assemble(name: str, params: dict[str, Any]) -> str:
        parts = ("statistics", "graphs", "ranker", "index")
        statistics, graphs, ranker, index = (toy_line / part for part in parts)
        return assemble_bundle(
            statistics, graphs, ranker, index, toy_line / "features", tmp_path / name, cut, "toy", params
        )

    assert assemble("a", {}) == assemble("b", {}) == read_manifest(toy_line / "bundle")["bundle_id"]
    assert assemble("c", {"type_penalty": 1.0}) != read_manifest(toy_line / "bundle")["bundle_id"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"type_penalty": 0.0}, "type_penalty 0.0, .*: expected a penalty of more than 0"),
        ({"novelty": -0.1}, "novelty -0.1, .*: expected"),
        ({"novel_slots": [0]}, r"novel_slots is \(0,\), expected places from 1"),
    ],
)
def test_weights_that_mean_nothing_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        read_params(BundleParams, given)
