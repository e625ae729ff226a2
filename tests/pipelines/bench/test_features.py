"""Every figure of the feature bench comes from a real run."""

import json
import threading
from pathlib import Path

import psutil
import pytest

from feature_repo.events import read_dataset
from pipelines.bench.features import FeatureBench, _local_broker, bench_features, fold_rate
from pipelines.bench.load.local_store import local_server
from pipelines.bench.load.waiting import NotReached, wait_for
from serving.release.bundle import load_bundle


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


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "kills"), [(30.0, 1), (1.0, 20)])
def test_too_few_lines_after_the_cut_are_refused(
    toy_line: Path, tmp_path: Path, seconds: float, kills: int
) -> None:
    """A kill without lines would prove nothing, and an empty backlog is never worked off."""
    events = read_dataset(toy_line / "dataset").events
    with pytest.raises(ValueError, match=r"lines after the cut, \d0,00\d needed: lower --seconds or --kills"):
        bench_features(toy_line / "evaluated", events, tmp_path, seconds, kills)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_stream_that_ends_ends_the_bench(toy_line: Path, tmp_path: Path) -> None:
    events = read_dataset(toy_line / "dataset").events
    with local_server() as url, _local_broker() as kafka:
        bundle = load_bundle(toy_line / "evaluated")
        bench = FeatureBench(tmp_path, url, kafka, events[:0], events, bundle, seconds=0.0, kills=0)

        def kill() -> None:
            wait_for((tmp_path / "stream.json").exists, "the stream's heartbeat")
            for child in psutil.Process().children():
                if "stream" in child.cmdline():
                    child.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(NotReached, match="the stream ended with exit code -9"):
            fold_rate(bench)
        killer.join()
