"""The typed gRPC service, reco.v1.Recommendations: a message -> an answer, over the path of all protocols."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from serving.checkout.checkout import Checkout
from serving.errors import InvalidRequest
from serving.proto.recommendations_pb2 import Recommendation, RecommendRequest, RecommendResponse
from serving.proto.recommendations_pb2_grpc import RecommendationsServicer
from serving.schemas import PRIORITIES, Response, parse_request, read_call

_PLAIN = ("user_id", "store_id", "k", "profile", "request_id")
SERVICES = ("", "reco.v1.Recommendations", "inference.GRPCInferenceService")  # "": the endpoint as a whole
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
MAX_WATCHES = 64  # any caller may watch, without a token
WATCH_S = 0.2  # between two looks of a watch
_PRIORITIES = {1: "checkout", 2: "prefetch"}  # by the number in the message; 0 is the first, too


class RecommendationsService(RecommendationsServicer):
    """Answers `Recommend`; the interceptor around it turns InvalidRequest into INVALID_ARGUMENT."""

    def __init__(self, checkout: Checkout) -> None:
        self._checkout = checkout

    async def Recommend(self, request: RecommendRequest, context: Any) -> RecommendResponse:
        """Answer one request."""
        headers = read_metadata(context)
        if request.priority:
            if request.priority not in _PRIORITIES:
                raise InvalidRequest(f"priority must be {' or '.join(PRIORITIES)}")
            headers["x-priority"] = _PRIORITIES[request.priority]
        call = read_call(headers, "gRPC", self._checkout.service.limit_s)
        await self._checkout.enter(call)
        profiles = self._checkout.recommender.bundle.profiles
        plain = _plain(request)
        parsed = parse_request(plain, now=time.time(), default_id=call.request_id, profiles=profiles)
        return _message(await self._checkout.answer(parsed, call))


class Health(grpc.GenericRpcHandler):
    """`Check` and `Watch` of `grpc.health.v1`, which kubelets, load balancers and clients ask.

    Its two messages have one field each, of the same number and type as two well-known ones.
    """

    def __init__(self, is_ready: Callable[[], Awaitable[bool]]) -> None:
        self._is_ready = is_ready
        self._watches = 0

    def service(self, handler_call_details: Any) -> Any:
        """Return the method, None for those of other services."""
        decode, encode = StringValue.FromString, Int32Value.SerializeToString
        match handler_call_details.method:
            case "/grpc.health.v1.Health/Check":
                return grpc.unary_unary_rpc_method_handler(self._check, decode, encode)
            case "/grpc.health.v1.Health/Watch":
                return grpc.unary_stream_rpc_method_handler(self._watch, decode, encode)
        return None

    async def _check(self, request: StringValue, context: Any) -> Int32Value:
        if request.value not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return Int32Value(value=await self._status(request.value))

    async def _watch(self, request: StringValue, context: Any) -> AsyncIterator[Int32Value]:
        """Send the status, and each change of it.

        A process that stops being ready drains, and never is again. So the stream ends then: else the server
        would wait for it until the end of its grace.
        """
        if self._watches >= MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"at most {MAX_WATCHES} watches at a time"
            )
        self._watches += 1
        try:
            sent = 0
            while sent != _NOT_SERVING:
                status = await self._status(request.value)
                if status != sent:
                    yield Int32Value(value=status)
                    sent = status
                await asyncio.sleep(WATCH_S)
        finally:
            self._watches -= 1

    async def _status(self, service: str) -> int:
        if not await self._is_ready():
            return _NOT_SERVING
        return _SERVING if service in SERVICES else _SERVICE_UNKNOWN


def read_metadata(context: Any) -> dict[str, str]:
    """Return a call's metadata as headers, the time it has left among them as `x-deadline-ms`."""
    headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
    left_s = context.time_remaining()
    if left_s is not None:
        given_ms = headers.get("x-deadline-ms")
        left_ms = max(left_s * 1e3, 1e-3)
        if given_ms is None or _is_longer(given_ms, left_ms):
            headers["x-deadline-ms"] = f"{left_ms:.3f}"
    return headers


def _is_longer(text: str, left_ms: float) -> bool:
    try:
        return float(text) > left_ms
    except ValueError:
        return False  # is refused where it is read


def _plain(message: RecommendRequest) -> dict[str, Any]:
    """Return the message as the JSON object that the other protocols take, for the same checks."""
    raw: dict[str, Any] = {"basket": list(message.basket)}
    raw |= {name: getattr(message, name) for name in _PLAIN if message.HasField(name)}
    if message.HasField("at"):
        try:
            raw["at"] = message.at.ToDatetime(UTC).isoformat()
        except (ValueError, OverflowError) as error:
            raise InvalidRequest("at must be a time of the years 1 to 9999") from error
    return raw


def _message(response: Response) -> RecommendResponse:
    plain = response.to_dict()
    plain["items"] = [Recommendation(**item) for item in plain["items"]]
    return RecommendResponse(**plain)
