"""Connections of a server -> those that are too late, and the one that makes room when there are too many.

uvicorn waits without limit for a request's head and for a body that the application does not read. It accepts
any number of connections and any length of head. Here each connection whose client must act (send the rest,
send the next request, read the answer) has a time limit. Twice a second the late ones are cut. A connection
that waits for us has no limit. Without room for another one, the connection that has kept us waiting longest is
cut: a client with frequent requests is never that one.
"""

from __future__ import annotations

import resource
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

SWEEP_S = 0.5  # between two looks for those that are too late
FIRST_S = 4.0  # from the connection to the first byte of its first request
MARGIN_S = 1.0  # beyond the limit of a body: by then it was refused with 408, and its rest still arrives
MAX_HEAD_BYTES = 16_384  # request line and headers
MAX_HEADERS = 100
MAX_UNREAD_BYTES = 1_048_576  # of a body that is still coming when its request is answered: refused, mostly
SPARE_FILES = 512  # of this process, besides its connections: bundle, logs, store
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
