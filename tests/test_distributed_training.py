"""Two processes under torchrun train the ranker that one process trains."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from components.data.examples import read_ranker_examples
from components.ranker.ranker_artefact import read_ranker
from components.ranker.scoring import OnnxRanker
from components.ranker.train_ranker import train_ranker

pytestmark = pytest.mark.slow
PARAMS = '{"dlrm": {"epochs": 1, "size": {"dropout": 0.0}}}'


def test_two_processes_train_the_same_as_one(toy_line: Path, tmp_path: Path) -> None:
    examples, statistics = toy_line / "examples", toy_line / "statistics"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["--model", "dlrm", "--params", PARAMS, "--ranker", str(tmp_path / "two")]
    paths = ["--examples", str(examples), "--statistics", str(statistics)]
    done = subprocess.run(
        [*run, "-m", "components.ranker.train_ranker", *asked, *paths],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    size = {"dlrm": {"epochs": 1, "size": {"dropout": 0.0}}}
    train_ranker(examples, statistics, tmp_path / "one", "dlrm", size)
    held_out = read_ranker_examples(examples, "calibration")
    one, two = (OnnxRanker(read_ranker(tmp_path / name).graph).scores(held_out) for name in ("one", "two"))
    # The list loss is averaged over the same lists; only its small pointwise part weighs rows by process.
    assert np.abs(one - two).max() < 0.05
    assert np.corrcoef(one, two)[0, 1] > 0.999
