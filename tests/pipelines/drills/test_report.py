"""A result of known figures -> the page about them, and a picture."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monitoring.alerting import read_slo
from pipelines.drills.catalogue import choose_drills
from pipelines.drills.outcome import CLIENT, RAW, Answer
from pipelines.drills.report import (
    alerts_table,
    draw_dashboards,
    draw_drills,
    drill_rows,
    drill_table,
    list_table,
    release_table,
)
from pipelines.live.monitors import Monitors


def tally(**changed: Any) -> dict[str, Any]:
    counts = dict.fromkeys(("failed", "degraded", "late", "unlabelled"), 0)
    times = {"p50_ms": 3.0, "p99_ms": 8.25, "max_ms": 9.0}
    return {"requests": 1_200, **counts, "reasons": {}, **times, **changed}


def drill(passed: bool, recovery_s: float | None = 0.5) -> dict[str, Any]:
    during = {
        CLIENT: tally(degraded=1_100, reasons={"features_unavailable": 1_100}, late=2),
        RAW: tally(failed=7, p50_ms=None),
    }
    goal = {"name": "until answers are whole again", "goal": "<= 3 s", "unit": " s"}
    return {
        "proves": "it goes on",
        **{phase: {CLIENT: tally(), RAW: tally()} for phase in ("before", "after")},
        "during": during,
        "all": {CLIENT: tally(requests=3_600, late=2), RAW: tally()},
        "faults": [{"name": "killed", "seconds": 10.0, "during": during}],
        "goals": [{**goal, "measured": recovery_s, "reached": passed}],
        "recovery_s": recovery_s,
        "passed": passed,
        "marks_s": [[1.0, 2.0]],
        "notes": {"dropped": 7},
    }


def result() -> dict[str, Any]:
    return {
        "bundle_id": "b1",
        "machine": {"cores": 2, "cpu": "a processor"},
        "commit": "abc",
        "measured_at": "now",
        "deadline_ms": 50.0,
        "effort": {"client_rate": 40.0, "raw_rate": 20.0, "during_s": 10.0},
        "drills": {"store-killed": drill(True), "overload": drill(False, None)},
        "broken_off": {"worker-killed": "it never was ready"},
    }


def test_the_page_begins_with_the_passed_and_the_failed_drills() -> None:
    page = drill_table(result())
    assert page.startswith("# Drills on bundle b1\n\n1 of 3 drills reach every figure, ")
    assert "not `overload`, `worker-killed`; of 7,200 calls" in page
    assert "of 7,200 calls of the client 0 failed, 4 came too late, and 0 were less" in page
    assert "\n`worker-killed` was broken off: it never was ready\n" in page
    assert "| until answers are whole again | <= 3 s | 0.5 s | yes |" in page
    assert "| until answers are whole again | <= 3 s | – | no |" in page
    assert "| killed | 10.0 | client | 1200 | 0 | 1100 | features_unavailable 1100 | 3.0 / 8.2 |" in page
    assert page.count('Noted beside: `{"dropped": 7}`') == 2
    assert "| killed | 10.0 | raw | 1200 | 7 | 0 | – | – / 8.2 |" in page


def test_a_row_shows_the_effect_on_callers() -> None:
    _, line, killed, overload = drill_rows(result())
    assert set(line) == {"|", "-"}
    assert (
        killed
        == "| `store-killed` | 0 | 2 | 1,100 of 1,200 | 3.0 / 8.2 | 3.0 / 8.2 | 3.0 / 8.2 | 0.50 | yes |"
    )
    assert overload.endswith("| never | no |")


def test_each_drill_is_drawn(tmp_path: Path) -> None:
    whole = {"rung": "full", "degraded": False, "items": [], "bundle_id": "b1"}
    answers = [Answer(0, 5.0 + n / 10, 4.0, 4.0, n != 3, whole if n != 3 else {}) for n in range(9)]
    draw_drills(result(), {"store-killed": answers, "overload": answers}, tmp_path / "drills.png")
    assert (tmp_path / "drills.png").read_bytes().startswith(b"\x89PNG")


def test_pages_are_counted_and_shown_with_the_misses() -> None:
    names = ("fault", "expected", "paged_s", "resolved_s", "wrong", "tickets")
    rows: list[tuple[Any, ...]] = [
        ("killed", "A", 44.4, 250.2, [], ["T"]),
        ("slow", "A", 61.0, None, ["B"], []),
        ("full", "", None, None, [], []),
    ]
    pages = [dict(zip(names, row, strict=True)) for row in rows]
    found = result() | {"broken_off": {}, "effort": {"during_s": 75.0, "history_s": 130.0}}
    goals = [
        {"name": "wrong pages", "goal": "<= 0", "measured": 1.0, "reached": False},
        {"name": "until the right page", "goal": "<= 60 s", "measured": None, "reached": False},
        {"name": "failed", "goal": "<= 0", "measured": 0.0, "reached": True},
    ]
    found["drills"] = {"one": {"pages": pages, "goals": goals}}
    text = alerts_table(found)
    assert "3 faults, 2 of which must page: 2 right pages came, 1 of them within 60 s" in text
    assert "1 ended within 300 s of the repair. Wrong pages: 1." in text
    assert "| `one` | killed | A | 44 | 250 | none | T |" in text
    assert "\n- `one`: wrong pages 1 (wanted <= 0); until the right page – (wanted <= 60 s)\n" in text


@pytest.mark.parametrize(("name", "page"), [("alerts", alerts_table), ("release", release_table)])
def test_the_published_page_is_that_of_its_result_file(name: str, page: Callable[[Any], str]) -> None:
    figures = Path(__file__).parents[3] / "docs" / "figures"
    result = json.loads((figures / f"{name}.json").read_text(encoding="utf-8"))
    assert page(result) == (figures / f"{name}.md").read_text(encoding="utf-8")


def test_the_pages_of_the_docs_are_drawn_from_a_prometheus(tmp_path: Path) -> None:
    class Recorded(Monitors):
        def series(self, query: str, points: int = 400) -> dict[str, list[tuple[float, float]]]:
            return {"full": [(0.0, 1.0), (5.0, 2.0)]} if "responses" in query else {}

    draw_dashboards(Recorded("", 0.0), tmp_path)
    names = {f"dashboard-{board['name']}.png" for board in read_slo()["dashboards"]}
    assert {file.name for file in tmp_path.iterdir()} == names
    height = int.from_bytes((tmp_path / "dashboard-checkout.png").read_bytes()[20:24])
    assert height == 338, "two of its six panels have data: one row"


def test_the_list_has_a_line_for_each_drill_and_the_goals_of_a_single_one() -> None:
    [drill] = choose_drills(["store-frozen"])
    said = list_table([drill])
    assert said.startswith("store-frozen: a frozen store holds no request")
    assert "faults: frozen" in said
    assert "longest wait of a request for the store" in said
    assert "<= 15 ms" in said
    drills = choose_drills(["all"])
    lines = list_table(drills).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [drill.name for drill in drills]
