"""CI has Prometheus' programs, so that the tests of alerts run there; a machine without them skips."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("file", [".ci/run", ".github/workflows/test.yml", ".github/workflows/infra.yml"])
def test_whatever_runs_the_slow_tests_fetches_them_before(file: str) -> None:
    text = (ROOT / file).read_text()
    assert (
        0 < text.find(".ci/prometheus .venv/prometheus") < max(map(text.rfind, ("make test", "make infra")))
    )
