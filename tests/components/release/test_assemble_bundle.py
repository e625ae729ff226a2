"""The assembled bundle holds its golden requests, and the same parts give the same id."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.data.examples import RankerExamples
from components.release.assemble_bundle import NEW_AMONG, NEW_GAINS, assemble_bundle, choose_new_gain
from feature_repo.schema import DENSE_NAMES
from serving.answer.recommender import verify_golden
from serving.release.bundle import load_bundle
from serving.release.manifest import read_manifest


@pytest.mark.slow
def test_golden_requests_cover_users_strangers_and_odd_baskets(toy_line: Path) -> None:
    golden = [json.loads(line) for line in (toy_line / "bundle" / "golden.jsonl").read_text().splitlines()]
    assert any("user_id" in g["request"] for g in golden)
    assert any("user_id" not in g["request"] for g in golden)
    assert any(g["request"]["basket"] == [] for g in golden)
    assert any(g["request"]["basket"] == ["no such item"] for g in golden)
    assert all(len(g["expected"]) == 10 for g in golden)
    assert verify_golden(load_bundle(toy_line / "bundle")) == len(golden)


@pytest.mark.slow
def test_the_same_parts_give_the_same_bundle(toy_line: Path, tmp_path: Path) -> None:
    cut = (toy_line / "cut.txt").read_text()

    def assemble(name: str, params: dict[str, Any]) -> str:
        names = ("examples", "statistics", "graphs", "ranker", "index", "features")
        examples, statistics, graphs, ranker, index, features = (toy_line / part for part in names)
        place = tmp_path / name
        return assemble_bundle(
            examples, statistics, graphs, ranker, index, features, place, cut, "toy", params
        )

    assert assemble("a", {}) == assemble("b", {}) == read_manifest(toy_line / "bundle")["bundle_id"]
    assert assemble("c", {"type_penalty": 1.0}) != read_manifest(toy_line / "bundle")["bundle_id"]


def held_out(missed: int, count: int = 40) -> tuple[RankerExamples, np.ndarray]:
    """Lists of NEW_AMONG bought items at 0.5 and a new one, which was purchased; in `missed` it has 0.3.

    Bought together puts the new one first. Its score is 0.6 in the other lists.
    """
    width = NEW_AMONG + 1
    dense = np.zeros((count, width, len(DENSE_NAMES)), np.float32)
    dense[:, :NEW_AMONG, DENSE_NAMES.index("user_has_item")] = 1.0
    dense[:, NEW_AMONG, DENSE_NAMES.index("together_sum")] = 1.0
    label, scores = np.zeros((count, width), np.int8), np.full((count, width), 0.5, np.float32)
    label[:, NEW_AMONG] = 1
    scores[:, NEW_AMONG] = np.where(np.arange(count) < missed, 0.3, 0.6)
    nothing = np.zeros((count, 1), np.int32)
    lists = RankerExamples(
        dense.reshape(-1, len(DENSE_NAMES)),
        np.zeros((count * width, 4), np.int32),
        label.ravel(),
        np.arange(count + 1) * width,
        nothing,
        nothing.astype(np.float16),
        nothing,
    )
    return lists, scores.ravel()


def test_new_items_get_the_least_gain_that_finds_as_many_as_bought_together() -> None:
    lists, scores = held_out(missed=30)
    assert choose_new_gain(lists, scores) == 1.75, "0.3 x 1.75 is more than 0.5, 0.3 x 1.5 is less"
    assert choose_new_gain(lists, scores / np.where(scores == 0.3, 10, 1).astype(np.float32)) == NEW_GAINS[-1]


def test_new_items_have_no_gain_where_fewer_may_be_chance() -> None:
    assert choose_new_gain(*held_out(missed=0)) == 1.0
    assert choose_new_gain(*held_out(missed=2)) == 1.0, "two lists of 40: the interval holds 0"
    assert choose_new_gain(*held_out(missed=8)) > 1.0
    lists, scores = held_out(missed=30)
    lists.dense[:, DENSE_NAMES.index("user_has_item")] = 0.0
    assert choose_new_gain(lists, scores) == 1.0, "strangers: all is new to them"
