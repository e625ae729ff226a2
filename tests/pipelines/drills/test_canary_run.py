"""The figures of one case, from the states that were seen and the answers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.bench.load.waiting import NotReached
from pipelines.drills.canary import CASES, Case, Shop
from pipelines.drills.canary_run import _figures, drill_release
from pipelines.drills.outcome import CLIENT, RAW, Answer
from pipelines.drills.report import release_table
from pipelines.inspect.ask import evaluation_requests

SLOW = next(case for case in CASES if case.name == "slow")


def answer(due: float, bundle: str, ok: bool = True, degraded: bool = False) -> Answer:
    document = {"bundle_id": bundle, "degraded": degraded, "rung": "full", "items": []} if ok else {}
    return Answer(0, due, 1.0, 1.0, ok, document)


def test_times_count_from_the_mirror_and_hurt_is_what_the_canary_did() -> None:
    seen = [
        (10.0, "stage", 0),
        (12.0, "shadow", 0),
        (20.0, "step", 1),
        (24.0, "abort", 0),
        (25.0, "aborted", 0),
    ]
    streams = {
        CLIENT: [answer(11.0, "old"), answer(21.0, "new", degraded=True)],
        RAW: [answer(22.0, "old", ok=False), answer(24.5, "new")],
    }
    found = _figures(SLOW, seen, streams, "new")
    assert (found["detect_s"], found["abort_s"], found["full_s"]) == (12.0, 0.5, None)
    assert (found["requests"], found["failed_at_client"], found["failed_straight"]) == (4, 0, 1)
    assert (found["touched"], found["hurt"], found["largest_weight"]) == (50.0, 2, 1)
    live = _figures(replace(SLOW, fault="slow-live"), seen, streams, "new")
    assert live["detect_s"] == 4.0, "its fault shows from the first step on"


def test_the_page_has_a_row_for_each_case() -> None:
    seen = [(1.0, "shadow", 0), (2.0, "abort", 0)]
    streams = {CLIENT: [answer(1.0, "old")], RAW: [answer(1.0, "old", ok=False)]}
    case = {
        **_figures(SLOW, seen, streams, "new"),
        "ended": "aborted",
        "passed": False,
        "proves": "a bad one is aborted",
        "reason": "errors",
        "goals": [],
    }
    page = release_table(
        {
            "bundle_id": "b1",
            "rate": 50.0,
            "cases": {"failing": case},
            "broken_off": {"good": "waited 1 s in vain"},
            "machine": {"cores": 2, "cpu": "a processor"},
            "commit": "c",
            "measured_at": "now",
        }
    )
    assert "0 of 2 cases reach every figure, not failing, good." in page
    assert "`good` was broken off: waited 1 s in vain" in page
    assert "| `failing` | 1.0 | 0.0 | 2 | 0 | 1 | 0.0 % | aborted | 0 % | no |" in page


def never_goes_on(shop: Shop) -> dict[str, Any]:
    raise NotReached("waited 1 s in vain: the release goes on")


@pytest.mark.slow
def test_a_case_runs_on_real_endpoints_after_one_that_was_broken_off(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.drills.canary_run.BEFORE_S", 1.0)
    bundle = toy_line / "evaluated"
    requests = evaluation_requests(bundle, 200)
    cases = [
        Case("broken-off", "nothing", "", never_goes_on),
        *(
            replace(case, pace=replace(case.pace, ready_s=4.0))
            for case in CASES
            if case.name == "never-ready"
        ),
    ]
    result = drill_release(
        bundle, toy_line / "home" / "offline_store", requests, tmp_path, cases, 10.0, 5_000.0
    )
    assert result["broken_off"] == {"broken-off": "waited 1 s in vain: the release goes on"}
    assert list(result["cases"]) == ["never-ready"]
    assert not result["passed"]
    case = result["cases"]["never-ready"]
    assert (case["ended"], case["reason"]) == ("aborted", "stage after 4 s: the slot is not ready")
    assert (case["largest_weight"], case["failed_at_client"], case["failed_straight"]) == (0, 0, 0)
    assert (tmp_path / "release.md").is_file()
