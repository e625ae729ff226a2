"""A result of known numbers -> a report with exactly those."""

import re
from pathlib import Path
from typing import Any

from pipelines.bench.load.report import difference, draw_load, load_table


def arm(p50: float, cpu_ms: float, capacity: float, ratio: float | None = None) -> dict[str, Any]:
    ms = {"p50": p50, "p99": 2 * p50, "p99_9": None, "mean": p50, "max": 3 * p50}
    probes = [
        {
            "rate": rate,
            "p50_ms": p50,
            "p99_ms": p99,
            "in_time_ratio": 1.0,
        }
        for rate, p99 in ((capacity, 20.0), (2 * capacity, 80.0), (2 * capacity, 90.0))
    ]
    spread = None if ratio is None else {"median": ratio, "min": ratio - 0.25, "max": ratio + 0.25}
    stage = {**ms, "share": 0.5}
    found: dict[str, Any] = {
        "what": "a server",
        "ready_s": 1.0,
        "first_ms": 3 * p50,
        "first_degraded": False,
        "choosing": {"p50": 1.25, "p99": 2.75},
        "memory_mb": {"rss": 300.4, "pss": 200.0},
        "alone": {"p50_ms": p50, "p99_ms": 2 * p50, "rounds": []},
        "cpu_ms": cpu_ms,
        "stages": {"ranking": stage, "unexplained": stage, "client": {**ms, "share": 1.0}},
        "capacity": {
            **{"rate": capacity, "goal_ms": 50.0, "probes": probes},
            "rates": [0.5 * capacity, capacity, 2 * capacity],
        },
        "half": {
            **{"rate": capacity / 2, "ms": ms, "requests": 100},
            **{"failed": 1, "refused": 0, "unanswered": 1, "degraded": 3},
        },
        "overload": {
            **{"goodput_ratio": 0.9, "degraded_ratio": 0.25, "refused": 7, "requests": 300},
            **{"degraded": 4, "failed": 2, "unanswered": 1},
        },
    }
    if ratio is not None:
        found["ratio"] = {
            "p50_ms": spread,
            "cpu_ms": spread,
            "capacity": {"median": 1 / ratio, "min": 0.5 / ratio, "max": 1.0},
        }
    return found


def result(**more: Any) -> dict[str, Any]:
    ms = {"p50": 2.0, "p99": None}
    return {
        "bundle_id": "b1",
        "measured_at": "2026-11-22T00:00:00+00:00",
        "machine": {"cpu": "A processor", "cores": 2},
        "software": {"python": "3.11"},
        "commit": "abc",
        "effort": {"rounds": 3, "alone_s": 2.0, "searches": 4},
        "goal_ms": 50.0,
        "requests": 7,
        "candidates": 500,
        "online_store": {"users": 1_000, "items": 80},
        "skipped": {"eager": "no weights"},
        "arms": {"ours": arm(2.0, 1.5, 400.0), "fastapi-torch": arm(90.0, 60.0, 8.0, 4.0)},
        "basket_length": {"ms": {"1": ms, "200": ms}, "growth": {"p50": 1.25, "p99": None}},
        "goals": [
            {"name": "p50", "goal": "<= 2 ms", "measured": 2.0, "unit": " ms", "reached": True},
            {"name": "rate", "goal": ">= 500", "measured": 400.0, "unit": "", "reached": False},
            {"name": "two", "goal": ">= 900", "measured": None, "unit": "", "reached": None},
            {"name": "over", "goal": ">= 8 x", "measured": None, "unit": " x", "reached": True},
        ],
        **more,
    }


def test_the_first_table_has_one_row_per_arm() -> None:
    text = load_table(result())
    rows = re.findall(r"^\| (?:\*\*ours\*\*|fastapi-torch|eager) \|.*$", text, re.MULTILINE)
    assert rows[:3] == [
        "| **ours** | 2.00 | 4.00 | 400 [200, 800] | 1.50 | 300 / 200 |  |  |  |",
        "| fastapi-torch | 90.00 | 180 | 8.00 [4.00, 16] | 60.00 | 300 / 200 "
        "| 4.00x [3.75, 4.25] | 4.00x [3.75, 4.25] | no difference (0.25x [0.12, 1.00]) |",
        "| eager | skipped: no weights |" + "  |" * 7,
    ]
    assert "at most 500 candidates ranked for each" in text
    assert "`ours` $0.021 and 4.2 Wh; `fastapi-torch` $0.833 and 166.7 Wh." in text


def test_the_report_begins_with_ours_beside_the_unoptimised_stack() -> None:
    arms = {"ours": arm(2.0, 1.5, 400.0), "fastapi-torch": arm(19.0, 9.0, 80.0, 9.5)}
    lines = load_table(result(arms=arms)).splitlines()
    assert lines[2] == (
        "An answer takes `ours` 2.00 ms (p50) and 1.50 ms of processor time; one process gives "
        "400 [200, 800] answers a second with 99 % within 50 ms. `fastapi-torch` against that: "
        "p50 9.50x [9.25, 9.75], "
        "processor time 9.50x [9.25, 9.75], answers a second no difference (0.11x [0.05, 1.00])."
    )
    assert lines[4].startswith("| arm | p50 ms |")
    alone = load_table(result(arms={"ours": arms["ours"]})).splitlines()[2]
    assert alone.endswith("99 % within 50 ms. `fastapi-torch` was not measured beside it.")


def test_a_capacity_that_each_search_found_alike_was_not_measured_once() -> None:
    ours = arm(2.0, 1.5, 400.0)
    for rates, text in (([400.0] * 4, "400 [400, 400]"), ([400.0], "400, measured once")):
        ours["capacity"]["rates"] = rates
        assert f"one process gives {text} answers a second" in load_table(result(arms={"ours": ours}))


def test_one_round_proves_no_difference() -> None:
    assert difference({"median": 0.8, "min": 0.8, "max": 0.8}) == "0.80x, measured once"
    assert difference(None) == "–"


def test_each_figure_and_each_goal_has_its_line_and_misses_are_marked() -> None:
    text = load_table(result())
    for line in (
        "re-ranking of an answer together: p50 1.25 ms, p99 2.75 ms.",
        "| p50 | <= 2 ms | 2.00 ms | yes |",
        "| rate | >= 500 | 400 | no |",
        "| two | >= 900 | – | not measured |",
        "| over | >= 8 x | the other holds no rate | yes |",
        "| ours | 200.0 | 2.00 | 4.00 | – | 2, 0, 3 of 100 | 90% | 25% | 7 of 300 | 3 |",
        "From 1 item to 200: p50 1.25x.",
        "| ranking | 50.0% | 2.00 | 4.00 | 2.000 | 90.000 |",
    ):
        assert line in text
    assert "Endurance" not in text, "it was not measured"


def test_an_arm_without_capacity_and_an_endurance_run_are_reported() -> None:
    slow = arm(90.0, 60.0, 0.0, 4.0)
    del slow["half"], slow["overload"]
    grown = {"requests": 60_000, "failed": 0, "anonymous_mb": [(0, 300.0), (1_000, 350.0), (2_000, 310.0)]}
    grown |= {"mb_per_1000_requests": 0.0123, "mb_grown": 0.6}
    text = load_table(result(arms={"ours": arm(2.0, 1.5, 400.0), "fastapi-torch": slow}, endurance=grown))
    assert "| fastapi-torch | held no rate |" in text
    assert "60,000 requests without a pause, 0 failed" in text
    assert "was 300 MiB at the start, and from 310 to 350 MiB after it" in text
    assert "grew by 0.6 MiB, 0.012 MiB per 1,000 requests" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw_load(result(), tmp_path / "figures" / "load.png")
    assert (tmp_path / "figures" / "load.png").read_bytes().startswith(b"\x89PNG")
