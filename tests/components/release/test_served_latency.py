"""Two real bundles of the toy shop: the one made slow is recognised."""

import time
from pathlib import Path
from typing import Any

import pytest

from components.release.served_latency import served_latency
from serving.answer.recommender import Recommender
from serving.release.bundle import read_manifest


@pytest.mark.slow
def test_the_slower_bundle_is_recognised(toy_line: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two are the same models, sealed twice; one of them sleeps 5 ms before each answer."""
    challenger, champion = toy_line / "evaluated", toy_line / "bundle"
    slow_id = read_manifest(challenger)["bundle_id"]
    asked: list[str] = []

    class Sleepy(Recommender):
        def recommend(self, *arguments: Any) -> Any:
            asked.append(self.bundle.bundle_id)
            if self.bundle.bundle_id == slow_id:
                time.sleep(0.005)
            return super().recommend(*arguments)

    monkeypatch.setattr("components.release.served_latency.Recommender", Sleepy)
    found = served_latency(challenger, champion, rounds=4)
    assert found["added_ms"] > 2.5  # at least half of it, whatever else this machine does
    assert found["challenger"]["bundle_id"] == slow_id
    assert found["champion"]["bundle_id"] == read_manifest(champion)["bundle_id"]
    for name in ("challenger", "champion"):
        assert 0 < found[name]["p50_ms"] <= found[name]["p99_ms"]
    golden = len((challenger / "golden.jsonl").read_text().splitlines())
    assert found["challenger"]["answers"] == found["champion"]["answers"] == 4 * golden
    assert found["machine"]["cores"] > 0
    assert len(asked) == 2 * (4 + 2) * golden
    # In turns, and each goes first as often as the other: neither gains by a quiet moment or a warm cache.
    firsts = asked[::2]
    assert all(set(pair) == set(asked) for pair in zip(firsts, asked[1::2], strict=True))
    assert abs(firsts.count(slow_id) - len(firsts) / 2) <= 1
