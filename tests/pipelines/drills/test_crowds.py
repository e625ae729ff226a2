"""Crowds of callers and an unreachable endpoint: each fault has its effect."""

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from pipelines.bench.load.generator import load_generator
from pipelines.drills import crowds
from pipelines.drills.crowds import _cold, _cut_off, was_computed
from pipelines.drills.fault_proxy import Proxy
from pipelines.drills.outcome import CLIENT
from serving.schemas import MAX_BASKET, parse_instances
from tests.chaos.listening import listening
from tests.pipelines.drills.parts import system_of


def test_a_silent_service_accepts_connections_and_a_stopped_one_does_not() -> None:
    def echo(client: socket.socket) -> None:
        while data := client.recv(100):
            client.sendall(data)

    def ask(timeout_s: float = 60.0) -> bytes:
        with socket.create_connection(("127.0.0.1", front.port), timeout=timeout_s) as client:
            client.sendall(b"abc")
            return client.recv(100)

    with listening(echo) as address, Proxy(address) as front:
        system = system_of(front=front)
        assert ask() == b"abc"
        with crowds.service_silent(system, {}), pytest.raises(TimeoutError):
            ask(0.2)
        with crowds.service_refuses(system, {}), pytest.raises(ConnectionRefusedError):
            ask()
        assert ask() == b"abc"


def refuse_the_impatient(client: socket.socket) -> None:
    if client.recv(1) == b"x":
        client.sendall(b"HTTP/1.1 408 Late\r\n\r\n")
        return
    client.recv(1)  # waits for ever


@pytest.mark.parametrize(("said", "left", "wait_s"), [(b"x", 0, 60.0), (b"y", 2, 0.1)])
def test_connections_that_are_not_cut_off_are_counted(said: bytes, left: int, wait_s: float) -> None:
    with listening(refuse_the_impatient) as address:
        found = asyncio.run(_cut_off(address, said, 2, wait_s))
    assert (found["crowd"], found["left"], found["last_s"] > 0) == (2, left, left == 0)


def test_cold_requests_are_distinct_and_valid() -> None:
    asked = [{"user_id": f"u{n}", "basket": ["a", "b"]} for n in range(3)]
    cold = _cold(system_of(testbed=SimpleNamespace(asked=asked)), 600)
    assert len(set(cold[:MAX_BASKET])) == MAX_BASKET
    for body in cold:
        assert parse_instances(orjson.loads(body), now=0.0, default_id="r")
    assert asked[0]["basket"] == ["a", "b"], "the constant streams are as before"


def test_only_an_answer_with_a_ranking_time_counts_as_computed() -> None:
    def answer(degraded: bool = False, **stage_ms: float) -> bytes:
        return orjson.dumps({"predictions": [{"stage_ms": stage_ms, "degraded": degraded}]})

    assert was_computed(answer(retrieval=0.3, ranking=1.0))
    others = answer(cache=0.1), answer(True, fallback=0.1), answer(True, ranking=1.0)
    assert not any(map(was_computed, (*others, b"", orjson.dumps({"error": "overloaded"}))))


@pytest.mark.slow
def test_without_a_host_address_the_client_falls_back(tmp_path: Path) -> None:
    (tmp_path / "best_sellers.json").write_text('["bread"]')
    notes: dict[str, Any] = {}
    with load_generator() as flood:
        testbed = SimpleNamespace(
            generators={CLIENT: flood},
            asked=[{"basket": ["a"]}],
            best_sellers=tmp_path / "best_sellers.json",
            deadline_ms=200.0,
        )
        system = system_of(testbed=testbed, flood=flood, effort=SimpleNamespace(client_rate=50.0))
        with crowds.name_gone(system, notes):
            time.sleep(1.0)
    found = notes["nameless"]
    assert found["asked"] > 0
    assert (found["failed"], found["degraded"]) == (0, found["asked"])
    assert found["max_ms"] > 0
