"""An HTTP request as it arrives -> the answer of one of our two routes, a refusal, or KServe's application.

    POST /v1/recommendations           one request -> one response
    POST /v1/models/checkout:predict   KServe's V1: {"instances": [request, ...]} -> {"predictions": [...]}

`Limits` bounds each body before anything is parsed. A body that is not JSON gets 400, JSON that is not a
request gets 422. KServe's own handling of V1 costs more than the rest of the endpoint; our route gives the
same bytes (a test compares). V2, metadata and readiness stay KServe's. `serving.api.http_server` bounds the
time of a head and the number of connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from serving.api.problems import MEDIA_TYPE, problem
from serving.checkout.checkout import Checkout
from serving.errors import InvalidRequest, NotJson, Overloaded
from serving.metrics import count_fault, count_rejected
from serving.schemas import (
    ARRIVED_AT,
    HEADERS,
    Call,
    Instances,
    RequestBody,
    check_json,
    read_body,
    read_call,
)
from serving.settings import Settings

RECOMMENDATIONS = "/v1/recommendations"
PREDICT = "/v1/models/checkout:predict"
# ASGI's types.
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
# Takes the body; raises InvalidRequest, Overloaded.
Route = Callable[[Scope, bytes], Awaitable[bytes]]

# Keys of the scope that the HTTP server writes: when a request had arrived whole (perf_counter), and that its
# client has left. Keys that it reads: the task to cancel if the client leaves, and that the rest of a body is
# discarded.
ARRIVED, GONE, TASK, UNREAD = "reco.arrived", "reco.gone", "reco.task", "reco.unread"
_HEADERS = {name.encode(): name for name in HEADERS}
# Headers that announce something else than one JSON document: CloudEvents, and V2's binary tensors.
_BINARY = b"inference-header-content-length"
_DROPPED = (b"content-type", _BINARY, b"content-encoding")
_JSON, _PROBLEM = (b"content-type", b"application/json"), (b"content-type", MEDIA_TYPE.encode())
_encode = msgspec.json.Encoder().encode


def routes(checkout: Checkout) -> dict[str, Route]:
    """Return the route of each path that a POST may name."""

    async def recommend(scope: Scope, body: bytes) -> bytes:
        question = read_body(body, RequestBody)
        call = await _enter(scope, checkout)
        profiles = checkout.service.recommender.bundle.profiles
        request = question.to_request(time.time(), call.request_id, profiles)
        return _encode((await checkout.answer(request, call)).to_dict())

    async def predict(scope: Scope, body: bytes) -> bytes:
        instances = read_body(body, Instances)
        call = await _enter(scope, checkout)
        profiles = checkout.service.recommender.bundle.profiles
        requests = instances.to_requests(time.time(), call.request_id, profiles)
        responses = await checkout.answer_each(requests, call)
        return _encode({"predictions": [response.to_dict() for response in responses]})

    return {RECOMMENDATIONS: recommend, PREDICT: predict}


async def _enter(scope: Scope, checkout: Checkout) -> Call:
    headers = {
        _HEADERS[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS
    }
    call = read_call(headers, scope["path"], checkout.service.limit_s, scope.get(ARRIVED))
    await checkout.enter(call)
    return call


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class _Gone(Exception):
    """The client went away before its body was read."""


class Limits:
    """ASGI application: bounds the length of a body, the time it takes to arrive, and its format."""

    def __init__(self, app: App, settings: Settings, routes: Mapping[str, Route] | None = None) -> None:
        self._app = app
        self._routes = {} if routes is None else routes
        self._limit = settings.body_limit_bytes
        self._timeout_s = settings.body_timeout_ms / 1e3
        # On loopback a browser is the one way in from outside: any web page can let it post here.
        self._refuses_pages = settings.is_local
        self.draining = False  # then each answer closes its connection, so that its client connects elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request here if it is of our routes or invalid, else pass it on with its body read."""
        if self.draining:
            send = _last(send)
        route = self._routes.get(scope["path"])
        if scope["method"] == "POST":
            await self._post(route, scope, receive, send)
        elif route is None:
            await self._app(scope, receive, send)  # no handler there reads a body
        else:
            count_rejected("route")
            await refuse(send, 405, "method not allowed here", (b"allow", b"POST"))

    async def _post(self, route: Route | None, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._refuses_pages and any(name == b"origin" for name, _ in scope["headers"]):
                raise _Refused(403, "web_page", "web pages may not ask: no Origin header is expected here")
            body = await self._read(scope, receive)
            _refuse_binary(scope, body)
            if route is not None:
                scope[TASK] = asyncio.current_task()
                try:
                    answer = await route(scope, body)
                finally:
                    scope.pop(TASK, None)  # from here on there is nothing to cancel but the sending
            elif body:  # an empty one may be right: the application behind us decides
                check_json(body)
        except asyncio.CancelledError:
            if GONE not in scope:
                raise
            count_rejected("client_gone")
        except _Refused as refused:
            count_rejected(refused.reason)
            # The rest of a body must not be read as the next request; that of a long one is discarded.
            scope[UNREAD] = refused.status in (403, 413)
            last = refused.status in (403, 408, 413) and not self.draining
            await refuse(_last(send) if last else send, refused.status, str(refused))
        except NotJson as error:
            count_rejected("not_json")
            await refuse(send, 400, str(error))
        except InvalidRequest as error:
            count_rejected("invalid_input")
            await refuse(send, 422, str(error))
        except Overloaded as error:
            count_rejected(error.reason)
            await refuse(send, 429, str(error))
        except _Gone:
            count_rejected("client_gone")
        except Exception:  # uvicorn logs its traceback, and would send plain text
            count_fault("http")
            await refuse(send, 500, "internal error")
            raise
        else:
            if route is None:
                ARRIVED_AT.set(scope.get(ARRIVED))
                await self._app(_as_json(scope), _replay(body, receive), send)
            else:
                await _answer(send, 200, answer, _JSON)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        if ARRIVED in scope:  # the whole body is here: no timer is needed
            return await self._collect(_announced(scope), receive)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._collect(_announced(scope), receive)
        except TimeoutError as error:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            raise _Refused(408, "body_timeout", message) from error

    async def _collect(self, announced: int | None, receive: Receive) -> bytes:
        if announced is not None and announced > self._limit:
            raise self._too_large()
        chunks, length = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            length += len(chunk)
            if length > self._limit:
                raise self._too_large()
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self) -> _Refused:
        return _Refused(413, "body_too_large", f"the body is longer than {self._limit} bytes")


def _announced(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # the HTTP parser has refused anything but digits
    return None


def _refuse_binary(scope: Scope, body: bytes) -> None:
    if body and any(name == _BINARY for name, _ in scope["headers"]):
        raise _Refused(400, "binary_tensors", "binary tensors are not read over REST: send JSON, or use gRPC")


def _as_json(scope: Scope) -> Scope:
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _DROPPED and not name.startswith(b"ce-")
    ]
    return {**scope, "headers": [*headers, _JSON]}


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _last(send: Send) -> Send:
    async def closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await send(message)

    return closing


async def refuse(send: Send, status: int, detail: str, *headers: tuple[bytes, bytes]) -> None:
    """Answer with a problem document, and with more headers if there are any."""
    await _answer(send, status, _encode(problem(status, detail)), _PROBLEM, *headers)


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    every = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": every})
    await send({"type": "http.response.body", "body": body})
