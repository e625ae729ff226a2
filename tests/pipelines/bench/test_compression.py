"""The compression bench measures every ranker of a whole training run."""

import json
from pathlib import Path

import pytest

from components.compression.compile_ranker import TORCH
from components.hyper_parameters import RANKERS
from pipelines.bench.compression import TUNED, TrainingLine, bench_compression, whole_ensemble
from tests.operators import read_operators_once

pytestmark = pytest.mark.slow


def test_every_ranker_and_every_form_of_the_student_is_on_the_leaderboard(
    toy_line: Path, toy_training_line: TrainingLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_operators_once(monkeypatch)
    monkeypatch.setattr("components.ranker.scoring.REPEATS", 3)
    monkeypatch.setattr("components.ranker.fitting.LEAST_STEPS", 1)  # how good a ranker is does not matter
    # Layers, which are taught, and trees: each ranker is trained in test_train_ranker.py.
    kinds = {name: RANKERS[name] for name in ("dlrm", "gradient_boosting")}
    monkeypatch.setattr("pipelines.bench.compression.RANKERS", kinds)
    monkeypatch.setattr("pipelines.bench.compression.TUNED", TUNED[-1:])  # bits: test_quantize_ranker.py
    monkeypatch.setattr("pipelines.bench.compression.TORCH", TORCH[:1])  # compiled: test_compile_ranker.py
    results = bench_compression(toy_training_line, tmp_path)
    board = results["rankers"]
    assert {"teacher dlrm", "student", "student without teachers", "pruned", "served"} <= set(board)
    assert "ensemble" not in board, "one teacher would be measured twice"
    assert whole_ensemble(results) is board["teacher dlrm"]
    assert {f"ranker {name}" for name in kinds if name != "dlrm"} <= set(board)
    assert f"pruned, {TUNED[-1]}, tuned" in board
    assert {"pruned, fp16", "pruned, int8", "pruned, int4"} <= set(board)
    assert results["against_ensemble"]["teacher dlrm"]["ndcg_at_10"] == 1.0
    # The evaluation of the bundle has measured the same ranker on the same baskets.
    evaluation = json.loads((toy_line / "evaluated" / "evaluation.json").read_text())
    assert board["served"]["ndcg_at_10"] == evaluation["served"]["ndcg_at_10"]
    written = json.loads((tmp_path / "compression.json").read_text())
    assert written["rankers"].keys() == board.keys()
    text = (tmp_path / "compression.md").read_text()
    assert "| served |" in text
    assert "| student | torch_eager |" in text
    assert (tmp_path / "compression-bytes.png").read_bytes().startswith(b"\x89PNG")
