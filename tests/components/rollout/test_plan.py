"""The next record: which observation ends a state, and how."""

from dataclasses import replace

import pytest

from components.rollout.comparison import GO, HOLD, GateVerdict
from components.rollout.plan import (
    UNDOABLE,
    Observed,
    Pace,
    RecordInvalid,
    Release,
    advance,
    from_json,
    name_of,
    to_json,
)
from tests.components.rollout.toy_cluster import RECORD

PACE = Pace()
IDEAL = Observed(done=True, verdict=GateVerdict(GO, ""))


def path(record: Release) -> list[str]:
    names = [name_of(record)]
    while record.active:
        record = advance(record, IDEAL, record.since + PACE.hold_s, PACE)
        names.append(name_of(record))
    return names


def test_a_release_goes_through_every_state_in_order() -> None:
    steps = [f"step {weight} %" for weight in (1, 5, 25, 50, 100)]
    assert path(RECORD) == [
        *("verify", "publish", "stage", "shadow", "restage", *steps, "seal", "hold", "settle", "done")
    ]
    alone = replace(RECORD, compared=False)
    assert path(alone) == ["verify", "publish", "stage", "step 100 %", "seal", "hold", "settle", "done"]


@pytest.mark.parametrize("state", UNDOABLE)
def test_a_fault_before_the_seal_gives_all_traffic_back(state: str) -> None:
    record = advance(replace(RECORD, state=state, weight=5), Observed(fault="broken"), 101.0, PACE)
    assert (record.state, record.weight, record.reason) == ("abort", 0, "broken")


def test_after_the_seal_a_missing_series_changes_nothing() -> None:
    held = replace(RECORD, state="hold", weight=100)
    assert advance(held, Observed(missing="x", missing_s=900.0), 101.0, PACE) == held


def test_a_gap_in_the_metrics_is_waited_for_and_then_ends_it() -> None:
    record = replace(RECORD, state="step", weight=5)
    gap = Observed(missing="no metrics", missing_s=59.0)
    assert advance(record, gap, 101.0, PACE) == record
    assert advance(record, replace(gap, missing_s=60.0), 101.0, PACE).reason == "no metrics, for 60 s"


def test_the_last_look_of_each_state_is_kept() -> None:
    record = replace(RECORD, state="step", weight=5)
    for reason in ("1 of 150 answers", "2 of 150 answers"):
        record = advance(record, Observed(verdict=GateVerdict(HOLD, reason)), 101.0, PACE)
    assert [look["reason"] for look in record.gate] == ["2 of 150 answers"]


def test_a_record_survives_the_annotation() -> None:
    record = advance(replace(RECORD, state="shadow"), IDEAL, 120.0, PACE)
    assert from_json(to_json(record)) == record
    for text in ("", '{"id": 1}'):
        with pytest.raises(RecordInvalid, match="kubectl annotate"):
            from_json(text)
