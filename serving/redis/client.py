"""An address -> clients of redis-py: one with a deadline for requests and facts, and a plain one.

Protocol, TLS, sentinels and clusters are the library's. `RedisClient` adds two properties:

* One deadline bounds a call. The library's timeouts bound each wait only: a server that sends byte by byte
  would hold its caller.
* No caller connects. A call runs in a task that may outlive its caller by CONNECT_S. The task opens the
  connection or reads the late reply, and the next call finds the connection ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio as aioredis
import redis.cluster
from redis._parsers import AsyncCommandsParser, _AsyncRESP2Parser
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, ResponseError
from redis.retry import Retry

from serving.redis.address import RedisAddress

CONNECT_S = 0.5  # for a call that opens its connection first
MAX_CONNECTIONS = 16  # to one server; further calls wait for one
# If our own loop is LATE_S late, a reply that has arrived still counts: reading it takes LATE_STEPS steps of
# the loop. Otherwise the call ends at once, because in each step another request may compute.
LATE_S, LATE_STEPS = 2e-3, 4

Reply = Any  # bytes, int, None or a list of those; a few commands are parsed further by redis-py


class ReplyError(Exception):
    """The server answered with an error; `code` is its first word, for example NOAUTH or WRONGTYPE.

    The text of the error is dropped: it may repeat the command.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class RedisClient:
    """A client of a server, of a cluster, or of the master that sentinels name.

    Each event loop that awaits `ask` has connections of its own. Callers that cannot await share a loop in a
    thread of this client.
    """

    def __init__(self, address: RedisAddress) -> None:
        """Take the address; nothing is connected yet."""
        self._address = address
        self._opened: dict[asyncio.AbstractEventLoop, _Opened] = {}
        self._calls: set[asyncio.Task[Reply]] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # of that thread

    async def ask(self, deadline: float, *command: str | bytes | int) -> Reply:
        """Send a command and return the reply; it may be sent twice.

        Args:
            deadline: the value of `time.perf_counter()` at which the call raises; a partial reply is dropped.
            command: its words; the name of the command as `str`.

        Raises:
            ReplyError: the server refuses the command.
            OSError: no server can be reached; a TimeoutError at the deadline.
            ValueError: the reply is not of Redis' protocol.
        """
        left_s = deadline - time.perf_counter()
        if left_s <= 0:
            raise TimeoutError("no reply in time")
        opened = self._opened_here()
        if opened.places.locked():
            try:
                await asyncio.wait_for(opened.places.acquire(), left_s)
            except TimeoutError:
                raise TimeoutError("no connection became free in time") from None
            left_s = max(deadline - time.perf_counter(), 0.0)
        else:
            await opened.places.acquire()
        call = asyncio.ensure_future(self._call(opened, max(left_s, CONNECT_S), command))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        call.add_done_callback(lambda _: opened.places.release())
        await asyncio.wait((call,), timeout=left_s)
        steps = LATE_STEPS if time.perf_counter() - deadline > LATE_S else 0
        while steps and not call.done():
            steps -= 1
            await asyncio.sleep(0)
        if not call.done():
            raise TimeoutError("no reply in time")
        return call.result()

    def ask_now(self, deadline: float, *command: str | bytes | int) -> Reply:
        """Do as `ask` and wait for the reply; for callers that cannot await.

        The time until the deadline begins with the call: waiting for another caller's reply does not count.
        """
        left_s = deadline - time.perf_counter()

        async def ask() -> Reply:
            return await self.ask(time.perf_counter() + left_s, *command)

        with self._lock:
            if self._loop is None:  # it runs between calls, too: a connection that is opened must get on
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="redis", daemon=True).start()
            asked = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            return asked.result(max(left_s, 0.0) + CONNECT_S)
        except TimeoutError:  # also in a process that was forked: the thread is missing there
            asked.cancel()
            raise
        except CancelledError:
            raise ConnectionError("the connections were closed meanwhile") from None

    async def aclose(self) -> None:
        """Close the connections of the running loop; a later call opens them again."""
        loop = asyncio.get_running_loop()
        calls = [call for call in self._calls.copy() if call.get_loop() is loop]
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        if opened := self._opened.pop(loop, None):
            await opened.close()

    def close(self) -> None:
        """Close the connections of `ask_now`; a later call opens them again."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self.aclose(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    async def _call(self, opened: _Opened, limit_s: float, command: tuple[str | bytes | int, ...]) -> Reply:
        try:
            async with asyncio.timeout(limit_s):
                return await opened.client.execute_command(*command)
        except (TimeoutError, redis.TimeoutError):
            self._failed(opened)
            raise TimeoutError("no reply in time") from None
        except (ResponseError, redis.ConnectionError) as error:
            if code := _code(error):
                raise ReplyError(code) from None
            self._failed(opened)
            raise ConnectionError(str(error)) from None
        # IndexError: no node has a slot. RuntimeError: uvloop's, where the server has reset the connection.
        except (RedisClusterException, IndexError, RuntimeError, OSError) as error:
            self._failed(opened)
            raise ConnectionError(f"{type(error).__name__}: {error}") from None
        except (redis.RedisError, ValueError) as error:
            raise ValueError("the server does not speak Redis' protocol") from error
        finally:
            if opened.is_dropped:
                await opened.close()

    def _opened_here(self) -> _Opened:
        loop = asyncio.get_running_loop()
        if loop not in self._opened:
            for ended in [one for one in list(self._opened) if one.is_closed()]:
                self._opened.pop(ended, None)
            self._opened[loop] = _open(self._address)
        return self._opened[loop]

    def _failed(self, opened: _Opened) -> None:
        """Drop the client of a cluster: the library's client keeps every connection that failed to open."""
        if isinstance(opened.client, aioredis.RedisCluster) and not opened.is_dropped:
            opened.is_dropped = True
            self._opened.pop(asyncio.get_running_loop(), None)

    def _ended(self, call: asyncio.Task[Reply]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # mark as retrieved: the caller may be gone


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


@dataclass(eq=False, slots=True)
class _Opened:
    """A client of the library and all its connections; the library's own lists are incomplete."""

    places: asyncio.Semaphore  # for calls; a pool of the library without a free connection raises an error
    client: Any = None
    connections: set[Any] = field(default_factory=set)  # those that are connected
    is_dropped: bool = False  # its last calls close it

    async def close(self) -> None:
        """Close the connections at once: a frozen server would not answer."""
        if isinstance(self.client, aioredis.RedisCluster):
            with contextlib.suppress(redis.RedisError, OSError):
                await self.client.aclose()
        for connection in list(self.connections):
            if connection.is_connected:
                connection._writer.transport.abort()
                await connection.disconnect(nowait=True)
        await asyncio.sleep(0)  # the transports close in the next step


# ------------------------------------------------------------------------------- parser and connections


class _Parser(_AsyncRESP2Parser):
    """The library's parser in Python: hiredis reserves memory for any size that a reply announces."""

    _stream: Any  # a StreamReader while connected

    async def can_read_destructive(self) -> bool:
        """Report bytes that belong to no command, or the end or loss of the connection."""
        return bool(self._buffer or self._stream._buffer or self._stream.at_eof() or self._stream.exception())


class _Connection(aioredis.Connection):
    """Knows its owner while it is connected, and is open once the server has answered."""

    def __init__(self, *, opened: _Opened, **options: Any) -> None:
        self._owner = opened
        super().__init__(parser_class=_Parser, driver_info=None, **options)

    async def _connect(self) -> None:
        await super()._connect()
        self._owner.connections.add(self)

    async def disconnect(self, *args: Any, **options: Any) -> None:
        """Close the connection, and let go of it."""
        self._owner.connections.discard(self)
        await super().disconnect(*args, **options)

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and wait until the server answers: a frozen server accepts connections too."""
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                await super().on_connect_check_health(check_health)
                await self._send_ping()
        except BaseException as error:
            await self.disconnect(nowait=True)
            if isinstance(error, TimeoutError):
                raise redis.TimeoutError("no answer to a connection") from None
            raise


class _TlsConnection(_Connection, aioredis.SSLConnection):
    async def _connect(self) -> None:
        # Certificates change while the endpoint runs. Reading them takes up to 30 ms, so not on the loop.
        self.ssl_context.context = await asyncio.to_thread(_tls_context, self.ssl_context)
        await super()._connect()


class _Master(_Connection, SentinelManagedConnection):
    pass


class _TlsMaster(SentinelManagedConnection, _TlsConnection):
    pass


def _tls_context(settings: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_certs)
    context.check_hostname = settings.check_hostname
    if settings.certfile:
        context.load_cert_chain(settings.certfile, settings.keyfile)
    return context


class _FirstWord(AsyncCommandsParser):
    """Finds the key of a command; the library's COMMAND call to the cluster would need a permission."""

    async def initialize(self, node: object = None) -> None:
        """Do nothing."""

    async def get_keys(self, *command: Any) -> Any:
        """Return the key: in each command used here it follows the name."""
        return command[1:2]


def _open(address: RedisAddress) -> _Opened:
    # A cluster has no limit: the calls of a frozen node must not keep others from their nodes.
    opened = _Opened(asyncio.Semaphore(sys.maxsize if address.kind == "cluster" else MAX_CONNECTIONS))
    opened.client = _client(address, opened)
    return opened


def _client(address: RedisAddress, opened: _Opened) -> Any:
    # A frozen node must leave time for the next one.
    share_s = CONNECT_S / (1 if address.kind == "server" else len(address.nodes) + 1)
    options = client_options(address, share_s) | {"retry": Retry(NoBackoff(), 1), "opened": opened}
    del options["socket_timeout"]  # `ask` bounds the call
    if address.kind == "cluster":
        del options["opened"]
        return _open_cluster(address, options, opened)
    options.pop("ssl", None)
    options |= {"db": address.db, "max_connections": MAX_CONNECTIONS, "socket_keepalive": True}
    direct = _TlsConnection if address.tls else _Connection
    if address.kind == "sentinel":
        return _open_master(address, options, direct)
    host, port = address.nodes[0]
    return aioredis.Redis(connection_pool=aioredis.ConnectionPool(direct, host=host, port=port, **options))


def _open_master(address: RedisAddress, options: dict[str, Any], direct: type[aioredis.Connection]) -> Any:
    entry = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl_", "opened"))}
    entry |= {"password": address.sentinel_password or None}
    sentinel = aioredis.Sentinel(address.nodes, sentinel_kwargs={}, **options)
    sentinel.sentinels = [
        aioredis.Redis(connection_pool=aioredis.ConnectionPool(direct, host=host, port=port, **entry))
        for host, port in address.nodes
    ]
    managed = _TlsMaster if address.tls else _Master
    return sentinel.master_for(address.service, connection_class=managed)


def _open_cluster(address: RedisAddress, options: dict[str, Any], opened: _Opened) -> Any:
    nodes = [ClusterNode(host, port) for host, port in address.nodes]
    client = aioredis.RedisCluster(
        startup_nodes=nodes, require_full_coverage=False, driver_info=None, socket_keepalive=True, **options
    )
    connection_class = _TlsConnection if address.tls else _Connection
    # The constructor takes no class of connections.
    for settings in (client.connection_kwargs, client.nodes_manager.connection_kwargs):
        settings |= {"connection_class": connection_class, "opened": opened}
        settings.pop("driver_info", None)
    for node in client.startup_nodes:
        node.connection_class = connection_class
        node.connection_kwargs["opened"] = opened
        node.connection_kwargs.pop("driver_info", None)
    client.commands_parser = _FirstWord()
    return client


def _code(error: Exception) -> str:
    """Return the code of an error that the server sent, "" for any other."""
    if code := getattr(error, "status_code", None):
        return str(code)
    if not isinstance(error, ResponseError):
        return ""
    word = str(error).partition(" ")[0]
    return word if word.isupper() else "ERR"


# --------------------------------------------------------------------------------------- the plain client


def open_client(address: RedisAddress, timeout_s: float) -> redis.Redis | redis.RedisCluster:
    """Return a client with a timeout for each wait and without retries, for work outside requests.

    Raises:
        redis.RedisClusterException: no node of the cluster answers; others connect when they are first used.
    """
    options = client_options(address, timeout_s)
    # By default the library retries with a back-off of a second, regardless of the timeouts.
    once: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)}
    if address.kind == "cluster":
        nodes = [redis.cluster.ClusterNode(host, port) for host, port in address.nodes]
        return redis.RedisCluster(startup_nodes=nodes, **once, **options)
    options |= {"db": address.db} | once
    if address.kind == "sentinel":
        entry = {name: value for name, value in options.items() if name.startswith(("socket_", "ssl"))}
        entry |= {"password": address.sentinel_password or None} | once
        return redis.Sentinel(address.nodes, sentinel_kwargs=entry, **options).master_for(address.service)
    host, port = address.nodes[0]
    return redis.Redis(host, port, **options)


def client_options(address: RedisAddress, timeout_s: float) -> dict[str, Any]:
    """Return the options for every server, under redis-py's names."""
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    if address.tls:
        options |= {"ssl": True, "ssl_check_hostname": address.ssl_check_hostname}
        files = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
        options |= {name: getattr(address, name) for name in files if getattr(address, name)}
    credentials = {"username": address.username, "password": address.password}
    return options | {name: value for name, value in credentials.items() if value}
