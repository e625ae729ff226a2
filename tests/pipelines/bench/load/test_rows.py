"""The runs of an arm -> its figures, pooled over the pairs, and its ratios to ours."""

from typing import Any, cast

import pytest

from pipelines.bench.load.arms import Arm
from pipelines.bench.load.capacity_search import Capacity
from pipelines.bench.load.connections import UNANSWERED
from pipelines.bench.load.measure import ArmRun
from pipelines.bench.load.measured_server import MeasuredServer
from pipelines.bench.load.rows import choosing_of, pooled_row, ratios, stages_of
from tests.pipelines.bench.load.loads import load_of


def run_of(p50_ms: list[float], rate: float, **more: Any) -> ArmRun:
    """Return a run with a round for each p50, and a capacity."""
    server = cast(MeasuredServer, None)
    run = ArmRun(Arm("some", "a server"), server, (), 2.0, **more)
    for p50 in p50_ms:
        times = {"p50_ms": p50, "p99_ms": 2 * p50}
        run.rounds.append({**times, "cpu_ms": p50 / 2})
    run.capacities = [Capacity(rate, ())]
    run.memory_mb = {"rss": 300.0, "pss": 200.0}
    return run


def test_ours_is_the_median_over_all_its_pairs() -> None:
    runs = [run_of([1.0, 2.0], 100.0), run_of([3.0, 4.0], 300.0), run_of([5.0], 200.0)]
    row = pooled_row(runs, 50.0)
    assert (row["alone"]["p50_ms"], row["alone"]["p99_ms"], row["cpu_ms"]) == (3.0, 6.0, 1.5)
    assert (row["capacity"]["rate"], row["capacity"]["rates"]) == (200.0, [100.0, 300.0, 200.0])
    assert row["memory_mb"] == {"rss": 300.0, "pss": 200.0}
    assert "half" not in row


def test_an_arm_is_compared_with_ours_of_the_same_pair() -> None:
    found = ratios(run_of([2.0, 8.0, 3.0], 50.0), run_of([1.0, 2.0, 3.0], 100.0))
    assert found["p50_ms"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert found["capacity"] == {"median": 0.5, "min": 0.5, "max": 0.5}
    assert "capacity" not in ratios(run_of([2.0], 50.0), run_of([1.0], 0.0))


def test_a_capacity_is_the_median_of_its_searches_and_compared_search_by_search() -> None:
    run, ours = run_of([1.0], 0.0), run_of([1.0], 0.0)
    run.capacities = [Capacity(rate, ()) for rate in (90.0, 4.0, 110.0)]  # a pause ended the second
    ours.capacities = [Capacity(rate, ()) for rate in (100.0, 100.0, 100.0)]
    assert run.rate == 90.0
    assert ratios(run, ours)["capacity"] == {"median": 0.9, "min": 0.04, "max": 1.1}


def test_overload_counts_full_answers_in_time_over_the_time_they_were_due() -> None:
    # 30 a second for a server that can do 10: it answers 9 in full and 12 by its fallback.
    due = [number / 30 for number in range(301)]
    kinds = [number % 10 for number in range(301)]  # below 3: in full; below 7: degraded; else late
    ms = [5.0 if kind < 7 else 9_000.0 for kind in kinds]
    load = load_of(ms, [number for number, kind in enumerate(kinds) if 3 <= kind < 7], due)
    run = run_of([1.0], 10.0, half=[load], overload=load)
    found = pooled_row([run], 50.0)["overload"]
    assert found["goodput_ratio"] == pytest.approx(0.9, rel=0.02)
    assert found["degraded_ratio"] == pytest.approx(1.2, rel=0.02)
    run.overload = load_of([5.0] * 5, due_s=[0.0, 0.01, 0.02, 0.03, 0.04])
    few = pooled_row([run], 50.0)["overload"]
    assert few["goodput_ratio"] is None, "five requests came together by chance"
    assert few["requests"] == 5


def test_half_load_pools_the_requests_of_all_rounds() -> None:
    loads = [load_of([1.0] * 60)] * 2
    row = pooled_row([run_of([1.0], 20.0, half=loads)], 50.0)
    assert (row["half"]["rate"], row["half"]["requests"]) == (10.0, 120)
    assert row["half"]["ms"]["p99"] == 1.0
    loads[0].status[:2] = UNANSWERED  # their connections were refused at once
    assert pooled_row([run_of([1.0], 20.0, half=loads)], 50.0)["half"]["ms"]["p99"] == pytest.approx(5_901.0)


def test_stages_are_collected_in_order_of_first_appearance() -> None:
    answers: list[dict[str, float]] = [
        {"client_ms": 1.0, "fallback": 0.5, "total": 0.5},  # the first was late
        *[{"client_ms": 3.0, "features": 1.0, "ranking": 1.0, "total": 2.0}] * 3,
    ]
    rows = stages_of(answers)
    assert rows is not None
    assert list(rows) == ["fallback", "features", "ranking", "unexplained", "client"]
    assert [row["mean"] for row in rows.values()] == [0.125, 0.75, 0.75, 0.875, 2.5]
    assert rows["ranking"]["share"] == 0.3
    answers = [{"client_ms": 1.0}]
    assert stages_of(answers) is None


def test_the_selecting_stages_are_added_per_answer() -> None:
    assert choosing_of([]) is None
    # Their p99s are 9 each, but no answer was slow in more than one of them.
    slow = [{"retrieval": 9.0}, {"ranking": 9.0}, {"reranking": 9.0}]
    stages = {"features": 4.0, "retrieval": 1.0, "ranking": 1.0, "reranking": 1.0, "total": 7.0}
    answers = [{"client_ms": 20.0, **stages, **more} for more in (*slow * 2, *[{}] * 95)]
    found = choosing_of(answers)
    assert found is not None
    assert (found["p50"], found["p99"]) == (3.0, 11.0)
    answers = [{"client_ms": 60.0, "fallback": 0.1, "total": 0.1}] * 101
    found = choosing_of(answers)
    assert found is not None
    assert found["p99"] == 60.0, "a late answer counts with all that the client waited"
