"""The tables are written whole, from the evaluation of a real bundle."""

import json
from pathlib import Path

import pytest

from pipelines.bench.funnel import sample
from pipelines.bench.quality import BASELINES, bench_quality

pytestmark = pytest.mark.slow


def test_the_result_files_hold_the_figures(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sources, map and ceiling are compared with numbers in test_funnel.py.
    monkeypatch.setattr("pipelines.bench.quality.sample", lambda tasks, most=30: sample(tasks, 30))
    results = bench_quality(
        toy_line / "evaluated", toy_line / "dataset", toy_line / "retriever", tmp_path, True
    )
    recorded = json.loads((toy_line / "evaluated" / "evaluation.json").read_text())
    assert results["served"] == recorded["served"]  # evaluating again gives the same numbers
    assert json.loads((tmp_path / "quality.json").read_text())["machine"]["cores"] >= 1
    table = (tmp_path / "quality.md").read_text()
    assert f"| **served** | {recorded['served']['recall_at_10']:.4f} |" in table
    assert all(f"| {BASELINES[name]} |" in table for name in recorded["baselines"])
    assert [(goal["measured"], goal["unit"]) for goal in results["goals"][:1]] == [
        (recorded["served"]["ndcg_at_10"], "")
    ]
    assert f"| NDCG@10 | >= 0.188 | {recorded['served']['ndcg_at_10']:.5f} | yes |" in table
    assert "| a perfect ranker |" in table
    assert "Items that the catalogue lacks, sold fewer than five times before the cut" in table
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["quality.json", "quality.md", "quality.png"]
