"""Ranked lists in a real Redis: found, forgotten in time, and never waited for when it is not well."""

import itertools
import signal
import socket
import subprocess
import time
from contextlib import closing
from typing import Any

import pytest
import redis

from serving.cache.redis_answers import MAX_WAITING, PREFIX, RedisAnswers
from serving.redis.commands import RedisCommands
from serving.stores.circuit_breaker import FAILURES, LATEST
from tests.chaos.listening import listening
from tests.chaos.procs import eventually, free_port

Server = tuple[str, subprocess.Popen[bytes]]
PATIENT_MS = 10_000.0  # a busy machine is not what is tested


def ready(answers: RedisAnswers) -> RedisAnswers:
    eventually(lambda: not answers.is_open)
    return answers


def test_a_redis_that_is_not_there_is_a_miss_and_what_is_put_is_dropped() -> None:
    answers = RedisAnswers(f"redis://127.0.0.1:{free_port()}", keep_s=60.0)
    assert answers.is_open, "it is not asked before it has answered once"
    for _ in range(10):
        assert answers.get(b"key") is None
        answers.put(b"key", b"value")
    assert answers.flush(0)
    answers.close()


def test_a_redis_that_never_answers_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(RedisCommands):
        asked = 0

        def ask(self, *question: Any) -> Any:
            self.asked += 1
            return super().ask(*question)

    monkeypatch.setattr("serving.cache.redis_answers.RedisCommands", Counted)
    url = f"redis://:hunter2@127.0.0.1:{(port := free_port())}"
    with closing(RedisAnswers(url, keep_s=60.0, probe_s=0.001)) as answers:
        commands: Any = answers._commands
        eventually(lambda: commands.asked > 3)
    (told,) = caplog.records
    assert f"answer_cache is not asked until it answers: Redis at 127.0.0.1:{port}" in told.getMessage()
    assert "hunter2" not in caplog.text


def test_one_that_fails_every_second_time_is_not_asked_for_long(caplog: pytest.LogCaptureFixture) -> None:
    turns = itertools.count()

    def serve(connection: socket.socket) -> None:
        while asked := connection.recv(4_096):
            if b"GET" not in asked:
                connection.sendall(b"+PONG\r\n")
            elif next(turns) % 2 == 0:  # the first is the probe
                connection.sendall(b"$-1\r\n")

    with listening(serve) as (host, port):
        answers = RedisAnswers(f"redis://{host}:{port}", keep_s=60.0, timeout_ms=50.0)
        try:
            ready(answers)
            asked = 0
            while not answers.is_open and asked < 1_000:
                answers.get(b"key")
                asked += 1
            assert FAILURES < asked <= 2 * LATEST
            assert len([record for record in caplog.records if "answer_cache failed" in record.message]) == 1
        finally:
            answers.close()


def test_a_url_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="expected redis"):
        RedisAnswers("sqlite:///x", keep_s=60.0)


@pytest.mark.slow
def test_what_is_put_is_got_by_another_replica_for_a_time_that_is_spread(valkey: Server) -> None:
    one, other = (ready(RedisAnswers(valkey[0], keep_s=1_000.0, timeout_ms=PATIENT_MS)) for _ in range(2))
    for number in range(50):
        one.put(b"key %d" % number, b"value %d" % number)
    assert one.flush(30)
    assert [other.get(b"key %d" % number) for number in (0, 49, 50)] == [b"value 0", b"value 49", None]
    with redis.Redis.from_url(valkey[0]) as client:
        left = [int(client.pttl(PREFIX + b"key %d" % number)) for number in range(50)]
    assert len(set(left)) > 40
    assert 500_000 < min(left) < 800_000 < 1_200_000 < max(left) <= 1_350_000
    one.close()
    other.close()


@pytest.mark.slow
def test_a_frozen_redis_is_asked_a_few_times_and_again_when_it_is_back(valkey: Server) -> None:
    url, server = valkey
    answers = ready(RedisAnswers(url, keep_s=60.0, timeout_ms=50.0))
    server.send_signal(signal.SIGSTOP)
    try:
        for _ in range(FAILURES):
            assert not answers.is_open
            assert answers.get(b"key") is None
        assert answers.is_open
        assert answers.get(b"key") is None
    finally:
        server.send_signal(signal.SIGCONT)
    eventually(lambda: not answers.is_open)
    answers.close()


@pytest.mark.slow
def test_a_server_that_takes_no_more_costs_no_answer(valkey: Server) -> None:
    with redis.Redis.from_url(valkey[0]) as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory-policy", "noeviction")
    answers = ready(RedisAnswers(valkey[0], keep_s=60.0, timeout_ms=PATIENT_MS))
    for number in range(2 * MAX_WAITING):
        answers.put(b"%d" % number, bytes(1 << 16))
        assert answers.get(b"none") is None
    answers.close()


@pytest.mark.slow
def test_a_closed_one_leaves_no_thread_waiting(valkey: Server) -> None:
    answers = ready(RedisAnswers(valkey[0], keep_s=60.0))
    answers.close()
    assert not answers._thread.is_alive()


def test_a_hurried_request_waits_no_longer_and_is_no_failure_of_redis() -> None:
    def serve(connection: socket.socket) -> None:
        while asked := connection.recv(4_096):
            if b"GET" not in asked:
                connection.sendall(b"+PONG\r\n")
            elif b":probe" in asked:
                connection.sendall(b"$-1\r\n")

    with listening(serve) as (host, port):
        answers = ready(RedisAnswers(f"redis://{host}:{port}", keep_s=60.0, timeout_ms=PATIENT_MS))
        began = time.perf_counter()
        for _ in range(2 * FAILURES):
            assert answers.get(b"key", time.perf_counter() + 0.01) is None
            assert answers.get(b"key", time.perf_counter() - 1) is None
        assert time.perf_counter() - began < PATIENT_MS / 1e3 / 2
        assert not answers.is_open
        answers.close()


@pytest.mark.slow
def test_a_server_that_refuses_to_write_is_still_read(valkey: Server) -> None:
    with closing(ready(RedisAnswers(valkey[0], keep_s=60.0, timeout_ms=PATIENT_MS))) as answers:
        answers.put(b"before", b"value")
        assert answers.flush(30)
        with redis.Redis.from_url(valkey[0]) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "1")
        for number in range(20):
            answers.put(b"%d" % number, b"value")
        assert answers.flush(30)
        assert not answers.is_open
        assert answers.get(b"before") == b"value"
