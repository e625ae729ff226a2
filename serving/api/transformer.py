"""KServe adapter `checkout`: `Checkout` as a model of KServe's, for V2 and gRPC, metadata and readiness.

V1 is read here for KServe's own server alone, which a bench compares: `serving.api.http_routes` has ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from kserve import InferRequest, InferResponse, Model

from serving.api.predictor import read_tensors, respond, wanted_outputs
from serving.checkout.checkout import Checkout
from serving.errors import InvalidRequest
from serving.schemas import Recommendation, Response, parse_instances, parse_request, read_call

_INPUTS = {
    "basket": ("BYTES",),
    "user_id": ("BYTES",),
    "store_id": ("BYTES",),
    "at": ("BYTES",),
    "k": ("INT32", "INT64"),
    "profile": ("BYTES",),
    "request_id": ("BYTES",),
}


class Transformer(Model):
    """The whole path as one model, with the ranker collocated or behind it."""

    def __init__(self, checkout: Checkout) -> None:
        super().__init__("checkout")
        self._checkout = checkout
        self.ready = True

    def get_input_types(self) -> list[dict[str, Any]]:
        """Return the metadata of the inputs for /v2/models/checkout; all but `basket` may be absent."""
        shapes = {"basket": [-1]}
        return [{"name": n, "datatype": t[0], "shape": shapes.get(n, [1])} for n, t in _INPUTS.items()]

    def get_output_types(self) -> list[dict[str, Any]]:
        """Return the metadata of the outputs for /v2/models/checkout: one entry per recommended item."""
        return [{"name": name, "datatype": kind, "shape": [-1]} for name, (kind, _) in _columns(()).items()]

    async def predict(
        self,
        payload: InferRequest | Mapping[str, Any],
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> dict[str, Any] | InferResponse:
        """Answer a body as its protocol wants it.

        Raises:
            InvalidRequest: the message names the place and the expected value, never the sent one.
            InvalidInput: the same, of a tensor.
            Overloaded: it is a prefetch, and there is no time for it.
        """
        checkout = self._checkout
        envelope = payload if isinstance(payload, InferRequest) else None
        route = "V1" if envelope is None else "V2 over gRPC" if envelope.from_grpc else "V2"
        call = read_call(headers or {}, route, checkout.service.limit_s)
        await checkout.enter(call)
        given: dict[str, Any] = {
            "now": time.time(),
            "default_id": call.request_id,
            "profiles": checkout.recommender.bundle.profiles,
        }
        if envelope is None:
            requests = parse_instances(payload, **given)
        else:
            wanted_outputs(envelope, _columns(()))  # an answer that is refused later would be logged as shown
            requests = [parse_request(_from_tensors(envelope), **given)]
        responses = await checkout.answer_each(requests, call)
        if envelope is None:
            return {"predictions": [response.to_dict() for response in responses]}
        return _to_tensors(envelope, self.name, responses[0])


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
    """Return the items as tensors; an unknown term of an item is NaN or an empty text."""
    return {
        "item_id": ("BYTES", [item.item_id for item in items]),
        "score": ("FP32", [item.score for item in items]),
        "source": ("BYTES", [item.source for item in items]),
        "reason": ("BYTES", [item.reason for item in items]),
        "price": ("FP64", [math.nan if item.price is None else item.price for item in items]),
        "promotion": ("FP64", [math.nan if item.promotion is None else item.promotion for item in items]),
        "coupon": ("BYTES", [item.coupon or "" for item in items]),
    }


def _to_tensors(envelope: InferRequest, model: str, response: Response) -> InferResponse:
    parameters: dict[str, str | bool | int] = {
        "bundle_id": response.bundle_id,
        "rung": response.rung,
        "degraded": response.degraded,
        "degraded_reason": response.degraded_reason or "",
        "stage_ms": msgspec.json.encode(response.to_dict()["stage_ms"]).decode(),
    }
    return respond(envelope, model, response.request_id, _columns(response.items), parameters)
