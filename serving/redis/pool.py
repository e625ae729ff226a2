"""Connections to one place that are ready when a read needs one: they are opened in the background.

Connecting may take a name look-up, a handshake, a question to a sentinel: more than a read may wait. So no
read ever connects; it takes what is ready, or waits for it as long as its own deadline allows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from serving.redis.connection import Connection, ReplyError

CONNECT_S = 0.5  # for opening one connection, all included
MAX_CONNECTIONS = 16
_MAX_OPENING = 2  # at once: a frozen server shall not gather threads


class Pool:
    """Ready connections, safe to share between threads."""

    def __init__(self, connect: Callable[[float], Connection]) -> None:
        """Take the function that opens a connection before a deadline."""
        self._connect = connect
        self._changed = threading.Condition()
        self._ready: list[Connection] = []
        # What these no longer hold is closed when it comes back.
        self._taken: set[Connection] = set()
        self._opening: set[threading.Thread] = set()
        self._waiting = 0  # reads without a connection
        self._failures = 0
        self._failure: Exception | None = None

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """Give a connection for the block; one on which anything but a `ReplyError` happens is replaced.

        Raises:
            ReplyError, OSError, ValueError: none could be opened; TimeoutError: none was ready in time.
        """
        taken = self._take(deadline)
        healthy = False
        try:
            yield taken
            healthy = True
        except ReplyError:
            healthy = True
            raise
        except TimeoutError:
            raise
        except OSError:
            self.drop_ready()  # a server that was restarted has closed them all
            raise
        finally:
            self._give_back(taken, healthy)

    def prepare(self) -> None:
        """Begin to open a connection unless one is ready; returns at once."""
        with self._changed:
            if not self._ready:
                self._open_another()

    def drop_ready(self) -> None:
        """Close what is ready and not in use."""
        with self._changed:
            ready, self._ready = self._ready, []
        for connection in ready:
            connection.close()

    def close(self) -> None:
        """Close what is ready, and what is in use or being opened once it is done; the pool stays usable."""
        with self._changed:
            self._taken.clear()
            self._opening.clear()
            self._changed.notify_all()  # who waits opens another
        self.drop_ready()

    def _take(self, deadline: float) -> Connection:
        with self._changed:
            failures = self._failures
            self._waiting += 1
            try:
                while not self._ready:
                    if self._failures > failures and self._failure is not None:
                        raise self._failure.with_traceback(None)  # many reads raise this one
                    self._open_another()
                    left = deadline - time.perf_counter()
                    if left <= 0 or not self._changed.wait(left):
                        raise TimeoutError("no connection in time")
            finally:
                self._waiting -= 1
            connection = self._ready.pop()
            self._taken.add(connection)
            return connection

    def _give_back(self, connection: Connection, healthy: bool) -> None:
        with self._changed:
            known = connection in self._taken
            self._taken.discard(connection)
            if known and healthy:
                self._ready.append(connection)
                self._changed.notify_all()
                return
            if known:
                self._open_another()  # so that the next read finds it
        connection.close()

    def _open_another(self) -> None:
        """Start to open a connection, within the limits; the lock is held."""
        if len(self._opening) >= min(max(self._waiting, 1), _MAX_OPENING):
            return
        if len(self._ready) + len(self._taken) + len(self._opening) >= MAX_CONNECTIONS:
            return
        thread = threading.Thread(target=self._open, name="redis-connect", daemon=True)
        self._opening.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter ends
            self._opening.discard(thread)
            self._failed(ConnectionError(str(error)))

    def _open(self) -> None:
        opened: Connection | None = None
        failure: Exception | None = None
        try:
            opened = self._connect(time.perf_counter() + CONNECT_S)
        except (OSError, ReplyError, ValueError) as error:
            failure = error
        finally:
            with self._changed:
                wanted = threading.current_thread() in self._opening
                self._opening.discard(threading.current_thread())
                if opened is not None and wanted:
                    self._ready.append(opened)
                    self._changed.notify_all()  # who still waits opens another
                elif failure is not None and wanted:
                    self._failed(failure)
            if opened is not None and not wanted:
                opened.close()

    def _failed(self, failure: Exception) -> None:
        self._failures += 1
        self._failure = failure
        self._changed.notify_all()
