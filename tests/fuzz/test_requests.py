"""Made-up requests against the OpenAPI document: some 500 of them here, 2,000 with `make fuzz`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CASES = 500
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_answer_matches_the_openapi_document() -> None:
    command = [sys.executable, "-m", "tests.fuzz.requests", "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout, done.stderr[-3_000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == ""
    assert found["cases"] >= CASES * 0.8
