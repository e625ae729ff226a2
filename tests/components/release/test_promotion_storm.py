"""Real processes that promote: killed at any point, and several at once; `make storm` has more rounds."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from components.release.register_bundle import register_bundle
from tests.components.conftest import champions
from tests.programs import run_python

pytestmark = pytest.mark.slow
MOST_S = 7_200.0
KILLS = int(os.environ.get("STORM_KILLS", "2"))
ROUNDS = int(os.environ.get("STORM_ROUNDS", "2"))


@champions(1)
def test_no_state_is_mixed_and_no_line_is_lost(
    evaluated: Callable[..., Path], home: Path, uri: str, dataset: Path, tmp_path: Path
) -> None:
    dataset.rename(home / "dataset")
    register_bundle(evaluated("b2"), uri, "recommender")
    of_kills = shutil.copytree(home, tmp_path / "kill")
    for number in range(3, 10):
        register_bundle(evaluated(f"b{number}"), uri, "recommender")
    said = run_python(
        *("-W", "ignore", "-m", "tests.components.release.promotion_storm"),
        *(of_kills, str(KILLS), home, str(ROUNDS)),
        timeout_s=MOST_S,
    )
    sys.stdout.write(said)
    killed, competed = (json.loads(line) for line in said.splitlines()[-2:])
    assert killed["killed"] == KILLS
    assert competed["rounds"] == ROUNDS
    assert competed["wins"] == competed["lines"] > 0
