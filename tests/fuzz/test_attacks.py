"""Attacks of all tables against one endpoint: some 30 of them here, all with `make fuzz`."""

import json

import pytest

from tests.fuzz.attacks import MEGABYTES, TABLES, attacks
from tests.programs import run_python

CASES = 30


def test_the_tables_hold_two_hundred_different_attacks() -> None:
    every = attacks()
    assert len({(attack.family, attack.name) for attack in every}) == len(every) >= 200


@pytest.mark.slow
def test_the_endpoint_answers_as_before_each_attack() -> None:
    found = json.loads(run_python("-m", "tests.fuzz.attacks", "--cases", str(CASES)))
    assert found["wrong"] == []
    assert found["grown_mb"] <= MEGABYTES
    assert len(found["families"]) >= len(TABLES) - 1
