"""Every figure of the feature bench comes from a real run."""

import json
from pathlib import Path

import pytest

from feature_repo.events import read_dataset
from pipelines.bench.features import bench_features


@pytest.mark.slow
def test_all_parts_are_measured_and_written(toy_line: Path, tmp_path: Path) -> None:
    events = read_dataset(toy_line / "dataset").events
    result = bench_features(toy_line / "evaluated", events, tmp_path, seconds=1.0, kills=1)
    assert json.loads((tmp_path / "features.json").read_bytes()).keys() == result.keys()
    assert result["online_read"]["reads"] == 200
    assert result["visible"]["probes"] > 0
    assert result["fold"]["events"] >= 0
    assert result["hard_stream"]["users_equal"] == result["hard_stream"]["users"]
    assert result["hard_stream"]["dead_letters"] == result["hard_stream"]["poison"]
    assert result["kills"]["equal"] == result["kills"]["kills"] == 1
    assert result["replay"]["equal"] == result["replay"]["compared"] > 100
    assert result["replay"]["streamed_events_of_these_users"] > 0
    table = (tmp_path / "features.md").read_text()
    assert "bit-equal when computed again" in table
