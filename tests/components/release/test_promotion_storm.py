"""Real processes that promote: killed at any point, and several at once; `make storm` has more rounds."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from components.release.promote_bundle import promote_bundle
from components.release.register_bundle import register_bundle
from tests.components.conftest import as_planned
from tests.programs import run_python

pytestmark = pytest.mark.slow
MOST_S = 7_200.0
COUNTS = {
    "kill": int(os.environ.get("STORM_KILLS", "2")),
    "compete": int(os.environ.get("STORM_ROUNDS", "2")),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_no_state_is_mixed_and_no_line_is_lost(
    kind: str, evaluated: Callable[..., Path], home: Path, uri: str, dataset: Path
) -> None:
    for number in range(9 if kind == "compete" else 2):
        register_bundle(evaluated(f"b{number}"), uri, "recommender")
    dataset.rename(home / "dataset")
    promote_bundle("1", [home / "dataset"], uri, "recommender", str(home), examine=as_planned)
    said = run_python(
        *("-W", "ignore", "-m", "tests.components.release.promotion_storm", home, kind, str(COUNTS[kind])),
        timeout_s=MOST_S,
    )
    result = json.loads(said.splitlines()[-1])
    sys.stdout.write(f"{kind}: {result}\n")
    assert result["killed" if kind == "kill" else "rounds"] == COUNTS[kind]
    if kind == "compete":
        assert result["wins"] == result["lines"] > 0
