"""The steps run on a synthetic shop; the result has the time of each and the quality of each precision."""

import json
import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from pipelines.bench.scale import TABLE_DIM, bench_scale
from tests.operators import read_operators_once

pytestmark = pytest.mark.slow
ITEMS = 400


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are forks of one process that has imported PyTorch; ten new ones would each import it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.pipelines.bench.quick_steps"])
    monkeypatch.setattr("pipelines.bench.scale.get_context", lambda kind: context)


def test_every_step_is_measured_and_every_precision_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.bench.scale.CALLS", 20)
    read_operators_once(monkeypatch)
    results = bench_scale(items=ITEMS, users=200, out_dir=tmp_path)
    steps = {row["step"]: row for row in results["steps"]}
    assert steps["fit_statistics"]["result"]["items"] == ITEMS  # all of them are recommended
    assert steps["build_index"]["result"]["items"] == ITEMS
    assert all(row["seconds"] > 0 and row["gib"] > 0.01 for row in results["steps"])
    four = results["variants"]["int4"]
    assert four["parent_bytes"] - four["bytes"] > 7 / 8 * 4 * 64 * ITEMS
    assert (
        0.4 < four["ndcg_at_10"]["parent"] < 0.95
    )  # neither hopeless nor certain: bits could cost something
    assert json.loads((tmp_path / "scale.json").read_text())["items"] == ITEMS
    table = (tmp_path / "scale.md").read_text()
    assert "| build_examples |" in table
    assert "| INT4 | fp32 |" in table
    rows = results["lookups"]
    assert [row["items"] for row in rows] == [4, 40, 400]
    assert [row["table_mb"] for row in rows] == [n * TABLE_DIM * 4 / 1e6 for n in (4, 40, 400)]
    assert all(0 < row["share"] < 1 and row["ms"] > 0 for row in rows)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["scale.json", "scale.md"]


def interrupted(bench: int, ended: Path, *_: object) -> None:
    """Interrupt the bench, as its user does, and go on."""
    os.kill(bench, signal.SIGTERM)
    time.sleep(30)
    ended.touch()


def test_an_interrupt_ends_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = partial(interrupted, os.getpid(), tmp_path / "ended")
    monkeypatch.setattr("pipelines.bench.scale.write_synthetic_shop", work)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            bench_scale(items=ITEMS, users=200, out_dir=tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "ended").exists(), "the bench waited for its step"
