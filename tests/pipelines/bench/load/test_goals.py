"""A result of known figures -> each goal is reached or missed accordingly."""

import json
from typing import Any

import pytest

from pipelines.bench.load.goals import judge_goals


def result() -> dict[str, Any]:
    """A result in which every figure equals its bound."""
    p99s = {"features": 0.49, "retrieval": 0.99, "ranking": 0.99, "reranking": 0.49}
    stages = {name: {"p99": p99} for name, p99 in p99s.items()}
    ours = {
        "ready_s": 20.0,
        "first_ms": 8.0,
        "first_degraded": False,
        "alone": {"p50_ms": 2.0, "p99_ms": 4.0, "rounds": [{"answered": 1_000, "degraded": 10}] * 5},
        "cpu_ms": 1.8,
        "capacity": {"rate": 500.0},
        "stages": {**stages, "unexplained": {"share": 0.25}},
        "choosing": {"p99": 50.0},
        "half": {"unanswered": 0, "ms": {"p50": 45.0, "p95": 90.0, "p99": 99.0, "max": 2_000.0}},
        "overload": {"goodput_ratio": 0.9},
    }
    return {
        "goal_ms": 50.0,
        "arms": {
            "ours": ours,
            "fastapi-torch": {"ratio": {"p50_ms": {"median": 2.67}, "capacity": {"median": 0.3125}}},
        },
        "basket_length": {"growth": {"p50": 9.0, "p99": 1.5}},
        "endurance": {"requests": 60_000, "mb_per_1000_requests": 5 / 60},
    }


def judged(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {goal["name"]: goal for goal in judge_goals(found)}


def test_all_goals_are_reached_at_their_bounds() -> None:
    goals = judge_goals(result())
    assert {goal["reached"] for goal in goals} == {True}
    assert [(goal["goal"], goal["measured"]) for goal in goals] == [
        *[("<= 2 ms", 2.0), ("<= 4 ms", 4.0)],
        *[("< 0.5 ms", 0.49), ("< 1 ms", 0.99), ("< 1 ms", 0.99), ("< 0.5 ms", 0.49)],
        *[("<= 50 ms", 50.0), (">= 75 %", 75.0)],
        *[("<= 1.8 ms", 1.8), (">= 500", 500.0), (">= 2.67 x", 2.67), (">= 3.2 x", 3.2)],
        *[("<= 1.5 x", 1.5), (">= 90 %", 90.0)],
        *[("<= 45 ms", 45.0), ("<= 90 ms", 90.0), ("< 100 ms", 99.0)],
        *[("<= 2000 ms", 2_000.0), ("<= 20 s", 20.0), ("<= 2 x", 2.0)],
        ("<= 5 MiB", 5.0),
    ]
    figures = {goal["name"].rpartition(", ")[0] or goal["name"] for goal in goals}
    assert len(figures) == len(goals), "a goal that another one implies counts a figure twice"
    json.dumps(goals, allow_nan=False)


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        (("arms", "ours", "alone", "p50_ms"), 2.01, "p50 over KServe REST"),
        (("arms", "ours", "alone", "p99_ms"), 4.01, "p99 over KServe REST"),
        (("arms", "ours", "stages", "features", "p99"), 0.5, "p99 of features"),
        (("arms", "ours", "stages", "reranking", "p99"), 0.5, "p99 of reranking"),
        (("arms", "ours", "choosing", "p99"), 50.1, "p99 of retrieval, ranking and re-ranking"),
        (("arms", "ours", "stages", "unexplained", "share"), 0.26, "share of the client's"),
        (("arms", "ours", "half", "ms", "p50"), 45.1, "p50 at half of the capacity, within 45 ms"),
        (("arms", "ours", "half", "ms", "p95"), 90.1, "p95 at half of the capacity, within 90 ms"),
        (("arms", "ours", "half", "ms", "p99"), 100.0, "p99 at half of the capacity, below 100 ms"),
        (("arms", "ours", "half", "ms", "max"), 2_001.0, "slowest answer at half"),
        (("arms", "ours", "half", "unanswered"), 1, "slowest answer at half"),
        (("arms", "ours", "ready_s"), 20.1, "from start to ready, within 20 s"),
        (("arms", "ours", "first_ms"), 8.1, "first answer of all"),
        (("arms", "ours", "first_ms"), None, "first answer of all"),
        (("arms", "ours", "first_degraded"), True, "first answer of all"),
        (("arms", "ours", "cpu_ms"), 1.81, "processor time"),
        (("arms", "fastapi-torch", "ratio", "p50_ms", "median"), 2.66, "p50 lower"),
        (("arms", "fastapi-torch", "ratio", "capacity", "median"), 0.32, "capacity higher"),
        (("arms", "ours", "overload", "goodput_ratio"), 0.89, "full answers in time"),
        (("basket_length", "growth", "p99"), 1.51, "p99 with the longest"),
        (("endurance", "mb_per_1000_requests"), 0.084, "growth of memory"),
    ],
)
def test_a_figure_beyond_its_bound_misses_that_goal_alone(
    path: tuple[str, ...], value: float | None, name: str
) -> None:
    found = result()
    place: Any = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    missed = [goal for goal in judge_goals(found) if goal["reached"] is not True]
    assert [goal["reached"] for goal in missed] == [False]
    assert missed[0]["name"].startswith(name)


def test_degraded_answers_reach_no_goal_of_the_full_path() -> None:
    """With a deadline of a millisecond each is a fallback's, at once and without ranking."""
    found = result()
    found["arms"]["ours"]["alone"]["rounds"] = [{"answered": 1_000, "degraded": 11}]
    open_goals = [goal["name"] for goal in judge_goals(found) if goal["reached"] is None]
    assert [name.partition(",")[0] for name in open_goals] == [
        *("p50 over KServe REST", "p99 over KServe REST"),
        *("p99 of features", "p99 of retrieval", "p99 of ranking", "p99 of reranking"),
        *("share of the client's mean time that the stages explain", "processor time of an answer"),
        "p50 lower than that of `fastapi-torch`",
    ]


def test_an_unmeasured_goal_is_neither_reached_nor_missed() -> None:
    found = result()
    found["arms"] = {"ours": {**found["arms"]["ours"], "stages": None, "choosing": None}}
    del found["arms"]["ours"]["overload"], found["arms"]["ours"]["half"], found["endurance"]
    del found["arms"]["ours"]["first_ms"]
    found["basket_length"] = {"growth": {"p50": 1.0, "p99": None}}
    goals = judged(found)
    assert sum(goal["reached"] is None for goal in goals.values()) == 15
    assert all(goal["measured"] is None for goal in goals.values() if goal["reached"] is None)
    assert not any(name.startswith("growth of") for name in goals), "only with --endurance"


def test_memory_is_judged_only_after_enough_requests() -> None:
    found = result()
    found["endurance"]["requests"] = 400
    assert judged(found)["growth of memory in 60,000 requests"]["reached"] is None


def test_a_server_that_holds_no_rate_is_exceeded_by_no_figure() -> None:
    found, name = result(), "capacity higher than that of `fastapi-torch`"
    found["arms"]["fastapi-torch"]["ratio"]["capacity"] = {"median": 0.0}
    assert (judged(found)[name]["reached"], judged(found)[name]["measured"]) == (True, None)
    found["arms"]["fastapi-torch"]["ratio"]["capacity"] = None  # ours holds no rate either
    assert (judged(found)[name]["reached"], judged(found)[name]["measured"]) == (None, None)
