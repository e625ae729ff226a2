"""A connection that breaks -> its request is unanswered; test_generator.py asks many over a pool."""

import asyncio

from pipelines.bench.load.connections import OK, UNANSWERED, ConnectionPool, Exchange
from pipelines.bench.load.generator import LoadPlan
from pipelines.live.ports import free_port


async def asked(answer: bytes) -> Exchange:
    """Send one request to a server that answers with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"body")
        writer.write(answer)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        pool = ConnectionPool(LoadPlan(f"http://127.0.0.1:{port}/", (), 1.0, connections=1))
        exchange = Exchange(b"body", pool.now(), pool.now())
        pool.ask(exchange)
        while pool.busy:
            await asyncio.sleep(0.005)
        await pool.close()
    return exchange


def test_a_request_on_a_connection_that_breaks_is_unanswered() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert asyncio.run(asked(answer)).status == UNANSWERED


def test_requests_that_wait_for_a_refused_connection_are_sent_too() -> None:
    async def refused(count: int) -> list[Exchange]:
        pool = ConnectionPool(LoadPlan(f"http://127.0.0.1:{free_port()}/", (), 1.0, connections=1))
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


def test_a_closed_loop_has_a_request_in_flight_all_the_time() -> None:
    async def looked() -> list[int]:
        pool = ConnectionPool(LoadPlan("http://127.0.0.1:9/", (), 1.0, connections=0))
        first, second = (Exchange(b"body", pool.now(), pool.now()) for _ in range(2))
        pool.on_answer = lambda: pool.ask(second)
        pool.ask(first)
        pool.done(first, OK, b"")
        busy = [pool.busy]
        for _ in range(2):
            await asyncio.sleep(0)
            busy.append(pool.busy)
        await pool.close()
        return busy

    assert asyncio.run(looked()) == [1, 1, 1], "the loop would end where it sees none"
