"""Spoilt bundles, made-up requests and attacks: some of them here, all with `make fuzz`."""

import json
from typing import Any

import pytest

from tests.fuzz import artefacts, attacks
from tests.programs import run_python


def fuzz(program: str, cases: int) -> dict[str, Any]:
    return dict(json.loads(run_python("-m", f"tests.fuzz.{program}", "--cases", str(cases))))


@pytest.mark.slow
def test_every_corrupt_bundle_is_refused_and_a_resealed_one_does_no_harm() -> None:
    cases = 300
    found = fuzz("artefacts", cases)
    assert found["wrong"] == []
    assert found["spoilt"] == {"cases": cases // 2, "refused": cases // 2}
    assert found["sealed_anew"]["refused"] > cases // 8, "what is behind the hashes is reached"
    assert found["largest_mb"] <= artefacts.MEGABYTES


@pytest.mark.slow
def test_every_answer_matches_the_openapi_document() -> None:
    found = fuzz("requests", 500)
    assert found["wrong"] == ""
    assert found["cases"] >= 400


def test_the_tables_hold_two_hundred_different_attacks() -> None:
    every = attacks.attacks()
    assert len({(attack.family, attack.name) for attack in every}) == len(every) >= 200


@pytest.mark.slow
def test_the_endpoint_answers_as_before_each_attack() -> None:
    found = fuzz("attacks", 30)
    assert found["wrong"] == []
    assert found["grown_mb"] <= attacks.MEGABYTES
    assert len(found["families"]) >= len(attacks.TABLES) - 1
