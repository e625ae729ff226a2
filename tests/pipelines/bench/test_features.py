"""Every figure of the feature bench comes from a real run."""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feature_repo.events import read_dataset
from feature_repo.stream.kafka import KafkaSettings
from monitoring.skew import replay
from pipelines.bench.features import (
    PROBED,
    FeatureBench,
    bench_features,
    fold_rate,
    replayed,
    until_shown,
)
from pipelines.bench.load.waiting import NotReached
from serving.release.bundle import load_bundle
from tests.conftest import Broker


@pytest.fixture(scope="module")
def measured(toy_line: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The figures, in a folder with the files; it also keeps the home as the replay left it."""
    out = tmp_path_factory.mktemp("features")

    def replay_and_keep(bench: FeatureBench) -> dict[str, Any]:
        found = replayed(bench)
        for name in ("offline_store", "prediction_log"):
            shutil.copytree(bench.home / name, out / name)
        return found

    events = read_dataset(toy_line / "dataset").events
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.bench.features.replayed", replay_and_keep)
        return bench_features(toy_line / "evaluated", events, out, seconds=1.0, kills=1), out


@pytest.mark.slow
def test_all_parts_are_measured_and_written(measured: tuple[dict[str, Any], Path]) -> None:
    result, out = measured
    assert json.loads((out / "features.json").read_bytes()).keys() == result.keys()
    assert result["online_read"]["reads"] == 200
    assert result["visible"]["probes"] > 0
    assert result["kills"]["equal"] == result["kills"]["kills"] == 1
    assert result["replay"]["equal"] == result["replay"]["compared"] > 100
    assert result["replay"]["changed_while_asking"] > 0
    table = (out / "features.md").read_text()
    assert "bit-equal when computed again" in table


def test_a_stall_is_charged_to_every_event_that_was_sent_meanwhile() -> None:
    """A probe that takes the newest event after each answer meets one stall once."""
    sent_at = time.perf_counter() - 10 + np.arange(10_000) / 1e3  # for ten seconds no row showed anything
    now = time.perf_counter()
    took = until_shown(sent_at, lambda event: True)
    assert len(took) == 10_000 / PROBED
    assert (np.array(took) >= (now - sent_at[::PROBED]) * 1e3).all()


@pytest.mark.slow
def test_the_replay_is_proved_by_rows_that_changed_while_asking(
    toy_line: Path, measured: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    log = shutil.copytree(measured[1] / "prediction_log", tmp_path / "log")
    for segment in log.glob("*.parquet"):  # as if the row had been read after the events
        answers = pq.read_table(segment)
        frame = answers.select(["user_id", "row_version"]).to_pandas()
        latest = frame.groupby("user_id")["row_version"].transform("max")
        place = answers.schema.get_field_index("row_version")
        column = pa.array(latest, answers.schema.field(place).type, from_pandas=True)
        pq.write_table(answers.set_column(place, answers.schema.field(place), column), segment)
    wrong = replay(log, measured[1] / "offline_store", toy_line / "evaluated", 1_000)
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


# A stream that shows its heartbeat in the file of the first argument and is killed.
ENDING = """
import os, signal, sys
with open(sys.argv[1] + ".part", "w") as state:
    state.write('{"events": 0}')
os.replace(state.name, sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_stream_that_ends_ends_the_bench(
    toy_line: Path, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = [sys.executable, "-c", ENDING, str(tmp_path / "stream.json")]
    monkeypatch.setattr("pipelines.bench.features.reco", lambda *arguments: ending)
    events = read_dataset(toy_line / "dataset").events
    bundle, kafka = load_bundle(toy_line / "evaluated"), KafkaSettings(bootstrap=broker.bootstrap)
    bench = FeatureBench(tmp_path, "", kafka, events[:0], events[:100], bundle, seconds=0.0, kills=0)
    with pytest.raises(NotReached, match="the stream ended with exit code -9"):
        fold_rate(bench)
