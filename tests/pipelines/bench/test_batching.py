"""Each figure of the bench is there, and says of the artificial device what its formula says."""

import json
from pathlib import Path

import pytest

from pipelines.bench.batching import JOINED, LOADS, POLICIES, batching_table, bench_batching
from serving.settings import Settings


@pytest.mark.slow  # asks git for the commit
def test_joining_is_measured_and_steered(toy_bundle: Path, toy_store: str, tmp_path: Path) -> None:
    at = "2017-12-05T18:30:00Z"
    requests = [
        {"request_id": f"r{n}", "user_id": f"u{n % 3}", "basket": [f"{1_000_000 + n}"], "k": 10, "at": at}
        for n in range(20)
    ]
    settings = Settings(home=tmp_path / "home", store_url=toy_store)
    result = bench_batching(toy_bundle, requests, tmp_path / "out", settings, rounds=3, asks=1_000)
    assert list(result["ranker_ms_per_request"]) == [str(k) for k in JOINED]
    assert all(0 < found["p50"] <= found["p95"] for found in result["ranker_ms_per_request"].values())
    assert result["cheapest"] in JOINED
    assert 0 < result["way_us"]["call"] < result["way_us"]["alone"] < result["way_us"]["queue"]
    for loads in result["loads"].values():
        assert [load["load"] for load in loads] == list(LOADS)
        for load in loads:
            assert list(load["policies"]) == list(POLICIES)
            assert load["policies"]["one a call"]["requests_per_call"] == 1
            for arm in load["policies"].values():
                assert 0 < arm["p50_ms"] <= arm["p99_ms"]
    quiet, *_, rush = (load["policies"] for load in result["loads"]["device"])
    assert quiet["steered"]["state"]["decision"] == "alone"
    assert rush["steered"]["requests_per_call"] > 2
    assert rush["steered"]["p99_ms"] < rush["one a call"]["p99_ms"]
    assert json.loads((tmp_path / "out" / "batching.json").read_text())["bundle_id"] == result["bundle_id"]
    assert (tmp_path / "out" / "batching.md").read_text() == batching_table(result)
    assert not (tmp_path / "home").exists()


def test_without_requests_there_is_nothing_to_measure(toy_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no requests"):
        bench_batching(toy_bundle, [], tmp_path)
