"""A prepared turn -> its scores from a ranker elsewhere, over the Open Inference Protocol's gRPC.

Elsewhere is our own endpoint's model `ranker`, or Triton with the bundle's `ranker.onnx`. The scores must be
those of the turn's own bundle: ours says its bundle in each answer; Triton does not, there the model's name
must hold the bundle's id. One channel serves all requests. A call is made once and ends with the time of its
request; an absent ranker is reported at once, and after a few failures it is not asked until it says
that the model is ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np
from kserve.protocol.grpc.grpc_predict_v2_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelReadyRequest,
    ModelReadyResponse,
)

from feature_repo.schema import CATEGORICAL, DENSE_NAMES
from serving.checkout.batching import Batcher
from serving.checkout.checkout import Turn
from serving.errors import (
    DeadlineExceeded,
    RankerMismatch,
    RankerUnavailable,
    RankingFailed,
    RowsRefused,
)
from serving.metrics import RANKER_CALLS
from serving.stores.circuit_breaker import PROBE_S, CircuitBreaker

MAX_ROWS = 800  # of a joined call
FAIR_S = 0.01  # a ranker that had less of a hurried request's time is not at fault
READY_S, LOOP_S = 1.0, 5.0  # that a probe may take, and with all that its loop does meanwhile
TLS = "https://"  # before the address of a ranker behind TLS
BUNDLE_ID = "{bundle_id}"  # stands for the id in a model's name
Inputs = tuple[np.ndarray, np.ndarray]  # (n, features) float32, (n, levels) int64
_SERVICE = "/inference.GRPCInferenceService/"
_OPTIONS = [
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
]
_calls = {name: RANKER_CALLS.labels(name) for name in ("answered", "failed", "late", "mismatch", "refused")}


class RemoteRanker:
    """Scores turns elsewhere; `rank` is a `Rank` of the checkout's. Belongs to one event loop."""

    def __init__(
        self,
        address: str,
        *,
        tls: tuple[Path | None, Path | None, Path | None] = (None, None, None),
        max_wait_ms: float = 0.0,
        max_rows: int = MAX_ROWS,
        probe_s: float = PROBE_S,
    ) -> None:
        """Take HOST:PORT or HOST:PORT/MODEL, of which MODEL may hold `{bundle_id}`.

        Args:
            address: with `https://` before it, the connection is encrypted.
            tls: PEM files of the authorities, of our own key and of our own certificate.
            max_wait_ms: see `Batcher`.
            max_rows: see `Batcher`.
            probe_s: see `CircuitBreaker`.
        """
        self._target, _, model = address.removeprefix(TLS).partition("/")
        self._is_encrypted, self._tls = address.startswith(TLS), tls
        self._model = model or "ranker"
        self._asked = self._model  # the name of the model that the last turn wanted
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.breaker = CircuitBreaker("ranker", self._probe, probe_s=probe_s)
        self._batcher = Batcher(self._score, max_wait_ms=max_wait_ms, max_rows=max_rows)

    async def rank(self, turn: Turn) -> np.ndarray:
        """Return one score per candidate, (n,) float32.

        Raises:
            DeadlineExceeded: the scores did not come in time.
            RankerUnavailable: the ranker is not there, refuses, or does not answer with scores.
            RankerMismatch: the scores are of another bundle.
        """
        assert turn.prepared is not None
        if not len(turn.prepared.dense):
            return np.empty(0, np.float32)
        bundle_id = turn.recommender.bundle.bundle_id
        self._asked = self._model.replace(BUNDLE_ID, bundle_id)  # a probe asks for that of the newest turn
        if self.breaker.is_open:
            _calls["refused"].inc()
            raise RankerUnavailable(f"{self._target} failed repeatedly and is not asked until it is ready")
        if turn.until <= time.perf_counter():
            _calls["refused"].inc()
            raise DeadlineExceeded("no time is left to ask the ranker")
        dense, categorical = turn.prepared.dense, turn.prepared.categorical
        scores: np.ndarray = await self._batcher.ask(
            (dense, categorical),
            rows=len(dense),
            bundle_id=bundle_id,
            priority=turn.call.priority,
            deadline=turn.until,
        )
        return scores

    async def _score(self, bundle_id: str, works: Sequence[Inputs], deadline: float) -> list[np.ndarray]:
        """Return the scores of each request, out of one call for the rows of all; see `rank`."""
        dense, categorical = works[0] if len(works) == 1 else map(np.concatenate, zip(*works, strict=True))
        scores = await self._call(bundle_id, dense, categorical, deadline)
        if len(works) == 1:
            return [scores]
        return np.split(scores, np.cumsum([len(rows) for rows, _ in works])[:-1])

    async def _call(
        self, bundle_id: str, dense: np.ndarray, categorical: np.ndarray, deadline: float
    ) -> np.ndarray:
        model = self._model.replace(BUNDLE_ID, bundle_id)
        request = write_request(model, dense, categorical)
        timeout_s = max(deadline - time.perf_counter(), 0.0)
        try:
            infer = self._open().unary_unary(
                f"{_SERVICE}ModelInfer", ModelInferRequest.SerializeToString, ModelInferResponse.FromString
            )
            response = await infer(request, timeout=timeout_s)
            if response is None:  # gRPC's word for a body that cannot be read
                raise RankerUnavailable(f"{self._target} gave no ModelInferResponse")
            scores = read_scores(response)
            if scores.shape != (len(dense),):
                raise RankerUnavailable(f"{self._target} gave {scores.size} scores for {len(dense)} rows")
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, timeout_s) from error
        except RankerUnavailable as error:
            self._failed(error)
            raise
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the loop ends
            _calls["failed"].inc()  # the breaker knows: a probe has hung up
            raise RankerUnavailable(f"the connection to {self._target} was closed") from None
        self.breaker.succeeded()
        try:
            _check_bundle(response, bundle_id, named=bundle_id in model)
        except RankerMismatch:
            _calls["mismatch"].inc()
            raise
        _calls["answered"].inc()
        return scores

    def _failure(self, error: grpc.aio.AioRpcError, timeout_s: float) -> RankingFailed:
        """Return what an error of gRPC means to the request; the breaker learns of it."""
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            _calls["late"].inc()
            if timeout_s >= FAIR_S:
                self.breaker.failed(f"{self._target} did not answer in {timeout_s * 1e3:.0f} ms")
            return DeadlineExceeded(f"{self._target} did not answer in time")
        # The details of an answer that we did not write do not belong in our log.
        why = f"{self._target} says {error.code().name}"
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            _calls["failed"].inc()
            self.breaker.succeeded()  # the ranker is well: something is wrong with these rows
            return RowsRefused(why)
        self._failed(why)
        return RankerUnavailable(why)

    async def close(self) -> None:
        """Close the connection."""
        await asyncio.to_thread(self.breaker.close)  # a probe may wait for this loop
        await self._hang_up()

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:  # not before: a channel belongs to the loop that runs when it is made
            self._loop = asyncio.get_running_loop()  # first: without a certificate there is a probe, too
            if self._is_encrypted:
                try:  # each time: certificates change while the endpoint runs
                    files = [file and file.read_bytes() for file in self._tls]
                except OSError as error:
                    raise RankerUnavailable(f"{error.filename}: {error.strerror}") from error
                if b"" in files:  # maybe written just now; with an empty key gRPC ends the process
                    raise RankerUnavailable(f"{self._tls[files.index(b'')]} is empty")
                credentials = grpc.ssl_channel_credentials(*files)
                self._channel = grpc.aio.secure_channel(self._target, credentials, options=_OPTIONS)
            else:
                self._channel = grpc.aio.insecure_channel(self._target, options=_OPTIONS)
        return self._channel

    def _failed(self, why: object) -> None:
        _calls["failed"].inc()
        self.breaker.failed(why)

    def _probe(self) -> bool:
        """Ask whether the model is ready; for the breaker's thread."""
        assert self._loop is not None
        asked = asyncio.run_coroutine_threadsafe(self._is_ready(), self._loop)
        try:
            return asked.result(LOOP_S)
        except TimeoutError:
            asked.cancel()
            return False

    async def _is_ready(self) -> bool:
        """Ask over a new connection: the old one may lead to a machine that is gone without a word."""
        await self._hang_up()
        try:
            ask = self._open().unary_unary(
                f"{_SERVICE}ModelReady", ModelReadyRequest.SerializeToString, ModelReadyResponse.FromString
            )
            answer = await ask(ModelReadyRequest(name=self._asked), timeout=READY_S)
            return answer is not None and bool(answer.ready)
        except (RankerUnavailable, grpc.aio.AioRpcError):
            return False

    async def _hang_up(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


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
        RankerUnavailable: there is no such output, or it cannot be read.
    """
    for number, output in enumerate(response.outputs):
        if output.name == "score" and output.datatype == "FP32":
            if not response.raw_output_contents:
                return np.array(output.contents.fp32_contents, np.float32)
            try:
                return np.frombuffer(response.raw_output_contents[number], "<f4")
            except (IndexError, ValueError) as error:
                raise RankerUnavailable(f"the ranker's scores cannot be read: {error}") from error
    raise RankerUnavailable("the ranker's answer holds no output `score` of FP32")


def _check_bundle(response: ModelInferResponse, bundle_id: str, named: bool) -> None:
    found = response.parameters["bundle_id"].string_param if "bundle_id" in response.parameters else None
    if found is None and named:
        return
    if found != bundle_id:
        has = "does not name its bundle" if found is None else f"has bundle {found[:64]}"
        raise RankerMismatch(
            f"the ranker {has}, expected {bundle_id}: deploy both, or name the model after it"
        )
