"""The path without a protocol around it: the checkout gets an answer in spite of any error."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from serving.answer.recommender import Asked, Recommender
from serving.cache.answer_cache import AnswerCache
from serving.checkout.admission import SLICE_S
from serving.checkout.budgets import FIRST, MARGIN_S
from serving.checkout.checkout import FEWEST, Checkout, Rank, Turn, rank_here
from serving.errors import FeaturesUnavailable, Overloaded, RankerMismatch, RankerUnavailable
from serving.observe.stderr_log import JsonFormatter
from serving.prediction_log import PredictionLog, read_log
from serving.schemas import Request, Response
from serving.stages.retrieval import thin
from serving.stores.online_features import MemoryStore, UserRow, open_store
from tests.serving.conftest import call, experienced, find_in, metric

REQUEST = Request(("1000005",), 1_512_498_600.0, "u1", None, 4, "r1")


def ask(
    recommender: Recommender, *, rank: Rank = rank_here, request: Request = REQUEST, limit_s: float = 1e6
) -> Response:
    return asyncio.run(Checkout(recommender, 1e6, rank).answer(request, call(limit_s)))


@pytest.mark.parametrize("priority", ["checkout", "prefetch"])
async def test_a_later_request_of_a_body_queues_as_its_first(recommender: Recommender, priority: str) -> None:
    """Later prefetches of one body would stand in the queue of the shoppers who pay."""
    asked: list[bool] = []

    class Entrance:
        def enter(self, urgent: bool) -> asyncio.Future[None] | None:
            asked.append(urgent)
            return asyncio.get_running_loop().create_future() if len(asked) > 1 and not urgent else None

    checkout = Checkout(recommender, 10.0)
    checkout._entrance = Entrance()  # type: ignore[assignment]
    of_body = call(0.05, priority=priority)
    turn = Turn(REQUEST, of_body, recommender, of_body.arrived)
    await checkout.wait_turn(turn)
    await asyncio.wait_for(checkout.wait_turn(turn), 20)  # a queue that never moves
    assert (turn.call.deadline - turn.call.arrived) == pytest.approx(0.05)
    assert asked == [priority == "checkout"] * 2


@pytest.mark.parametrize(
    ("queue", "each_s"), [(3, 0.06), (300, 2 * SLICE_S)], ids=["has waited too long", "would have to"]
)
def test_a_prefetch_that_queues_too_long_is_refused(
    recommender: Recommender, queue: int, each_s: float
) -> None:
    begun_when_refused: list[int] = []
    begun = 0

    async def other(checkout: Checkout) -> None:
        nonlocal begun
        await checkout.enter(call())
        begun += 1
        time.sleep(each_s)

    async def prefetch(checkout: Checkout) -> None:
        with pytest.raises(Overloaded):
            await checkout.enter(call(1.0, priority="prefetch"))
        begun_when_refused.append(begun)

    async def ask_all() -> None:
        checkout = Checkout(recommender, 1_000.0)
        await asyncio.gather(*(other(checkout) for _ in range(1 + queue)), prefetch(checkout))

    asyncio.run(ask_all())
    assert (begun_when_refused[0] == 1) == (queue == 300)
    assert begun == 1 + queue


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RankerUnavailable("gone"), "ranker_unavailable"),
        (RankerMismatch("other"), "ranker_mismatch"),
        (ValueError("a bug"), "predict_error"),
        (TimeoutError(), "predict_error"),
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
    # An internal error is logged with its traceback, an unavailable ranker in one line.
    assert bool(caplog.records[0].exc_info) == (reason == "predict_error")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [(lambda s: s[:1], "predict_error"), (lambda s: s * np.nan, "scores_invalid")],
    ids=["too few", "not finite"],
)
def test_scores_that_cannot_be_used_are_answered_by_best_sellers(
    recommender: Recommender, broken: Callable[[np.ndarray], np.ndarray], reason: str
) -> None:
    async def rank(turn: Turn) -> np.ndarray:
        return broken(await rank_here(turn))

    assert ask(recommender, rank=rank).degraded_reason == reason


def test_broken_retrieval_is_answered_by_the_store_s_best_sellers(recommender: Recommender) -> None:
    broken = Recommender(replace(recommender.bundle, query_tower=None), open_store("memory:"))
    answer = ask(broken, request=replace(REQUEST, store_id="store-1"))
    assert (answer.rung, answer.degraded_reason) == ("segment", "preprocess_error")
    assert {item.source for item in answer.items} == {"store"}


def test_the_fallback_knows_best_sellers_for_a_profile_of_another_bundle(recommender: Recommender) -> None:
    expected = recommender.fallback(REQUEST, "test").items
    assert recommender.fallback(replace(REQUEST, profile="no such profile"), "test").items == expected != ()


def test_a_late_answer_takes_a_lower_rung(recommender: Recommender, tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, ())
    late = Recommender(recommender.bundle, open_store("memory:"), log)
    assert ask(late, limit_s=0.0).degraded_reason == "deadline_exceeded"
    log.close()
    assert read_log(tmp_path)["degraded_reason"].to_pylist() == ["deadline_exceeded"]


@pytest.mark.parametrize(
    ("priority", "waited_s", "reason"),
    [("checkout", 70, None), ("checkout", 90, "overloaded"), ("prefetch", 8, None)],
)
def test_a_request_that_queued_too_long_is_answered_at_once(
    recommender: Recommender, priority: str, waited_s: float, reason: str | None
) -> None:
    waiting = call(100, waited_s, priority)
    answer = asyncio.run(Checkout(recommender, 1e6).answer(REQUEST, waiting))
    assert (answer.degraded_reason, answer.degraded) == (reason, reason is not None)
    assert len(answer.items) == REQUEST.k


def test_a_prefetch_without_time_is_refused_and_computes_nothing(recommender: Recommender) -> None:
    turns: list[Turn] = []
    checkout = Checkout(recommender, 1e6, observers=(turns.append,))
    with pytest.raises(Overloaded, match="ask later"):
        asyncio.run(checkout.answer(REQUEST, call(100, waited_s=25, priority="prefetch")))
    assert not turns


def test_a_computing_request_is_counted_for_any_outcome(recommender: Recommender) -> None:
    seen: list[int] = []

    async def rank(turn: Turn) -> np.ndarray:
        seen.append(checkout.service.admission._computing)
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
    assert (seen, checkout.service.admission._computing) == ([1] * 4, 0)


def test_an_answer_is_observed_once_and_a_rehearsal_is_not(recommender: Recommender) -> None:
    seen: list[Turn] = []
    checkout = Checkout(recommender, 0.0, observers=(seen.append,))
    silent = Recommender(recommender.bundle, open_store("memory:"))

    async def rehearse() -> Response:
        with checkout.rehearsing(silent):
            return await checkout.answer(REQUEST, call(checkout.service.limit_s))

    assert asyncio.run(rehearse()).rung == "full"
    assert not seen
    assert (checkout.recommender, checkout.service.limit_s) == (recommender, 0.0)
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
    async def slow(turn: Turn) -> np.ndarray:
        await asyncio.sleep(0.1)
        raise RankerUnavailable("gone")

    before = metric("reco_answer_seconds_sum")
    answer = ask(recommender, rank=slow)
    assert answer.degraded_reason == "ranker_unavailable"
    assert metric("reco_answer_seconds_sum") - before >= 0.1
    assert answer.stage_ms["total"] - answer.stage_ms["fallback"] >= 99


def test_the_wait_for_a_shared_call_is_measured(recommender: Recommender) -> None:
    before = metric("reco_queue_seconds_sum")
    asyncio.run(Checkout(recommender, 1e6).answer(REQUEST, call(waited_s=5.0)))
    assert metric("reco_queue_seconds_sum") - before >= 5.0


# ---------------------------------------------------------------------------------- nothing of a shopper

CANARY = "CANARY"
SECRET = replace(REQUEST, user_id=f"{CANARY}-SHOPPER", basket=(f"{CANARY}-ITEM", "1000005"))


def answer_without_leak(caplog: pytest.LogCaptureFixture, checkout: Checkout) -> Response:
    """Answer, and search the endpoint's log for the shopper."""
    usual = caplog.handler.formatter
    caplog.handler.setFormatter(JsonFormatter())
    try:
        answer = asyncio.run(checkout.answer(SECRET, call()))
    finally:
        caplog.handler.setFormatter(usual)
    assert CANARY not in caplog.text
    assert CANARY not in str(answer.to_dict())
    return answer


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("near", "preprocess_error"),
        ("rank", "predict_error"),
        ("finish", "postprocess_error"),
        ("observe", None),
    ],
)
@pytest.mark.parametrize("error", [KeyError(SECRET.user_id), ValueError(SECRET), KeyError(SECRET.basket[0])])
def test_an_internal_error_logs_its_place_and_no_shopper_data(
    recommender: Recommender,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    reason: str | None,
    error: Exception,
) -> None:
    def broken(*_: object) -> None:
        raise error

    async def breaks(turn: Turn) -> np.ndarray:
        raise error

    checkout = Checkout(
        recommender,
        1e6,
        breaks if place == "rank" else rank_here,
        observers=[broken] if place == "observe" else (),
    )
    if place in ("near", "finish"):
        monkeypatch.setattr(recommender, place, broken)
    assert answer_without_leak(caplog, checkout).degraded_reason == reason
    assert f"in {'breaks' if place == 'rank' else 'broken'}" in caplog.text
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("broken", ["fallback", "last_kept", "key"])
def test_an_error_in_a_fallback_or_the_cache_logs_no_shopper_data(
    recommender: Recommender, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def raises(*_: object) -> None:
        raise KeyError(SECRET.user_id, SECRET.basket)

    async def gone(turn: Turn) -> np.ndarray:
        raise RankerUnavailable("gone")

    recommender.answers = AnswerCache()
    monkeypatch.setattr(recommender, broken, raises)
    answer = answer_without_leak(caplog, Checkout(recommender, 1e6, gone))
    assert answer.rung == ("empty" if broken == "fallback" else "popular")
    assert "in raises" in caplog.text


@pytest.mark.parametrize("reason", ["features_unavailable", "features_invalid"])
def test_an_unusable_row_costs_its_history_and_logs_no_shopper_data(
    recommender: Recommender, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    class Broken(MemoryStore):
        def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
            if reason == "features_unavailable":
                raise FeaturesUnavailable("the store is away")
            return UserRow(f"{CANARY}\xff".encode("latin-1") * 9, REQUEST.at)

    broken, stranger = (Recommender(recommender.bundle, store) for store in (Broken(), MemoryStore()))
    answer = answer_without_leak(caplog, Checkout(broken, 1e6))
    assert answer.degraded_reason == broken.recommend(SECRET).degraded_reason == reason
    assert answer.items == broken.recommend(SECRET).items == stranger.recommend(SECRET).items
    assert "answering without the user's history" in caplog.text


# ----------------------------------------------------------------------------------------- the ladder


def test_with_time_for_some_candidates_only_these_are_ranked(recommender: Recommender) -> None:
    turns: list[Turn] = []
    checkout = experienced(Checkout(recommender, 1e6, observers=(turns.append,)), ranking_s=1_000.0)
    answer = asyncio.run(checkout.answer(REQUEST, call(limit_s=600.0)))
    prepared = turns[0].prepared
    assert prepared is not None
    every = recommender.prepare(REQUEST)
    assert 100 < len(prepared.candidates.codes) < 120 < len(every.candidates.codes), "600 of 1,000 s for 200"
    some = thin(every.candidates, len(prepared.candidates.codes))
    np.testing.assert_array_equal(prepared.candidates.codes, some.codes)
    rows = recommender.bundle.statistics.find(every.candidates.codes, some.codes)
    np.testing.assert_array_equal(prepared.dense, every.dense[rows])
    by_hand = replace(every, candidates=some, dense=every.dense[rows], categorical=every.categorical[rows])
    expected = recommender.finish(by_hand, recommender.rank(by_hand.dense, by_hand.categorical))
    assert answer.items == expected.items
    assert (answer.rung, answer.degraded, answer.degraded_reason) == ("fewer", True, "deadline_near")


def test_with_time_for_all_candidates_the_answer_is_unchanged(recommender: Recommender) -> None:
    checkout = experienced(Checkout(recommender, 1e6), 1.0, 10.0, 1.0)
    answer = asyncio.run(checkout.answer(REQUEST, call(limit_s=600.0)))
    assert structs.replace(answer, stage_ms={}) == structs.replace(
        recommender.recommend(REQUEST), stage_ms={}
    )


@pytest.mark.parametrize("slow", ["retrieval_s", "ranking_s", "reranking_s"])
def test_a_stage_that_would_miss_the_deadline_is_not_started(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    begun: list[Asked] = []
    monkeypatch.setattr(recommender, "near", begun.append)
    checkout = experienced(Checkout(recommender, 1e6), **{slow: 10_000.0})
    answer = asyncio.run(checkout.answer(REQUEST, call(limit_s=600.0)))
    assert (answer.rung, answer.degraded_reason) == ("popular", "deadline_near")
    assert not begun


def test_slow_retrieval_leaves_less_time_for_ranking(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_in([50.0], recommender, monkeypatch)
    turns: list[Turn] = []
    checkout = experienced(Checkout(recommender, 1e6, observers=(turns.append,)), ranking_s=200.0)
    answer = asyncio.run(checkout.answer(REQUEST, call(limit_s=170.0)))
    assert answer.rung == "fewer"
    assert FEWEST <= len(turns[0].prepared.dense) <= 120  # type: ignore[union-attr]


@pytest.mark.parametrize(("reranking_s", "left_s"), [(1_800.0, 1_800.0), (0.0, MARGIN_S)])
def test_a_hanging_ranker_holds_no_request_past_its_budget(
    recommender: Recommender, reranking_s: float, left_s: float
) -> None:
    """The later stages have their share: half an hour of the hour here."""
    waits: list[float] = []

    async def hangs(turn: Turn) -> np.ndarray:
        waits.append(turn.call.deadline - turn.until)
        turn.call = replace(turn.call, deadline=math.inf)  # the budget ends this call
        await asyncio.sleep(3_600)
        raise AssertionError("nobody waits so long")

    checkout = experienced(Checkout(recommender, 1e6, hangs), reranking_s=reranking_s)
    answer = asyncio.run(checkout.answer(REQUEST, call(limit_s=reranking_s + 1.0)))
    assert (answer.rung, answer.degraded_reason) == ("popular", "deadline_exceeded")
    assert waits == [pytest.approx(left_s)]


def test_late_retrieval_still_updates_the_budget(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_in([110.0], recommender, monkeypatch)
    checkout = experienced(Checkout(recommender, 1e6), retrieval_s=10.0)
    before = checkout.service.budgets.retrieval.of()
    assert asyncio.run(checkout.answer(REQUEST, call(100.0))).degraded_reason == "deadline_near"
    assert checkout.service.budgets.retrieval.of() > before


async def test_every_stage_updates_its_budget_except_in_a_rehearsal(recommender: Recommender) -> None:
    checkout = Checkout(recommender, 1e6)
    with checkout.rehearsing(recommender):
        for _ in range(2 * FIRST):
            await checkout.answer(REQUEST, call(math.inf))
    assert checkout.service.budgets.ranking.of(100) == 0
    for _ in range(FIRST):
        await checkout.answer(REQUEST, call())
    budgets = checkout.service.budgets
    for budget in (budgets.features, budgets.retrieval, budgets.reranking):
        assert 0 < budget.of() < 1
    assert 0 < budgets.ranking.of(100) < 1


def test_a_store_read_may_take_the_time_not_needed_by_later_stages(recommender: Recommender) -> None:
    read_by: list[float] = []

    class Asked(MemoryStore):
        def read(self, user_id: str, deadline: float = math.inf) -> None:
            read_by.append(deadline)

    hurried = Recommender(recommender.bundle, Asked())
    checkout = experienced(Checkout(hurried, 1e6), 10.0, 40.0, 1.0)
    asked = call(limit_s=100.0)
    asyncio.run(checkout.answer(REQUEST, asked))
    fewest_s = 40.0 * FEWEST / 200
    assert read_by == [pytest.approx(asked.deadline - 10.0 - fewest_s - 1.0, abs=0.01)]
