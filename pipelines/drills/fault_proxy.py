"""A TCP proxy that spoils the answers of a server, steered by the attributes of a Python object."""

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

Address = tuple[str, int]


class Proxy:
    """Listens on a port of its own and passes everything on; a fault can be set and taken back at any time.

    With a TLS context it is the TLS end of a server that has none.
    """

    def __init__(self, upstream: Address, tls: ssl.SSLContext | None = None) -> None:
        self.latency_s: Callable[[], float] = lambda: 0.0  # before each piece of an answer
        self.frozen = False  # accepts, and moves nothing in either direction
        self.drip: tuple[int, float] | None = None  # answers in pieces of so many bytes, a pause in seconds
        self.limit_bytes: int | None = None  # of answers on a connection from now on; then it is closed
        self.accepted = 0
        self._upstream, self._tls = upstream, tls
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self.port = 0
        self.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where it listens, HOST:PORT."""
        return f"127.0.0.1:{self.port}"

    def listen(self) -> None:
        """Take connections, on the same port again after `refuse`."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept, self._listener)

    def refuse(self) -> None:
        """Refuse new connections; those that stand go on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def reset_peer(self) -> None:
        """Reset every connection that stands."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RD)  # wakes its thread and, unlike the other half, says nothing
            one.close()

    def freeze(self) -> None:
        """Move nothing from now on."""
        self.frozen = True

    def heal(self) -> None:
        """Take all faults back that are attributes."""
        self.latency_s, self.frozen, self.drip, self.limit_bytes = lambda: 0.0, False, None, None

    def close(self) -> None:
        """Close everything, which ends the threads."""
        self._closed = True
        self.refuse()
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _close(one)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=target, args=arguments, daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed
            self.accepted += 1
            self._start(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        server = None
        try:
            if self._tls:
                client.settimeout(5)
                client = self._tls.wrap_socket(client, server_side=True)
                client.settimeout(None)
            server = socket.create_connection(self._upstream)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._part(client, *([server] if server else []))
            return
        with self._lock:
            self._sockets |= {client, server}
        if self._closed:
            self._part(client, server)
        self._start(self._questions, client, server)
        self._answers(server, client)

    def _questions(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65_536):
                self._wait_while_frozen()
                server.sendall(data)
        self._part(client, server)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                self._wait_while_frozen()
                time.sleep(self.latency_s())
                if self.limit_bytes is not None:
                    client.sendall(data[: self.limit_bytes])
                    break
                size, pause_s = self.drip or (len(data), 0.0)
                for begin in range(0, len(data), size):
                    client.sendall(data[begin : begin + size])
                    time.sleep(pause_s)
        self._part(client, server)

    def _wait_while_frozen(self) -> None:
        while self.frozen and not self._closed:
            time.sleep(0.002)

    def _part(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= set(sockets)
        for one in sockets:
            _close(one)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
