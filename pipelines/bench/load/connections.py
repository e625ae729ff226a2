"""Requests -> the answers of one server, over a bounded pool of connections: HTTP, or our client."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

if TYPE_CHECKING:
    from pipelines.bench.load.generator import LoadPlan
    from serving.client.client import AsyncClient

OK, UNANSWERED = 200, 0


class Exchange:
    """One request in flight, and its answer."""

    __slots__ = ("answer", "body", "done", "due", "status", "turned_to")

    def __init__(self, body: bytes, due: float, turned_to: float) -> None:
        self.body, self.due, self.turned_to = body, due, turned_to
        self.done, self.status, self.answer = 0.0, UNANSWERED, b""


class ConnectionPool:
    """Connections to one server, opened as needed; what finds none free waits its turn."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan, self._loop = plan, asyncio.get_running_loop()
        self._url = urlsplit(plan.url)
        self._host, self._port = self._url.hostname or "", self._url.port or 80
        self._opened: set[_Connection] = set()
        self._client: AsyncClient | None = None
        # The connection idle for longest is next: each process of a server gets its share of the requests.
        self._idle: deque[_Connection] = deque()
        self._waiting: deque[Exchange] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self.now = self._loop.time
        self.busy = 0  # requests without an answer
        self.on_answer: Any = None  # called after each; the closed loop asks again

    def ask(self, exchange: Exchange) -> None:
        """Send a request over a connection of its own, now or when one is free."""
        self.busy += 1
        self._send(exchange)

    def done(self, exchange: Exchange, status: int, answer: bytes) -> None:
        """Take an answer."""
        exchange.done, exchange.status, exchange.answer = self.now(), status, answer
        self._loop.call_soon(self._answered)

    def _answered(self) -> None:
        # In one step: a closed loop that saw no request in flight between the two would end.
        self.busy -= 1
        if self.on_answer is not None:
            self.on_answer()

    def free(self, connection: _Connection) -> None:
        """Use a connection again."""
        if self._waiting:
            connection.ask(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Forget a connection that was closed."""
        self._opened.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        self._send_next()

    async def close(self) -> None:
        """Close all connections; requests in flight stay unanswered."""
        self.on_answer = None
        self._waiting.clear()
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._opened):
            await connection.close()
        if self._client is not None:
            await self._client.close()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn

    def _send_next(self) -> None:
        """Give the place of a connection that is gone to a request that waits."""
        if self._waiting:
            self._send(self._waiting.popleft())

    def _send(self, exchange: Exchange) -> None:
        if self._idle:
            self._idle.popleft().ask(exchange)
        elif len(self._opened) + len(self._opening) < self._plan.connections:
            task = self._loop.create_task(self._open(exchange))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(exchange)

    async def _open(self, exchange: Exchange) -> None:
        connection: _Connection
        if self._url.scheme == "client+http":
            connection = _ClientConnection(self, self._shared_client())
        else:
            connection = _HttpConnection(self, self._url.path, self._plan.prefetch)
            try:
                await self._loop.create_connection(lambda: connection, self._host, self._port)
            except OSError:
                task = asyncio.current_task()
                assert task is not None
                self._opening.discard(task)  # before the next request looks for a place
                self.done(exchange, UNANSWERED, b"")
                self._send_next()
                return
        self._opened.add(connection)
        connection.ask(exchange)

    def _shared_client(self) -> AsyncClient:
        """Return the one client that all callers share."""
        if self._client is None:
            from serving.client.client import AsyncClient, read_best_sellers

            best_sellers, url = read_best_sellers(self._plan.best_sellers), f"http://{self._url.netloc}"
            self._client = AsyncClient(url, best_sellers, deadline_ms=self._plan.deadline_ms)
        return self._client


class _HttpConnection(asyncio.Protocol):
    """A keep-alive HTTP/1.1 connection with one request at a time: bare, so that its own time is small."""

    def __init__(self, pool: ConnectionPool, path: str, prefetch: bool) -> None:
        self._pool = pool
        priority = "X-Priority: prefetch\r\n" if prefetch else ""
        head = f"POST {path} HTTP/1.1\r\nHost: load\r\nContent-Type: application/json\r\n{priority}"
        self._head = head.encode()
        self._exchange: Exchange | None = None
        self._came = bytearray()
        self._length = 0  # of the whole answer once its head is here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, exchange: Exchange) -> None:
        """Send one request."""
        self._exchange = exchange
        size = len(exchange.body)
        self._transport.write(b"%sContent-Length: %d\r\n\r\n%s" % (self._head, size, exchange.body))

    def data_received(self, data: bytes) -> None:
        """Collect the answer."""
        self._came += data
        if not self._length:
            end = self._came.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._came[:end]).lower() + b"\r\n"
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0].strip()
            if not length.isdigit():  # chunks: no server measured here sends them
                self._transport.abort()
                return
            self._closing = b"connection: close" in head
            self._status, self._body_at = int(head[9:12]), end + 4
            self._length = self._body_at + int(length)
        if len(self._came) >= self._length:
            self._answer()

    def _answer(self) -> None:
        exchange, body = self._exchange, bytes(self._came[self._body_at : self._length])
        self._exchange, self._length = None, 0
        self._came.clear()
        if exchange is not None:
            self._pool.done(exchange, self._status, body)
        if self._closing:
            self._transport.close()
        else:
            self._pool.free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the request in flight as never answered."""
        if self._exchange is not None:
            self._pool.done(self._exchange, UNANSWERED, b"")
            self._exchange = None
        self._pool.lost(self)

    async def close(self) -> None:
        """Close the connection."""
        self._exchange = None
        self._transport.abort()


class _ClientConnection:
    """A caller of the project's own client: a call at a time; connections are the client's own."""

    def __init__(self, pool: ConnectionPool, client: AsyncClient) -> None:
        self._pool, self._client = pool, client
        self._task: asyncio.Task[None] | None = None

    def ask(self, exchange: Exchange) -> None:
        """Call the client with one request."""
        self._task = asyncio.get_running_loop().create_task(self._ask(exchange))

    async def _ask(self, exchange: Exchange) -> None:
        try:
            response = await self._client.recommend(**orjson.loads(exchange.body))
            status, answer = OK, orjson.dumps(response)  # a dataclass
        except Exception:  # noqa: BLE001 - it promises to raise nothing: any exception is counted
            status, answer = 500, b""
        self._pool.done(exchange, status, answer)
        self._pool.free(self)

    async def close(self) -> None:
        """Cancel the call in flight."""
        if self._task is not None:
            self._task.cancel()


_Connection = _HttpConnection | _ClientConnection
