"""Every figure of the feature bench comes from a real run."""

import contextlib
import json
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.events import read_dataset
from feature_repo.stream.archive import BASE, EVENTS, write_segment
from monitoring.skew import replay
from pipelines.bench.features import (
    PROBED,
    FeatureBench,
    _local_broker,
    _table,
    bench_features,
    fold_rate,
    replayed,
    until_shown,
)
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
    assert result["kills"]["equal"] == result["kills"]["kills"] == 1
    assert result["replay"]["equal"] == result["replay"]["compared"] > 100
    table = (tmp_path / "features.md").read_text()
    assert "bit-equal when computed again" in table


def test_a_stall_is_charged_to_every_event_that_was_sent_meanwhile() -> None:
    """A probe that takes the newest event after each answer meets one stall once."""
    sent_at = time.perf_counter() - 10 + np.arange(10_000) / 1e3  # for ten seconds no row showed anything
    now = time.perf_counter()
    took = until_shown(sent_at, lambda event: True)
    assert len(took) == 10_000 / PROBED
    assert (np.array(took) >= (now - sent_at[::PROBED]) * 1e3).all()


@pytest.mark.slow
def test_the_replay_is_proved_by_rows_that_changed_while_asking(toy_line: Path, tmp_path: Path) -> None:
    loaded = load_bundle(toy_line / "evaluated")
    events = read_dataset(toy_line / "dataset").events
    is_before = events["at"] < loaded.manifest["cut"]
    before, after = events[is_before], events[~is_before]
    write_segment(tmp_path / "offline_store" / EVENTS, _table(before), BASE)
    with local_server() as url, _local_broker() as kafka:
        found = replayed(FeatureBench(tmp_path, url, kafka, before, after, loaded, seconds=1.0, kills=0))
    assert found["equal"] == found["compared"] > 100
    assert found["changed_while_asking"] > 0
    log = tmp_path / "prediction_log"
    for segment in log.glob("*.parquet"):  # as if the row had been read after the events
        answers = pq.read_table(segment)
        frame = answers.select(["user_id", "row_version"]).to_pandas()
        latest = frame.groupby("user_id")["row_version"].transform("max")
        place = answers.schema.get_field_index("row_version")
        column = pa.array(latest, answers.schema.field(place).type, from_pandas=True)
        pq.write_table(answers.set_column(place, answers.schema.field(place), column), segment)
    wrong = replay(log, tmp_path / "offline_store", loaded.path, 1_000)
    assert wrong.equal < wrong.compared


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "kills"), [(30.0, 1), (1.0, 20)])
def test_too_few_lines_after_the_cut_are_refused(
    toy_line: Path, tmp_path: Path, seconds: float, kills: int
) -> None:
    """A kill without lines would prove nothing, and an empty backlog is never worked off."""
    events = read_dataset(toy_line / "dataset").events
    with pytest.raises(ValueError, match=r"lines after the cut, [\d,]+ needed: lower --seconds or --kills"):
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
                with contextlib.suppress(psutil.Error):  # a child has just ended
                    if "stream" in child.cmdline():
                        child.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(NotReached, match="the stream ended with exit code -9"):
            fold_rate(bench)
        killer.join()
