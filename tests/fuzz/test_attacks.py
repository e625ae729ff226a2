"""Attacks of all tables against one endpoint: some 30 of them here, all with `make fuzz`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.attacks import MEGABYTES, TABLES, attacks

CASES = 30
ROOT = Path(__file__).parents[2]


def test_the_tables_hold_two_hundred_different_attacks() -> None:
    every = attacks()
    assert len({(attack.family, attack.name) for attack in every}) == len(every) >= 200


@pytest.mark.slow
def test_the_endpoint_answers_as_before_each_attack() -> None:
    command = [sys.executable, "-m", "tests.fuzz.attacks", "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr[-3_000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["grown_mb"] <= MEGABYTES
    assert len(found["families"]) >= len(TABLES) - 1
