"""The table of peers, from the toy line."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from components.data.fit_statistics import fit, read_purchases
from components.evaluation.protocol import read_tasks
from feature_repo.statistics import read_statistics, read_vocabulary
from pipelines.bench.compression import TrainingLine
from pipelines.bench.judged_lists import VALIDATION
from pipelines.bench.peers.compare import _judge, bench_peers
from pipelines.bench.peers.rankers import Peer, fit_item_knn, fit_personal

pytestmark = pytest.mark.slow


def test_peers_are_tuned_and_judged_beside_the_served_path(
    toy_training_line: TrainingLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.ranker.scoring.REPEATS", 3)
    peers = {
        "personal": Peer("NumPy", fit_personal, ({"tau_days": 30.0}, {"tau_days": np.inf})),
        "item-kNN": Peer(
            "implicit", fit_item_knn, ({"weighting": "cosine", "neighbours": 20},), with_own=True
        ),
        "nothing": Peer("NumPy", lambda seen: lambda asked: np.zeros(seen.items)),
    }
    results = bench_peers(toy_training_line, tmp_path, peers)
    assert set(results["peers"]) == {
        "personal",
        "item-kNN",
        "item-kNN + own purchases",
        "nothing",
        "LightGBM, our features",
    }
    assert len(results["tried"]) == 2 + 1 + 4 + 1
    # A peer that knows nothing ranks by the best sellers of before the weeks that choose, not of these.
    found, asked = _best_sellers_in_validation(toy_training_line)
    assert results["tried"][-1]["ndcg_at_10"] == round(found, 5) != round(asked, 5)
    for name, row in results["peers"].items():
        ratio = results["served"]["ndcg_at_10"] / row["ndcg_at_10"]
        assert results["served_against"][name]["ndcg_at_10"] == pytest.approx(ratio, abs=1e-2)
    table = (tmp_path / "peers.md").read_text()
    assert "| **served** | this project |" in table
    assert "Served and LightGBM also have counts of all purchases until the night before" in table
    assert "EASE sees the 10,000 most bought items" in table
    assert "| item-kNN + own purchases | implicit |" in table


def _best_sellers_in_validation(line: TrainingLine) -> tuple[float, float]:
    """NDCG@10 of the best sellers before the four weeks before the cut, and of the best sellers in these."""
    purchases, items = read_purchases(line.dataset)
    at_cut, vocabulary = read_statistics(line.statistics), read_vocabulary(line.statistics)
    cut = pd.Timestamp((line.dataset.parent / "cut.txt").read_text())
    start = cut - VALIDATION
    before = fit(purchases.before(start), items, vocabulary, start, at_cut.item_ids)
    known = purchases.before(cut)
    tasks = read_tasks(known, at_cut, start.timestamp(), cut.timestamp()).hidden
    return tuple(  # type: ignore[return-value]
        float(_judge(lambda asked: np.zeros(len(at_cut.item_ids)), tasks, one).values("ndcg_at_10").mean())
        for one in (before, at_cut)
    )
