"""Request -> the endpoint's answer: attempts, retry budget, circuit breaker, addresses.

The client retries a failed attempt once (connection lost, 429, 5xx), after its `Retry-After`. It never
retries a slow one: the endpoint keeps the deadline itself and answers from a lower rung in time. A second
request would bring the same answer and double the load of an overloaded server. The endpoint cannot answer
for its own death, and that shows as a lost connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from importlib import import_module

import httpx

from .answers import (
    CIRCUIT_OPEN,
    CLOSED,
    CONNECTION_FAILED,
    DEADLINE_EXCEEDED,
    INVALID_REQUEST,
    MALFORMED_ANSWER,
    NAME_UNRESOLVED,
    OVERLOADED,
    SERVER_ERROR,
    UNEXPECTED_STATUS,
    NotAnswered,
    Recommendations,
    read_answer,
)

PATH = "/v1/recommendations"
SERVER_SHARE = 0.9  # of the time left goes to the server; the rest is for the way back
MAX_CONNECTIONS = 32
KEEP_ALIVE_S = 60.0  # the endpoint closes an idle connection after 65 s
RETRY_SHARE = 0.1  # retries per call
MAX_SAVED_RETRIES = 10.0  # how many retries a quiet time saves up
FAILURES = 5  # in a row, until the breaker opens
FAIR_S = 0.01  # a call with less time says nothing about the endpoint if no answer comes
PAUSE_S = 1.0  # between two probes of an open breaker
NAME_TTL_S = 30.0  # a host's addresses stay valid this long
NO_NAME_TTL_S = 1.0  # and a failed lookup this long
_RETRIED = frozenset({CONNECTION_FAILED, OVERLOADED, SERVER_ERROR})

_log = logging.getLogger(__name__)
Resolve = Callable[[str, int], Sequence[str]]  # host, port -> addresses; raises OSError


def load_transport() -> None:
    """Import the modules that httpx imports with its first connection: a call has no time for that."""
    for module in ("httpcore", "anyio._backends._asyncio"):
        with contextlib.suppress(ImportError):
            import_module(module)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One encoded request; `deadline` is in the seconds of time.monotonic."""

    body: bytes
    request_id: str
    deadline: float


def resolve(host: str, port: int) -> Sequence[str]:
    """Return a host's addresses as the system knows them; may hang for as long as its resolver does.

    Raises:
        OSError: the name has no address.
    """
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))


class EndpointCaller:
    """Calls one endpoint in one event loop: attempts, retry budget and breaker; needs no locks."""

    def __init__(
        self,
        target: httpx.URL,
        tls: ssl.SSLContext | bool,
        resolve: Resolve,
        token: str = "",
        fair_s: float = FAIR_S,
    ) -> None:
        self._target, self._fair_s, self._closed = target, fair_s, False
        self._addresses = Addresses(target, resolve)
        self._budget, self._breaker = RetryBudget(), CallBreaker()
        self._tasks: set[asyncio.Task[Recommendations]] = set()
        # Calls queue for a connection here, not in httpx's pool. The pool loses a connection for ever if it
        # hands it to a call that is cancelled in the same moment, and calls with one deadline are.
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)
        # We connect to an address; the header and the TLS handshake name the host.
        self._extensions = {"sni_hostname": target.host} if target.scheme == "https" else {}
        self._http = httpx.AsyncClient(
            headers={
                "host": target.netloc.decode("ascii"),
                "content-type": "application/json",
                "accept-encoding": "identity",
                **({"authorization": f"Bearer {token}"} if token else {}),
            },
            verify=tls,
            timeout=None,  # one deadline covers the whole call
            limits=httpx.Limits(max_keepalive_connections=MAX_CONNECTIONS, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,  # a proxy of the shell must not stand between checkout and endpoint
        )

    async def answer(self, request: PreparedRequest) -> Recommendations:
        """Send the request, and once more if it failed.

        Raises:
            NotAnswered: at the request's deadline at the latest.
        """
        if self._closed:
            raise NotAnswered(CLOSED, "the client was closed")
        if not self._breaker.allows(time.monotonic()):
            raise NotAnswered(CIRCUIT_OPEN, f"{FAILURES} calls in a row failed")
        self._budget.earn()
        is_hurried = request.deadline - time.monotonic() < self._fair_s
        task = asyncio.get_running_loop().create_task(self._attempts(request))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            # Not wait_for: it waits until the cancelled task has ended.
            await asyncio.wait({task}, timeout=max(request.deadline - time.monotonic(), 0))
            if task.cancelled():
                raise NotAnswered(CLOSED, "the client was closed")
            if not task.done():
                task.cancel(None if is_hurried else DEADLINE_EXCEEDED)
                raise NotAnswered(DEADLINE_EXCEEDED, "no answer within the deadline")
            response = task.result()
        except NotAnswered as error:
            if error.reason == INVALID_REQUEST:
                self._breaker.succeed()
            elif error.reason != CLOSED and not (is_hurried and error.reason == DEADLINE_EXCEEDED):
                self._breaker.failed(time.monotonic(), error)
            raise
        finally:
            if not task.cancelling():  # a second cancel would take the reason away
                task.cancel()
        self._breaker.succeed()
        return response

    async def close(self) -> None:
        """Cancel the calls in flight and close the connections."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn

    def _forget(self, task: asyncio.Task[Recommendations]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: its caller may have left

    async def _attempts(self, request: PreparedRequest) -> Recommendations:
        try:
            return await self._attempt(request)
        except NotAnswered as error:
            pause_s = error.retry_after_s
            # After a pause there must be time for the answer: an attempt that is cut off says nothing.
            needed_s = pause_s + self._fair_s if pause_s > 0 else 0.0
            is_in_time = needed_s < request.deadline - time.monotonic()
            if error.reason not in _RETRIED or not is_in_time or not self._budget.spend():
                raise
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        return await self._attempt(request)

    async def _attempt(self, request: PreparedRequest) -> Recommendations:
        address = await self._addresses.first()
        try:
            async with self._connections:
                answer = await self._post(address, request)
        except httpx.TransportError as error:
            self._addresses.failed(address)
            raise NotAnswered(CONNECTION_FAILED, repr(error)) from error
        except httpx.HTTPError as error:
            raise NotAnswered(MALFORMED_ANSWER, repr(error)) from error
        if answer.status_code != 200:
            raise NotAnswered(
                _reason_of(answer.status_code),
                f"{answer.status_code} {answer.text[:300]}",
                _retry_after_s(answer.headers.get("retry-after", "")),
            )
        return read_answer(answer.content, request.request_id)

    async def _post(self, address: str, request: PreparedRequest) -> httpx.Response:
        left_ms = (request.deadline - time.monotonic()) * 1e3
        try:
            return await self._http.post(
                self._target.copy_with(host=address),
                content=request.body,
                headers={"x-deadline-ms": f"{max(left_ms * SERVER_SHARE, 0.1):.1f}"},
                extensions=self._extensions,
            )
        except asyncio.CancelledError as error:
            # Else the caller left early or came late, which says nothing.
            if DEADLINE_EXCEEDED in error.args:
                self._addresses.failed(address)  # a dead host refuses nothing: it is silent
            raise


def _reason_of(status: int) -> str:
    if status in (400, 413, 422):
        return INVALID_REQUEST
    if status in (429, 503):
        return OVERLOADED
    return SERVER_ERROR if status >= 500 else UNEXPECTED_STATUS


def _retry_after_s(text: str) -> float:
    """Return the seconds of a header Retry-After, a number or a date; 0 for anything else."""
    if text.isdecimal():
        return float(text)
    try:
        asked = parsedate_to_datetime(text)
        return (asked if asked.tzinfo else asked.replace(tzinfo=UTC)).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0


class Addresses:
    """A host's addresses; the one that answered last comes first.

    A background thread looks them up: while the name service hangs, the previous addresses stay in use. One
    lookup runs at a time, however many calls wait.
    """

    def __init__(self, target: httpx.URL, resolve: Resolve) -> None:
        self._host, self._resolve = target.host, resolve
        self._port = target.port or (443 if target.scheme == "https" else 80)
        self._addresses: tuple[str, ...] = ()
        self._until = -math.inf
        self._lookup: asyncio.Future[None] | None = None
        with contextlib.suppress(ValueError):
            self._addresses, self._until = (str(ipaddress.ip_address(self._host)),), math.inf

    async def first(self) -> str:
        """Return the address to connect to.

        Raises:
            NotAnswered: the name has no address.
        """
        if self._lookup is None and time.monotonic() >= self._until:
            self._look_up(asyncio.get_running_loop())
        if not self._addresses and self._lookup is not None:
            await asyncio.shield(self._lookup)
        if not self._addresses:
            raise NotAnswered(NAME_UNRESOLVED, f"{self._host} has no address")
        return self._addresses[0]

    def failed(self, address: str) -> None:
        """Use another address next time, and look the name up again."""
        if self._until < math.inf and self._addresses[0] == address:
            self._addresses, self._until = (*self._addresses[1:], address), -math.inf

    def _look_up(self, loop: asyncio.AbstractEventLoop) -> None:
        lookup = loop.create_future()

        def look_up() -> None:
            try:
                addresses = tuple(self._resolve(self._host, self._port))
            except (OSError, UnicodeError):
                addresses = ()
            except Exception:  # noqa: BLE001 - the edge of the thread: without an end no look-up would follow
                _log.exception("%s could not be looked up", self._host)
                addresses = ()
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._take, lookup, addresses)

        # A daemon thread, unlike an executor's: process exit does not wait for a hanging name service.
        threading.Thread(target=look_up, name="recommend-resolve", daemon=True).start()
        self._lookup = lookup

    def _take(self, lookup: asyncio.Future[None], addresses: tuple[str, ...]) -> None:
        if addresses:
            first = self._addresses[:1] if self._addresses and self._addresses[0] in addresses else ()
            self._addresses = tuple(dict.fromkeys((*first, *addresses)))
        self._until = time.monotonic() + (NAME_TTL_S if addresses else NO_NAME_TTL_S)
        self._lookup = None
        lookup.set_result(None)


@dataclass(slots=True)
class RetryBudget:
    """Retries are a share of the calls, so that they never double the load of a failing server."""

    saved: float = 1.0

    def earn(self) -> None:
        """Count a call."""
        self.saved = min(self.saved + RETRY_SHARE, MAX_SAVED_RETRIES)

    def spend(self) -> bool:
        """Use one retry; return whether one was left."""
        if self.saved < 1:
            return False
        self.saved -= 1
        return True


@dataclass(slots=True)
class CallBreaker:
    """Circuit breaker that probes with calls. Times are those of time.monotonic."""

    failures: int = 0  # in a row
    probe_at: float = -math.inf  # next probe while it is open

    def allows(self, now: float) -> bool:
        """Return whether a call may be sent; an open breaker lets one through every PAUSE_S."""
        if self.failures < FAILURES:
            return True
        if now < self.probe_at:
            return False
        self.probe_at = now + PAUSE_S
        return True

    def succeed(self) -> None:
        """Count an answer."""
        if self.failures >= FAILURES:
            _log.info("the recommender is back")
        self.failures = 0

    def failed(self, now: float, error: NotAnswered) -> None:
        """Count a failure."""
        self.failures += 1
        if self.failures == FAILURES:
            _log.warning("the recommender failed %d times in a row; calls pause: %s", FAILURES, error)
        if self.failures >= FAILURES:
            self.probe_at = now + PAUSE_S
