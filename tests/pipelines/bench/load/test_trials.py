"""Loads of known figures -> each trial reports exactly those."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from pipelines.bench.load.connections import OK
from pipelines.bench.load.generator import Load
from pipelines.bench.load.measured_server import MeasuredServer
from pipelines.bench.load.trials import memory_growth


class Growing:
    """A server whose memory grows by so many MiB between two looks."""

    def __init__(self, each_mb: float) -> None:
        self._looks: Iterator[float] = (300.0 + each_mb * look for look in range(1_000))

    def memory_mb(self) -> dict[str, float]:
        return {"rss": next(self._looks)}


def send(seconds: float, requests: int, **plan: Any) -> Load:
    """Answer all requests but the first."""
    none = np.zeros(requests, bool)
    status = np.full(requests, OK)
    status[0] = 500
    return Load(none * 0.0, none * 1.0, none * 0.0, status, none, 0.0)


@pytest.mark.parametrize("each_mb", [0.0, 0.5])
def test_the_growth_of_memory_is_its_slope_after_the_first_quarter(each_mb: float) -> None:
    found = memory_growth(send, cast(MeasuredServer, Growing(each_mb)), requests=2_000)
    assert (found["requests"], found["failed"]) == (2_000, 20), "one of each hundred"
    assert found["mb_per_1000_requests"] == pytest.approx(each_mb * 10, abs=1e-9)
    assert found["mb_after_warm_up"] == pytest.approx(each_mb * 15)
