"""The tables are written whole, from the evaluation of a real bundle."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from components.data.fit_statistics import purchases_of
from components.data.ingest_events import TEST_WINDOW
from components.evaluation.evaluate_bundle import serve, tasks_after
from components.evaluation.metrics import Bootstrap, summary
from components.retriever.refresh_counts import refresh_counts
from feature_repo.events import read_dataset
from pipelines.bench.funnel import sample
from pipelines.bench.quality import BASELINES, _with_frozen_history, bench_quality
from serving.release.bundle import load_bundle

pytestmark = pytest.mark.slow


def test_the_result_files_hold_the_figures(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sources, map and ceiling are compared with numbers in test_funnel.py.
    monkeypatch.setattr("pipelines.bench.quality.sample", lambda tasks, most=30: sample(tasks, 30))
    monkeypatch.setattr("components.evaluation.evaluate_bundle.ALONE", 0)
    results = bench_quality(
        toy_line / "evaluated", toy_line / "dataset", toy_line / "retriever", tmp_path, True
    )
    recorded = json.loads((toy_line / "evaluated" / "evaluation.json").read_text())
    for part in ("served", "candidates", "cold"):  # evaluated again, in two processes: the same numbers
        assert results[part] == recorded[part]
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


def test_history_frozen_at_the_cut_comes_with_the_counts_of_the_cut(toy_line: Path, tmp_path: Path) -> None:
    """Whenever the bundle was refreshed: its own counts hold the purchases that it is tested on."""
    bundle, data = load_bundle(toy_line / "evaluated"), read_dataset(toy_line / "dataset")
    cut, purchases = pd.Timestamp(bundle.manifest["cut"]), purchases_of(data.events)
    tasks = tasks_after(purchases, bundle.statistics, cut).hidden[-60:]
    refresh_counts(
        bundle.path, toy_line / "retriever", toy_line / "dataset", tmp_path / "new", cut + TEST_WINDOW
    )
    new = load_bundle(tmp_path / "new")
    before, after = (_with_frozen_history(each, tasks, purchases) for each in (bundle, new))
    assert after == before
    frozen = [replace(task, history=task.history.before(cut.timestamp())) for task in tasks]
    own_counts = summary(
        serve(new, frozen)[0], Bootstrap([task.user_id for task in tasks]), len(new.statistics.item_ids)
    )
    assert own_counts != before
