"""Slow clients beside a healthy one, against the real server; the figures are for a quiet machine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving.bench_slow_clients import beside_healthy
from serving.connections import FIRST_S, SWEEP_S
from serving.load_generator import load_generator
from serving.settings import Settings

BODIES = [json.dumps({"basket": [str(1_000_000 + n)], "k": 10}).encode() for n in range(200)]
BUSY = 10.0  # times: a busy machine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count", "status", "longest_s"),
    [
        ("half-bodies", 200, "408", 1.0),
        ("idle", 200, None, FIRST_S + 2 * SWEEP_S),
        ("long-body", 1, "413", 60.0),
    ],
)
def test_healthy_callers_are_all_answered_beside_slow_ones(
    toy_bundle: Path,
    toy_store: str,
    tmp_path: Path,
    start_endpoint: Callable[..., Any],
    kind: str,
    count: int,
    status: str | None,
    longest_s: float,
) -> None:
    settings = Settings(home=tmp_path, store_url=toy_store, deadline_ms=30_000.0, log=False)
    running = start_endpoint(toy_bundle, settings)
    with load_generator() as generator:
        url = f"{running.http}/v1/recommendations"
        measured = beside_healthy(generator, url, BODIES, kind, count, rate=50, seconds=4.0, pairs=1)
    print(json.dumps(measured))  # noqa: T201 - what the README tells comes from here
    (seen,) = measured["slow_clients"]
    assert measured["failed"] == 0
    assert seen["opened"] >= count
    assert set(seen["statuses"]) <= {status}
    assert seen["longest_s"] < longest_s * BUSY
    if kind == "half-bodies":
        assert seen["statuses"]["408"] >= count
