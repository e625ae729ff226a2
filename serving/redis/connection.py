"""One connection to a Redis server: bytes out, a reply in, before a deadline that holds in total.

A client library's time-outs count for each wait on the socket: a server that drips a byte every few
milliseconds holds its caller for as long as it likes, and retries multiply them. Here each wait gets what
is left until the deadline, through connecting, TLS and half replies alike. Only looking a host name up
cannot be bounded: connections are opened away from the request (`redis_pool`).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator

from serving.redis.address import RedisAddress

Reply = bytes | int | list["Reply"] | None
_CHUNK_BYTES = 65_536
_MAX_LINE_BYTES = 65_536
_MAX_DEPTH = 8  # of arrays in arrays; CLUSTER SLOTS has four


class ReplyError(Exception):
    """The server answered with an error; `code` is its first word, for example NOAUTH or MOVED."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]

    def __str__(self) -> str:
        """Return the code alone: the rest of an error may repeat what was sent."""
        return self.code


class Connection:
    """A connection on which one thread at a time asks; after anything but a `ReplyError` it is of no use."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = bytearray()
        self._is_late = False  # the deadline of this question has come once

    def ask(self, deadline: float, *command: bytes) -> Reply:
        """Send a command and return the server's reply.

        Args:
            deadline: the moment of `time.perf_counter()` when this raises, whatever has come by then.
            command: its words.

        Raises:
            ReplyError: the server refuses the command.
            OSError: the connection is lost, or TimeoutError at the deadline.
            ValueError: what came is no reply of a Redis server.
        """
        words = [b"*%d\r\n" % len(command), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in command)]
        self._is_late = False
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(b"".join(words))
        return self._reply(deadline, 0)

    def close(self) -> None:
        """Close the socket; nothing is said to the server, which may be frozen."""
        self._socket.close()

    def _reply(self, deadline: float, depth: int) -> Reply:
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-" and depth == 0:  # within an array it would leave the rest unread
            raise ReplyError(rest.decode("utf-8", "replace"))
        if kind not in (b":", b"$", b"*"):
            raise ValueError("the server does not speak Redis' protocol")
        number = int(rest)
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"$":
            return self._exactly(number + 2, deadline)[:-2]
        if depth == _MAX_DEPTH:
            raise ValueError("the server's reply is nested too deep")
        return [self._reply(deadline, depth + 1) for _ in range(number)]

    def _line(self, deadline: float) -> bytes:
        while (end := self._received.find(b"\r\n")) < 0:
            if len(self._received) > _MAX_LINE_BYTES:
                raise ValueError("the server does not speak Redis' protocol")
            self._receive(deadline)
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        return line

    def _exactly(self, count: int, deadline: float) -> bytes:
        while len(self._received) < count:
            self._receive(deadline)
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken

    def _receive(self, deadline: float) -> None:
        try:
            self._socket.settimeout(_left(deadline))
            chunk = self._socket.recv(_CHUNK_BYTES)
        except TimeoutError:
            if self._is_late:
                raise
            chunk = self._receive_at_once()
        if not chunk:
            raise ConnectionResetError("the server closed the connection")
        self._received += chunk

    def _receive_at_once(self) -> bytes:
        """Return what is here, without waiting: this thread may be the late one, not the server."""
        self._is_late = True
        self._socket.settimeout(0.0)
        try:
            return self._socket.recv(_CHUNK_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError) as error:
            raise TimeoutError("no reply in time") from error


def connect(address: RedisAddress, node: tuple[str, int], deadline: float) -> Connection:
    """Return a connection to a server that has answered on it.

    Raises:
        ReplyError: the server refuses the user, the password or the database.
        OSError, ValueError: as `Connection.ask`; also a certificate that is not trusted.
    """
    with _entered(address, node, deadline, address.username, address.password) as connection:
        if address.db:
            connection.ask(deadline, b"SELECT", b"%d" % address.db)
        connection.ask(deadline, b"PING")  # a frozen server accepts connections too
        return connection


def connect_to_master(address: RedisAddress, deadline: float) -> Connection:
    """Return a connection to the master that the sentinels name; the first of them that answers is believed.

    Raises:
        ReplyError, OSError, ValueError: as `connect`.
    """
    return connect(address, _master(address, deadline), deadline)


def _master(address: RedisAddress, deadline: float) -> tuple[str, int]:
    last: Exception = ConnectionError("no sentinel")
    for number, node in enumerate(address.nodes):
        # A frozen sentinel must leave time for the others, and for the master.
        share = time.perf_counter() + _left(deadline) / (len(address.nodes) - number + 1)
        try:
            with _entered(address, node, share, "", address.sentinel_password) as sentinel:
                service = address.service.encode()
                found = sentinel.ask(share, b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", service)
                sentinel.close()
        except (OSError, ReplyError, ValueError) as error:
            last = error
            continue
        match found:
            case [bytes(host), bytes(port)]:
                return host.decode(), int(port)
            case _:
                raise ConnectionError(f"the sentinels watch no service {address.service!r}")
    raise last


@contextlib.contextmanager
def _entered(
    address: RedisAddress, node: tuple[str, int], deadline: float, username: str, password: str
) -> Iterator[Connection]:
    """Give a connection that is logged in; it is closed when the block fails, and the caller's otherwise."""
    opened = socket.create_connection(node, _left(deadline))
    try:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if address.tls:
            # Python counts a socket's time-out for the handshake as a whole.
            opened.settimeout(_left(deadline))
            opened = _tls_context(address).wrap_socket(opened, server_hostname=node[0])
        connection = Connection(opened)
        if password:
            login = [username.encode()] if username else []
            connection.ask(deadline, b"AUTH", *login, password.encode())
        yield connection
    except BaseException:
        opened.close()
        raise


def _tls_context(address: RedisAddress) -> ssl.SSLContext:
    # Read anew for each connection: certificates are replaced while the endpoint runs.
    context = ssl.create_default_context(cafile=address.ssl_ca_certs or None)
    context.check_hostname = address.ssl_check_hostname
    if address.ssl_certfile:
        context.load_cert_chain(address.ssl_certfile, address.ssl_keyfile or None)
    return context


def _left(deadline: float) -> float:
    """Return the seconds until the deadline."""
    left = deadline - time.perf_counter()
    if left <= 0:
        raise TimeoutError("no reply in time")
    return left
