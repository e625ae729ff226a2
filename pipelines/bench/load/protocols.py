"""Request lines -> the same request in each protocol of ours: bytes of the message and milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import orjson

from pipelines.bench.load.arms import PREDICT
from pipelines.bench.load.generator import Load, LoadGenerator, Plan
from pipelines.bench.report import percentiles
from serving.api.http_routes import RECOMMENDATIONS

WARM_UP = 20  # requests before each run


def compare_protocols(
    generator: LoadGenerator,
    ready: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
    seconds: float,
    rounds: int,
) -> dict[str, dict[str, Any]]:
    """Send ours the same requests in each protocol, in turns.

    Args:
        generator: sends them, one at a time.
        ready: the endpoint's ready line, with its addresses.
        requests: request lines.
        seconds: of a protocol and round.
        rounds: of all protocols.
    """
    http, grpc = str(ready["http"]), f"grpc://{ready.get('grpc')}"
    ways = {
        "REST V1": (http + PREDICT, [orjson.dumps({"instances": [one]}) for one in requests]),
        "REST V2": (
            f"{http}/v2/models/checkout/infer",
            [orjson.dumps({"inputs": v2_inputs(one)}) for one in requests],
        ),
        "own REST route": (http + RECOMMENDATIONS, [orjson.dumps(one) for one in requests]),
    }
    if ready.get("grpc"):
        method = "inference.GRPCInferenceService/ModelInfer"
        ways["gRPC"] = (f"{grpc}/{method}", [grpc_message(one) for one in requests])
        method = "reco.v1.Recommendations/Recommend"
        ways["typed gRPC"] = (f"{grpc}/{method}", [typed_message(one) for one in requests])
    files = {name: generator.bodies(bodies) for name, (_, bodies) in ways.items()}
    loads: dict[str, list[Load]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (url, _) in ways.items():
            loads[name].append(generator.run(Plan(url, files[name], seconds, connections=1, warm_up=WARM_UP)))
    return {name: _protocol_row(bodies, loads[name]) for name, (_, bodies) in ways.items()}


def _protocol_row(bodies: Sequence[bytes], loads: Sequence[Load]) -> dict[str, Any]:
    answered = np.concatenate([load.answered for load in loads])
    sizes = np.concatenate([load.answer_bytes for load in loads])[answered]
    return {
        "request_bytes": float(np.mean([len(body) for body in bodies])),
        "answer_bytes": float(sizes.mean()) if len(sizes) else None,
        "failed": int((~answered).sum()),
        "ms": percentiles(np.concatenate([load.client_ms for load in loads])[answered]),
    }


def v2_inputs(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a request line as the tensors of the Open Inference Protocol."""
    kinds = {"k": "INT64"}
    values = {name: value if name == "basket" else [value] for name, value in request.items()}
    return [
        {"name": name, "shape": [len(data)], "datatype": kinds.get(name, "BYTES"), "data": data}
        for name, data in values.items()
    ]


def grpc_message(request: Mapping[str, Any]) -> bytes:
    """Return a request line as the ModelInferRequest that travels."""
    from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest

    message = ModelInferRequest(model_name="checkout")
    for tensor in v2_inputs(request):
        added = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        if tensor["datatype"] == "BYTES":
            added.contents.bytes_contents.extend(text.encode() for text in tensor["data"])
        else:
            added.contents.int64_contents.extend(tensor["data"])
    return bytes(message.SerializeToString())


def typed_message(request: Mapping[str, Any]) -> bytes:
    """Return a request line as the RecommendRequest that travels."""
    from serving.proto.recommendations_pb2 import RecommendRequest

    message = RecommendRequest(**{name: value for name, value in request.items() if name != "at"})
    if request.get("at"):
        message.at.FromDatetime(datetime.fromisoformat(request["at"]))
    return bytes(message.SerializeToString())
