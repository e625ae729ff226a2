"""Made-up requests against the OpenAPI document: some 500 of them here, 2,000 with `make fuzz`."""

import json

import pytest

from tests.programs import run_python

CASES = 500


@pytest.mark.slow
def test_every_answer_matches_the_openapi_document() -> None:
    found = json.loads(run_python("-m", "tests.fuzz.requests", "--cases", str(CASES)))
    assert found["wrong"] == ""
    assert found["cases"] >= CASES * 0.8
