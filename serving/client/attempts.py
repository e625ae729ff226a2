"""A question -> the endpoint's answer, or why there is none: attempts, their budget, the breaker, addresses.

What `serving.client.client` asks with. A second attempt follows a first one that failed (connection lost,
429,
5xx), never one that is slow: the endpoint keeps the deadline itself and answers from a lower rung in time,
so that
asking it twice would bring the same answer and double its load just when it has too much. What it cannot
answer for is its own death, and that shows as a connection lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import httpx

from serving.schemas import Recommendation, Response

# Loaded by httpx with the first connection otherwise, which takes longer than a call may.
for _late in ("httpcore", "anyio._backends._asyncio"):
    with contextlib.suppress(ImportError):
        import_module(_late)

PATH = "/v1/recommendations"
FOR_THE_SERVER = 0.9  # of the time that is left; the rest is for the way back
MAX_CONNECTIONS = 32
KEEP_ALIVE_S = 60.0  # the endpoint closes an idle connection after 65
RETRY_SHARE, RETRIES_SAVED = 0.1, 10.0  # retries per call, and how many of them a quiet time saves up
FAILURES = 5  # calls in a row, until the endpoint is not asked any more
PAUSE_S = 1.0  # then one call tries again, every so often
NAME_S, NO_NAME_S = 30.0, 1.0  # how long a name's addresses hold, and that there are none

# Reasons of an answer that is none of the endpoint's.
INVALID_REQUEST = "invalid_request"  # the caller must fix it
DEADLINE_EXCEEDED = "deadline_exceeded"
NAME_UNRESOLVED = "name_unresolved"
CONNECTION_FAILED = "connection_failed"
OVERLOADED = "overloaded"  # 429, 503
SERVER_ERROR = "server_error"  # other 5xx
UNEXPECTED_STATUS = "unexpected_status"  # the address is not that of an endpoint
MALFORMED_ANSWER = "malformed_answer"
CIRCUIT_OPEN = "circuit_open"
CLOSED = "closed"
CLIENT_ERROR = "client_error"  # a fault of this module; the log has it
_RETRIED = frozenset({CONNECTION_FAILED, OVERLOADED, SERVER_ERROR})


_log = logging.getLogger(__name__)
Resolve = Callable[[str, int], Sequence[str]]  # host, port -> addresses; raises OSError


class NotAnswered(Exception):
    """The endpoint gave no answer; raised by a `strict` client only. `reason` is one of those above."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Question:
    """One request on its way: when nobody waits for its answer any more, in time.monotonic."""

    body: bytes
    request_id: str
    deadline: float


def resolve(host: str, port: int) -> Sequence[str]:
    """Return a host's addresses as the system knows them; may hang for as long as its resolver does.

    Raises:
        OSError: there are none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


class Asker:
    """Asks one endpoint, in one event loop: attempts, their budget and the breaker; needs no locks."""

    def __init__(self, target: httpx.URL, tls: ssl.SSLContext | bool, resolve: Resolve) -> None:
        self._target, self._closed = target, False
        self._addresses = Addresses(target, resolve)
        self._budget, self._breaker = Budget(), Breaker()
        self._tasks: set[asyncio.Task[Response]] = set()
        # Who waits for a connection waits here, not in httpx's pool: that one loses for ever a connection
        # that it gives to somebody who stops waiting in the same moment, as all with one deadline do.
        self._connections = asyncio.Semaphore(MAX_CONNECTIONS)
        # We connect to an address; that the host's name is meant says the header, and the TLS handshake.
        self._extensions = {"sni_hostname": target.host} if target.scheme == "https" else {}
        self._http = httpx.AsyncClient(
            headers={
                "host": target.netloc.decode("ascii"),
                "content-type": "application/json",
                "accept-encoding": "identity",
            },
            verify=tls,
            timeout=None,  # the deadline is of the whole
            limits=httpx.Limits(max_keepalive_connections=MAX_CONNECTIONS, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=False,  # a shell's proxy is not between a checkout and its endpoint
        )

    async def answer(self, question: Question) -> Response:
        """Ask, and once more if that failed.

        Raises:
            NotAnswered: with the reason, at the question's deadline at the latest.
        """
        if self._closed:
            raise NotAnswered(CLOSED, "the client was closed")
        if not self._breaker.lets_through(time.monotonic()):
            raise NotAnswered(CIRCUIT_OPEN, f"{FAILURES} calls in a row failed")
        self._budget.earn()
        task = asyncio.get_running_loop().create_task(self._attempts(question))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            # Not wait_for, which waits until what it has cancelled is over.
            await asyncio.wait({task}, timeout=max(question.deadline - time.monotonic(), 0))
            if task.cancelled():
                raise NotAnswered(CLOSED, "the client was closed")
            if not task.done():
                raise NotAnswered(DEADLINE_EXCEEDED, "no answer within the deadline")
            response = task.result()
        except NotAnswered as error:
            if error.reason == INVALID_REQUEST:
                self._breaker.well()
            elif error.reason != CLOSED:
                self._breaker.failed(time.monotonic(), error)
            raise
        finally:
            task.cancel()
        self._breaker.well()
        return response

    async def close(self) -> None:
        """End what is under way and close the connections."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn

    def _forget(self, task: asyncio.Task[Response]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # one that nobody waited for is no news

    async def _attempts(self, question: Question) -> Response:
        try:
            return await self._attempt(question)
        except NotAnswered as error:
            if error.reason not in _RETRIED or not self._budget.spend():
                raise
        return await self._attempt(question)

    async def _attempt(self, question: Question) -> Response:
        address = await self._addresses.first()
        try:
            async with self._connections:
                left_ms = (question.deadline - time.monotonic()) * 1e3
                answer = await self._http.post(
                    self._target.copy_with(host=address),
                    content=question.body,
                    headers={"x-deadline-ms": f"{max(left_ms * FOR_THE_SERVER, 0.1):.1f}"},
                    extensions=self._extensions,
                )
        except httpx.TransportError as error:
            self._addresses.failed(address)
            raise NotAnswered(CONNECTION_FAILED, repr(error)) from error
        except httpx.HTTPError as error:
            raise NotAnswered(MALFORMED_ANSWER, repr(error)) from error
        if answer.status_code != 200:
            raise NotAnswered(_meaning(answer.status_code), f"{answer.status_code} {answer.text[:300]}")
        return read_answer(answer.content, question.request_id)


def _meaning(status: int) -> str:
    if status in (400, 413, 422):
        return INVALID_REQUEST
    if status in (429, 503):
        return OVERLOADED
    return SERVER_ERROR if status >= 500 else UNEXPECTED_STATUS


def read_answer(content: bytes, request_id: str) -> Response:
    """Read an answer; fields that are not known yet are passed over.

    Raises:
        NotAnswered: it is not what the endpoint says, or is another request's.
    """
    try:
        found = json.loads(content)
        if found.get("request_id", request_id) != request_id:
            raise ValueError("another request's answer")
        reason = found.get("degraded_reason")
        return Response(
            request_id,
            tuple(map(_recommendation, found["items"])),
            str(found.get("bundle_id", "")),
            str(found.get("rung", "full")),
            found.get("degraded", False) is True,
            None if reason is None else str(reason),
            {str(stage): _number(ms) for stage, ms in (found.get("stage_ms") or {}).items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise NotAnswered(MALFORMED_ANSWER, repr(error)[:300]) from error


def _recommendation(found: dict[str, Any]) -> Recommendation:
    price, promotion, coupon = found.get("price"), found.get("promotion"), found.get("coupon")
    item_id = found["item_id"]
    if not isinstance(item_id, str) or not item_id:
        raise TypeError("item_id is no text")
    return Recommendation(
        item_id,
        _number(found["score"]),
        str(found.get("source", "")),
        str(found.get("reason", "")),
        None if price is None else _number(price),
        None if promotion is None else _number(promotion),
        None if coupon is None else str(coupon),
    )


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("a number is not finite, or none")
    return float(value)


class Addresses:
    """A host's addresses, the one that answered last first.

    They are asked for in the background: while the name service hangs, those known before go on. One thread
    at a time asks, however many calls wait.
    """

    def __init__(self, target: httpx.URL, resolve: Resolve) -> None:
        self._host, self._resolve = target.host, resolve
        self._port = target.port or (443 if target.scheme == "https" else 80)
        self._known: tuple[str, ...] = ()
        self._until = -math.inf
        self._asking: asyncio.Future[None] | None = None
        with contextlib.suppress(ValueError):
            self._known, self._until = (str(ipaddress.ip_address(self._host)),), math.inf

    async def first(self) -> str:
        """Return the address to ask.

        Raises:
            NotAnswered: the name has none.
        """
        if self._asking is None and time.monotonic() >= self._until:
            self._ask(asyncio.get_running_loop())
        if not self._known and self._asking is not None:
            await asyncio.shield(self._asking)
        if not self._known:
            raise NotAnswered(NAME_UNRESOLVED, f"{self._host} has no address")
        return self._known[0]

    def failed(self, address: str) -> None:
        """Take another address next time, and ask whether they still hold."""
        if self._until < math.inf and self._known[0] == address:
            self._known, self._until = (*self._known[1:], address), -math.inf

    def _ask(self, loop: asyncio.AbstractEventLoop) -> None:
        asking = loop.create_future()

        def ask() -> None:
            try:
                found = tuple(self._resolve(self._host, self._port))
            except (OSError, UnicodeError):
                found = ()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._take, asking, found)

        # A daemon, unlike an executor's: a process that ends does not wait for a name service that hangs.
        threading.Thread(target=ask, name="recommend-resolve", daemon=True).start()
        self._asking = asking

    def _take(self, asking: asyncio.Future[None], found: tuple[str, ...]) -> None:
        if found:
            first = self._known[:1] if self._known and self._known[0] in found else ()
            self._known = tuple(dict.fromkeys((*first, *found)))
        self._until = time.monotonic() + (NAME_S if found else NO_NAME_S)
        self._asking = None
        asking.set_result(None)


@dataclass(slots=True)
class Budget:
    """Retries that may be made, a share of the calls: a server in trouble is not asked twice as much."""

    saved: float = 1.0

    def earn(self) -> None:
        """Count a call."""
        self.saved = min(self.saved + RETRY_SHARE, RETRIES_SAVED)

    def spend(self) -> bool:
        """Take a retry; say whether there was one."""
        if self.saved < 1:
            return False
        self.saved -= 1
        return True


@dataclass(slots=True)
class Breaker:
    """Whether to ask at all; unlike `serving.stores.circuit_breaker` it probes with calls.

    Times are of time.monotonic.
    """

    failures: int = 0  # in a row
    again: float = -math.inf  # when one call may try, while it is open

    def lets_through(self, now: float) -> bool:
        """Say whether a call may ask; while it is open, one in PAUSE_S may."""
        if self.failures < FAILURES:
            return True
        if now < self.again:
            return False
        self.again = now + PAUSE_S
        return True

    def well(self) -> None:
        """Take an answer."""
        if self.failures >= FAILURES:
            _log.info("the recommender is back")
        self.failures = 0

    def failed(self, now: float, error: NotAnswered) -> None:
        """Take a failure."""
        self.failures += 1
        if self.failures == FAILURES:
            _log.warning("the recommender failed %d times in a row and is not asked: %s", FAILURES, error)
        if self.failures >= FAILURES:
            self.again = now + PAUSE_S
