"""The versions of the release drill, and its cases."""

from pathlib import Path

import pytest

from pipelines.drills.bad_endpoint import FAILING_LIVE
from pipelines.drills.canary import CASES, GATE, DrillVersions, Shop
from tests.components.rollout.toy_cluster import RECORD, ToyCluster


def test_the_alias_moves_once_and_back(tmp_path: Path) -> None:
    versions = DrillVersions(tmp_path, {"1": "b1", "2": "b2"})
    for _ in range(2):
        versions.seal(RECORD)
    assert versions.champions == ["1", "2"]
    assert versions.previous() == ("1", "b1")
    for _ in range(2):
        versions.undo(RECORD)
        assert versions.champions == ["1"]


def test_only_a_fault_that_no_gate_can_foresee_may_fail_answers() -> None:
    early = GATE.weights[1] + GATE.weights[5]
    failed = {case.name: case.most_failed for case in CASES if case.most_failed}
    assert failed == {"failing-live": int(FAILING_LIVE * early)}


def test_a_case_whose_canary_is_aborted_has_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside other work: the case is missed, and the drill goes on with the next one."""
    toy, versions = ToyCluster(tmp_path), DrillVersions(tmp_path, {"1": "b1", "2": "b2"})
    toy.errors = 0.5
    monkeypatch.setattr(Shop, "rollout", lambda _: toy.rollout())
    [case] = [case for case in CASES if case.name == "good"]
    shop = Shop(None, versions, GATE)  # type: ignore[arg-type]
    end = case.act(shop)
    assert (end["ended"], "errors" in end["reason"]) == ("aborted", True)
