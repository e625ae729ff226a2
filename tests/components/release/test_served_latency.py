"""Two real bundles of the toy shop: the one made slow is recognised."""

import time
from pathlib import Path
from typing import Any

import pytest

from components.data.fit_statistics import purchases_of
from components.release.examination import sample_tasks
from components.release.served_latency import served_latency
from feature_repo.events import read_dataset
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle


@pytest.mark.slow
def test_the_slower_bundle_is_recognised(toy_line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are the same models, sealed twice; one of them sleeps 5 ms before each answer."""
    challenger, champion = load_bundle(toy_line / "evaluated"), load_bundle(toy_line / "bundle")
    purchases = purchases_of(read_dataset(toy_line / "dataset").events)
    tasks, _ = sample_tasks(challenger, purchases, 20)
    users = {task.user_id for task in tasks}
    asked: list[str] = []

    class Sleepy(Recommender):
        def recommend(self, *arguments: Any) -> Any:
            asked.append(self.bundle.bundle_id)
            if self.bundle is challenger:
                time.sleep(0.005)
            return super().recommend(*arguments)

    monkeypatch.setattr("components.release.served_latency.Recommender", Sleepy)
    found = served_latency(challenger, champion, tasks, turns=4)
    assert found["added_ms"] > 2.5  # at least half of it, whatever else this machine does
    for name, bundle in (("challenger", challenger), ("champion", champion)):
        assert found[name]["bundle_id"] == bundle.bundle_id
        assert found[name]["requests"] == len(users)
        assert 0 < found[name]["p50_ms"] <= found[name]["p99_ms"]
    assert found["machine"]["cores"] > 0
    assert len(asked) == 2 * (4 + 2) * len(users)
    # In turns, and each goes first as often as the other: neither gains by a quiet moment or a warm cache.
    firsts = asked[::2]
    assert all(set(pair) == set(asked) for pair in zip(firsts, asked[1::2], strict=True))
    assert abs(firsts.count(challenger.bundle_id) - len(firsts) / 2) <= 1
    alone = served_latency(challenger, None, tasks[:2], turns=1)
    assert "champion" not in alone
    assert "added_ms" not in alone
