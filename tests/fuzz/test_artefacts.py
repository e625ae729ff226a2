"""Spoilt bundles against our loader: 300 of them here, 2,000 with `make fuzz`."""

import json

import pytest

from tests.fuzz.artefacts import MEGABYTES
from tests.programs import run_python

CASES = 300


@pytest.mark.slow
def test_every_corrupt_bundle_is_refused_and_a_resealed_one_does_no_harm() -> None:
    found = json.loads(run_python("-m", "tests.fuzz.artefacts", "--cases", str(CASES)))
    assert found["wrong"] == []
    assert found["spoilt"] == {"cases": CASES // 2, "refused": CASES // 2}
    assert found["sealed_anew"]["refused"] > CASES // 8, "what is behind the hashes is reached"
    assert found["largest_mb"] <= MEGABYTES
