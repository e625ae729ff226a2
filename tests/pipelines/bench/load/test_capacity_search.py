"""The search finds the capacity of a server with a known one."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.bench.load.capacity_search import (
    GOAL_MS,
    HIGHEST,
    LOWEST,
    PRECISION,
    Capacity,
    Probe,
    search_capacity,
)


def queue(capacity: float, rate: float) -> Probe:
    """Return the probe of a server that meets the goal up to its capacity and no further."""
    return Probe(rate, 1.0, 0, 1.0, 10.0 if rate <= capacity else 80.0)


def search(probe: Callable[[float], Probe], start: float) -> Capacity:
    """Search the capacity of one server alone."""
    searching = search_capacity(start)
    rate = next(searching)
    while True:
        try:
            rate = searching.send(probe(rate))
        except StopIteration as end:
            capacity: Capacity = end.value
            return capacity


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(1.0, 1e4), st.floats(0.1, 1e4))
def test_the_knee_is_found_from_any_starting_rate(capacity: float, start: float) -> None:
    found = search(lambda rate: queue(capacity, rate), start)
    assert capacity / (1 + PRECISION) <= found.rate <= capacity
    assert found.rate in [probe.rate for probe in found.probes]


def test_each_rate_near_the_knee_is_probed_twice_and_each_doubling_once() -> None:
    found = search(lambda rate: queue(100.0, rate), 10.0)
    asked = [probe.rate for probe in found.probes]
    assert asked[:6] == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0]
    assert all(asked.count(rate) == 2 for rate in asked[4:])


def test_one_failed_probe_does_not_end_the_search() -> None:
    calls: list[float] = []

    def noisy(rate: float) -> Probe:
        calls.append(rate)
        return queue(0.0 if len(calls) % 4 == 0 else 1_000.0, rate)

    assert 1_000.0 / (1 + PRECISION) <= search(noisy, 100.0).rate <= 1_000.0


@pytest.mark.parametrize(
    "broken",
    [{"failed": 1}, {"answered_ratio": 0.98}, {"p99_ms": 51.0}, {"p99_ms": None}, {"degraded_ratio": 0.02}],
)
def test_a_probe_that_breaks_a_goal_does_not_hold(broken: dict[str, float | None]) -> None:
    sound = {"rate": 1.0, "answered_ratio": 1.0, "failed": 0, "p50_ms": 1.0, "p99_ms": 50.0}
    assert Probe(**sound).holds(GOAL_MS)  # type: ignore[arg-type]
    assert not Probe(**{**sound, **broken}).holds(GOAL_MS)  # type: ignore[arg-type]


def test_the_search_ends_for_a_server_that_holds_no_rate_or_any_rate() -> None:
    assert search(lambda rate: queue(0.0, rate), 100.0).rate == 0.0
    assert search(lambda rate: queue(np.inf, rate), 100.0).rate > HIGHEST / 2
    assert all(probe.rate >= LOWEST for probe in search(lambda rate: queue(0.0, rate), 100.0).probes)


def test_searches_take_turns() -> None:
    searches = {capacity: search_capacity(10.0) for capacity in (50.0, 400.0)}
    rates = {capacity: next(search) for capacity, search in searches.items()}
    found = {}
    while searches:
        for capacity in list(searches):
            try:
                rates[capacity] = searches[capacity].send(queue(capacity, rates[capacity]))
            except StopIteration as end:
                found[capacity] = end.value.rate
                del searches[capacity]
    assert all(capacity / (1 + PRECISION) <= rate <= capacity for capacity, rate in found.items())


def test_a_short_run_is_judged_by_its_maximum() -> None:
    counts = {"requests": 10, "answered": 9, "failed": 0, "refused": 1, "unanswered": 0, "degraded": 3}
    probe = Probe.of(5.0, {**counts, "ms": {"p50": 2.0, "p99": None, "max": 9.0}})
    assert probe == Probe(5.0, 0.9, 1, 2.0, 9.0, 3 / 9)
