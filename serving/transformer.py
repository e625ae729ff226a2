"""KServe adapter `checkout`: a checkout's request in -> recommended items out, over REST V1, V2 and gRPC.

    preprocess    the body is checked, the user's features are read, candidates are retrieved
    predict       the ranker scores the candidates, in this process
    postprocess   the list is made and written as the protocol wants it

One model object answers all requests: what belongs to one request travels in its `Turn`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from kserve import InferRequest, InferResponse, Model
from kserve.errors import InvalidInput

from feature_repo.ids import MAX_ID_LENGTH, is_id
from serving import metrics
from serving.errors import InvalidRequest
from serving.predictor import Ranker, read_tensors, respond
from serving.recommender import Prepared, Recommender
from serving.schemas import Recommendation, Request, Response, parse_request

MAX_INSTANCES = 64  # requests in one V1 body
_INPUTS = {
    "basket": ("BYTES",),
    "user_id": ("BYTES",),
    "store_id": ("BYTES",),
    "at": ("BYTES",),
    "k": ("INT32", "INT64"),
    "profile": ("BYTES",),
    "request_id": ("BYTES",),
}
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """One request on its way through the three stages."""

    request: Request
    began: float  # perf_counter
    prepared: Prepared | None = None
    scores: np.ndarray | None = None
    response: Response | None = None  # set early when a fallback answers


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call of the endpoint asked: its requests, and the V2 envelope they came in, if any."""

    turns: list[Turn]
    envelope: InferRequest | None


class Checkout(Model):
    """The whole path, with the ranker collocated."""

    def __init__(
        self, recommender: Recommender, ranker: Ranker, deadline_ms: float, name: str = "checkout"
    ) -> None:
        super().__init__(name)
        self._recommender = recommender
        self._ranker = ranker
        self._deadline_s = deadline_ms / 1e3
        self.ready = True

    def load(self) -> bool:
        """Do nothing: a bundle is loaded before its transformer exists."""
        return bool(self.ready)

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return what /v2/models/checkout tells of the inputs; all but `basket` may be absent."""
        shapes = {"basket": [-1]}
        return [{"name": n, "datatype": t[0], "shape": shapes.get(n, [1])} for n, t in _INPUTS.items()]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return what /v2/models/checkout tells of the outputs: one entry per recommended item."""
        return [{"name": name, "datatype": kind, "shape": [-1]} for name, (kind, _) in _columns(()).items()]

    async def preprocess(
        self, payload: InferRequest | Mapping[str, Any] | bytes, headers: dict[str, str] | None = None
    ) -> Asked:
        """Check the body; read features and retrieve candidates for the first of its requests."""
        default_id = _default_id(headers)
        try:
            if isinstance(payload, InferRequest):
                raws, envelope = [_from_tensors(payload)], payload
            else:
                raws, envelope = _instances(payload), None
            requests = _parse(raws, default_id, self._recommender.bundle.profiles)
            asked = Asked([Turn(request, time.perf_counter()) for request in requests], envelope)
        except InvalidRequest as error:
            raise InvalidInput(str(error)) from error
        if asked.turns:
            self._prepare(asked.turns[0])
        return asked

    async def predict(
        self,
        payload: Asked,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> Asked:
        """Score the candidates.

        Further requests of the same body are answered here one after the other, each as if it had come
        alone: its deadline begins when its turn does, and other callers get theirs in between.
        """
        for number, turn in enumerate(payload.turns):
            if number:
                await asyncio.sleep(0)
                turn.began = time.perf_counter()
                self._prepare(turn)
            self._rank(turn)
            if len(payload.turns) > 1:
                self._finish(turn)  # now: its time must not hold the others'
        return payload

    async def postprocess(
        self,
        result: Asked,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> dict[str, Any] | InferResponse:
        """Make the list and write it as the protocol wants it."""
        responses = [self._finish(turn) for turn in result.turns]
        for response in responses:
            metrics.count_response(response.rung, response.degraded_reason, response.stage_ms)
        if result.envelope is None:
            return {"predictions": [response.to_dict() for response in responses]}
        return _to_tensors(result.envelope, self.name, responses[0])

    def _prepare(self, turn: Turn) -> None:
        def act() -> None:
            turn.prepared = self._recommender.prepare(turn.request)

        self._attempt(turn, "preprocess", act)

    def _rank(self, turn: Turn) -> None:
        def act() -> None:
            assert turn.prepared is not None
            turn.scores = self._ranker.rank(turn.prepared.dense, turn.prepared.categorical)

        if turn.response is None and time.perf_counter() - turn.began > self._deadline_s:
            turn.response = self._fallback(turn.request, "deadline_exceeded")
        self._attempt(turn, "predict", act)

    def _finish(self, turn: Turn) -> Response:
        def act() -> None:
            assert turn.prepared is not None
            assert turn.scores is not None
            turn.response = self._recommender.finish(turn.prepared, turn.scores)

        self._attempt(turn, "postprocess", act)
        assert turn.response is not None
        return turn.response

    def _attempt(self, turn: Turn, stage: str, act: Callable[[], None]) -> None:
        """Do one stage; whatever breaks in it, the checkout gets an answer."""
        if turn.response is not None:
            return
        try:
            act()
        except Exception:  # noqa: BLE001 - the edge of the process: no fault of ours may become a 500
            _log.exception("%s failed; answered by the fallback", stage)
            turn.response = self._fallback(turn.request, f"{stage}_error")

    def _fallback(self, request: Request, reason: str) -> Response:
        try:
            return self._recommender.fallback(request, reason)
        except Exception:  # noqa: BLE001 - likewise
            _log.exception("the fallback failed; answered with an empty list")
            bundle_id = self._recommender.bundle.bundle_id
            return Response(
                request.request_id, (), bundle_id, rung="empty", degraded=True, degraded_reason=reason
            )


def _default_id(headers: Mapping[str, str] | None) -> str:
    given = (headers or {}).get("x-request-id", "")
    return given if is_id(given) else uuid.uuid4().hex


def _instances(body: object) -> list[Any]:
    if not isinstance(body, Mapping) or set(body) != {"instances"} or not isinstance(body["instances"], list):
        raise InvalidRequest('the body must be {"instances": [request, ...]} and nothing else')
    if len(body["instances"]) > MAX_INSTANCES:
        raise InvalidRequest(
            f"instances has {len(body['instances'])} requests, at most {MAX_INSTANCES} are allowed"
        )
    return body["instances"]


def _parse(raws: list[Any], default_id: str, profiles: Collection[str]) -> list[Request]:
    requests = []
    now = time.time()
    for number, raw in enumerate(raws):
        try:
            own_id = f"{default_id}-{number}"[-MAX_ID_LENGTH:] if number else default_id
            requests.append(parse_request(raw, now=now, default_id=own_id, profiles=profiles))
        except InvalidRequest as error:
            raise InvalidRequest(f"instances[{number}]: {error}" if len(raws) > 1 else str(error)) from error
    return requests


def _from_tensors(envelope: InferRequest) -> dict[str, Any]:
    """Return the request in the tensors as the JSON object that V1 takes, for the same checks."""
    raw: dict[str, Any] = {}
    for name, values in read_tensors(envelope, _INPUTS).items():
        if values.ndim != 1 or (name != "basket" and len(values) != 1):
            raise InvalidRequest(f"input {name} must have the shape {'[n]' if name == 'basket' else '[1]'}")
        decoded = [_decoded(name, value) for value in values.tolist()]
        raw[name] = decoded if name == "basket" else decoded[0]
    if envelope.id:
        raw.setdefault("request_id", envelope.id)
    return raw


def _decoded(name: str, value: object) -> object:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} must be UTF-8") from error


def _columns(items: Sequence[Recommendation]) -> dict[str, tuple[str, list[Any]]]:
    """Return the items as tensors; what is not known of an item is NaN or an empty text."""
    return {
        "item_id": ("BYTES", [item.item_id for item in items]),
        "score": ("FP32", [item.score for item in items]),
        "source": ("BYTES", [item.source for item in items]),
        "reason": ("BYTES", [item.reason for item in items]),
        "price": ("FP32", [math.nan if item.price is None else item.price for item in items]),
        "promotion": ("FP32", [math.nan if item.promotion is None else item.promotion for item in items]),
        "coupon": ("BYTES", [item.coupon or "" for item in items]),
    }


def _to_tensors(envelope: InferRequest, model: str, response: Response) -> InferResponse:
    parameters: dict[str, str | bool | int] = {
        "bundle_id": response.bundle_id,
        "rung": response.rung,
        "degraded": response.degraded,
        "degraded_reason": response.degraded_reason or "",
        "stage_ms": orjson.dumps(response.to_dict()["stage_ms"]).decode(),
    }
    return respond(envelope, model, response.request_id, _columns(response.items), parameters)
