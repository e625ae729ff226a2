"""Faults that one can see by themselves; what the others do is seen in `test_drill_run`."""

import contextlib
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from feature_repo.aggregates import unpack
from pipelines.bench.load.generator import load_generator
from pipelines.drills import faults
from pipelines.drills.fault_proxy import Proxy
from pipelines.drills.faults import _cold, _cut_off, poisoned, was_computed
from pipelines.drills.system import System
from serving.schemas import MAX_BASKET, parse_instances
from serving.stores.feast_layout import HISTORY_FIELD, bytes_value
from tests.chaos.listening import listening
from tests.chaos.rows import packed, proto


def test_each_kind_of_poison_is_what_no_reader_takes_or_no_shopper_paid() -> None:
    row = {HISTORY_FIELD: proto(packed("apple", "pear"))}
    spoilt = [poisoned(row, number)[HISTORY_FIELD] for number in range(6)]
    cut, nonsense, other_format, *money = spoilt
    with pytest.raises(ValueError, match="cut short"):
        unpack(bytes_value(cut))
    with pytest.raises(ValueError, match="not a Feast bytes value"):
        bytes_value(nonsense)
    with pytest.raises(ValueError, match="format 99"):
        unpack(bytes_value(other_format))
    *none, absurd = money
    for value in none:
        with pytest.raises(ValueError, match="an amount that is none"):
            unpack(bytes_value(value))
    np.testing.assert_array_equal(unpack(bytes_value(absurd)).paid, np.full(2, 1e30, np.float32))
    assert poisoned(row, 6)[HISTORY_FIELD] == cut, "in turns"


def test_a_spoilt_bundle_differs_in_one_byte_or_lacks_half_a_file(tmp_path: Path) -> None:
    (tmp_path / "ranker.onnx").write_bytes(b"0123456789")
    (tmp_path / "index.faiss").write_bytes(b"0123456789")
    faults.flip_a_byte(tmp_path)
    faults.cut_in_half(tmp_path)
    ranker = (tmp_path / "ranker.onnx").read_bytes()
    assert sum(one != other for one, other in zip(ranker, b"0123456789", strict=True)) == 1
    assert (tmp_path / "index.faiss").read_bytes() == b"01234"


def system_of(**parts: Any) -> System:
    return cast(System, SimpleNamespace(**parts))


def test_a_spoilt_proxy_is_healed_whatever_happens() -> None:
    with listening(lambda client: None) as address, Proxy(address) as proxy:
        system = system_of(proxy=proxy)
        with contextlib.suppress(RuntimeError), faults.store_late(0.02)(system, {}):
            assert proxy.latency_s() == 0.02
            raise RuntimeError
        assert proxy.latency_s() == 0.0
        with faults.answers_cut(7)(system, {}):
            assert proxy.limit_bytes == 7
        with faults.answers_drip(1, 0.01)(system, {}):
            assert proxy.limit_bytes is None
            assert proxy.drip == (1, 0.01)
        healed: object = proxy.drip
        assert healed is None


def test_one_answer_in_so_many_is_late() -> None:
    late = faults.store_late_now_and_then(4, 0.2)
    with (
        listening(lambda client: None) as address,
        Proxy(address) as proxy,
        late(system_of(proxy=proxy), {}),
    ):
        waits = [proxy.latency_s() for _ in range(12)]
    assert waits == [0.0, 0.0, 0.0, 0.2] * 3


def test_a_silent_service_takes_connections_and_a_gone_one_does_not() -> None:
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
        with faults.service_silent(system, {}), pytest.raises(TimeoutError):
            ask(0.2)
        with faults.service_refuses(system, {}), pytest.raises(ConnectionRefusedError):
            ask()
        assert ask() == b"abc"


def test_something_is_done_again_and_again_until_the_end() -> None:
    done = threading.Event()
    counts: list[int] = []

    def act() -> None:
        counts.append(1)
        if len(counts) == 3:
            done.set()

    with faults._repeating(act, 0.001):
        assert done.wait(60)
    seen = len(counts)
    time.sleep(0.02)
    assert len(counts) == seen


def test_who_is_cut_off_is_counted_and_who_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "CUT_S", 0.3)

    def refuse_the_impatient(client: socket.socket) -> None:
        if client.recv(1) == b"x":
            client.sendall(b"HTTP/1.1 408 Late\r\n\r\n")
            return
        client.recv(1)  # waits for ever

    with listening(refuse_the_impatient) as address, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
        for one, said in zip(crowd, (b"x", b"y", b"x"), strict=True):
            one.sendall(said)
        found = _cut_off(crowd, time.monotonic())
    assert (found["crowd"], found["cut"]) == (3, 2)
    assert 0 < found["last_s"] < 60


def test_cold_questions_are_all_different_and_questions() -> None:
    asked = [{"user_id": f"u{n}", "basket": ["a", "b"]} for n in range(3)]
    cold = _cold(system_of(ground=SimpleNamespace(asked=asked)), 600)
    assert len(set(cold[:MAX_BASKET])) == MAX_BASKET
    for body in cold:
        assert parse_instances(orjson.loads(body), now=0.0, default_id="r")
    assert asked[0]["basket"] == ["a", "b"], "those who ask all the time ask on as before"


def test_only_an_answer_that_names_the_ranking_was_computed() -> None:
    def answer(degraded: bool = False, **stage_ms: float) -> bytes:
        return orjson.dumps({"predictions": [{"stage_ms": stage_ms, "degraded": degraded}]})

    assert was_computed(answer(retrieval=0.3, ranking=1.0))
    others = answer(cache=0.1), answer(True, fallback=0.1), answer(True, ranking=1.0)
    assert not any(map(was_computed, (*others, b"", orjson.dumps({"error": "overloaded"}))))


@pytest.mark.slow
def test_without_a_name_the_client_answers_by_itself(tmp_path: Path) -> None:
    (tmp_path / "best_sellers.json").write_text('["bread"]')
    ground = SimpleNamespace(
        asked=[{"basket": ["a"]}],
        folder=tmp_path,
        best_sellers=tmp_path / "best_sellers.json",
        deadline_ms=200.0,
    )
    notes: dict[str, Any] = {}
    with load_generator() as flood:
        system = system_of(ground=ground, flood=flood, effort=SimpleNamespace(client_rate=50.0))
        with faults.name_gone(system, notes):
            time.sleep(1.0)
    found = notes["nameless"]
    assert found["asked"] > 0
    assert (found["failed"], found["degraded"]) == (0, found["asked"])
    assert found["max_ms"] > 0
