"""A call's bearer token -> let in, or refused with 401 and UNAUTHENTICATED; `RECO_CALLER_TOKENS` names them.

Reading stays open: probes, metrics, metadata and the document of the API hold no shopper and no item. Only a
digest of a token is kept in memory.
"""

from __future__ import annotations

import hashlib
import hmac
from inspect import isawaitable
from typing import Any

import grpc
from grpc_interceptor.server import AsyncServerInterceptor

from serving.api.http_routes import UNREAD, App, Receive, Scope, Send, refuse
from serving.metrics import count_rejected

_DETAIL = "no valid token: send `Authorization: Bearer TOKEN`"
_ASKS = ("/Recommend", "/ModelInfer")


class Callers:
    """The tokens of the callers that may ask; without any, every caller may."""

    def __init__(self, tokens: str) -> None:
        """Take the tokens, separated by commas: two of them while one replaces the other."""
        self._digests = [_digest(token.strip()) for token in tokens.split(",") if token.strip()]

    def may_ask(self, authorization: str) -> bool:
        """Return whether the header names a token; the time it takes says nothing about the tokens."""
        scheme, _, token = authorization.partition(" ")
        given = _digest(token.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return not self._digests or (any(matches) and scheme.lower() == "bearer")

    def guard(self, app: App) -> App:
        """Return the application behind the check, or the application itself if there are no tokens."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["method"] not in ("GET", "HEAD"):
                headers = dict(scope["headers"])
                if not self.may_ask(headers.get(b"authorization", b"").decode("latin-1")):
                    count_rejected("caller")
                    scope[UNREAD] = True  # its body is not read: the connection ends with this answer
                    await refuse(
                        send, 401, _DETAIL, (b"www-authenticate", b"Bearer"), (b"connection", b"close")
                    )
                    return
            await app(scope, receive, send)

        return guarded if self._digests else app


class CallerInterceptor(AsyncServerInterceptor):
    """The same check for gRPC."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept(self, method: Any, request_or_iterator: Any, context: Any, method_name: str) -> Any:
        """Call the method if it asks for nothing, or if its caller may ask."""
        if method_name.endswith(_ASKS):
            metadata = dict(context.invocation_metadata())
            if not self._callers.may_ask(str(metadata.get("authorization", ""))):
                count_rejected("caller")
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, _DETAIL)
        answer = method(request_or_iterator, context)
        return await answer if isawaitable(answer) else answer  # a stream is no coroutine


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
