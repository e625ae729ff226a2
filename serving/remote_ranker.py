"""A prepared turn -> its scores from a ranker elsewhere, over the Open Inference Protocol's gRPC.

Elsewhere is our own endpoint's model `ranker`, or Triton with the bundle's `ranker.onnx`. The scores must be
those of the turn's own bundle: ours says its bundle in each answer; Triton does not, there the model's name
must hold the bundle's id. One channel serves all requests. A call is made once and ends with the deadline of
its request; a ranker that is not there is told at once.
"""

from __future__ import annotations

import time

import grpc
import numpy as np
from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest, ModelInferResponse

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from serving.checkout import Turn
from serving.errors import DeadlineExceeded, RankerMismatch, RankerUnavailable

MARGIN_S = 0.002  # what is left of the deadline for making the list when the scores are here
BUNDLE_ID = "{bundle_id}"  # stands for the id in a model's name
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class RemoteRanker:
    """Scores turns elsewhere; `rank` is a `Rank` of the checkout's."""

    def __init__(self, address: str) -> None:
        """Take HOST:PORT or HOST:PORT/MODEL, of which MODEL may hold `{bundle_id}`."""
        self._target, _, model = address.partition("/")
        self._model = model or "ranker"
        self._channel: grpc.aio.Channel | None = None

    async def rank(self, turn: Turn) -> np.ndarray:
        """Return one score per candidate, (n,) float32.

        Raises:
            DeadlineExceeded: the scores did not come in time.
            RankerUnavailable: the ranker is not there, refuses, or does not answer with scores.
            RankerMismatch: the scores are of another bundle.
        """
        assert turn.prepared is not None
        timeout_s = turn.call.deadline - time.perf_counter() - MARGIN_S
        if timeout_s <= 0:
            raise DeadlineExceeded("no time is left to ask the ranker")
        bundle_id = turn.recommender.bundle.bundle_id
        model = self._model.replace(BUNDLE_ID, bundle_id)
        request = write_request(model, turn.prepared.dense, turn.prepared.categorical)
        infer = self._open().unary_unary(
            _INFER, ModelInferRequest.SerializeToString, ModelInferResponse.FromString
        )
        try:
            response = await infer(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"{self._target} did not answer in time") from error
            # The details of an answer that we did not write do not belong in our log.
            raise RankerUnavailable(f"{self._target} says {error.code().name}") from error
        _check_bundle(response, bundle_id, named=bundle_id in model)
        return read_scores(response)

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:  # not before: a channel belongs to the loop that runs when it is made
            self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        return self._channel


def write_request(model: str, dense: np.ndarray, categorical: np.ndarray) -> ModelInferRequest:
    """Return rows of features as binary tensors.

    Args:
        model: its name.
        dense: (n, features) float32.
        categorical: (n, levels) int64.
    """
    request = ModelInferRequest(model_name=model)
    for name, kind, rows, width in (
        ("dense", "FP32", np.ascontiguousarray(dense, "<f4"), len(DENSE_NAMES)),
        ("categorical", "INT64", np.ascontiguousarray(categorical, "<i8"), len(CATEGORICAL)),
    ):
        request.inputs.add(name=name, datatype=kind, shape=[len(rows), width])
        request.raw_input_contents.append(rows.tobytes())
    request.outputs.add(name="score")
    return request


def read_scores(response: ModelInferResponse) -> np.ndarray:
    """Return the output `score`, (n,) float32, from either of the two forms the protocol has.

    Raises:
        RankerUnavailable: there is no such output.
    """
    for number, output in enumerate(response.outputs):
        if output.name == "score" and output.datatype == "FP32":
            if response.raw_output_contents:
                scores = np.frombuffer(response.raw_output_contents[number], "<f4")
            else:
                scores = np.array(output.contents.fp32_contents, np.float32)
            return scores
    raise RankerUnavailable("the ranker's answer holds no output `score` of FP32")


def _check_bundle(response: ModelInferResponse, bundle_id: str, named: bool) -> None:
    told = response.parameters["bundle_id"].string_param if "bundle_id" in response.parameters else None
    if told is None and named:
        return
    if told != bundle_id:
        found = "does not tell its bundle" if told is None else f"has bundle {told[:64]}"
        raise RankerMismatch(
            f"the ranker {found}, expected {bundle_id}: deploy both, or name the model after it"
        )
