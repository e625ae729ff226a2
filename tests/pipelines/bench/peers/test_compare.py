"""The table of peers, from the toy line."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.bench.compression import TrainingLine
from pipelines.bench.peers.compare import bench_peers
from pipelines.bench.peers.rankers import Peer, fit_item_knn, fit_personal

pytestmark = pytest.mark.slow


def test_peers_are_tuned_and_judged_beside_the_served_path(
    toy_training_line: TrainingLine, tmp_path: Path
) -> None:
    peers = {
        "personal": Peer("NumPy", fit_personal, ({"tau_days": 30.0}, {"tau_days": np.inf})),
        "item-kNN": Peer(
            "implicit", fit_item_knn, ({"weighting": "cosine", "neighbours": 20},), with_own=True
        ),
    }
    results = bench_peers(toy_training_line, tmp_path, peers)
    assert set(results["peers"]) == {
        "personal",
        "item-kNN",
        "item-kNN + own purchases",
        "LightGBM, our features",
    }
    assert len(results["tried"]) == 2 + 1 + 4
    for name, row in results["peers"].items():
        ratio = results["served"]["ndcg_at_10"] / row["ndcg_at_10"]
        assert results["served_against"][name]["ndcg_at_10"] == pytest.approx(ratio, abs=1e-2)
    table = (tmp_path / "peers.md").read_text()
    assert "| **served** | this project |" in table
    assert "Served and LightGBM also have counts of all purchases until the night before" in table
    assert "EASE sees the 10,000 most bought items" in table
    assert "| item-kNN + own purchases | implicit |" in table
