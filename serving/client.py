"""A basket -> recommendations in time, whatever the endpoint does: the client for the checkout's own code.

    with Client("http://recommender:8080", read_best_sellers("best_sellers.json")) as client:
        answer = client.recommend(["1041453", "995242"], user_id="1228", k=5)

It needs httpx and no other library. A call ends within its deadline and raises nothing: what the endpoint did
not answer is answered from the best sellers, `degraded`, with the reason.

A second attempt follows a first one that failed (connection lost, 429, 5xx), never one that is slow: the
endpoint keeps the deadline itself and answers from a lower rung in time, so that asking it twice would bring
the same answer and double its load just when it has too much. What it cannot answer for is its own death, and
that shows as a connection lost.

httpx's timeouts are per phase, and a name's resolution cannot be interrupted at all. So a call waits for its
answer, not for whoever fetches it: names are resolved in a thread of their own, one at a time, and `Client`
hands its calls to one event loop in another. However many calls hang, it is two threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import os
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import httpx

from serving.schemas import DEFAULT_K, MAX_K, Recommendation, Response

if TYPE_CHECKING:
    from serving.bundle import Bundle

PATH = "/v1/recommendations"
SOURCE = "client_fallback"
DEADLINE_MS = 50.0
FOR_THE_SERVER = 0.9  # of the time that is left; the rest is for the way back
GRACE_S = 0.01  # after the deadline, for the loop's thread to say itself why there is no answer
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


class Asked(TypedDict, total=False):
    """What may be said besides the basket; `at` without an offset is UTC, `deadline_ms` is of this call."""

    user_id: str | None
    store_id: str | None
    at: datetime | str | None
    k: int
    profile: str | None
    request_id: str | None
    deadline_ms: float


def resolve(host: str, port: int) -> Sequence[str]:
    """Return a host's addresses as the system knows them; may hang for as long as its resolver does.

    Raises:
        OSError: there are none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def write_best_sellers(bundle: Bundle, file: Path) -> None:
    """Write a bundle's best sellers, best first, where a client without the bundle can read them."""
    removed = set(bundle.removed.tolist())
    codes = [code for code in bundle.statistics.popular.tolist() if code not in removed]
    file.write_text(json.dumps(bundle.statistics.item_ids[codes].tolist()), encoding="utf-8")


def read_best_sellers(file: str | Path) -> list[str]:
    """Return what `write_best_sellers` has written.

    Raises:
        OSError: there is no such file.
        ValueError: it is not a JSON list of item ids.
    """
    found = json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError(f"{file} is not a JSON list of item ids: write it with write_best_sellers")
    return found


class AsyncClient:
    """The client of one event loop; tasks may share it."""

    def __init__(
        self,
        url: str,
        best_sellers: Sequence[str],
        *,
        deadline_ms: float = DEADLINE_MS,
        strict: bool = False,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        """Take the endpoint's address and what is offered without it.

        Args:
            url: http(s)://HOST[:PORT], and a path if a proxy wants one before ours.
            best_sellers: item ids, best first; longer than k by a basket, since nothing in it is offered.
            deadline_ms: of a call that names none.
            strict: raise `NotAnswered` instead of answering without the endpoint.
            tls: for an authority of one's own; None: those that everybody trusts.
            resolve: finds the host's addresses.

        Raises:
            ValueError: the address or the deadline cannot be meant.
        """
        _check_deadline(deadline_ms)
        self._deadline_ms = deadline_ms
        self._last_resort = _LastResort(best_sellers, strict)
        self._asker = _Asker(*_target(url, tls), resolve)

    async def recommend(self, basket: Sequence[str], **asked: Unpack[Asked]) -> Response:
        """Return what goes with a basket; raises `NotAnswered` if the client is strict, else nothing."""
        try:
            return await self._asker.answer(_question(basket, asked, self._deadline_ms))
        except Exception as error:  # noqa: BLE001 (the edge: the checkout is never blocked)
            return self._last_resort.answer(error, basket, asked)

    async def close(self) -> None:
        """End the calls under way and close the connections."""
        await self._asker.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client:
    """The client of code that waits; threads may share it, and a process that is forked off goes on with it.

    Its thread starts with the first call, and ends with `close`.
    """

    def __init__(
        self,
        url: str,
        best_sellers: Sequence[str],
        *,
        deadline_ms: float = DEADLINE_MS,
        strict: bool = False,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        """Take what `AsyncClient` takes."""
        _check_deadline(deadline_ms)
        self._deadline_ms = deadline_ms
        self._last_resort = _LastResort(best_sellers, strict)
        self._asker_of = _target(url, tls), resolve
        self._lock = threading.Lock()
        self._closed = False
        self._side: _Side | None = None

    def recommend(self, basket: Sequence[str], **asked: Unpack[Asked]) -> Response:
        """Return what goes with a basket; raises `NotAnswered` if the client is strict, else nothing."""
        try:
            question = _question(basket, asked, self._deadline_ms)
            return self._running().answer(question)
        except Exception as error:  # noqa: BLE001 (the edge: the checkout is never blocked)
            return self._last_resort.answer(error, basket, asked)

    def close(self) -> None:
        """End the calls under way, close the connections and wait for the thread."""
        with self._lock:
            self._closed = True
            side, self._side = self._side, None
        if side is not None and side.process == os.getpid():
            side.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> _Side:
        side = self._side
        if side is not None and side.process == os.getpid():
            return side
        with self._lock:
            if self._closed:
                raise NotAnswered(CLOSED, "the client was closed")
            # After a fork: the thread stayed behind, and the connections are the parent's.
            if self._side is None or self._side.process != os.getpid():
                target, resolve = self._asker_of
                self._side = _Side(_Asker(*target, resolve))
            return self._side


class FakeClient:
    """A client for the tests of who calls one: answers these items, or fails for this reason.

    `calls` are the arguments of each call, in order.
    """

    def __init__(
        self, items: Sequence[str] = (), failure: str | None = None, *, strict: bool = False
    ) -> None:
        """Take what to answer; with a failure, the items are the best sellers."""
        self.calls: list[dict[str, Any]] = []
        self._items, self._failure = items, failure
        self._last_resort = _LastResort(items, strict)

    def recommend(self, basket: Sequence[str], **asked: Unpack[Asked]) -> Response:
        """Answer as `Client` would."""
        self.calls.append({"basket": list(basket), **asked})
        if self._failure is not None:
            return self._last_resort.answer(NotAnswered(self._failure, "as told"), basket, asked)
        items = [Recommendation(item, 0.5, "fake", "as told") for item in self._items if item not in basket]
        return Response(asked.get("request_id") or "fake", tuple(items[: asked.get("k", DEFAULT_K)]), "fake")

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class AsyncFakeClient:
    """Likewise, for who calls an `AsyncClient`."""

    def __init__(
        self, items: Sequence[str] = (), failure: str | None = None, *, strict: bool = False
    ) -> None:
        """Take what `FakeClient` takes."""
        self._fake = FakeClient(items, failure, strict=strict)
        self.calls = self._fake.calls

    async def recommend(self, basket: Sequence[str], **asked: Unpack[Asked]) -> Response:
        """Answer as `AsyncClient` would."""
        return self._fake.recommend(basket, **asked)

    async def close(self) -> None:
        """Do nothing."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Question:
    """One request on its way: when nobody waits for its answer any more, in time.monotonic."""

    body: bytes
    request_id: str
    deadline: float


def _question(basket: Sequence[str], asked: Asked, deadline_ms: float) -> _Question:
    """Return the question as it is sent; what the fields may hold is the endpoint's to judge.

    Raises:
        NotAnswered: it cannot be written as JSON.
    """
    began = time.monotonic()
    fields: dict[str, Any] = {"basket": basket, **asked}
    try:
        if isinstance(basket, str):
            raise TypeError("basket is one text, not a list of item ids")
        _check_deadline(deadline_ms := fields.pop("deadline_ms", deadline_ms))
        fields["basket"] = list(basket)
        if isinstance(at := fields.get("at"), datetime):
            fields["at"] = at.isoformat()
        request_id = fields["request_id"] = fields.get("request_id") or uuid.uuid4().hex
        body = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAnswered(INVALID_REQUEST, str(error)) from error
    return _Question(body, request_id, began + deadline_ms / 1e3)


def _check_deadline(deadline_ms: float) -> None:
    if not 0 < deadline_ms < math.inf:  # also refuses nan
        raise ValueError(f"deadline_ms is {deadline_ms}: a number of milliseconds above 0")


def _target(url: str, tls: ssl.SSLContext | None) -> tuple[httpx.URL, ssl.SSLContext | bool]:
    """Return where to ask, and what checks a certificate: to read that takes longer than a call may."""
    base = httpx.URL(url)
    if base.scheme not in ("http", "https") or not base.host:
        raise ValueError(f"{url!r} is no address of an endpoint: http(s)://HOST[:PORT]")
    target = base.copy_with(path=base.path.rstrip("/") + PATH)
    if base.scheme == "http":
        return target, False
    return target, tls or httpx.create_ssl_context(trust_env=False)


class _LastResort:
    """What is said when the endpoint says nothing."""

    def __init__(self, best_sellers: Sequence[str], strict: bool) -> None:
        self._items, self._strict = tuple(dict.fromkeys(best_sellers)), strict

    def answer(self, error: Exception, basket: Collection[object], asked: Asked) -> Response:
        """Return the best sellers without the basket's; raises `NotAnswered` if the client is strict."""
        if not isinstance(error, NotAnswered):
            _log.error("the client failed; answered by the best sellers", exc_info=error)
            error, cause = NotAnswered(CLIENT_ERROR, repr(error)), error
            error.__cause__ = cause
        elif error.reason == INVALID_REQUEST:
            _log.warning("answered by the best sellers: %s", error)
        if self._strict:
            raise error
        # What was asked may be why there is no answer: none of it is taken to be what it should be.
        has = {item for item in basket if isinstance(item, str)} if isinstance(basket, Collection) else set()
        k, request_id = asked.get("k", DEFAULT_K), asked.get("request_id")
        k = min(max(k, 0), MAX_K) if isinstance(k, int) else DEFAULT_K
        offered = [item for item in self._items if item not in has][:k]
        return Response(
            request_id if isinstance(request_id, str) else "",
            tuple(Recommendation(item, 0.0, SOURCE, "popular") for item in offered),
            bundle_id="",
            rung="popular" if offered else "empty",
            degraded=True,
            degraded_reason=error.reason,
        )


class _Side:
    """An event loop in a thread of its own, and whom it asks."""

    def __init__(self, asker: _Asker) -> None:
        self.process = os.getpid()
        self._asker, self._loop = asker, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="recommend-client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._loop.close()
            raise

    def answer(self, question: _Question) -> Response:
        """Ask in the loop, and wait no longer than the deadline even if the loop hangs.

        Raises:
            NotAnswered: with the reason.
        """
        asking = self._asker.answer(question)
        try:
            future = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError as error:
            asking.close()
            raise NotAnswered(CLOSED, "the client was closed") from error
        try:
            return future.result(question.deadline - time.monotonic() + GRACE_S)
        except TimeoutError as error:
            raise NotAnswered(DEADLINE_EXCEEDED, "the client's own loop had no time") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """End the loop and its thread."""
        closing = asyncio.run_coroutine_threadsafe(self._asker.close(), self._loop)
        with contextlib.suppress(TimeoutError):
            closing.result(PAUSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PAUSE_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


class _Asker:
    """Asks one endpoint, in one event loop: attempts, their budget and the breaker; needs no locks."""

    def __init__(self, target: httpx.URL, tls: ssl.SSLContext | bool, resolve: Resolve) -> None:
        self._target, self._closed = target, False
        self._addresses = _Addresses(target, resolve)
        self._budget, self._breaker = _Budget(), _Breaker()
        self._tasks: set[asyncio.Task[Response]] = set()
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
            limits=httpx.Limits(
                max_connections=MAX_CONNECTIONS,
                max_keepalive_connections=MAX_CONNECTIONS,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
            trust_env=False,  # a shell's proxy is not between a checkout and its endpoint
        )

    async def answer(self, question: _Question) -> Response:
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

    async def _attempts(self, question: _Question) -> Response:
        try:
            return await self._attempt(question)
        except NotAnswered as error:
            if error.reason not in _RETRIED or not self._budget.spend():
                raise
        return await self._attempt(question)

    async def _attempt(self, question: _Question) -> Response:
        address = await self._addresses.first()
        left_ms = (question.deadline - time.monotonic()) * 1e3
        try:
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
        return _response(answer.content, question.request_id)


def _meaning(status: int) -> str:
    if status in (400, 413, 422):
        return INVALID_REQUEST
    if status in (429, 503):
        return OVERLOADED
    return SERVER_ERROR if status >= 500 else UNEXPECTED_STATUS


def _response(content: bytes, request_id: str) -> Response:
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


class _Addresses:
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
class _Budget:
    """Retries that may be made, a share of the calls: a server in trouble is not asked twice as much."""

    saved: float = 1.0

    def earn(self) -> None:
        self.saved = min(self.saved + RETRY_SHARE, RETRIES_SAVED)

    def spend(self) -> bool:
        if self.saved < 1:
            return False
        self.saved -= 1
        return True


@dataclass(slots=True)
class _Breaker:
    """Whether to ask at all; unlike `serving.circuit_breaker` it probes with calls, not in the background.

    Times are of time.monotonic.
    """

    failures: int = 0  # in a row
    again: float = field(default=-math.inf)  # when one call may try, while it is open

    def lets_through(self, now: float) -> bool:
        if self.failures < FAILURES:
            return True
        if now < self.again:
            return False
        self.again = now + PAUSE_S
        return True

    def well(self) -> None:
        if self.failures >= FAILURES:
            _log.info("the recommender is back")
        self.failures = 0

    def failed(self, now: float, error: NotAnswered) -> None:
        self.failures += 1
        if self.failures == FAILURES:
            _log.warning("the recommender failed %d times in a row and is not asked: %s", FAILURES, error)
        if self.failures >= FAILURES:
            self.again = now + PAUSE_S
