"""A decoded JSON body -> the answer's bytes: the two routes that go past KServe.

    POST /v1/recommendations           one request -> one response
    POST /v1/models/checkout:predict   KServe's V1: {"instances": [request, ...]} -> {"predictions": [...]}

KServe's own handling of V1 costs more than the rest of the endpoint; what it would say is said here byte
for byte (a test compares). V2, gRPC, metadata and readiness stay KServe's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from serving.checkout.call_headers import HEADERS, Call, read_call
from serving.checkout.checkout import Checkout
from serving.errors import ClientGone
from serving.schemas import parse_instances, parse_request

RECOMMENDATIONS = "/v1/recommendations"
PREDICT = "/v1/models/checkout:predict"
Scope = MutableMapping[str, Any]  # ASGI's
Route = Callable[[Scope, object], Awaitable[bytes]]  # raises InvalidRequest, Overloaded, ClientGone

# What the HTTP server says in the scope: when a request was here whole (perf_counter), and that its client
# has left; and what it is told there: the task to cancel if the client leaves later, and that the rest of a
# body is of no use.
ARRIVED, GONE, TASK, UNREAD = "reco.arrived", "reco.gone", "reco.task", "reco.unread"
_HEADERS = {name.encode(): name for name in HEADERS}


def routes(checkout: Checkout) -> dict[str, Route]:
    """Return what answers a POST, by path."""

    async def recommend(scope: Scope, document: object) -> bytes:
        call = _call(scope, checkout.limit_s)
        await checkout.enter(call)
        profiles = checkout.recommender.bundle.profiles
        request = parse_request(document, now=time.time(), default_id=call.request_id, profiles=profiles)
        return orjson.dumps((await checkout.answer(request, call)).to_dict())

    async def predict(scope: Scope, document: object) -> bytes:
        """Answer the requests one after the other, each with the whole deadline once its turn comes."""
        call = _call(scope, checkout.limit_s)
        await checkout.enter(call)
        profiles = checkout.recommender.bundle.profiles
        predictions = []
        requests = parse_instances(document, time.time(), call.request_id, profiles)
        # All of them now: a bundle that takes over meanwhile may not have the profiles that were checked.
        turns = [checkout.begin(request, call) for request in requests]
        for number, turn in enumerate(turns):
            if number:
                await checkout.wait_turn(turn)
            predictions.append((await checkout.complete(turn)).to_dict())
        return orjson.dumps({"predictions": predictions})

    return {RECOMMENDATIONS: _cancellable(recommend), PREDICT: _cancellable(predict)}


def _call(scope: Scope, limit_s: float) -> Call:
    headers = {
        _HEADERS[name]: value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS
    }
    return read_call(headers, scope["path"], limit_s, scope.get(ARRIVED), lambda: GONE in scope)


def _cancellable(route: Route) -> Route:
    async def tried(scope: Scope, document: object) -> bytes:
        scope[TASK] = asyncio.current_task()
        try:
            return await route(scope, document)
        except asyncio.CancelledError:
            if GONE in scope:
                raise ClientGone from None
            raise

    return tried
