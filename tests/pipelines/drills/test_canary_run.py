"""The figures of one case, from the states that were seen and the answers."""

from pipelines.drills.canary_run import _figures
from pipelines.drills.outcome import CLIENT, RAW, Answer
from pipelines.drills.report import release_table


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
    found = _figures(seen, streams, "new")
    assert (found["detect_s"], found["abort_s"], found["full_s"]) == (12.0, 0.5, None)
    assert (found["requests"], found["failed_at_client"], found["failed_straight"]) == (4, 0, 1)
    assert (found["touched"], found["hurt"], found["largest_weight"]) == (50.0, 2, 1)


def test_the_page_has_a_row_for_each_case() -> None:
    case = {
        **_figures([(1.0, "shadow", 0), (2.0, "abort", 0)], {CLIENT: [answer(1.0, "old")], RAW: []}, "new"),
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
            "machine": {"cores": 2, "cpu": "a processor"},
            "commit": "c",
            "measured_at": "now",
        }
    )
    assert "0 of 1 cases reach every figure, not failing." in page
    assert "| `failing` | 1.0 | 0.0 | 1 | 0 | 0 | 0.0 % | aborted | 0 % | no |" in page
