"""The search finds the capacity of a server with a known one."""

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.bench.load.capacity_search import (
    HIGHEST,
    LOWEST,
    PRECISION,
    Capacity,
    Probe,
    search_capacity,
)


def queue(capacity: float, rate: float) -> Probe:
    """Return the probe of a server that is in time up to its capacity and no further."""
    return Probe(rate, 1.0 if rate <= capacity else 0.5, 10.0)


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


def test_99_of_100_requests_in_time_hold_a_rate() -> None:
    assert Probe(1.0, 0.99, 500.0).holds, "one pause of the machine is within what may be late"
    assert not Probe(1.0, 0.98, 10.0).holds


def test_the_search_ends_for_a_server_that_holds_no_rate_or_any_rate() -> None:
    assert search(lambda rate: queue(0.0, rate), 100.0).rate == 0.0
    assert search(lambda rate: queue(np.inf, rate), 100.0).rate > HIGHEST / 2
    assert all(probe.rate >= LOWEST for probe in search(lambda rate: queue(0.0, rate), 100.0).probes)


def test_refused_late_and_degraded_requests_are_not_in_time() -> None:
    probe = Probe.of(5.0, {"requests": 10, "good": 6, "ms": {"p99": None, "max": 9.0}})
    assert probe == Probe(5.0, 0.6, 9.0), "a short run shows its maximum"
