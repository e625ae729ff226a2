"""A pool of connections -> at most so many at once, and each answer with its request."""

import asyncio
import contextlib

from pipelines.bench.load.connections import OK, UNANSWERED, ConnectionPool, Exchange
from pipelines.bench.load.generator import LoadPlan
from pipelines.live.ports import free_port


async def _line(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await reader.readline()
    return b""


async def answered(count: int, connections: int, answer: bytes) -> tuple[list[Exchange], int]:
    """Send requests to a server that answers after 10 ms; return them and the most connections at once."""
    opened, most = 0, 0
    serving: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, most
        serving.append(asyncio.current_task())
        opened += 1
        most = max(most, opened)
        while head := await _line(reader):
            while (line := await reader.readline()) != b"\r\n":
                head += line
            await reader.readexactly(int(head.rpartition(b":")[2]))
            await asyncio.sleep(0.01)
            writer.write(answer)
        opened -= 1
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(LoadPlan(f"http://127.0.0.1:{port}/", "", 1.0, connections=connections))
        exchanges = [Exchange(b"body", pool.now(), pool.now()) for _ in range(count)]
        for exchange in exchanges:
            pool.ask(exchange)
        while pool.busy:
            await asyncio.sleep(0.005)
        await pool.close()
        await asyncio.gather(*(task for task in serving if task))
    return exchanges, most


def test_requests_beyond_the_connections_wait_for_a_free_connection() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes"
    exchanges, most = asyncio.run(answered(6, 2, answer))
    assert most == 2
    assert {(one.status, one.answer, one.size) for one in exchanges} == {(OK, b"yes", 3)}
    assert len({one.done for one in exchanges}) > 1


def test_a_request_on_a_connection_that_breaks_is_unanswered() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    [exchange], _ = asyncio.run(answered(1, 1, answer))
    assert exchange.status == UNANSWERED


def test_requests_that_wait_for_a_refused_connection_are_sent_too() -> None:
    async def refused(count: int) -> list[Exchange]:
        pool = ConnectionPool(LoadPlan(f"http://127.0.0.1:{free_port()}/", "", 1.0, connections=1))
        exchanges = [Exchange(b"body", pool.now(), pool.now()) for _ in range(count)]
        for exchange in exchanges:
            pool.ask(exchange)
        async with asyncio.timeout(30):
            while pool.busy:
                await asyncio.sleep(0.005)
        await pool.close()
        return exchanges

    exchanges = asyncio.run(refused(4))
    assert all(one.done for one in exchanges)
    assert {one.status for one in exchanges} == {UNANSWERED}
