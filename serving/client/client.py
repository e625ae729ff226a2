"""Basket -> recommendations within a deadline, whatever the endpoint does.

    with Client("http://recommender:8080", read_best_sellers("best_sellers.json")) as client:
        answer = client.recommend(["1041453", "995242"], user_id="1228", k=5)

A call ends within its deadline and raises nothing. Where the endpoint gives no answer, the client
answers with the best sellers, marked `degraded`, with the reason.

httpx has one timeout a phase, and a DNS lookup cannot be interrupted at all. So a call waits for its result,
not for the work itself: lookups run in their own thread, one at a time, and `Client` hands its calls to an
event loop in another thread. However many calls hang, there are two threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import os
import re
import ssl
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack, get_type_hints

import httpx

from .answers import (
    CLIENT_ERROR,
    CLOSED,
    DEADLINE_EXCEEDED,
    DEFAULT_K,
    INVALID_REQUEST,
    MAX_K,
    NotAnswered,
    Recommendations,
    RecommendedItem,
)
from .attempts import FAIR_S, PATH, EndpointCaller, PreparedRequest, Resolve, load_transport, resolve

SOURCE = "client_fallback"
DEADLINE_MS = 50.0
GRACE_S = 0.01  # after the deadline, so that the loop's thread can report the reason itself
CLOSING_S = 1.0  # until the loop's thread must have ended

_log = logging.getLogger(__name__)


class InvalidCall(ValueError):
    """An argument that is a programming error: the call raises, and nothing is sent."""


class RequestOptions(TypedDict, total=False):
    """Optional fields of a request.

    `at` without an offset is UTC. A `k` above 100 counts as 100. `explain` adds names and reason codes.
    `deadline_ms` counts for this call.
    """

    user_id: str | None
    store_id: str | None
    at: datetime | str | None
    k: int
    profile: str | None
    request_id: str | None
    explain: bool
    deadline_ms: float


_KINDS = get_type_hints(RequestOptions)


def read_best_sellers(file: str | Path) -> list[str]:
    """Read a list of best sellers, best first, as `reco best-sellers` writes it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a JSON list of item ids.
    """
    try:
        items = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{file} is not a JSON list of item ids: write it with `reco best-sellers`")
    return items


class _Endpoint:
    """What both clients are made of: address, deadline and fallback."""

    def __init__(
        self,
        url: str,
        best_sellers: Sequence[str],
        *,
        deadline_ms: float = DEADLINE_MS,
        strict: bool = False,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        """Check the address and prepare the fallback; connects with the first call.

        Args:
            url: http(s)://HOST[:PORT], with a path prefix if a proxy needs one.
            best_sellers: item ids, best first. Items of the basket are left out: have more than k.
            deadline_ms: default deadline of a call.
            strict: raise `NotAnswered` instead of answering with best sellers.
            token: one of the endpoint's `RECO_CALLER_TOKENS`, if it has any.
            tls: for your own certificate authority; None uses the public ones.
            resolve: looks up the host's addresses.

        Raises:
            ValueError: the address, the deadline or the token is invalid.
        """
        if not 0 < deadline_ms < math.inf:  # NaN is refused, too
            raise ValueError(f"deadline_ms is {deadline_ms}, expected milliseconds above 0")
        if not re.fullmatch("[!-~]*", token):
            raise ValueError(
                "token holds a space or a character that no header may have: strip what was read"
            )
        load_transport()
        self._deadline_ms = deadline_ms
        self._fallback = BestSellers(best_sellers, strict)
        fair_s = min(FAIR_S, deadline_ms / 2e3)
        self._connect = functools.partial(EndpointCaller, *_target(url, tls), resolve, token, fair_s)
        self._open()

    def _open(self) -> None:
        raise NotImplementedError


class AsyncClient(_Endpoint):
    """The client of one event loop; tasks may share it."""

    def _open(self) -> None:
        self._caller = self._connect()

    async def recommend(self, basket: Sequence[str], **options: Unpack[RequestOptions]) -> Recommendations:
        """Return recommendations for a basket.

        Raises:
            InvalidCall: a programming error; nothing was sent.
            NotAnswered: only if the client is strict.
        """
        try:
            return await self._caller.answer(_prepare(basket, options, self._deadline_ms))
        except InvalidCall:
            raise
        except Exception as error:  # noqa: BLE001 (the edge: the checkout is never blocked)
            return self._fallback.answer(error, basket, options)

    async def close(self) -> None:
        """Cancel the calls in flight and close the connections."""
        await self._caller.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Client(_Endpoint):
    """The blocking client. Threads may share it, and it works on in a forked child.

    Its thread starts with the first call and ends with `close`.
    """

    def _open(self) -> None:
        # By process: a fork may copy a lock that another thread holds, which is missing there.
        self._locks: dict[int, threading.Lock] = {}
        self._closed = False
        self._loop_thread: _LoopThread | None = None

    def recommend(self, basket: Sequence[str], **options: Unpack[RequestOptions]) -> Recommendations:
        """Return recommendations for a basket; raises as `AsyncClient.recommend`."""
        try:
            request = _prepare(basket, options, self._deadline_ms)
            return self._running(request.deadline).answer(request)
        except InvalidCall:
            raise
        except Exception as error:  # noqa: BLE001 (the edge: the checkout is never blocked)
            return self._fallback.answer(error, basket, options)

    def close(self) -> None:
        """Cancel the calls in flight, close the connections and wait for the thread."""
        with self._lock():
            self._closed = True
            loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is not None and loop_thread.process == os.getpid():
            loop_thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> threading.Lock:
        return self._locks.setdefault(os.getpid(), threading.Lock())

    def _running(self, deadline: float) -> _LoopThread:
        loop_thread = self._loop_thread
        if loop_thread is not None and loop_thread.process == os.getpid():
            return loop_thread
        lock = self._lock()
        if not lock.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise NotAnswered(DEADLINE_EXCEEDED, "another thread was still starting the client")
        try:
            if self._closed:
                raise NotAnswered(CLOSED, "the client was closed")
            # After a fork the thread is missing, and the connections belong to the parent.
            if self._loop_thread is None or self._loop_thread.process != os.getpid():
                self._loop_thread = _LoopThread(self._connect())
            return self._loop_thread
        finally:
            lock.release()


def _prepare(basket: Sequence[str], options: RequestOptions, deadline_ms: float) -> PreparedRequest:
    """Return the encoded request; the endpoint validates the values.

    Raises:
        InvalidCall: the arguments are of the wrong kind.
        NotAnswered: no time is left, or the basket's items cannot be written as JSON.
    """
    started_at = time.monotonic()
    check_call(basket, options)
    fields: dict[str, Any] = {**options, "basket": list(basket)}
    if (deadline_ms := fields.pop("deadline_ms", deadline_ms)) <= 0:  # the caller's time is over
        raise NotAnswered(DEADLINE_EXCEEDED, "no time was left for the call")
    if isinstance(at := fields.get("at"), datetime):
        fields["at"] = at.isoformat()
    request_id = fields["request_id"] = fields.get("request_id") or uuid.uuid4().hex
    try:
        body = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAnswered(INVALID_REQUEST, str(error)) from error
    return PreparedRequest(body, request_id, started_at + deadline_ms / 1e3)


def check_call(basket: object, options: RequestOptions) -> None:
    """Check a call for programming errors. One invalid item of a basket comes from data, and never raises.

    Raises:
        InvalidCall: naming the argument, its type or value, and the expected one.
    """
    for name, value in options.items():
        if name not in _KINDS:
            raise InvalidCall(f"no argument {name!r}: there is {', '.join(_KINDS)}")
        kind = _KINDS[name]
        if not isinstance(value, (int | float) if kind is float else kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            expected = getattr(kind, "__name__", kind)
            raise InvalidCall(f"{name} is of type {type(value).__name__}, expected {expected}")
    if options.get("k", DEFAULT_K) < 0:
        raise InvalidCall(f"k is {options['k']}, expected 0 or more")
    if not math.isfinite(options.get("deadline_ms", DEADLINE_MS)):
        raise InvalidCall(f"deadline_ms is {options['deadline_ms']}, expected milliseconds")
    if isinstance(basket, str) or not isinstance(basket, Collection):
        raise InvalidCall(f"basket is of type {type(basket).__name__}, expected a list of item ids")
    if len(basket) and not any(isinstance(item, str) for item in basket):
        raise InvalidCall("no item of the basket is of type str, expected ids as text")


def _target(url: str, tls: ssl.SSLContext | None) -> tuple[httpx.URL, ssl.SSLContext | bool]:
    """Return the target and its TLS context, which takes too long to load within a call."""
    try:
        base = httpx.URL(url)
    except httpx.InvalidURL:
        base = httpx.URL("")
    if base.scheme not in ("http", "https") or not base.host or (base.port or 0) > 65_535:
        raise ValueError(f"{url!r} is not an endpoint's address, expected http(s)://HOST[:PORT]")
    target = base.copy_with(path=base.path.rstrip("/") + PATH)
    if base.scheme == "http":
        return target, False
    return target, tls or httpx.create_ssl_context(trust_env=False)


class BestSellers:
    """The answer without the endpoint: best sellers."""

    def __init__(self, best_sellers: Sequence[str], strict: bool) -> None:
        self._items, self._strict = tuple(dict.fromkeys(best_sellers)), strict

    def answer(
        self, error: Exception, basket: Collection[object], options: RequestOptions
    ) -> Recommendations:
        """Return best sellers that are not in the basket; raises `NotAnswered` if the client is strict."""
        if not isinstance(error, NotAnswered):
            _log.error("the client failed; answered by the best sellers", exc_info=error)
            error, cause = NotAnswered(CLIENT_ERROR, type(error).__name__), error
            error.__cause__ = cause
        elif error.reason == INVALID_REQUEST:
            _log.warning("answered by the best sellers: %s", error)
        if self._strict:
            raise error
        excluded = set[str]()
        try:
            for item in basket if isinstance(basket, Collection) else ():
                if isinstance(item, str):
                    excluded.add(item)
        except Exception:  # noqa: BLE001 (a deleted database row, a set that another thread changes)
            _log.warning("a basket cannot be read; the best sellers may repeat its items")
        offered = [item for item in self._items if item not in excluded][
            : min(options.get("k", DEFAULT_K), MAX_K)
        ]
        return Recommendations(
            options.get("request_id") or "",
            tuple(RecommendedItem(item, 0.0, SOURCE, "popular") for item in offered),
            bundle_id="",
            rung="popular" if offered else "empty",
            degraded=True,
            degraded_reason=error.reason,
        )


class _LoopThread:
    """An event loop in its own thread, with its caller of the endpoint."""

    def __init__(self, caller: EndpointCaller) -> None:
        self.process = os.getpid()
        self._caller, self._runner = caller, asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="recommend-client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._loop.close()
            raise

    def answer(self, request: PreparedRequest) -> Recommendations:
        """Call from the loop and wait until the deadline, even if the loop hangs.

        Raises:
            NotAnswered: with the reason.
        """
        answering = self._caller.answer(request)
        try:
            future = asyncio.run_coroutine_threadsafe(answering, self._loop)
        except RuntimeError as error:
            answering.close()
            raise NotAnswered(CLOSED, "the client was closed") from error
        try:
            return future.result(request.deadline - time.monotonic() + GRACE_S)
        except CancelledError as error:
            raise NotAnswered(CLOSED, "the client was closed") from error
        except TimeoutError as error:
            raise NotAnswered(DEADLINE_EXCEEDED, "the client's own event loop was busy") from error
        finally:
            future.cancel()

    def close(self) -> None:
        """Stop the loop and its thread; calls that are still in flight then are cancelled."""
        closing = asyncio.run_coroutine_threadsafe(self._caller.close(), self._loop)
        with contextlib.suppress(TimeoutError):
            closing.result(CLOSING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        with self._runner:  # at the end it cancels what `close` had no time to wait for
            self._loop.run_forever()
