"""An HTTP request as it arrives -> one whose body is short, complete and JSON, or a refusal.

Stands in front of everything, so that nothing is parsed before its size is known, and hands what it has
parsed to the routes that answer by themselves; the rest goes to the KServe application. What cannot be read
is a 400, what can be read and is no request a 422. How long a head may take to come, and how many connections
there may be, is the protocol's: `serving.api.http_server`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from serving.api.http_routes import ARRIVED, UNREAD, Route, Scope
from serving.api.problems import MEDIA_TYPE, problem
from serving.errors import ClientGone, InvalidRequest, Overloaded
from serving.metrics import count_rejected
from serving.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Ways to announce something else than one JSON document: CloudEvents, and V2's binary tensors.
_DROPPED = (b"content-type", b"inference-header-content-length", b"content-encoding")
_JSON, _PROBLEM = (b"content-type", b"application/json"), (b"content-type", MEDIA_TYPE.encode())


class _Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class _Gone(Exception):
    """The client went away before its body was here."""


class Limits:
    """ASGI application: bounds the length of a body, the time it takes to arrive, and what it may be."""

    def __init__(self, app: App, settings: Settings, routes: Mapping[str, Route] | None = None) -> None:
        """Take what answers: by the path of a POST the route, for all else the application behind."""
        self._app = app
        self._routes = {} if routes is None else routes
        self._limit = settings.body_limit_bytes
        self._timeout_s = settings.body_timeout_ms / 1e3
        self.draining = False  # then each answer tells its client to connect anew: elsewhere

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its body read and checked, or answer it here."""
        if self.draining:
            send = _last(send)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = self._routes.get(scope["path"])
        if scope["method"] != "POST":
            if route is None:
                await self._app(scope, receive, send)  # nothing there reads a body
            else:
                count_rejected("route")
                await refuse(send, 405, "method not allowed here", (b"allow", b"POST"))
            return
        try:
            body = await self._read(scope, receive)
            # A path that takes no body says so itself.
            document = _parse(scope, body) if body or route is not None else None
            answer = None if route is None else await route(scope, document)
        except _Refused as refused:
            count_rejected(refused.reason)
            # The rest of a body must not be read as the next request; that of a long one is of no use.
            scope[UNREAD] = refused.status == 413
            last = refused.status in (408, 413) and not self.draining
            await refuse(_last(send) if last else send, refused.status, str(refused))
        except InvalidRequest as error:
            count_rejected("invalid_input")
            await refuse(send, 422, str(error))
        except Overloaded as error:
            count_rejected(error.reason)
            await refuse(send, 429, str(error))
        except (_Gone, ClientGone):
            count_rejected("client_gone")
        except Exception:  # uvicorn logs its traceback, and would send plain text
            await refuse(send, 500, "internal error")
            raise
        else:
            if answer is None:
                await self._app(_as_json(scope), _replay(body, receive), send)
            else:
                await _answer(send, 200, answer, _JSON)

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        if ARRIVED in scope:  # all of it is here: no clock need be set
            return await self._collect(_announced(scope), receive)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._collect(_announced(scope), receive)
        except TimeoutError as error:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            raise _Refused(408, "body_timeout", message) from error

    async def _collect(self, announced: int | None, receive: Receive) -> bytes:
        too_large = _Refused(413, "body_too_large", f"the body is longer than {self._limit} bytes")
        if announced is not None and announced > self._limit:
            raise too_large
        chunks, length = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            length += len(chunk)
            if length > self._limit:
                raise too_large
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)


def _announced(scope: Scope) -> int | None:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)  # the HTTP parser has refused anything but digits
    return None


def _parse(scope: Scope, body: bytes) -> object:
    if any(name == b"inference-header-content-length" for name, _ in scope["headers"]):
        raise _Refused(400, "binary_tensors", "binary tensors are not read over REST: send JSON, or use gRPC")
    try:
        # orjson refuses NaN, infinite numbers, lone surrogates and deep nesting; the JSON module that
        # the V2 routes use behind this would accept some of them.
        document: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _Refused(
            400, "not_json", "the body is not JSON (UTF-8, finite numbers, moderate nesting)"
        ) from error
    return document


def _as_json(scope: Scope) -> Scope:
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _DROPPED and not name.startswith(b"ce-")
    ]
    return {**scope, "headers": [*kept, (b"content-type", b"application/json")]}


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
    await _answer(send, status, orjson.dumps(problem(status, detail)), _PROBLEM, *headers)


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    every = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": every})
    await send({"type": "http.response.body", "body": body})
