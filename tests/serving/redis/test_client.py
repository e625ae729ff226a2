"""Fake servers, a real server and a real cluster; logins are tested in test_redis_store."""

import asyncio
import inspect
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio as aioredis
import uvloop
from redis._parsers import AsyncCommandsParser
from redis.crc import key_slot
from redis.retry import Retry

from serving.errors import FeaturesUnavailable
from serving.redis.address import RedisAddress, parse_redis_url
from serving.redis.client import (
    LATE_STEPS,
    MAX_CONNECTIONS,
    RedisClient,
    ReplyError,
    _Parser,
    client_options,
    open_client,
)
from serving.stores.online_features import RedisStore, entity_key
from tests.chaos.listening import listening
from tests.chaos.procs import Valkey, eventually, free_port, valkey_server
from tests.chaos.rows import put_row, row_of


def soon(seconds: float = 10.0) -> float:
    return time.perf_counter() + seconds


def client_of(node: tuple[str, int]) -> RedisClient:
    return RedisClient(RedisAddress("server", (node,)))


@contextmanager
def client_to(serve: Callable[[socket.socket], None]) -> Iterator[RedisClient]:
    """A client of a server that runs `serve` on each connection; both end with the block."""
    with listening(serve) as node, closing(client_of(node)) as client:
        yield client


def answering(*answers: bytes) -> Callable[[socket.socket], None]:
    """Return a server that lets each connection in, and answers its commands in order with these bytes."""
    left = iter(answers)

    def serve(client: socket.socket) -> None:
        while sent := client.recv(4_096):
            answer = b"+PONG\r\n" if b"PING" in sent else next(left, None)
            if answer is None:
                return
            client.sendall(answer)

    return serve


# ------------------------------------------------------------------------------------------ replies


def test_an_error_shows_its_code_alone_and_the_connection_stays_open() -> None:
    with client_to(answering(b"-WRONGTYPE for 'hunter2'\r\n", b"+OK\r\n")) as client:
        with pytest.raises(ReplyError, match=r"^WRONGTYPE$"):
            client.ask_now(soon(), "GET", "key")
        assert client.ask_now(soon(), "GET", "key") == b"OK"


@pytest.mark.parametrize("answer", [b"$x\r\n", b"*1\r\n" * 2_000], ids=["no number", "nested too deep"])
def test_a_reply_that_the_parser_cannot_read_is_an_error(answer: bytes) -> None:
    with client_to(answering(answer, answer)) as client, pytest.raises((ValueError, ConnectionError)):
        client.ask_now(soon(), "ANY")


@pytest.mark.parametrize("answer", [b"", b"$10\r\nabc", b"*2\r\n$1\r\na\r\n"])
def test_half_an_answer_followed_by_eof_is_a_lost_connection(answer: bytes) -> None:
    def serve(client: socket.socket) -> None:
        while sent := client.recv(4_096):
            client.sendall(b"+PONG\r\n" if b"PING" in sent else answer)
            if b"PING" not in sent:
                return

    with client_to(serve) as client, pytest.raises(ConnectionError):
        client.ask_now(soon(), "ANY")


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_the_server_has_reset_is_replaced_before_a_command_is_sent(new_loop: Any) -> None:
    """The endpoint runs on uvloop, where a write to such a connection is a RuntimeError."""
    resets, answered = iter([True]), threading.Semaphore(0)

    def serve(client: socket.socket) -> None:
        while sent := client.recv(4_096):
            client.sendall(b"+PONG\r\n" if b"PING" in sent else b"+OK\r\n")
            if b"PING" not in sent and next(resets, False):
                answered.acquire()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return

    async def ask(node: tuple[str, int]) -> Any:
        client = client_of(node)
        assert await client.ask(soon(), "GET", "key") == b"OK"
        [opened] = client._opened.values()
        [connection] = opened.connections
        answered.release()
        while connection._reader.exception() is None:
            await asyncio.sleep(0.001)
        reply = await client.ask(soon(), "GET", "key")
        await client.aclose()
        return reply

    with listening(serve) as node, asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(ask(node)) == b"OK"


def test_an_error_of_the_loop_is_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop's, of a write to a connection that the server has reset; a cluster's client does not look."""

    async def write(*_: object, **__: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")

    with client_to(answering(b"+OK\r\n")) as client:
        assert client.ask_now(soon(), "GET", "key") == b"OK"
        monkeypatch.setattr(aioredis.Connection, "send_packed_command", write)
        with pytest.raises(ConnectionError, match="TCPTransport"):
            client.ask_now(soon(), "GET", "key")


def echo(client: socket.socket, times: int = 1) -> None:
    """Answer each command with the word behind its name."""
    while sent := client.recv(4_096):
        word = b"" if b"PING" in sent else sent.split(b"\r\n")[4]
        client.sendall(b"$%d\r\n%b\r\n" % (len(word), word) * times if word else b"+PONG\r\n")


def test_a_reply_that_is_sent_twice_never_answers_the_next_command() -> None:
    with client_to(partial(echo, times=2)) as client:
        for number in range(20):
            assert client.ask_now(soon(), "GET", f"key {number}") == b"key %d" % number


# ----------------------------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("head", [b"+", b"$2000000000\r\n", b"*2000000000\r\n", b"*60000\r\n$1\r\na\r\n"])
def test_a_dripping_server_holds_no_caller_beyond_the_deadline(head: bytes) -> None:
    dripped_out = threading.Event()  # a timeout for each wait alone would hold the caller until then

    def drip(client: socket.socket) -> None:
        client.recv(4_096)
        client.sendall(b"+PONG\r\n")
        client.recv(4_096)
        client.sendall(head)
        for _ in range(5_000):
            client.sendall(b"1")
            time.sleep(0.004)
        dripped_out.set()

    with client_to(drip) as client:
        with pytest.raises(TimeoutError):
            client.ask_now(soon(0.03), "ANY")
        assert not dripped_out.is_set()


def test_no_server_is_a_lost_connection_and_a_passed_deadline_sends_nothing() -> None:
    with closing(client_of(("127.0.0.1", free_port()))) as client:
        with pytest.raises(ConnectionError, match="Connect call failed"):
            client.ask_now(soon(), "GET", "key")
        with pytest.raises(TimeoutError):
            client.ask_now(time.perf_counter() - 1, "ANY")


async def test_a_reply_that_arrived_counts_although_our_loop_is_late() -> None:
    with listening(answering(b"+warm\r\n", b"+OK\r\n")) as node:
        client = client_of(node)
        await client.ask(soon(), "ANY")
        asked = asyncio.ensure_future(client.ask(soon(0.05), "ANY"))
        await asyncio.sleep(0.01)  # the command is sent
        time.sleep(0.1)  # another task computes
        assert await asked == b"OK"
        await client.aclose()


def test_a_call_ends_at_the_deadline_though_other_tasks_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.redis.client.CONNECT_S", 10.0)  # of the task that outlives its caller
    with listening(answering(b"+warm\r\n", b"")) as node:

        async def compute(steps: list[float]) -> None:
            while True:
                steps.append(time.perf_counter())
                time.sleep(0.02)
                await asyncio.sleep(0)

        async def ask() -> int:
            """Return how many steps of another task began between the deadline and the end of the call."""
            client, steps = client_of(node), list[float]()
            await client.ask(soon(), "ANY")
            computing = asyncio.ensure_future(compute(steps))
            deadline = soon(0.05)
            with pytest.raises(TimeoutError):
                await client.ask(deadline, "ANY")
            computing.cancel()
            await client.aclose()
            return sum(began > deadline for began in steps)

        # A few more while the loop wakes the call; a call that waits for its turn lets 500 begin.
        assert asyncio.run(ask()) <= LATE_STEPS + 20


async def test_the_loop_runs_while_a_server_is_frozen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client, steps = client_of(mute.getsockname()), 0
        asked = asyncio.ensure_future(client.ask(soon(0.2), "ANY"))
        while not asked.done():
            steps += 1
            await asyncio.sleep(0.001)
        with pytest.raises(TimeoutError):
            await asked
        await client.aclose()
    assert steps > 2, "a blocked loop takes no step"


def test_a_caller_that_gives_up_leaves_the_connection_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting takes longer than the first caller's deadline."""
    monkeypatch.setattr("serving.redis.client.CONNECT_S", 10.0)
    connections, gave_up = 0, threading.Event()

    def serve(client: socket.socket) -> None:
        nonlocal connections
        connections += 1
        gave_up.wait()
        answering(*[b"+OK\r\n"] * 5)(client)

    with client_to(serve) as client:
        with pytest.raises(TimeoutError):
            client.ask_now(soon(0.02), "ANY")
        gave_up.set()
        eventually(lambda: not client._calls)
        assert client.ask_now(soon(), "ANY") == b"OK"
    assert connections == 1


def test_a_client_that_is_closed_during_a_call_of_a_thread_is_a_lost_connection() -> None:
    asked, answered = threading.Event(), threading.Event()

    def serve(client: socket.socket) -> None:
        asked.set()
        answered.wait(60)

    with listening(serve) as node, ThreadPoolExecutor(1) as threads:
        client = client_of(node)
        call = threads.submit(client.ask_now, soon(30), "ANY")
        asked.wait(60)
        client.close()
        with pytest.raises((ConnectionError, TimeoutError)):
            call.result(60)
        answered.set()


def test_more_reads_at_once_than_connections_wait_for_one() -> None:
    """A burst is no fault of the server: the circuit breaker must not open."""

    def serve(client: socket.socket) -> None:
        while sent := client.recv(4_096):
            time.sleep(0.002)
            client.sendall(b"+PONG\r\n" if b"PING" in sent else b"+OK\r\n")

    async def burst(client: RedisClient) -> list[Any]:
        reads = (client.ask(soon(), "GET", "a") for _ in range(3 * MAX_CONNECTIONS))
        replies = await asyncio.gather(*reads, return_exceptions=True)
        await client.aclose()
        return replies

    with listening(serve) as node:
        assert asyncio.run(burst(client_of(node))) == [b"OK"] * 3 * MAX_CONNECTIONS


async def test_a_read_that_got_no_connection_ends_in_time_and_leaves_no_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = client_of(mute.getsockname())
        reads = [client.ask(soon(0.05), "GET", "a") for _ in range(2 * MAX_CONNECTIONS)]
        errors = await asyncio.gather(*reads, return_exceptions=True)
        assert {type(error) for error in errors} == {TimeoutError}
        assert len(client._calls) == MAX_CONNECTIONS
        await client.aclose()


# --------------------------------------------------------------------------------- loops and threads


def test_threads_share_a_client_beside_a_loop_that_awaits() -> None:
    wrong: list[object] = []

    def ask(client: RedisClient, thread: int) -> None:
        for number in range(50):
            word = f"{thread} {number}".encode()
            if (reply := client.ask_now(soon(), "GET", word)) != word:
                wrong.append(reply)

    async def ask_here(client: RedisClient) -> list[Any]:
        replies = await asyncio.gather(*(client.ask(soon(), "GET", f"{n}") for n in range(10)))
        replies.append(await asyncio.to_thread(client.ask_now, soon(), "GET", "thread"))
        replies.append(client.ask_now(soon(), "GET", "notebook"))  # it runs a loop in the thread of its cells
        await client.aclose()
        return replies

    with client_to(echo) as client:
        threads = [threading.Thread(target=ask, args=(client, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(2):  # each time in another loop
            assert asyncio.run(ask_here(client)) == [*(b"%d" % n for n in range(10)), b"thread", b"notebook"]
        for thread in threads:
            thread.join()
        assert wrong == []
        client.close()
        assert client.ask_now(soon(), "GET", "again") == b"again"


@pytest.mark.slow
def test_a_value_round_trips_and_a_closed_client_reconnects(
    valkey: tuple[str, subprocess.Popen[bytes]],
) -> None:
    client = RedisClient(parse_redis_url(valkey[0]))
    assert client.ask_now(soon(), "SET", b"key", b"\x00\r\nvalue", "PX", 60_000) in (b"OK", True)
    assert client.ask_now(soon(), "GET", b"key") == b"\x00\r\nvalue"
    assert client.ask_now(soon(), "GET", b"other") is None
    with pytest.raises(ReplyError):
        client.ask_now(soon(), "HGET", b"key", b"field")
    assert client.ask_now(soon(), "GET", b"key") == b"\x00\r\nvalue", "a refusal keeps the connection"
    client.close()
    assert client.ask_now(soon(), "DEL", b"key") == 1, "a later command connects again"
    client.close()


# ----------------------------------------------------------------------------------- the plain client


def test_a_default_client_has_a_timeout_and_no_retries() -> None:
    client = open_client(parse_redis_url("redis://ann:pw@cache:7000/3"), 0.5)
    assert isinstance(client, redis.Redis)
    options = client.connection_pool.connection_kwargs
    assert {name: options[name] for name in ("host", "port", "db", "username", "password")} == {
        "host": "cache", "port": 7000, "db": 3, "username": "ann", "password": "pw",
    }  # fmt: skip
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.5, 0.5)
    assert isinstance(options["retry"], Retry)
    assert options["retry"].get_retries() == 0


def test_tls_and_its_files() -> None:
    options = client_options(
        parse_redis_url("rediss://cache?ssl_ca_certs=/ca.pem&ssl_check_hostname=false"), 1
    )
    assert options == {
        "socket_timeout": 1, "socket_connect_timeout": 1,
        "ssl": True, "ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False,
    }  # fmt: skip


def test_a_sentinel_has_a_password_of_its_own() -> None:
    address = parse_redis_url("redis+sentinel://:pw@a:1,b:2/shop/2?sentinel_password=guard")
    pool: Any = open_client(address, 1).connection_pool  # type: ignore[union-attr]
    assert pool.service_name == "shop"
    assert (pool.connection_kwargs["db"], pool.connection_kwargs["password"]) == (2, "pw")
    options = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    sentinels = [(entry["host"], entry["port"], entry["password"]) for entry in options]
    assert sentinels == [("a", 1, "guard"), ("b", 2, "guard")]


# ------------------------------------------------------------------------------ internals of redis-py


def test_redis_py_has_each_internal_that_is_used() -> None:
    """Part of no public interface: a new minor version of redis-py may rename any of them."""
    connection = aioredis.Connection()
    for name in ("_writer", "_connect", "_send_ping", "is_connected", "on_connect_check_health"):
        assert hasattr(connection, name), name
    for name in ("_buffer", "_stream"):
        assert hasattr(_Parser(1), name), name
    assert "can_read_destructive" in inspect.getsource(aioredis.ConnectionPool.ensure_connection)
    assert "self._buffer" in inspect.getsource(asyncio.StreamReader.__init__)
    assert isinstance(asyncio.StreamWriter.transport, property)


async def test_a_cluster_of_redis_py_has_each_internal_that_is_used() -> None:
    cluster = aioredis.RedisCluster(host="127.0.0.1", port=1)
    assert cluster.connection_kwargs is not None
    assert cluster.nodes_manager.connection_kwargs is not None
    assert isinstance(cluster.commands_parser, AsyncCommandsParser)
    [node] = cluster.startup_nodes
    assert node.connection_class is aioredis.Connection
    assert isinstance(node.connection_kwargs, dict)


# ------------------------------------------------------------------------------------------- a cluster

CLUSTERED = ("--cluster-enabled", "yes", "--save", "", "--cluster-node-timeout", "1000")


def state_of(client: redis.Redis) -> str:
    return str(client.execute_command("CLUSTER INFO")["cluster_state"])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Valkey, Valkey]]:
    """Two nodes with half the slots each."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(valkey_server(tmp_path / name, *CLUSTERED)) for name in ("a", "b")]
        with nodes[0].client() as one, nodes[1].client() as other:
            one.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8_191)
            other.execute_command("CLUSTER ADDSLOTSRANGE", 8_192, 16_383)
            one.execute_command("CLUSTER MEET", "127.0.0.1", nodes[1].port)
            eventually(lambda: all(state_of(client) == "ok" for client in (one, other)))
        yield nodes[0], nodes[1]


def user_of(first: int, last: int) -> str:
    """Return a user whose key is in these slots."""
    users = (str(number) for number in range(10_000))
    return next(user for user in users if first <= key_slot(entity_key(user) + b"checkout") <= last)


@pytest.mark.slow
def test_a_cluster_without_slots_is_unavailable(tmp_path: Path) -> None:
    with valkey_server(tmp_path, *CLUSTERED) as node:
        url = f"redis+cluster://127.0.0.1:{node.port}"
        store = RedisStore(url, timeout_ms=1_000)
        with pytest.raises(FeaturesUnavailable):
            store.read("1")
        store.close()
        with pytest.raises(redis.RedisClusterException, match="slots are not covered"):
            open_client(parse_redis_url(url), 1)


@pytest.mark.slow
def test_each_user_is_found_on_its_node_with_one_dead_seed_node(cluster: tuple[Valkey, Valkey]) -> None:
    url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{cluster[1].port}"
    users = [str(number) for number in range(20)]
    with redis.RedisCluster("127.0.0.1", cluster[0].port) as client:
        for user in users:
            put_row(client, user)
    store = RedisStore(url, timeout_ms=1_000)
    assert [store.read(user) for user in [*users, "absent"]] == [*map(row_of, users), None]
    store.close()


@pytest.mark.slow
def test_a_cluster_user_needs_only_read_permission(cluster: tuple[Valkey, Valkey]) -> None:
    for node in cluster:
        with node.client() as client:
            client.execute_command(
                "ACL SETUSER", "shop", "on", ">word", "~*", "+ping", "+hmget", "+cluster|slots"
            )
    store = RedisStore(f"redis+cluster://shop:word@127.0.0.1:{cluster[0].port}", timeout_ms=1_000)
    assert [store.read(str(number)) for number in range(20)] == [None] * 20
    store.close()


@pytest.mark.slow
def test_a_moving_slot_is_followed_during_and_after_the_move(cluster: tuple[Valkey, Valkey]) -> None:
    source, target = cluster
    user = user_of(0, 8_191)
    key = entity_key(user) + b"checkout"
    slot = key_slot(key)
    store = RedisStore(f"redis+cluster://127.0.0.1:{source.port}", timeout_ms=1_000)
    with source.client() as one, target.client() as other:
        put_row(one, user)
        assert store.read(user) == row_of(user)
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (one, other)]
        other.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        one.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        one.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5_000)
        assert store.read(user) == row_of(user), "the source says ASK"
        for client in (other, one):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
        assert store.read(user) == row_of(user), "the source says MOVED"
        assert store.read(user) == row_of(user)
    store.close()


@pytest.mark.slow
def test_a_stopped_cluster_is_unavailable_and_found_again(cluster: tuple[Valkey, Valkey]) -> None:
    store = RedisStore(f"redis+cluster://127.0.0.1:{cluster[0].port}")
    user = user_of(8_192, 16_383)
    with cluster[1].client() as client:
        put_row(client, user)
    assert store.read(user) == row_of(user)
    cluster[1].kill()
    with pytest.raises(FeaturesUnavailable, match=r"cluster 127\.0\.0\.1"):
        store.read(user)
    cluster[1].restart()

    def back() -> bool:
        try:
            return store.read(user) is None  # on disk it has only its place in the cluster
        except FeaturesUnavailable:
            return False

    eventually(back)
    store.close()
