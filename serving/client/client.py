"""A basket -> recommendations in time, whatever the endpoint does: the client for the checkout's own code.

    with Client("http://recommender:8080", read_best_sellers("best_sellers.json")) as client:
        answer = client.recommend(["1041453", "995242"], user_id="1228", k=5)

It needs httpx and no other library. A call ends within its deadline and raises nothing: what the endpoint did
not answer is answered from the best sellers, `degraded`, with the reason.

httpx's timeouts are per phase, and a name's resolution cannot be interrupted at all. So a call waits for its
answer, not for whoever fetches it: names are resolved in a thread of their own, one at a time, and `Client`
hands its calls to one event loop in another. However many calls hang, it is two threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import ssl
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import httpx

from serving.client.attempts import (
    CLIENT_ERROR,
    CLOSED,
    DEADLINE_EXCEEDED,
    INVALID_REQUEST,
    PATH,
    Asker,
    Question,
    Resolve,
    resolve,
)
from serving.client.attempts import NotAnswered as NotAnswered
from serving.schemas import DEFAULT_K, MAX_K, Recommendation, Response

if TYPE_CHECKING:
    from serving.release.bundle import Bundle

SOURCE = "client_fallback"
DEADLINE_MS = 50.0
GRACE_S = 0.01  # after the deadline, for the loop's thread to say itself why there is no answer
CLOSING_S = 1.0  # for the loop's thread to end

_log = logging.getLogger(__name__)


class Asked(TypedDict, total=False):
    """What may be said besides the basket; `at` without an offset is UTC, `deadline_ms` is of this call."""

    user_id: str | None
    store_id: str | None
    at: datetime | str | None
    k: int
    profile: str | None
    request_id: str | None
    deadline_ms: float


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
        self._asker = Asker(*_target(url, tls), resolve)

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
                self._side = _Side(Asker(*target, resolve))
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


def _question(basket: Sequence[str], asked: Asked, deadline_ms: float) -> Question:
    """Return the question as it is sent; what the fields may hold is the endpoint's to judge.

    Raises:
        NotAnswered: it cannot be written as JSON.
    """
    began = time.monotonic()
    fields: dict[str, Any] = {"basket": basket, **asked}
    try:
        if isinstance(basket, str) or not isinstance(basket, Collection):
            raise TypeError("basket is no list of item ids")
        _check_deadline(deadline_ms := fields.pop("deadline_ms", deadline_ms))
        fields["basket"] = list(basket)
        if isinstance(at := fields.get("at"), datetime):
            fields["at"] = at.isoformat()
        request_id = fields["request_id"] = fields.get("request_id") or uuid.uuid4().hex
        body = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAnswered(INVALID_REQUEST, str(error)) from error
    return Question(body, request_id, began + deadline_ms / 1e3)


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
            error, cause = NotAnswered(CLIENT_ERROR, type(error).__name__), error
            error.__cause__ = cause
        elif error.reason == INVALID_REQUEST:
            _log.warning("answered by the best sellers: %s", error)
        if self._strict:
            raise error
        # What was asked may be why there is no answer: none of it is taken to be what it should be.
        has = _ids_in(basket)
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


def _ids_in(basket: object) -> set[str]:
    """Return the ids of a basket that may be none, up to where it cannot be read."""
    ids: set[str] = set()
    try:
        if isinstance(basket, Collection):
            for item in basket:
                if isinstance(item, str):
                    ids.add(item)
    except Exception:  # noqa: BLE001 (a row of a database that is gone, a set that another thread changes)
        _log.warning("a basket could not be read whole; what is in it may be among the best sellers")
    return ids


class _Side:
    """An event loop in a thread of its own, and whom it asks."""

    def __init__(self, asker: Asker) -> None:
        self.process = os.getpid()
        self._asker, self._loop = asker, asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="recommend-client", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads
            self._loop.close()
            raise

    def answer(self, question: Question) -> Response:
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
            closing.result(CLOSING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
