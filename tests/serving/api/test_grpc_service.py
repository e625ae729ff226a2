"""The typed service over real gRPC, in this process."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec import structs

from serving.answer.recommender import Recommender
from serving.api.callers import CallerInterceptor, Callers
from serving.api.endpoint import _Statuses
from serving.api.grpc_service import MAX_WATCHES, Health, RecommendationsService
from serving.checkout.checkout import Checkout, Turn, rank_here
from serving.proto.recommendations_pb2 import Priority, RecommendRequest
from serving.proto.recommendations_pb2_grpc import RecommendationsStub, add_RecommendationsServicer_to_server
from serving.schemas import Request
from tests.serving.conftest import metric

AT = 1_512_498_600.25


@contextlib.asynccontextmanager
async def channel_of(server: grpc.aio.Server) -> AsyncIterator[grpc.aio.Channel]:
    """A server that listens on this machine until the block ends, and a channel to it."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def served(checkout: Checkout) -> AsyncIterator[Any]:
    """The call of a service that answers from this checkout."""
    server = grpc.aio.server(interceptors=(_Statuses(),))
    add_RecommendationsServicer_to_server(RecommendationsService(checkout), server)
    async with channel_of(server) as channel:
        yield RecommendationsStub(channel).Recommend


def request(**fields: Any) -> RecommendRequest:
    message = RecommendRequest(basket=["1000005", "1000031"], user_id="u1", k=7, request_id="r1", **fields)
    message.at.FromNanoseconds(int(AT * 1e9))
    return message


async def test_the_answer_is_the_recommender_s(recommender: Recommender) -> None:
    async with served(Checkout(recommender, 1e9)) as recommend:
        answer = await recommend(request(store_id="store-2"), timeout=60)
    asked = Request(("1000005", "1000031"), AT, "u1", "store-2", 7, "r1")
    expected = structs.replace(recommender.recommend(asked), stage_ms={}).to_dict()
    found = {
        "request_id": answer.request_id,
        "bundle_id": answer.bundle_id,
        "rung": answer.rung,
        "degraded": answer.degraded,
        "degraded_reason": answer.degraded_reason if answer.HasField("degraded_reason") else None,
        "stage_ms": {},
        "items": [
            {field.name: value for field, value in item.ListFields()} | {"score": item.score}
            for item in answer.items
        ],
    }
    assert found == expected
    assert set(answer.stage_ms) == {"features", "retrieval", "ranking", "reranking", "total"}


async def test_an_empty_message_means_an_empty_basket_now(recommender: Recommender) -> None:
    turns, before = list[Turn](), time.time()
    async with served(Checkout(recommender, 1e9, observers=(turns.append,))) as recommend:
        answer = await recommend(RecommendRequest(), metadata=(("x-request-id", "till-4"),))
    assert (answer.request_id, len(answer.items)) == ("till-4", 10)
    asked = turns[0].request
    assert (asked.basket, asked.user_id, asked.store_id) == ((), None, None)
    assert before - 1 < asked.at < time.time() + 1


async def test_the_deadline_and_the_priority_of_the_call_are_the_request_s(recommender: Recommender) -> None:
    turns: list[Turn] = []
    async with served(Checkout(recommender, 500_000.0, observers=(turns.append,))) as recommend:
        await recommend(request(), timeout=100)
        await recommend(request(priority=Priority.PRIORITY_PREFETCH), timeout=1_000)
        await recommend(request(), timeout=1_000, metadata=(("x-deadline-ms", "50000"),))
        await recommend(request(), metadata=(("x-priority", "prefetch"), ("x-deadline-ms", "9e9")))
    limits_s = [turn.call.deadline - turn.call.arrived for turn in turns]
    assert 50 < limits_s[0] <= 102  # gRPC sends a time this long in whole seconds, rounded up
    assert limits_s[1:] == pytest.approx([500, 50, 500])
    assert [turn.call.priority for turn in turns] == ["checkout", "prefetch", "checkout", "prefetch"]


@pytest.mark.parametrize(
    "bad",
    [
        RecommendRequest(k=-1),
        RecommendRequest(basket=["a\x00b"]),
        RecommendRequest(priority=7),  # type: ignore[arg-type]
        RecommendRequest(at={"seconds": 10**15}),
    ],
    ids=["k", "basket", "priority", "at"],
)
async def test_an_invalid_request_is_not_observed_as_an_answer(
    recommender: Recommender, bad: RecommendRequest
) -> None:
    turns: list[Turn] = []
    async with served(Checkout(recommender, 1e9, observers=(turns.append,))) as recommend:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await recommend(bad, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not turns


async def test_a_cancelled_or_1_ms_call_ends_its_work_and_does_not_affect_the_next_one(
    recommender: Recommender,
) -> None:
    ended: list[str] = []
    ranking, over = asyncio.Event(), asyncio.Event()

    async def slow(turn: Turn) -> np.ndarray:
        if turn.request.k == 7:
            ranking.set()
            try:
                await asyncio.sleep(3_600)
            finally:
                ended.append("rank")
                over.set()
        return await rank_here(turn)

    async with served(Checkout(recommender, 1e9, slow)) as recommend:
        hurried = recommend(request(), timeout=0.001)
        if await hurried.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
            assert (await hurried).degraded  # in time, from a lower rung: the ranker never answers
        ended.clear()
        ranking.clear()
        over.clear()
        leaves = recommend(request(), timeout=3_000)
        await asyncio.wait_for(ranking.wait(), 60)
        assert leaves.cancel()
        assert await leaves.code() == grpc.StatusCode.CANCELLED
        await asyncio.wait_for(over.wait(), 60)
        assert ended == ["rank"], "no one waits for the scores"
        good = request()
        good.k = 3
        assert (await recommend(good, timeout=60)).rung == "full"


async def test_a_prefetch_over_its_shopper_s_limit_is_counted_as_such(recommender: Recommender) -> None:
    def refused() -> list[float]:
        return [metric("reco_rejected_total", reason=reason) for reason in ("user_over_limit", "overloaded")]

    before = refused()
    async with served(Checkout(recommender, 1e9, user_limit_per_s=1e-3)) as recommend:
        assert (await recommend(request(), timeout=60)).rung == "full"
        with pytest.raises(grpc.aio.AioRpcError, match="user_over_limit") as caught:
            await recommend(request(priority=Priority.PRIORITY_PREFETCH), timeout=60)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused() == [before[0] + 1, before[1]]


def faults() -> float:
    return metric("reco_faults_total", protocol="grpc")


async def test_an_error_of_ours_is_counted_and_says_nothing(recommender: Recommender) -> None:
    class Broken(Checkout):
        async def answer(self, request: Request, call: Any) -> Any:
            raise ZeroDivisionError("CANARY")

    before = faults()
    async with served(Broken(recommender, 1e9)) as recommend:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await recommend(request(), timeout=60)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    assert faults() == before + 1


SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"  # field 1 of the answer


class Ready:
    """Says whether the endpoint is ready."""

    yes = True

    async def __call__(self) -> bool:
        return self.yes


@contextlib.asynccontextmanager
async def watched(is_ready: Ready) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the health service, behind the interceptors of the endpoint."""
    server = grpc.aio.server(interceptors=(CallerInterceptor(Callers("0123456789abcdef")), _Statuses()))
    server.add_generic_rpc_handlers((Health(is_ready),))
    async with channel_of(server) as channel:
        yield channel


async def test_the_health_service_says_whether_the_endpoint_is_ready() -> None:
    is_ready, name, before = Ready(), b"reco.v1.Recommendations", faults()
    async with watched(is_ready) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"") == await check(b"\x0a" + bytes([len(name)]) + name) == SERVING
        is_ready.yes = False
        assert await check(b"") == NOT_SERVING
        is_ready.yes = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(b"\x0a\x01x")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert faults() == before, "a probe of another service is no fault of ours"


async def test_a_watch_gets_each_change_and_ends_when_the_process_drains() -> None:
    is_ready = Ready()
    async with watched(is_ready) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        own, other = watch(b""), watch(b"\x0a\x01x")
        assert [await own.read(), await other.read()] == [SERVING, SERVICE_UNKNOWN]
        is_ready.yes = False
        assert [await own.read(), await other.read()] == [NOT_SERVING, NOT_SERVING]
        assert await own.read() is grpc.aio.EOF
        assert await own.code() is grpc.StatusCode.OK


async def test_so_many_watches_are_open_at_a_time() -> None:
    before = faults()
    async with watched(Ready()) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        calls = [watch(b"") for _ in range(MAX_WATCHES)]
        assert {await call.read() for call in calls} == {SERVING}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(b"").read()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        for _ in range(600):  # until the server has seen the end of the first one
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await watch(b"").read() == SERVING
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("a watch that ended leaves no room for another one")
    assert faults() == before
