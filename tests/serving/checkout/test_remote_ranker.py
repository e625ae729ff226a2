"""A remote ranker: that of another endpoint, a missing one, and one of another product."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from serving.answer.recommender import Recommender
from serving.checkout.budgets import MARGIN_S
from serving.checkout.checkout import Turn
from serving.errors import DeadlineExceeded, RankerMismatch, RankerUnavailable
from serving.schemas import Request
from serving.stores.circuit_breaker import FAILURES
from serving.stores.online_features import open_store
from tests.serving.conftest import Running, call, metric

pytestmark = pytest.mark.slow  # importing kserve takes seconds

REQUEST = Request(("1000005",), 1_512_498_600.0, "u1", None, 10, "r1")


def turn(recommender: Recommender, limit_s: float = 60.0) -> Turn:
    given = call(limit_s)
    made = Turn(REQUEST, given, recommender, given.arrived)
    made.prepared, made.until = recommender.prepare(REQUEST), given.deadline - MARGIN_S
    return made


def ranked(address: str, *turns: Turn) -> list[np.ndarray]:
    from serving.checkout.remote_ranker import RemoteRanker

    async def run() -> list[np.ndarray]:
        ranker = RemoteRanker(address)
        try:
            return [await ranker.rank(one) for one in turns]
        finally:
            await ranker.close()

    return asyncio.run(run())


def test_the_scores_equal_those_of_this_process(endpoint: Any, recommender: Recommender) -> None:
    for scores in ranked(endpoint.grpc, turn(recommender), turn(recommender)):
        here = turn(recommender).prepared
        assert here is not None
        assert scores.dtype == np.float32
        np.testing.assert_array_equal(scores, recommender.rank(here.dense, here.categorical))


def test_a_call_of_as_many_rows_as_our_ranker_takes_arrives(endpoint: Any, recommender: Recommender) -> None:
    from serving.api.predictor import MAX_ROWS

    large = turn(recommender)
    assert large.prepared is not None
    rows = np.resize(np.arange(len(large.prepared.dense)), MAX_ROWS)
    dense, categorical = large.prepared.dense[rows], large.prepared.categorical[rows]
    large.prepared = replace(large.prepared, dense=dense, categorical=categorical)
    [scores] = ranked(endpoint.grpc, large)
    np.testing.assert_array_equal(scores, recommender.rank(dense, categorical))


def test_another_bundle_s_scores_are_refused(endpoint: Any, recommender: Recommender) -> None:
    other = Recommender(replace(recommender.bundle, bundle_id="other"), open_store("memory:"))
    with pytest.raises(RankerMismatch, match=f"has bundle {recommender.bundle.bundle_id}, expected other"):
        ranked(endpoint.grpc, turn(other))


def test_a_ranker_that_does_not_have_the_model_is_unavailable(
    endpoint: Any, recommender: Recommender
) -> None:
    with pytest.raises(RankerUnavailable, match="says NOT_FOUND"):
        ranked(f"{endpoint.grpc}/ranker-{{bundle_id}}", turn(recommender))


def test_a_hanging_ranker_costs_no_more_than_the_deadline(recommender: Recommender) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(DeadlineExceeded):
            ranked(f"127.0.0.1:{silent.getsockname()[1]}", turn(recommender, limit_s=0.3))
    with pytest.raises(DeadlineExceeded, match="no time is left"):
        ranked("127.0.0.1:1", turn(recommender, limit_s=0.001))


OWN = ""  # the id of the recommender's own bundle
Tls = tuple[Path | None, Path | None, Path | None]
NO_TLS: Tls = (None, None, None)


@dataclass
class Ranker:
    """A gRPC server that ranks as the recommender does, and can be late, wrong, or gone.

    Its answers name its bundle, as those of our endpoint do, unless `bundle_id` is None. With certificates it
    speaks TLS and wants one of its callers.
    """

    recommender: Recommender
    bundle_id: str | None = OWN
    raw: bool = True
    certificates: Path | None = None
    port: int = 0
    asked: int = 0
    wait_s: float = 0.0
    ready: bool = True
    unready: int = 0  # probes that were answered so
    refuses: bool = False
    only: str = ""  # the one model that it has; "": any
    cut: int = 0  # bytes that are missing at the end of the scores
    garbled: bool = False  # bodies that are no messages
    _server: Any = None

    @property
    def address(self) -> str:
        return f"{'https://' if self.certificates else ''}127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before."""
        import grpc
        from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb

        async def infer(request: Any, context: Any) -> Any:
            self.asked += 1
            await asyncio.sleep(self.wait_s)
            if self.only not in ("", request.model_name):
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
            if self.refuses:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not these rows")
            dense, categorical = request.raw_input_contents
            rows = request.inputs[0].shape[0]
            scores = self.recommender.rank(
                np.frombuffer(dense, "<f4").reshape(rows, -1),
                np.frombuffer(categorical, "<i8").reshape(rows, -1),
            )
            response = pb.ModelInferResponse(model_name=request.model_name)
            output = response.outputs.add(name="score", datatype="FP32", shape=[rows])
            if self.raw:
                response.raw_output_contents.append(scores.tobytes()[: 4 * rows - self.cut])
            else:
                output.contents.fp32_contents.extend(scores.tolist())
            if self.bundle_id is not None:
                response.parameters["bundle_id"].string_param = (
                    self.bundle_id or self.recommender.bundle.bundle_id
                )
            return response

        async def is_ready(request: Any, context: Any) -> Any:
            await asyncio.sleep(self.wait_s)
            ready = self.ready and self.only in ("", request.name)
            self.unready += not ready
            return pb.ModelReadyResponse(ready=ready)

        def written(message: Any) -> bytes:
            return b"\xff" if self.garbled else message.SerializeToString()

        methods = {
            "ModelInfer": grpc.unary_unary_rpc_method_handler(
                infer, pb.ModelInferRequest.FromString, written
            ),
            "ModelReady": grpc.unary_unary_rpc_method_handler(
                is_ready, pb.ModelReadyRequest.FromString, written
            ),
        }
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", methods),)
        )
        place = f"127.0.0.1:{self.port}"
        if self.certificates is None:
            self.port = self._server.add_insecure_port(place)
        else:
            ca, cert, key = (
                (self.certificates / f"{name}.pem").read_bytes() for name in ("ca", "cert", "key")
            )
            credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True)
            self.port = self._server.add_secure_port(place, credentials)
        await self._server.start()

    async def kill(self) -> None:
        await self._server.stop(None)


@contextlib.asynccontextmanager
async def ranking(
    elsewhere: Ranker, model: str = "", tls: Tls = NO_TLS, probe_s: float = 0.1
) -> AsyncIterator[tuple[Ranker, Any]]:
    """A remote ranker and its client; both end with the block."""
    from serving.checkout.remote_ranker import RemoteRanker

    await elsewhere.start()
    ranker = RemoteRanker(elsewhere.address + model, tls=tls, probe_s=probe_s)
    try:
        yield elsewhere, ranker
    finally:
        await ranker.close()
        await elsewhere.kill()


def answered(elsewhere: Ranker, model: str = "", tls: Tls = NO_TLS) -> list[float]:
    """Ask a ranker once; return the scores."""

    async def run() -> list[float]:
        async with ranking(elsewhere, model, tls) as (_, ranker):
            scores: np.ndarray = await ranker.rank(turn(elsewhere.recommender))
            return scores.tolist()

    return asyncio.run(run())


@pytest.mark.parametrize(("cut", "says"), [(3, "cannot be read"), (4, "gave .* scores for")])
async def test_scores_that_are_not_one_a_row_are_the_ranker_s_fault(
    recommender: Recommender, cut: int, says: str
) -> None:
    """Not that of the rows: the circuit breaker learns of it, and no row is asked again alone."""
    async with ranking(Ranker(recommender, cut=cut)) as (elsewhere, ranker):
        for _ in range(FAILURES):
            with pytest.raises(RankerUnavailable, match=says):
                await ranker.rank(turn(recommender))
        with pytest.raises(RankerUnavailable, match="failed repeatedly"):
            await ranker.rank(turn(recommender))
        assert elsewhere.asked == FAILURES


async def test_a_body_that_is_no_message_is_the_ranker_s_fault(recommender: Recommender) -> None:
    """gRPC returns None for it, of a call and of a probe."""
    async with ranking(Ranker(recommender, garbled=True, ready=False)) as (elsewhere, ranker):
        for _ in range(FAILURES):
            with pytest.raises(RankerUnavailable, match="gave no ModelInferResponse"):
                await ranker.rank(turn(recommender))
        await within(lambda: elsewhere.unready >= 2)
        assert ranker.breaker.is_open


@pytest.mark.parametrize("raw", [True, False])
def test_a_ranker_without_a_bundle_id_must_be_named_after_the_bundle(
    recommender: Recommender, raw: bool
) -> None:
    prepared = turn(recommender).prepared
    assert prepared is not None
    scores = recommender.rank(prepared.dense, prepared.categorical).tolist()
    assert answered(Ranker(recommender, None, raw), "/ranker-{bundle_id}") == scores
    assert len(scores) > 50
    with pytest.raises(RankerMismatch, match="does not name its bundle"):
        answered(Ranker(recommender, None, raw))
    with pytest.raises(RankerMismatch, match="has bundle other"):
        answered(Ranker(recommender, "other", raw), "/ranker-{bundle_id}")


def test_a_ranker_behind_tls_needs_its_authority_and_our_certificate(
    recommender: Recommender, certificates: Path, tmp_path: Path
) -> None:
    def behind_tls(*names: str) -> list[float]:
        ca, key, cert = (certificates / name if name else None for name in names)
        return answered(Ranker(recommender, certificates=certificates), tls=(ca, key, cert))

    assert len(behind_tls("ca.pem", "key.pem", "cert.pem")) > 50
    for wrong in (("ca.pem", "", ""), ("", "key.pem", "cert.pem")):
        with pytest.raises(RankerUnavailable, match="says UNAVAILABLE"):
            behind_tls(*wrong)
    (tmp_path / "key.pem").touch()
    with pytest.raises(RankerUnavailable, match=r"key\.pem is empty"):
        behind_tls("ca.pem", str(tmp_path / "key.pem"), "cert.pem")


def failed() -> float:
    return metric("reco_ranker_calls_total", outcome="failed")


async def test_an_absent_certificate_counts_as_a_failure_and_opens_the_breaker(
    recommender: Recommender, tmp_path: Path
) -> None:
    from serving.checkout.remote_ranker import RemoteRanker

    ranker = RemoteRanker("https://127.0.0.1:1", tls=(tmp_path / "absent.pem", None, None), probe_s=0.05)
    before = failed()
    for number in range(FAILURES):
        assert not ranker.breaker.is_open
        with pytest.raises(RankerUnavailable, match=r"absent\.pem: No such file"):
            await ranker.rank(turn(recommender))
        assert failed() == before + number + 1
    assert ranker.breaker.is_open
    await asyncio.sleep(0.2)
    assert ranker.breaker.is_open, "no probe succeeds without it"
    await ranker.close()


def test_without_a_candidate_no_ranker_is_asked(recommender: Recommender) -> None:
    nothing = turn(recommender)
    assert nothing.prepared is not None
    dense, categorical = nothing.prepared.dense[:0], nothing.prepared.categorical[:0]
    nothing.prepared = replace(nothing.prepared, dense=dense, categorical=categorical)
    [scores] = ranked("127.0.0.1:1", nothing)  # nothing listens there
    assert scores.shape == (0,)


def test_an_endpoint_with_a_remote_ranker_gives_the_same_answers(
    endpoint: Any, start_toy: Callable[..., Running]
) -> None:
    front = start_toy(ranker_address=endpoint.grpc)
    body = {"basket": ["1000005"], "user_id": "u1", "at": "2017-12-05T18:30:00Z", "request_id": "same"}
    own, elsewhere = (
        httpx.post(f"{http}/v1/recommendations", json=body, timeout=60).json()
        for http in (endpoint.http, front.http)
    )
    assert elsewhere.pop("stage_ms")
    assert own.pop("stage_ms")
    assert elsewhere == own
    assert elsewhere["rung"] == "full"
    front.process.kill()


# ---------------------------------------------------------------------------------------- the breaker


async def within(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_hanging_ranker_is_skipped_until_it_answers_again(recommender: Recommender) -> None:
    """The drill `ranker-killed` of `pipelines.drills` has the answers meanwhile."""

    def opened() -> float:
        return metric("reco_breaker_open", dependency="ranker")

    async with ranking(Ranker(recommender)) as (elsewhere, ranker):
        await ranker.rank(turn(recommender))
        elsewhere.wait_s = 30.0
        for _ in range(FAILURES):
            assert not ranker.breaker.is_open
            with pytest.raises(DeadlineExceeded):
                await ranker.rank(turn(recommender, limit_s=1.0))
        asked = elsewhere.asked
        assert ranker.breaker.is_open
        with pytest.raises(RankerUnavailable, match="is not asked until it is ready"):
            await ranker.rank(turn(recommender))
        await asyncio.sleep(1.5)  # a probe hangs as well
        assert (ranker.breaker.is_open, opened()) == (True, 1)
        assert elsewhere.asked == asked
        elsewhere.wait_s, elsewhere.ready = 0.0, False
        await within(lambda: elsewhere.unready >= 2)
        assert ranker.breaker.is_open, "its model is not ready"
        elsewhere.ready = True
        await within(lambda: not ranker.breaker.is_open and opened() == 0)
        assert len(await ranker.rank(turn(recommender))) > 50


async def test_after_a_rollback_the_probe_asks_for_the_model_of_the_bundle_that_answers(
    recommender: Recommender,
) -> None:
    before = recommender.bundle.bundle_id
    promoted = Recommender(replace(recommender.bundle, bundle_id="promoted"), open_store("memory:"))
    elsewhere = Ranker(recommender, only=f"ranker-{before}")
    async with ranking(elsewhere, "/ranker-{bundle_id}") as (_, ranker):
        for _ in range(FAILURES):
            with pytest.raises(RankerUnavailable, match="NOT_FOUND"):
                await ranker.rank(turn(promoted))
        with pytest.raises(RankerUnavailable, match="is not asked until it is ready"):
            await ranker.rank(turn(recommender))
        await within(lambda: not ranker.breaker.is_open)
        assert len(await ranker.rank(turn(recommender))) > 50


async def test_an_invalid_request_does_not_open_the_circuit_breaker(recommender: Recommender) -> None:
    from serving.checkout.remote_ranker import FAIR_S

    other = Recommender(replace(recommender.bundle, bundle_id="other"), open_store("memory:"))
    async with ranking(Ranker(recommender)) as (elsewhere, ranker):
        for _ in range(2 * FAILURES):
            with pytest.raises(RankerMismatch):
                await ranker.rank(turn(other))
        elsewhere.refuses = True
        for _ in range(2 * FAILURES):
            with pytest.raises(RankerUnavailable, match="INVALID_ARGUMENT"):
                await ranker.rank(turn(recommender))
        elsewhere.refuses, elsewhere.wait_s = False, 0.1
        for _ in range(2 * FAILURES):
            with pytest.raises(DeadlineExceeded):
                await ranker.rank(turn(recommender, limit_s=MARGIN_S + FAIR_S / 2))
        assert not ranker.breaker.is_open


async def test_a_call_ends_in_time_for_the_later_stages(recommender: Recommender) -> None:
    async with ranking(Ranker(recommender)) as (elsewhere, ranker):
        await ranker.rank(turn(recommender))
        elsewhere.wait_s = 600.0  # the call ends long before the answer
        late = turn(recommender)
        late.until = time.perf_counter() + 0.2
        with pytest.raises(DeadlineExceeded):
            await ranker.rank(late)


async def test_a_request_in_flight_is_answered_when_the_connection_closes(recommender: Recommender) -> None:
    async with ranking(Ranker(recommender)) as (elsewhere, ranker):
        await ranker.rank(turn(recommender))
        elsewhere.wait_s = 30.0
        waiting = asyncio.create_task(ranker.rank(turn(recommender)))
        await within(lambda: elsewhere.asked == 2)
        before = failed()
        await ranker.close()
        with pytest.raises(RankerUnavailable, match="was closed"):
            await waiting
        assert failed() == before + 1
