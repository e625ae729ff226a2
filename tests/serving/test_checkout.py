"""The path without a protocol around it: whatever breaks in it, the checkout gets an answer."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY

from serving.calls import Call
from serving.checkout import Checkout, Rank, Turn, find_together, rank_here, rank_together
from serving.errors import ClientGone, Overloaded, RankerMismatch, RankerUnavailable
from serving.online_features import open_store
from serving.prediction_log import PredictionLog, read_log
from serving.recommender import Recommender, open_recommender
from serving.schemas import Request, Response

REQUEST = Request(("1000005",), 1_512_498_600.0, "u1", None, 4, "r1")


@pytest.fixture
def recommender(toy_bundle: Path, toy_store: str) -> Recommender:
    return open_recommender(toy_bundle, open_store(toy_store))


def call(limit_s: float = 1e6, gone: Callable[[], bool] = lambda: False) -> Call:
    now = time.perf_counter()
    return Call(now, now + limit_s, "given", gone=gone)


def ask(
    recommender: Recommender, *, rank: Rank = rank_here, request: Request = REQUEST, limit_s: float = 1e6
) -> Response:
    return asyncio.run(Checkout(recommender, 1e6, rank).answer(request, call(limit_s)))


def test_the_answer_is_the_recommender_s(recommender: Recommender) -> None:
    answer, expected = ask(recommender), recommender.recommend(REQUEST)
    assert replace(answer, stage_ms={}) == replace(expected, stage_ms={})
    assert answer.rung == "full"


def test_requests_that_share_calls_are_answered_as_if_alone(recommender: Recommender) -> None:
    baskets = [("1000005",), (), ("1000001", "1000002"), ("no such item",)]
    requests = [replace(REQUEST, basket=basket, request_id=f"r{n}") for n, basket in enumerate(baskets)]
    requests += [replace(request, profile="premium") for request in requests]
    find, rank = (join(1e6, 0.0, 8_192) for join in (find_together, rank_together))
    checkout = Checkout(recommender, 1e6, rank, find)

    async def ask_all() -> list[Response]:
        return await asyncio.gather(*(checkout.answer(request, call()) for request in requests * 8))

    alone = [recommender.recommend(request) for request in requests]
    for answer, expected in zip(asyncio.run(ask_all()), alone * 8, strict=True):
        assert (answer.request_id, answer.rung) == (expected.request_id, "full")
        assert [item.item_id for item in answer.items] == [item.item_id for item in expected.items]
        given, wanted = ([item.score for item in one.items] for one in (answer, expected))
        np.testing.assert_allclose(given, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RankerUnavailable("gone"), "ranker_unavailable"),
        (RankerMismatch("other"), "ranker_mismatch"),
        (ValueError("a bug"), "predict_error"),
    ],
)
def test_a_ranker_that_fails_is_answered_by_best_sellers(
    recommender: Recommender, error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(turn: Turn) -> np.ndarray:
        raise error

    answer = ask(recommender, rank=fails)
    assert (answer.rung, answer.degraded, answer.degraded_reason) == ("popular", True, reason)
    assert [item.item_id for item in answer.items] == ["1000000", "1000001", "1000002", "1000003"]
    # A bug of ours is told with its traceback, a ranker that is away in one line.
    assert bool(caplog.records[0].exc_info) == (reason == "predict_error")


@pytest.mark.parametrize("broken", [lambda s: s[:1], lambda s: s * np.nan], ids=["too few", "not finite"])
def test_scores_that_cannot_be_used_are_answered_by_best_sellers(
    recommender: Recommender, broken: Callable[[np.ndarray], np.ndarray]
) -> None:
    async def rank(turn: Turn) -> np.ndarray:
        return broken(await rank_here(turn))

    assert ask(recommender, rank=rank).degraded_reason == "predict_error"


def test_broken_retrieval_is_answered_by_the_store_s_best_sellers(recommender: Recommender) -> None:
    broken = Recommender(replace(recommender.bundle, query_tower=None), open_store("memory:"))
    answer = ask(broken, request=replace(REQUEST, store_id="store-1"))
    assert (answer.rung, answer.degraded_reason) == ("segment", "preprocess_error")
    assert {item.source for item in answer.items} == {"store"}


def test_when_all_is_broken_the_answer_is_an_empty_list(
    recommender: Recommender, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = Recommender(recommender.bundle, open_store("memory:"))
    nothing.bundle = replace(recommender.bundle, statistics=None)  # type: ignore[arg-type]
    answer = ask(nothing)
    assert (answer.items, answer.rung, answer.degraded) == ((), "empty", True)
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]


def test_the_fallback_knows_best_sellers_for_a_profile_of_another_bundle(recommender: Recommender) -> None:
    expected = recommender.fallback(REQUEST, "test").items
    assert recommender.fallback(replace(REQUEST, profile="no such profile"), "test").items == expected != ()


def test_a_late_answer_steps_down(recommender: Recommender, tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, ())
    late = Recommender(recommender.bundle, open_store("memory:"), log)
    assert ask(late, limit_s=0.0).degraded_reason == "deadline_exceeded"
    log.close()
    assert read_log(tmp_path)["degraded_reason"].to_pylist() == ["deadline_exceeded"]


@pytest.mark.parametrize(
    ("priority", "waited_s", "reason"),
    [("checkout", 70, None), ("checkout", 90, "overloaded"), ("prefetch", 15, None)],
)
def test_who_waited_for_most_of_the_deadline_is_answered_at_once(
    recommender: Recommender, priority: str, waited_s: float, reason: str | None
) -> None:
    arrived = time.perf_counter() - waited_s
    waiting = Call(arrived, arrived + 100, "given", priority=priority)
    answer = asyncio.run(Checkout(recommender, 1e6).answer(REQUEST, waiting))
    assert (answer.degraded_reason, answer.degraded) == (reason, reason is not None)
    assert len(answer.items) == REQUEST.k


def test_a_prefetch_without_time_is_refused_and_computes_nothing(recommender: Recommender) -> None:
    arrived = time.perf_counter() - 25
    waiting = Call(arrived, arrived + 100, "given", priority="prefetch")
    turns: list[Turn] = []
    checkout = Checkout(recommender, 1e6, observers=(turns.append,))
    with pytest.raises(Overloaded, match="ask later"):
        asyncio.run(checkout.answer(REQUEST, waiting))
    assert not turns


def test_who_is_computed_is_counted_whatever_becomes_of_it(recommender: Recommender) -> None:
    seen: list[int] = []

    async def rank(turn: Turn) -> np.ndarray:
        seen.append(checkout._admission._computing)
        if turn.request.k == 1:
            raise RankerUnavailable("gone")
        if turn.request.k == 2:
            raise asyncio.CancelledError
        return await rank_here(turn)

    checkout = Checkout(recommender, 1e6, rank)

    async def ask_all() -> None:
        for k in range(4):
            with contextlib.suppress(asyncio.CancelledError):
                await checkout.answer(replace(REQUEST, k=k), call())

    asyncio.run(ask_all())
    assert (seen, checkout._admission._computing) == ([1] * 4, 0)


def test_a_request_whose_client_has_left_does_not_reach_the_ranker(recommender: Recommender) -> None:
    ranked: list[Turn] = []
    left = iter([False, True, True])  # between retrieval and ranking

    async def rank(turn: Turn) -> np.ndarray:
        ranked.append(turn)
        return await rank_here(turn)

    checkout = Checkout(recommender, 1e6, rank)
    for _ in range(2):
        with pytest.raises(ClientGone):
            asyncio.run(checkout.answer(REQUEST, call(gone=lambda: next(left))))
    assert not ranked


def test_a_swap_between_requests_leaves_those_on_their_way_alone(recommender: Recommender) -> None:
    other = Recommender(replace(recommender.bundle, bundle_id="other"), open_store("memory:"))

    async def swap_while_ranking() -> tuple[Response, Response]:
        async def rank(turn: Turn) -> np.ndarray:
            checkout.recommender = other
            return await rank_here(turn)

        checkout = Checkout(recommender, 1e6, rank)
        return await checkout.answer(REQUEST, call()), await checkout.answer(REQUEST, call())

    first, second = asyncio.run(swap_while_ranking())
    assert [first.bundle_id, second.bundle_id] == [recommender.bundle.bundle_id, "other"]


def test_an_answer_is_observed_once_and_a_rehearsal_is_not(recommender: Recommender) -> None:
    seen: list[Turn] = []
    checkout = Checkout(recommender, 0.0, observers=(seen.append,))
    silent = Recommender(recommender.bundle, open_store("memory:"))

    async def rehearse() -> Response:
        with checkout.rehearsing(silent):
            return await checkout.answer(REQUEST, call(checkout.limit_s))

    assert asyncio.run(rehearse()).rung == "full"
    assert not seen
    assert (checkout.recommender, checkout.limit_s) == (recommender, 0.0)
    asyncio.run(checkout.answer(REQUEST, call()))
    assert [name for name, _, _ in seen[0].stages] == ["preprocess", "predict", "postprocess"]
    assert len(seen) == 1


def test_an_observer_that_fails_costs_no_answer(
    recommender: Recommender, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Turn] = []

    def fails(turn: Turn) -> None:
        raise ValueError("a bug")

    checkout = Checkout(recommender, 1e6, observers=(fails, seen.append))
    assert asyncio.run(checkout.answer(REQUEST, call())).rung == "full"
    assert len(seen) == 1
    assert "an observer failed" in caplog.text


def test_a_fallback_took_as_long_as_the_request_waited_for_it(recommender: Recommender) -> None:
    def took_s() -> float:
        return REGISTRY.get_sample_value("reco_answer_seconds_sum") or 0.0

    async def slow(turn: Turn) -> np.ndarray:
        await asyncio.sleep(0.1)
        raise RankerUnavailable("gone")

    before = took_s()
    answer = ask(recommender, rank=slow)
    assert answer.degraded_reason == "ranker_unavailable"
    assert took_s() - before >= 0.1
    assert answer.stage_ms["total"] >= 100 > answer.stage_ms["fallback"]


def test_the_wait_for_others_is_measured(recommender: Recommender) -> None:
    def waited_s() -> float:
        return REGISTRY.get_sample_value("reco_queue_seconds_sum") or 0.0

    before, arrived = waited_s(), time.perf_counter() - 5.0
    asyncio.run(Checkout(recommender, 1e6).answer(REQUEST, Call(arrived, arrived + 1e6, "given")))
    assert waited_s() - before >= 5.0
