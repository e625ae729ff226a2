"""A result of known numbers -> a report that shows just those."""

import re
from pathlib import Path
from typing import Any

from pipelines.load_report import draw_load, load_table


def arm(p50: float, cpu_ms: float, capacity: float, ratio: float | None = None) -> dict[str, Any]:
    ms = {"p50": p50, "p99": 2 * p50, "p99_9": None, "mean": p50, "max": 3 * p50}
    probes = [
        {
            "rate": rate,
            "p50_ms": p50,
            "p99_ms": p99,
            "failed": 0,
            "answered_ratio": 1.0,
            "degraded_ratio": 0.0,
        }
        for rate, p99 in ((capacity, 20.0), (2 * capacity, 80.0), (2 * capacity, 90.0))
    ]
    spread = None if ratio is None else {"median": ratio, "min": ratio - 0.25, "max": ratio + 0.25}
    stage = {**ms, "share": 0.5}
    found: dict[str, Any] = {
        "what": "a server",
        "ready_s": 1.0,
        "memory_mb": {"rss": 300.4, "pss": 200.0},
        "alone": {"p50_ms": p50, "p99_ms": 2 * p50, "mean_ms": p50, "rounds": []},
        "cpu_ms": cpu_ms,
        "dollars_a_million": 0.02,
        "wh_a_million": 4.0,
        "stages": {"ranking": stage, "unexplained": stage, "client": {**ms, "share": 1.0}},
        "idle_cpu_ratio": 0.01,
        "capacity": {"rate": capacity, "goal_ms": 50.0, "probes": probes},
        "half": {
            **{"rate": capacity / 2, "ms": ms, "cpu_ms": cpu_ms, "requests": 100, "answered": 99},
            **{"failed": 1, "refused": 0, "unanswered": 1, "degraded": 3, "late": 0},
        },
        "overload": {"goodput_ratio": 0.9, "refused": 7, "requests": 300, "degraded": 4},
    }
    if ratio is not None:
        found["ratio"] = {"p50_ms": spread, "cpu_ms": spread, "capacity": 1 / ratio}
    return found


def result(**more: Any) -> dict[str, Any]:
    ms = {"p50": 2.0, "p99": None}
    return {
        "bundle_id": "b1",
        "measured_at": "2026-11-22T00:00:00+00:00",
        "machine": {"cpu": "A processor", "cores": 2, "load_average": (1.0, 1.0, 1.0)},
        "software": {"python": "3.11"},
        "commit": "abc",
        "load_average_before": (0.5, 0.5, 0.5),
        "load_average_after": (1.5, 1.0, 1.0),
        "effort": {"rounds": 3, "alone_s": 2.0},
        "goal_ms": 50.0,
        "distinct_requests": 7,
        "online_store": {"users": 1_000, "items": 80},
        "constants": {"watts_a_core": 10.0, "dollars_a_core_hour": 0.05},
        "skipped": {"eager": "no weights"},
        "floor": {"mean_ms": 0.123, "p50_ms": 0.1, "cpu_ms": 0.1},
        "arms": {"ours": arm(2.0, 1.5, 400.0), "unoptimised": arm(90.0, 60.0, 8.0, 4.0)},
        "basket_length": {"ms": {"1": ms, "200": ms}, "growth": {"p50": 1.25, "p99": None}},
        "payloads": {
            "REST V1": {"request_bytes": 200.0, "answer_bytes": 1_500.0, "failed": 0, "ms": ms},
            "gRPC": {
                "request_bytes": 100.0,
                "answer_bytes": 750.0,
                "failed": 0,
                "ms": {"p50": 3.0, "p99": 4.0},
            },
        },
        **more,
    }


def test_the_first_table_is_what_a_manager_reads() -> None:
    text = load_table(result())
    rows = re.findall(r"^\| (?:\*\*ours\*\*|unoptimised|eager) \|.*$", text, re.MULTILINE)
    assert rows[:3] == [
        "| **ours** | 2.00 | 4.00 | 400 | 1.50 | 0.020 | 4.0 | 300 / 200 |  |",
        "| unoptimised | 90.00 | 180 | 8.00 | 60.00 | 0.020 | 4.0 | 300 / 200 "
        "| 4.00x [3.75, 4.25], 4.00x [3.75, 4.25], 0.25x |",
        "| eager | skipped: no weights |" + " |" * 7,
    ]


def test_each_part_says_its_figures() -> None:
    text = load_table(result())
    assert "| ours | 200.0 | 2.00 | 4.00 | – | 1.50 | 2, 0, 3 of 100 | 90% | 7 of 300 | 4 |" in text
    assert "From 1 item to 200: p50 1.25x." in text
    assert "| gRPC | 100 | 750 | 3.00 | 4.00 | 1.50x | 0 |" in text
    assert "| ours | 400: 20.0, 800: 85.0 |" in text, "a rate that was asked twice shows its median"
    assert "takes 0.123 ms" in text
    assert "used 2.0% of a core" in text
    assert "Endurance" not in text


def test_an_arm_without_a_capacity_and_an_endurance_run_are_told() -> None:
    slow = arm(90.0, 60.0, 0.0, 4.0)
    del slow["half"], slow["overload"]
    grown = {"requests": 60_000, "failed": 0, "rss_mb": [(0, 300.0), (60_000, 310.0)]}
    grown |= {"mb_per_1000_requests": 0.0123, "mb_after_warm_up": 0.6}
    text = load_table(result(arms={"ours": arm(2.0, 1.5, 400.0), "unoptimised": slow}, endurance=grown))
    assert "| unoptimised | held no rate |" in text
    assert "60,000 requests without a pause, 0 failed" in text
    assert "0.012 MB a thousand requests" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw_load(result(), tmp_path / "figures")
    assert (tmp_path / "figures" / "load.png").read_bytes().startswith(b"\x89PNG")
