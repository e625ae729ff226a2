"""The assembled bundle holds its golden requests, and the same parts give the same id."""

import json
from pathlib import Path

import pytest

from components.assemble_bundle import assemble_bundle
from serving.bundle import load_bundle, read_manifest
from serving.recommender import verify_golden

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
    parts = [toy_line / name for name in ("statistics", "graphs", "index", "features")]
    cut = (toy_line / "cut.txt").read_text()
    first = assemble_bundle(*parts, tmp_path / "a", cut, "toy", {})
    assert (
        first
        == assemble_bundle(*parts, tmp_path / "b", cut, "toy", {})
        == read_manifest(toy_line / "bundle")["bundle_id"]
    )
    assert assemble_bundle(*parts, tmp_path / "c", cut, "toy", {"type_penalty": 1.0}) != first
