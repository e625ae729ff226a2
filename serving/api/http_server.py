"""uvicorn's server and protocol with the limits of a public port: `Endpoint` runs one of these.

uvicorn waits without limit for a request's head and for a body that the application does not read. It accepts
any number of connections and any length of head. Here each connection whose client must act (send the rest,
send the next request, read the answer) has a time limit. Twice a second the late ones are cut. A connection
that waits for us has no limit. Without room for another one, the connection that has kept us waiting longest
is cut: a client with frequent requests is never that one. The scope of a request gets the time of its arrival
and whether its client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Generic, TypeVar, cast

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.api.http_routes import ARRIVED, GONE, TASK, UNREAD, App, Receive, Scope, Send, refuse
from serving.api.problems import MEDIA_TYPE, problem
from serving.metrics import CONNECTIONS, LOOP_LAG_SECONDS, REQUESTS_IN_FLIGHT, count_rejected

SWEEP_S = 0.5  # between two looks for those that are too late
FIRST_S = 4.0  # from the connection to the first byte of its first request
MARGIN_S = 1.0  # beyond the limit of a body: by then it was refused with 408, and its rest still arrives
MAX_HEAD_BYTES = 16_384  # request line and headers
MAX_HEADERS = 100
MAX_UNREAD_BYTES = 1_048_576  # of a body that is still coming when its request is answered: refused, mostly
SPARE_FILES = 512  # of this process, besides its connections: bundle, logs, store
LAST_CALL_S = 0.5  # grace period for requests on connections accepted just before shutdown
# Among processes that accept on one socket, one waits this long per connection it has, so that the one with
# the fewest is the quickest.
SHY_S, SHYEST_S = 0.0005, 0.02
NO_FILES_S = 1.0  # where there are no files left for connections, those that wait are looked at again
AT_ONCE = 8  # connections accepted in one turn of the loop, between the steps of open ones
_TICK_S = 0.1  # uvicorn's
_NOT_ACCEPTED = "no connection can be accepted, those that come wait: %s"
_LONG_HEAD = f"the headers are longer than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS}"
_ONE_HOST = "expected one Host header"
_log = logging.getLogger(__name__)
Connection = TypeVar("Connection")


class Waits(Generic[Connection]):
    """Connections that we wait for, the one we have waited for longest first."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the largest number of connections, and a clock in seconds."""
        self.most = most
        self._clock = clock
        self._until: OrderedDict[Connection, float] = OrderedDict()

    def __len__(self) -> int:
        """Return how many we wait for."""
        return len(self._until)

    def expect(self, connection: Connection, within_s: float) -> None:
        """Begin to wait for a connection."""
        self._until.pop(connection, None)
        self._until[connection] = self._clock() + within_s

    def end(self, connection: Connection) -> None:
        """Wait no longer: it has done its part, or is gone."""
        self._until.pop(connection, None)

    def overdue(self) -> list[Connection]:
        """Return those whose time is over."""
        now = self._clock()
        return [connection for connection, until in self._until.items() if until < now]

    def longest(self) -> Connection | None:
        """Return the one that we have waited for longest, None if we wait for none."""
        return next(iter(self._until), None)


def room_for(connections: int) -> int:
    """Let this process open files for so many connections of HTTP, and of gRPC; return how many it may.

    That is less where the hard limit of open files (`ulimit -Hn`) is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return max(min(connections, (soft - SPARE_FILES) // 2), 1)
    return connections


class _Joined:
    """A transport that sends an answer's head with its body: one system call and one packet, not two."""

    def __init__(self, transport: Any, lingers: Callable[[], bool]) -> None:
        self._transport, self._lingers = transport, lingers
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        if self._lingers():
            self._transport.write_eof()
        else:
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, waits: Waits[_HttpProtocol], arrival_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits, self._arrival_s = waits, arrival_s
        self._gone = False
        self._in_head = False  # a request has begun, and its headers have not ended
        self._arriving = False  # a request has begun, and its body has not ended
        self._head_bytes = 0  # of a head that has not ended
        self._may_be_long = False  # not all of the head came in one part of a bounded length
        self._beside_body_bytes = 0  # since the last byte of a body: sizes of chunks, and trailers
        self._unread_bytes = 0  # of a body that came after its request was answered
        self._refused = False  # bytes behind the last request are not HTTP
        self._lingering = False  # all is said: it is closed as soon as the body has ended

    def connection_made(self, transport: Any) -> None:
        super().connection_made(cast("asyncio.Transport", _Joined(transport, self._lingers)))
        if len(self.connections) > self._waits.most:
            count_rejected("connections")
            (self._waits.longest() or self).abort()
        if not self.transport.is_closing():
            self._expect(FIRST_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._waits.end(self)
        for cycle in (self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                scope: Any = cycle.scope
                scope[GONE] = True
                if TASK in scope:
                    scope[TASK].cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Hang up, whatever is left to be sent."""
        self._waits.end(self)
        self.transport.abort()

    def cut(self) -> None:
        """Hang up on a client that is too late; one that is sending a head gets a 408."""
        if self._is_answering() and not self.flow.write_paused:
            self._expect(self._arrival_s)  # it sends the next request meanwhile: our answer comes first
        elif self._in_head and not self.transport.is_closing():
            self._hang_up(408, "head_timeout", f"the headers did not arrive within {self._arrival_s:g} s")
        else:
            self.abort()

    def data_received(self, data: bytes) -> None:
        if self._arriving and not self._in_head:  # of a body, and maybe of the next head
            self._may_be_long = True
            self._beside_body_bytes += len(data)
            self._parse(data)
            if self._arriving and self._beside_body_bytes > MAX_HEAD_BYTES:
                self._refuse_trailers()
            elif self._arriving and not self._is_answering():
                self._unread_bytes += len(data)
                if self._unread_bytes > MAX_UNREAD_BYTES:
                    self.flow.pause_reading()
                    self._expect(MARGIN_S)  # to read the answer, before it is cut off
            return
        for start in range(0, len(data), MAX_HEAD_BYTES):
            self._may_be_long, part = self._in_head, data[start : start + MAX_HEAD_BYTES]
            self._parse(part)
            if self.transport.is_closing():
                return
            if self._in_head:
                self._head_bytes = self._head_bytes + len(part) if self._may_be_long else 0
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._hang_up(431, "head_too_large", _LONG_HEAD)
                    return

    def on_body(self, body: bytes) -> None:
        self._beside_body_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._beside_body_bytes = 0
        self._in_head = self._arriving = True
        self._unread_bytes = 0
        self._expect(self._arrival_s)

    def on_headers_complete(self) -> None:
        headers = len(self.headers)
        is_too_large = headers > MAX_HEADERS or (self._may_be_long and self._head_length() > MAX_HEAD_BYTES)
        offers = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if offers and not is_too_large:
            return  # `_parse` brings it again
        self._in_head = False
        hosts = sum(name == b"host" for name, _ in self.headers)
        self.app = self.config.loaded_app
        if is_too_large:
            self.app = functools.partial(_refuse_head, 431, "head_too_large", _LONG_HEAD)
        elif hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):  # RFC 9112, 3.2
            self.app = functools.partial(_refuse_head, 400, "not_http", _ONE_HOST)
        super().on_headers_complete()
        if self.pipeline:
            self._waits.end(self)  # its body is not read before its turn comes
        else:
            self._expect(self._arrival_s + MARGIN_S)

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # nor did its headers count
        self._arriving = False
        scope: Any = self.scope
        scope[ARRIVED] = time.perf_counter()
        super().on_message_complete()
        if self._lingering:
            self.transport.close()
        elif self._is_answering():
            self._waits.end(self)
        else:  # it was answered before it was here whole
            self._expect(self.timeout_keep_alive + MARGIN_S)

    def on_response_complete(self) -> None:
        cast(_Joined, self.transport).flush()  # an answer without a body
        super().on_response_complete()
        if self._refused and not self._is_answering() and not self.transport.is_closing():
            self._refuse_rest()
        elif self.flow.write_paused or self.transport.is_closing():
            self._expect(self._arrival_s + MARGIN_S)  # until it has read
        elif self._is_answering():  # the next one, that was here already
            self._waits.end(self)
        elif self._arriving:
            self._expect(self._arrival_s + MARGIN_S)
        else:
            self._expect(self.timeout_keep_alive + MARGIN_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(self._arrival_s + MARGIN_S)  # it does not read what we send

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_answering():
            self._waits.end(self)
        else:
            self._expect(self.timeout_keep_alive + MARGIN_S)

    def _refuse_rest(self) -> None:
        self._refused = True
        if not self._is_answering():  # else first the requests before it
            self._hang_up(400, "not_http", "the request is not HTTP/1.1")

    def _parse(self, data: bytes) -> None:
        """Parse the bytes that came, each request without its offer of another protocol (`Upgrade`).

        A server may ignore an offer (RFC 9110, 7.8), but httptools ends a request that has one at its head.
        So a new parser gets this head without the offer, and then what follows.
        """
        self._unset_keepalive_if_required()
        parts = [memoryview(data)]
        while parts:
            part = parts.pop()
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserError:
                self._refuse_rest()
                return
            except httptools.HttpParserUpgrade as offer:
                parts.append(part[offer.args[0] :])
                if self._in_head:  # else it is a CONNECT, which needs no header to be one
                    parts.append(memoryview(self._head_without_offer()))
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([b"%s %s HTTP/%s" % (method, self.url, version), *lines, b"", b""])

    def _lingers(self) -> bool:
        """Say, once, whether only our side of the connection ends, and the rest of the body is still read.

        Closing while the client still sends triggers a TCP reset, which may destroy our answer before it is
        read.
        """
        lingers = self._arriving and not self._in_head and not self._lingering
        lingers = lingers and self.cycle is not None and bool(self.cycle.scope.get(UNREAD))
        self._lingering = self._lingering or lingers
        return lingers

    def _expect(self, within_s: float) -> None:
        """Wait for the client, unless it has gone: an answer may end, or its buffer empty, after that."""
        if not self._gone:
            self._waits.expect(self, within_s)

    def _is_answering(self) -> bool:
        """Say whether a request is here whole, or is read by the application, and has no answer yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _head_length(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _refuse_trailers(self) -> None:
        if self.pipeline or self.cycle is None or self.cycle.response_started:  # an answer is in the way
            count_rejected("head_too_large")
            self.abort()
        else:
            self._hang_up(431, "head_too_large", _LONG_HEAD)

    def _hang_up(self, status: int, reason: str, detail: str) -> None:
        count_rejected(reason)
        body = msgspec.json.encode(problem(status, detail))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._expect(MARGIN_S)  # to take it


async def _refuse_head(
    status: int, reason: str, detail: str, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer as an ASGI application, in the place of the one that would read these headers."""
    count_rejected(reason)
    scope[UNREAD] = True  # its body may still arrive: a connection that is closed at once loses the answer
    await refuse(send, status, detail, (b"connection", b"close"))


class HttpServer(uvicorn.Server):
    """uvicorn's, leaving the signals to `Endpoint`, and accepting few connections at a time.

    asyncio takes all that wait, and a crowd of them would hold up each request. Among processes that accept
    on one socket, the one with the fewest connections comes first: left to themselves, the process that wakes
    up first takes all, and keeps them as long as they keep their connections. What waits for a process that
    dies is taken by the others.
    """

    def __init__(
        self,
        app: App,
        arrival_s: float,
        keep_alive_s: int,
        grace_s: int,
        waits: Waits[_HttpProtocol],
        shy_s: float,
    ) -> None:
        """Take an application and its limits.

        Args:
            app: ASGI application.
            arrival_s: how long a request's head may take to arrive, and its body after that.
            keep_alive_s: how long a connection that was answered may wait with its next request.
            grace_s: how long requests on their way get when it ends.
            waits: of its connections.
            shy_s: SHY_S if other processes accept on its socket, too, else 0.
        """
        config = uvicorn.Config(
            app,
            http=cast(Any, functools.partial(_HttpProtocol, waits, arrival_s)),
            log_config=None,
            access_log=False,
            proxy_headers=False,  # no code reads the client's address
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=grace_s,
            timeout_keep_alive=keep_alive_s,
        )
        super().__init__(config)
        self._waits, self._shy_s = waits, shy_s
        self._ticked_at = math.inf
        self._coming: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup([])
        assert sockets is not None
        (self._listening,) = sockets
        self._listening.setblocking(False)
        self._listening.listen(self.config.backlog)
        self._loop = asyncio.get_running_loop()
        self._watch()

    async def on_tick(self, counter: int) -> bool:
        """Cut the connections that are too late, and measure; uvicorn calls this ten times a second."""
        now = time.perf_counter()
        LOOP_LAG_SECONDS.observe(max(now - self._ticked_at - _TICK_S, 0.0))
        self._ticked_at = now
        CONNECTIONS.set(len(self.server_state.connections))
        REQUESTS_IN_FLIGHT.set(len(self.server_state.tasks))
        if counter % round(SWEEP_S / _TICK_S) == 0:
            for connection in self._waits.overdue():
                connection.cut()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting; answer the requests of all connections that the kernel has accepted."""
        self._loop.remove_reader(self._listening)
        await asyncio.gather(*self._coming)
        waiting: list[socket.socket] = []
        try:
            waiting.extend(_waiting(self._listening))
        except OSError as error:
            _log.error(_NOT_ACCEPTED, error)
        # Closed before any of them is answered: clients that connect again after each answer would keep the
        # server open, until the parent kills this process with the records that it has not written.
        self._listening.close()
        for connection in waiting:
            await self._take(connection)
        await asyncio.sleep(LAST_CALL_S)
        await super().shutdown(sockets)

    def _watch(self) -> None:
        if not self.should_exit:
            self._loop.add_reader(self._listening, self._seen)

    def _seen(self) -> None:
        self._loop.remove_reader(self._listening)
        shy_s = min(len(self.server_state.connections) * self._shy_s, SHYEST_S)
        self._loop.call_later(shy_s, self._accept)

    def _accept(self) -> None:
        if self.should_exit:
            return
        several = AT_ONCE
        if self._shy_s:  # more with many connections: else a flood of new ones would delay those behind it
            several = 1 + int(len(self.server_state.connections) * SHY_S / SHYEST_S)
        try:
            for connection in itertools.islice(_waiting(self._listening), several):
                coming = self._loop.create_task(self._take(connection))
                self._coming.add(coming)
                coming.add_done_callback(self._coming.discard)
        except OSError as error:
            _log.error(_NOT_ACCEPTED, error)
            self._loop.call_later(NO_FILES_S, self._watch)  # not at once: there are still some to accept
        else:
            self._watch()

    async def _take(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it went away again
            await self._loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.Protocol:
        """Return what uvicorn makes for each connection."""
        made: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _waiting(listening: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that wait to be accepted.

    Raises:
        OSError: there is one, and no file or memory left for it.
    """
    listening.setblocking(False)
    while True:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # none, or one that has gone
            return
        connection.setblocking(False)
        yield connection
