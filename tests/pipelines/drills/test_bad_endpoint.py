"""The faults of the release drill's endpoints; tests/pipelines/live/test_small_cluster.py runs one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.drills import bad_endpoint
from serving.checkout.checkout import Checkout


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("complete", "_score"):  # put back after the test
        monkeypatch.setattr(Checkout, name, getattr(Checkout, name))

    async def nothing(turn: Any) -> None: ...

    parts: dict[str, Any] = {"prepare": nothing, "rank": nothing, "finish": lambda turn: "answer"}
    return lambda observers: SimpleNamespace(service=SimpleNamespace(observers=observers), **parts)


def turn(request_id: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(request_id=request_id))


def test_a_fault_spares_rehearsal_and_golden_requests(checkout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_endpoint, "FAILING", 1.0)
    bad_endpoint.spoil("failing", 0.0)
    complete: Any = Checkout.complete
    assert asyncio.run(complete(checkout(()), turn("r1"))) == "answer"
    assert asyncio.run(complete(checkout(("count",)), turn("golden-3"))) == "answer"
    with pytest.raises(RuntimeError, match="a drill's fault"):
        asyncio.run(complete(checkout(("count",)), turn("r1")))


def test_a_lower_rung_is_a_failed_score(checkout: Any) -> None:
    bad_endpoint.spoil("all-less", 0.0)
    score: Any = Checkout._score
    with pytest.raises(RuntimeError, match="a drill's fault"):
        asyncio.run(score(checkout(("count",)), turn("r1")))


def test_a_live_fault_spares_the_shadow(checkout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_endpoint, "FAILING_LIVE", 1.0)
    monkeypatch.setenv("RECO_LOG_DIR", "/var/log/reco/shadow")
    before = Checkout.complete
    bad_endpoint.spoil("failing-live", 0.0)
    assert Checkout.complete is before
    monkeypatch.setenv("RECO_LOG_DIR", "/var/log/reco")
    bad_endpoint.spoil("failing-live", 0.0)
    complete: Any = Checkout.complete
    with pytest.raises(RuntimeError, match="a drill's fault"):
        asyncio.run(complete(checkout(("count",)), turn("r1")))
