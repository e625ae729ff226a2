"""A server of a test's own: one function handles each connection."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Run `serve` on each connection, in a thread of its own; give the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            serve(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=run, args=(connection,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
