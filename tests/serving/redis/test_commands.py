"""Commands about a key; the forms of Redis are told apart in test_redis_store and test_redis_cluster."""

import subprocess
import time

import pytest

from serving.redis.address import parse_redis_url
from serving.redis.commands import RedisCommands
from serving.redis.connection import ReplyError
from tests.chaos.procs import free_port


def soon(seconds: float = 10.0) -> float:
    return time.perf_counter() + seconds


def test_nobody_there_is_an_error_of_the_system() -> None:
    commands = RedisCommands(parse_redis_url(f"redis://127.0.0.1:{free_port()}"))
    with pytest.raises(OSError, match=r"refused|in time"):
        commands.ask(soon(), b"GET", b"key")
    commands.close()


@pytest.mark.slow
def test_what_is_set_is_got_until_its_time_is_over(valkey: tuple[str, subprocess.Popen[bytes]]) -> None:
    commands = RedisCommands(parse_redis_url(valkey[0]))
    assert commands.ask(soon(), b"SET", b"key", b"\x00\r\nvalue", b"PX", b"60000") == b"OK"
    assert commands.ask(soon(), b"GET", b"key") == b"\x00\r\nvalue"
    left_ms = commands.ask(soon(), b"PTTL", b"key")
    assert isinstance(left_ms, int)
    assert 0 < left_ms <= 60_000
    assert commands.ask(soon(), b"GET", b"other") is None
    with pytest.raises(ReplyError):
        commands.ask(soon(), b"HGET", b"key", b"field")
    assert commands.ask(soon(), b"GET", b"key") == b"\x00\r\nvalue", (
        "a refusal does no harm to the connection"
    )
    commands.close()
    assert commands.ask(soon(), b"DEL", b"key") == 1, "a later command connects again"
    commands.close()
