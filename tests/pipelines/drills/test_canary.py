"""The versions of the release drill, and its cases."""

from dataclasses import replace
from pathlib import Path

import pytest

from components.home import Conflict
from components.release.registry import RegistryUnreachable
from pipelines.drills.bad_endpoint import FAILING_LIVE
from pipelines.drills.canary import CASES, GATE, DrillVersions
from tests.components.rollout.test_plan import RECORD


def test_the_alias_moves_once_and_back(tmp_path: Path) -> None:
    versions = DrillVersions(tmp_path, {"1": "b1", "2": "b2"})
    for _ in range(2):
        versions.seal(RECORD)
    assert versions.champions() == ["1", "2"]
    assert versions.previous() == ("1", "b1")
    versions.undo(RECORD)
    assert versions.champions() == ["1"]
    versions.undo(RECORD)
    assert versions.champions() == ["1"]


def test_a_registry_that_is_away_changes_nothing(tmp_path: Path) -> None:
    versions = DrillVersions(tmp_path, {"1": "b1", "2": "b2"})
    (tmp_path / "away").touch()
    with pytest.raises(RegistryUnreachable):
        versions.seal(replace(RECORD, state="seal"))
    assert versions.champions() == ["1"]


def test_an_alias_that_was_moved_by_hand_is_a_conflict(tmp_path: Path) -> None:
    versions = DrillVersions(tmp_path, {"1": "b1", "2": "b2"})
    (tmp_path / "moved").touch()
    with pytest.raises(Conflict, match="moved by hand"):
        versions.seal(RECORD)
    assert versions.champions() == ["1"]


def test_only_a_fault_that_no_gate_can_foresee_may_fail_answers() -> None:
    early = GATE.weights[1] + GATE.weights[5]
    failed = {case.name: case.most_failed for case in CASES if case.most_failed}
    assert failed == {"failing-live": int(FAILING_LIVE * early)}
