"""Spoilt bundles against our loader: 300 of them here, 2,000 with `make fuzz`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.artefacts import MEGABYTES

CASES = 300
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_corrupt_bundle_is_refused_and_a_resealed_one_does_no_harm() -> None:
    command = [sys.executable, "-m", "tests.fuzz.artefacts", "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr[-3_000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["spoilt"] == {"cases": CASES // 2, "refused": CASES // 2}
    assert found["sealed_anew"]["refused"] > CASES // 8, "what is behind the hashes is reached"
    assert found["largest_mb"] <= MEGABYTES
