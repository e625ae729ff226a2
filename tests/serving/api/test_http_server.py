"""The public HTTP server against slow, silent, oversized and too many clients, over real sockets."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from serving.api.http_routes import Limits
from serving.api.http_server import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    NO_FILES_S,
    SPARE_FILES,
    HttpServer,
    Waits,
    room_for,
)
from serving.api.problems import problem
from serving.schemas import check_json
from serving.settings import Settings
from tests.serving.conftest import metric

ARRIVAL_S, BODY_LIMIT = 0.3, 4_096
Ask = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
GOOD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
LONG = b"x" * 4_000_000


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("FIRST_S", 0.4), ("MARGIN_S", 0.2), ("SWEEP_S", 0.1)):
        monkeypatch.setattr(f"serving.api.http_server.{name}", seconds)


async def app(scope: Any, receive: Any, send: Any) -> None:
    body = LONG if scope["path"] == "/long" else b"here"
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, body: bytes) -> bytes:
    check_json(body)
    return json.dumps(json.loads(body)).encode()


async def broken(scope: Any, body: bytes) -> bytes:
    raise ZeroDivisionError


async def long(scope: Any, body: bytes) -> bytes:
    return LONG


BEGAN, ENDED = [0], [0]  # calls of `hang`


async def hang(scope: Any, body: bytes) -> bytes:
    BEGAN[0] += 1
    try:
        await asyncio.sleep(3_600)
    finally:
        ENDED[0] += 1
    return body


@contextlib.asynccontextmanager
async def serving(most: int = 100, waits: Waits[Any] | None = None) -> AsyncIterator[Ask]:
    """A server that ends with the block, which opens connections to it."""
    waits = Waits(most) if waits is None else waits
    settings = Settings(body_limit_bytes=BODY_LIMIT, body_timeout_ms=ARRIVAL_S * 1e3)
    limits = Limits(app, settings, {"/echo": echo, "/broken": broken, "/hang": hang, "/long": long})
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = HttpServer(limits, ARRIVAL_S, 1, 1, waits, 0.0)
        served = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.005)
        opened: list[asyncio.StreamWriter] = []

        async def ask() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            opened.append(writer)
            return reader, writer

        async with asyncio.timeout(120):
            yield ask
        for writer in opened:
            writer.close()
        server.should_exit = True
        await served
        assert len(waits) == 0


async def test_clients_that_connect_again_do_not_keep_the_server_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(app, Settings(), {})
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as clients:
        address = listening.getsockname()
        server: Any = HttpServer(limits, ARRIVAL_S, 1, 1, Waits(100), 0.0)
        take, taken = server._take, list[socket.socket]()

        async def take_and_connect_again(connection: socket.socket) -> None:
            taken.append(connection)
            with contextlib.suppress(ConnectionRefusedError):
                clients.enter_context(socket.create_connection(address))
            await take(connection)

        monkeypatch.setattr(server, "_take", take_and_connect_again)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.005)
        server.should_exit = True
        clients.enter_context(socket.create_connection(address))  # it waits until the server shuts down
        async with asyncio.timeout(60):
            await serving
        assert len(taken) == 1


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes that arrive until the server closes the connection."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # the bytes before the reset have arrived
        while part := await reader.read(65_536):
            answer += part
    return answer


def refusal(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    document = json.loads(body)
    assert b"content-type: application/problem+json" in head
    assert b"connection: close" in head
    assert head.startswith(b"HTTP/1.1 %d " % document["status"])
    assert len(answer) < 1_000
    return document["status"], document["detail"]


async def test_a_connection_is_answered_and_an_idle_one_is_closed() -> None:
    async with serving() as ask:
        (silent, _), (reader, writer) = await ask(), await ask()
        for _ in range(3):
            writer.write(GOOD)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"{}"
            await asyncio.sleep(0.25)
        assert silent.at_eof() or await all_of(silent) == b""
        assert await all_of(reader) == b""  # after the time that an idle connection is kept


async def answer_to(sent: bytes) -> bytes:
    """Return the bytes that a connection of their own brings, until the server closes it."""
    async with serving() as ask:
        reader, writer = await ask()
        writer.write(sent)
        return await all_of(reader)


OFFER = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
OFFERED = GOOD.replace(b"Host: x\r\n", OFFER)
NO_HOST = OFFERED.replace(b"Host: x\r\n", b"").replace(b"th: 2", b"th: %d" % len(GOOD))
LATE_HEAD = 408, f"the headers did not arrive within {ARRIVAL_S:g} s"
LONG_HEAD = 431, f"the headers are longer than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS}"
NOT_HTTP, ONE_HOST = (400, "the request is not HTTP/1.1"), (400, "expected one Host header")
REFUSED = {
    "a byte": (b"P", LATE_HEAD),
    "a head without headers": (b"POST /echo HTTP/1.1\r\n", LATE_HEAD),
    "half a header": (b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Le", LATE_HEAD),
    "a stalled body": (
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        (408, f"the body did not arrive within {ARRIVAL_S:g} s"),
    ),
    "TLS": (b"\x16\x03\x01\x02\x00", NOT_HTTP),
    "another method": (b"PRIVATE-17 / HTTP/1.1\r\n\r\n", NOT_HTTP),
    "another version": (b"GET  HTTP/9.9\r\n\r\n", NOT_HTTP),
    "no host": (GOOD.replace(b"Host: x\r\n", b""), ONE_HOST),
    "two hosts": (GOOD.replace(b"Host: x\r\n", b"Host: x\r\n" * 2), ONE_HOST),
    "two hosts in HTTP/1.0": (GOOD.replace(b"1.1\r\n", b"1.0\r\nHost: x\r\n"), ONE_HOST),
    "a request as the body of an offer without a host": (NO_HOST[:-2] + GOOD, ONE_HOST),
    "offers without end": (
        OFFERED.replace(b"Upgrade: h2c\r\n", b"Upgrade: h2c\r\n" * (MAX_HEADERS + 1)),
        LONG_HEAD,
    ),
}


@pytest.mark.parametrize(("sent", "expected"), REFUSED.values(), ids=REFUSED.keys())
async def test_an_invalid_request_is_refused_once_and_never_echoed(
    sent: bytes, expected: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The rest of its connection is no request: a second answer would be no JSON."""
    answer = await answer_to(sent)
    assert refusal(answer) == expected
    assert b"PRIVATE" not in answer
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_a_request_of_http_1_0_needs_no_host() -> None:
    assert (await answer_to(GOOD.replace(b"1.1\r\nHost: x\r\n", b"1.0\r\n"))).startswith(b"HTTP/1.1 200")


@contextlib.asynccontextmanager
async def dripping(writer: asyncio.StreamWriter, piece: bytes) -> AsyncIterator[None]:
    """Send a piece every 50 ms."""

    async def drip() -> None:
        while True:
            writer.write(piece)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(drip())
    yield
    task.cancel()


async def test_a_slowly_dripping_head_is_refused() -> None:
    async with serving() as ask:
        reader, writer = await ask()
        writer.write(b"GET / HTTP/1.1\r\n")
        async with dripping(writer, b"a: b\r\n"):
            assert refusal(await all_of(reader))[0] == 408


async def test_line_ends_do_not_begin_a_request() -> None:
    async with serving() as ask:
        reader, writer = await ask()
        async with dripping(writer, b"\r\n"):
            assert await all_of(reader) == b""


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"PUT /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["too long", "of a GET", "of no POST"],
)
async def test_an_unread_body_holds_no_connection(request_: bytes) -> None:
    async with serving() as ask:
        reader, writer = await ask()
        writer.write(request_)
        await reader.readuntil(b"\r\n\r\n")  # answered at once
        async with dripping(writer, b"1\r\nx\r\n"):
            await all_of(reader)


@pytest.mark.parametrize("how", [b"Content-Length: 80000000", b"Transfer-Encoding: chunked"])
async def test_a_client_that_keeps_sending_after_a_refusal_is_disconnected(how: bytes) -> None:
    piece = b"10000\r\n" + b" " * 65_536 + b"\r\n"

    async with serving() as ask:
        _, writer = await ask()
        with socket.create_connection(writer.get_extra_info("peername")) as caller:
            caller.setblocking(False)
            caller.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\n" + how + b"\r\n\r\n" + piece)
            answer = await asyncio.get_running_loop().sock_recv(caller, 1_000)
            assert answer.startswith(b"HTTP/1.1 413")
            sent, rest = 0, piece
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # cut off
                while sent < 80_000_000:
                    try:
                        count = caller.send(rest)
                        sent, rest = sent + count, rest[count:] or piece
                    except BlockingIOError:
                        pass
                    await asyncio.sleep(0)  # the server has its turn
            assert sent < 40_000_000, "more than the two sockets hold: the server has read it"


@pytest.mark.parametrize("length", [BODY_LIMIT + 1, 100 * BODY_LIMIT])
async def test_a_client_that_reads_after_sending_gets_the_refusal_and_a_close(length: int) -> None:
    async with serving() as ask:
        reader, writer = await ask()
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length)
        writer.write(b" " * (length - 1))
        await asyncio.sleep(ARRIVAL_S / 2)
        writer.write(b" " + GOOD)
        answer = await reader.read()  # a reset would raise
        assert refusal(answer) == (413, f"the body is longer than {BODY_LIMIT} bytes")


@pytest.mark.parametrize(
    ("headers", "is_told"),
    [
        (b"a: " + b"x" * MAX_HEAD_BYTES * 3, True),
        (b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", True),
        (b"a:b\r\n" * 100_000, False),  # a client that keeps sending may be disconnected before it reads
    ],
    ids=["one long", "some too many", "far too many"],
)
async def test_long_heads_are_refused_while_they_arrive(headers: bytes, is_told: bool) -> None:
    before = metric("reco_rejected_total", reason="head_too_large")
    answer = await answer_to(b"POST /echo HTTP/1.1\r\nHost: x\r\n" + headers)
    assert metric("reco_rejected_total", reason="head_too_large") == before + 1
    if is_told or answer:
        assert refusal(answer) == LONG_HEAD


@pytest.mark.parametrize(
    "piece", [b"x" * 1_000, b"a: b\r\n" * 100], ids=["one endless trailer", "endless trailers"]
)
async def test_endless_trailers_are_refused_while_they_arrive(piece: bytes) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async with serving() as ask:
        reader, writer = await ask()
        writer.write(head + b"2\r\n{}\r\n0\r\nx: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and sent < 100 * MAX_HEAD_BYTES:
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
                await asyncio.sleep(0)
        assert sent < 100 * MAX_HEAD_BYTES, "the connection was closed long before"
        answer = await all_of(reader)
        assert not answer or refusal(answer)[0] == 431

        reader, writer = await ask()  # a few are passed over
        writer.write(head + b"1\r\n{\r\n1\r\n}\r\n0\r\nx: y\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_head_of_some_kilobytes_is_accepted() -> None:
    async with serving() as ask:
        reader, writer = await ask()
        padding = b"a: " + b"x" * (MAX_HEAD_BYTES - 200) + b"\r\n"
        for part in (GOOD[:20], GOOD[20:30] + padding, GOOD[30:]):
            writer.write(part)
            await asyncio.sleep(0.02)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "request_",
    [OFFERED, b"POST /echo HTTP/1.1\r\n" + OFFER + CHUNKED, OFFERED.replace(b"h2c", b"websocket")],
    ids=["length", "chunked", "WebSocket"],
)
@pytest.mark.parametrize("step", [1, 7, 1_000], ids=["byte by byte", "in pieces", "at once"])
async def test_an_offer_of_another_protocol_is_ignored(request_: bytes, step: int) -> None:
    """Java's client offers HTTP/2 with the first request of each connection."""
    waits = Waits[Any](100, clock=lambda: 0.0)  # no head is late, however busy the machine is
    async with serving(waits=waits) as ask:
        reader, writer = await ask()
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = request_ + GOOD + request_ * 2 + GOOD
        for start in range(0, len(sent), step):
            writer.write(sent[start : start + step])
            await asyncio.sleep(0)
        for _ in range(5):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"{}"


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_last_request_with_an_offer_is_answered_and_its_connection_closed(version: bytes) -> None:
    answer = await answer_to(OFFERED.replace(b"1.1", version).replace(b"Upgrade,", b"close, Upgrade,"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize("target", [b"shop:443", b"/echo"])
async def test_a_tunnel_is_refused(target: bytes) -> None:
    for headers in (b"Host: x\r\n", OFFER):
        answer = await answer_to(b"CONNECT %s HTTP/1.1\r\n%s\r\n\x16\x03\x01" % (target, headers))
        statuses = [part.split()[0] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert statuses == ([b"400"] if target == b"shop:443" else [b"405", b"400"])


@pytest.mark.parametrize("number", [1, 5])
async def test_good_requests_before_a_bad_one_are_answered(number: int) -> None:
    *good, bad = (await answer_to(GOOD * number + b"not HTTP at all\r\n\r\n")).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in good] == [b"200"] * number
    assert refusal(b"HTTP/1.1 " + bad)[0] == 400


async def test_an_internal_error_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    before = metric("reco_faults_total", protocol="http")
    head, _, body = (await answer_to(GOOD.replace(b"/echo", b"/broken"))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body) == problem(500, "internal error")
    assert metric("reco_faults_total", protocol="http") == before + 1
    # Threads of other tests may log, too.
    [kind] = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert kind is ZeroDivisionError


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "while it is worked on"])
async def test_the_work_for_a_client_that_leaves_ends_and_is_counted(waits: bool) -> None:
    def gone() -> float:
        return metric("reco_rejected_total", reason="client_gone")

    async with serving() as ask:
        before = gone()
        for _ in range(20):
            _, writer = await ask()
            began = BEGAN[0]
            writer.write(GOOD.replace(b"/echo", b"/hang"))
            while waits and BEGAN[0] == began:
                await asyncio.sleep(0.005)
            writer.transport.abort()
        while gone() < before + 20:
            await asyncio.sleep(0.01)
        assert BEGAN == ENDED


async def test_a_client_that_leaves_without_reading_its_answers_makes_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as ask:
        _, writer = await ask()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(2 * GOOD.replace(b"/echo", b"/long"))
        await asyncio.sleep(0.2)
        writer.transport.abort()
        await asyncio.sleep(0.2)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_client_that_does_not_read_its_answers_is_disconnected() -> None:
    async with serving() as ask:
        reader, writer = await ask()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(4):
            writer.write(b"GET /long HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(2.0)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await all_of(reader)) < 4 * len(LONG)


async def test_a_full_server_closes_the_connection_with_the_longest_idle_time() -> None:
    async with serving(most=5) as ask:
        reader, writer = await ask()
        idle = [await ask() for _ in range(4)]
        for _ in range(3):
            writer.write(GOOD)
            await reader.readuntil(b"{}")
            idle.append(await ask())
            await asyncio.sleep(0.02)
        gone = [idler.at_eof() for idler, _ in idle]
        assert gone == [True, True, True, False, False, False, False]
        writer.write(GOOD)
        await reader.readuntil(b"{}")


async def test_simultaneous_requests_are_all_answered() -> None:
    """However long their turns take: no timeout runs for a client whose request has arrived."""

    async with serving() as ask:
        reader, writer = await ask()
        body = b'{"a": "%s"}' % (b"7" * 3_000)
        one = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        writer.write(one * 50)
        for _ in range(50):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert json.loads(await reader.readexactly(len(body))) == json.loads(body)


async def test_a_slightly_too_long_head_is_refused_in_any_split() -> None:
    async with serving() as ask:
        head = GOOD[:30] + b"a: " + b"x" * MAX_HEAD_BYTES + b"\r\n" + GOOD[30:]
        for cut in (10, 5_000, MAX_HEAD_BYTES, len(head)):
            reader, writer = await ask()
            writer.write(head[:cut])
            await asyncio.sleep(0.02)
            writer.write(head[cut:])
            assert refusal(await all_of(reader))[0] == 431


async def test_a_request_does_not_wait_for_a_crowd_of_new_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.api.http_server.AT_ONCE", 2)
    waits: Waits[Any] = Waits(1_000, clock=lambda: 0.0)  # no connection is late, however busy the machine is

    async with serving(waits=waits) as ask:
        reader, writer = await ask()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"here")
        with contextlib.ExitStack() as crowd:
            for _ in range(200):  # the kernel takes them at once
                crowd.enter_context(socket.create_connection(writer.get_extra_info("peername")))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"here")
            assert len(waits) < 150
            while len(waits) < 201:
                await asyncio.sleep(0.005)


@contextlib.contextmanager
def no_files_left() -> Iterator[None]:
    """Let this process open no more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_free_files_new_clients_wait_and_open_ones_are_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with contextlib.ExitStack() as stack:
        async with serving() as ask:
            reader, writer = await ask()
            writer.write(GOOD)
            await reader.readuntil(b"{}")
            address = writer.get_extra_info("peername")
            late, later = (stack.enter_context(socket.socket()) for _ in range(2))
            began = time.monotonic()
            with no_files_left():
                late.connect(address)  # the kernel takes it in
                late.sendall(GOOD)
                await asyncio.sleep(NO_FILES_S / 2)
                writer.write(GOOD)
                await reader.readuntil(b"{}")
                said = [
                    record for record in caplog.records if "no connection can be accepted" in record.message
                ]
                assert 1 <= len(said) <= 1 + (time.monotonic() - began) / NO_FILES_S
                assert "Too many open files" in said[0].message
            late.setblocking(False)
            assert (await asyncio.get_running_loop().sock_recv(late, 100)).startswith(b"HTTP/1.1 200")
            stack.enter_context(no_files_left())  # until it has ended
            later.connect(address)


def test_only_overdue_connections_are_listed() -> None:
    clock = SimpleNamespace(now=100.0)
    waits = Waits[str](10, lambda: clock.now)
    waits.expect("idle", 5.0)
    waits.expect("slow", 1.0)
    waits.expect("asked", 1.0)
    waits.end("asked")
    assert waits.overdue() == []
    clock.now += 2.0
    assert waits.overdue() == ["slow"]
    waits.expect("slow", 1.0)  # it continued, and its time starts again
    assert waits.overdue() == []
    clock.now += 4.0
    assert waits.overdue() == ["idle", "slow"]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    now = {"files": (1_024, 4_096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: now["files"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: now.update(files=pair))
    return now


def test_a_low_limit_of_open_files_is_raised_to_the_hard_limit(limits: dict[str, tuple[int, int]]) -> None:
    assert room_for(200) == 200
    assert limits["files"] == (1_024, 4_096), "there was room already"
    assert room_for(1_000) == 1_000
    assert limits["files"] == (2 * 1_000 + SPARE_FILES, 4_096)
    assert room_for(100_000) == (4_096 - SPARE_FILES) // 2
    assert limits["files"] == (4_096, 4_096)


def test_without_a_file_limit_all_connections_fit(limits: dict[str, tuple[int, int]]) -> None:
    limits["files"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert room_for(100_000) == 100_000


async def test_the_body_behind_a_refused_head_is_discarded() -> None:
    """A connection that is closed while a body comes is reset, and its client never reads the refusal."""

    async with serving() as ask:
        reader, writer = await ask()
        writer.write(b"POST /echo HTTP/1.1\r\nContent-Length: 200000\r\n\r\n")  # without a Host
        for _ in range(20):
            writer.write(b"x" * 10_000)
            await writer.drain()
        assert refusal(await all_of(reader))[0] == 400
