"""The path with a cache of answers: the same lists, one computation, and only current facts."""

import asyncio
import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from feature_repo.aggregates import pack
from feature_repo.facts import Fact
from feature_repo.schema import DENSE_NAMES
from serving.answer.recommender import Known, Recommender, open_recommender
from serving.answer.warming import warm_up
from serving.cache.answer_cache import AnswerCache
from serving.checkout.checkout import Checkout
from serving.errors import DeadlineExceeded, RankerUnavailable, RankingFailed, ScoresInvalid
from serving.prediction_log import PredictionLog, feature_rows, read_log
from serving.release.bundle import Bundle
from serving.schemas import Request, Response
from serving.shop.fact_store import open_fact_store
from serving.stages.reranking import Ranked
from serving.stages.retrieval import Quotas
from serving.stores.online_features import MemoryStore, UserRow, open_store
from tests.chaos.procs import eventually
from tests.conftest import make_row
from tests.serving.conftest import (
    Counting,
    Running,
    ask_all,
    call,
    experienced,
    find_in,
    metric,
    shown,
    tensors,
)
from tests.serving.shop.stock import set_stock

AT = 1_512_498_600.0
KNOWN = Request(("1000005",), AT, "u1", None, 4, "r1")
NOBODY = Request(("1000005",), AT, None, "store-1", 4, "r2")


@pytest.fixture
def cached(toy_bundle: Path, toy_opened: Bundle, toy_store: str) -> Recommender:
    store, answers = open_store(toy_store), AnswerCache()
    return open_recommender(toy_bundle, store, answers=answers, open_bundle=lambda _: toy_opened)


def only_list(recommender: Recommender) -> Ranked:
    """Return the one list that a recommender has cached."""
    (cached,) = recommender.answers._lists.values()  # type: ignore[union-attr]
    return cached.ranked


@pytest.mark.parametrize("request_", [KNOWN, NOBODY], ids=["a known user", "nobody"])
def test_a_cached_answer_is_the_computed_one(cached: Recommender, request_: Request) -> None:
    rank = Counting()
    computed = cached.recommend(request_)
    first, again = ask_all(cached, rank, request_, replace(request_, request_id="r9"))
    assert shown(first) == shown(again) == shown(computed)
    assert (first.request_id, again.request_id) == (request_.request_id, "r9")
    assert (again.rung, again.degraded) == ("full", False)
    assert len(rank.turns) == 1, "asked at once, computed once"
    assert set(again.stage_ms) == {"features", "cache", "reranking", "total"}


def each_takes(checkout: Checkout, seconds: float) -> None:
    """Teach the admission that each answer takes so long."""
    for _ in range(200):
        checkout.service.admission.served(0.0, seconds)
        checkout.service.admission._spent_s = 0.0


async def test_a_herd_that_waits_for_one_list_does_not_count_as_a_queue(cached: Recommender) -> None:
    rank = Counting(wait_s=0.05)
    before = metric("reco_cache_computed_total")
    checkout = Checkout(cached, 1e6, rank)
    each_takes(checkout, 1.0)  # so that 500 would be refused
    answers = await asyncio.gather(*(checkout.answer(NOBODY, call(100)) for _ in range(500)))
    assert {answer.rung for answer in answers} == {"full"}
    assert len(rank.turns) == 1
    assert metric("reco_cache_computed_total") == before + 1


async def test_lists_to_be_computed_count_as_a_queue(cached: Recommender) -> None:
    """All requests arrive before the first list is made: only as many start as fit the deadline."""
    requests = [replace(NOBODY, basket=(f"100000{n}", f"100001{n}"), request_id=str(n)) for n in range(9)]
    checkout = Checkout(cached, 100e3, Counting(wait_s=0.05))
    each_takes(checkout, 21.0)  # a fifth answer would take longer than the deadline allows
    answers = await asyncio.gather(*(checkout.answer(request, call(100)) for request in requests))
    assert [answer.rung for answer in answers] == ["full"] * 4 + ["segment"] * 5


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_request_without_time_to_compute_takes_a_cached_list(cached: Recommender, is_kept: bool) -> None:
    rank = Counting()
    if is_kept:
        ask_all(cached, rank, NOBODY)
    answer = asyncio.run(Checkout(cached, 100e3, rank).answer(NOBODY, call(100, waited_s=90)))
    assert (answer.rung, answer.degraded_reason) == (("full", None) if is_kept else ("segment", "overloaded"))
    assert len(rank.turns) == is_kept


def test_the_reason_counts_days_from_the_request_not_from_the_list(cached: Recommender) -> None:
    later = replace(KNOWN, at=AT + 40 * 60)
    rank = Counting()
    ask_all(cached, rank, KNOWN)
    (answer,) = ask_all(cached, rank, later)
    assert [item.reason for item in answer.items] == [item.reason for item in cached.recommend(later).items]


def test_a_list_longer_than_the_cached_length_is_computed_each_time(cached: Recommender) -> None:
    rank, long = Counting(), replace(NOBODY, k=16)
    answers = ask_all(cached, rank, long, long)
    assert len(rank.turns) == 2
    assert shown(answers[0]) == shown(cached.recommend(long))


def test_a_list_with_too_many_sold_out_items_is_computed_again(cached: Recommender) -> None:
    rank = Counting()
    ask_all(cached, rank, replace(NOBODY, k=10))
    kept = only_list(cached)
    assert not kept.whole
    some = kept.codes[:30].astype(np.int64)
    set_stock(cached, some)
    (answer,) = ask_all(cached, rank, replace(NOBODY, k=10))
    assert len(rank.turns) == 2
    assert len(answer.items) == 10
    assert not set(cached.bundle.statistics.item_ids[some]) & {item.item_id for item in answer.items}


def test_few_sold_out_candidates_are_replaced_as_without_a_cache(toy_bundle: Path) -> None:
    recommender = open_recommender(toy_bundle, open_store("memory:"), answers=AnswerCache())
    few = replace(recommender.bundle.settings, quotas=Quotas(total=40))
    small = replace(recommender.bundle, settings=few)
    recommender = Recommender(small, open_store("memory:"), answers=AnswerCache())
    ten = replace(NOBODY, k=10)
    ask_all(recommender, Counting(), ten)
    kept = only_list(recommender)
    assert (kept.whole, len(kept.codes)) == (True, 40)
    set_stock(recommender, kept.codes[:36])
    (answer,) = ask_all(recommender, Counting(), ten)
    assert len(answer.items) == 10
    assert shown(answer) == shown(recommender.recommend(ten))


def test_a_failing_ranker_is_called_once_and_stores_nothing(cached: Recommender) -> None:
    broken = Counting(RankerUnavailable("gone"))
    first, second = ask_all(cached, broken, NOBODY, NOBODY)
    assert (first.degraded_reason, second.degraded_reason) == ("ranker_unavailable",) * 2
    assert len(broken.turns) == 1
    (answer,) = ask_all(cached, Counting(), NOBODY)
    assert not answer.degraded


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("another")])
def test_a_bug_in_the_cache_costs_time_but_no_answer(
    cached: Recommender, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(cached, "key", broken)
    (answer,) = ask_all(cached, Counting(), NOBODY)
    assert shown(answer) == shown(cached.recommend(NOBODY))
    assert not answer.degraded


async def test_a_request_that_waits_for_a_shared_list_keeps_its_deadline(cached: Recommender) -> None:
    slow = Counting(wait_s=0.5)
    checkout = Checkout(cached, 1e6, slow)
    patient = asyncio.create_task(checkout.answer(NOBODY, call(60)))
    await asyncio.sleep(0.05)
    answer = await checkout.answer(NOBODY, call(0.05))
    assert not (await patient).degraded
    assert (answer.degraded_reason, answer.rung) == ("deadline_exceeded", "segment")


async def test_a_list_is_counted_although_the_request_that_began_it_got_less(cached: Recommender) -> None:
    before = metric("reco_cache_computed_total")
    answer = await Checkout(cached, 1e6, Counting(wait_s=600.0)).answer(NOBODY, call(1.0))
    assert (answer.degraded, "ranking" in answer.stage_ms) == (True, False)
    assert metric("reco_cache_computed_total") == before + 1


def test_a_request_with_time_left_computes_alone_after_a_failed_shared_one(cached: Recommender) -> None:
    rank = Counting(DeadlineExceeded("late"), wait_s=0.05, fails=1)
    first, *others = ask_all(cached, rank, NOBODY, NOBODY, NOBODY)
    assert first.degraded_reason == "deadline_exceeded", "it has asked already"
    assert [shown(other) for other in others] == [shown(cached.recommend(NOBODY))] * 2
    assert len(rank.turns) == 3


async def test_a_shared_list_gets_the_longest_deadline_of_its_requests(cached: Recommender) -> None:
    rank = Counting(wait_s=1.0)
    checkout = Checkout(cached, 60_000, rank)
    hurried, given = call(0.5, priority="prefetch"), call(60)
    first, patient = await asyncio.gather(checkout.answer(NOBODY, hurried), checkout.answer(NOBODY, given))
    assert first.degraded_reason == "deadline_exceeded"
    assert (patient.rung, patient.degraded) == ("full", False)
    (turn,) = rank.turns
    assert turn.call.priority == "checkout"
    assert 50 < turn.call.deadline - turn.call.arrived <= 60


def test_an_inner_timeout_is_not_a_missed_deadline(cached: Recommender) -> None:
    (answer,) = ask_all(cached, Counting(TimeoutError(), fails=1), NOBODY)
    assert shown(answer) == shown(cached.recommend(NOBODY))
    assert not answer.degraded


def test_the_computed_answer_is_logged_with_its_features_and_times(toy_bundle: Path, tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, DENSE_NAMES)
    recommender = open_recommender(toy_bundle, open_store("memory:"), log, answers=AnswerCache())
    alone = open_recommender(toy_bundle, open_store("memory:"))
    sold_out = alone.bundle.statistics.codes([alone.recommend(NOBODY).items[0].item_id])
    for each in (recommender, alone):
        set_stock(each, sold_out)

    before = metric("reco_stage_seconds_count", stage="ranking")
    requests = [replace(NOBODY, request_id=f"r{number}") for number in range(3)]
    answers = ask_all(recommender, Counting(), *requests[:2])
    answers += ask_all(recommender, Counting(), requests[2])
    log.close()
    assert [set(answer.stage_ms) for answer in answers] == [
        {"features", "retrieval", "ranking", "cache", "reranking", "total"},
        *[{"features", "cache", "reranking", "total"}] * 2,
    ]
    assert min(answers[0].stage_ms.values()) >= 0
    assert metric("reco_stage_seconds_count", stage="ranking") == before + 1
    table = read_log(tmp_path)
    assert table["item_ids"].to_pylist() == [[item.item_id for item in answer.items] for answer in answers]
    expected, codes = alone.prepare(NOBODY), alone.bundle.statistics.codes
    rows = alone.bundle.statistics.find(
        expected.candidates.codes, codes([item.item_id for item in answers[0].items])
    )
    assert sold_out[0] not in codes(table["item_ids"].to_pylist()[0])
    np.testing.assert_array_equal(feature_rows(table), expected.dense[rows])
    assert [len(one) > 0 for one in table["features"].to_pylist()] == [True, False, False]


def test_a_warm_cache_answers_without_the_ranker(toy_bundle: Path, tmp_path: Path) -> None:
    log = PredictionLog(tmp_path, DENSE_NAMES)
    before = open_recommender(toy_bundle, open_store("memory:"), log)
    for request in [NOBODY, NOBODY, *[replace(NOBODY, basket=())] * 2, KNOWN, KNOWN]:
        before.recommend(request)
    log.close()
    answers = AnswerCache()
    warmed = open_recommender(toy_bundle, open_store("memory:"), answers=answers)
    warm_up(warmed, tmp_path, lambda took_s: None)
    assert len(answers) == 2, "a known shopper's would not be asked for again"
    rank = Counting()
    (answer,) = ask_all(warmed, rank, NOBODY)
    assert shown(answer) == shown(before.recommend(NOBODY))
    assert not rank.turns


def test_a_list_with_a_score_that_is_not_finite_warms_nothing(
    cached: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "rank", lambda dense, _: np.full(len(dense), np.nan, np.float32))
    with pytest.raises(ScoresInvalid):
        cached.warm(NOBODY)
    assert cached.answers is not None
    assert len(cached.answers) == 0


def test_an_unreadable_log_warms_nothing_and_is_reported(
    cached: Recommender, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "20260101.parquet").write_text("not Parquet")
    warm_up(cached, tmp_path, lambda took_s: None)
    assert "the cache begins empty: the prediction log in" in caplog.text
    assert len(cached.answers or ()) == 0


def test_a_dropped_recommender_frees_its_cached_lists(toy_bundle: Path) -> None:
    """Without the collector: lists cached before `gc.freeze` would outlive their bundle for ever."""
    gc.collect()
    gc.disable()
    try:
        recommender = open_recommender(toy_bundle, open_store("memory:"), answers=AnswerCache())
        recommender.warm(NOBODY)
        ask_all(recommender, Counting(), NOBODY, replace(NOBODY, store_id="store-2"))
        cache = weakref.ref(recommender.answers)
        bundle = weakref.ref(recommender.bundle)
        del recommender
        assert (cache(), bundle()) == (None, None)
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_endpoint_caches_if_the_setting_is_on(start_toy: Callable[..., Running]) -> None:
    body = {"basket": ["1000005"], "store_id": "store-1", "k": 4}
    with httpx.Client(base_url=start_toy(answer_cache="memory:").http) as client:
        answers = [client.post("/v1/recommendations", json=body).json() for _ in range(3)]
        over_v2 = client.post("/v2/models/checkout/infer", json=tensors(**body)).json()
        metrics = client.get("/metrics").text
    assert all("cache" in answer["stage_ms"] for answer in answers)
    assert len({json.dumps(answer["items"]) for answer in answers}) == 1
    ids = next(output["data"] for output in over_v2["outputs"] if output["name"] == "item_id")
    assert ids == [item["item_id"] for item in answers[0]["items"]]
    assert 'reco_cache_lookups_total{level="process",outcome="hit"} 3.0' in metrics
    assert "reco_cache_entries 1.0" in metrics


# ----------------------------------------------------------------------------------- the rung `cached`


def expire_all(recommender: Recommender) -> None:
    """Let every list expire."""
    lists = recommender.answers._lists  # type: ignore[union-attr]
    for digest, cached in list(lists.items()):
        lists[digest] = cached._replace(expires_at=0.0)


@pytest.mark.parametrize("request_", [KNOWN, NOBODY], ids=["a known user", "nobody"])
@pytest.mark.parametrize("error", [RankerUnavailable("gone"), DeadlineExceeded("late")])
def test_an_expired_list_comes_before_best_sellers(
    cached: Recommender, request_: Request, error: RankingFailed
) -> None:
    (full,) = ask_all(cached, Counting(), request_)
    expire_all(cached)
    (answer,) = ask_all(cached, Counting(error), replace(request_, request_id="r9"))
    assert (answer.rung, answer.degraded, answer.degraded_reason) == ("cached", True, error.reason)
    assert (shown(answer), answer.request_id) == (shown(full), "r9")
    assert answer.stage_ms["total"] >= answer.stage_ms["cache"] + answer.stage_ms["reranking"]
    (again,) = ask_all(cached, Counting(), request_)
    assert (again.rung, shown(again)) == ("full", shown(full)), "it was made again"


def test_the_fallback_may_be_the_last_hours_or_the_anonymous_list(cached: Recommender) -> None:
    broken = Counting(RankerUnavailable("gone"))
    ask_all(cached, Counting(), KNOWN)
    (later,) = ask_all(cached, broken, replace(KNOWN, at=AT + 3_600))
    assert later.rung == "cached"
    assert "history" in {item.source for item in later.items}
    (much_later,) = ask_all(cached, broken, replace(KNOWN, at=AT + 3 * 3_600))
    assert much_later.rung == "popular"
    (nobody,) = ask_all(cached, Counting(), replace(KNOWN, user_id=None))
    (as_nobody,) = ask_all(cached, broken, replace(KNOWN, at=AT + 3 * 3_600))
    assert (as_nobody.rung, shown(as_nobody)) == ("cached", shown(nobody))
    (own,) = ask_all(cached, broken, replace(KNOWN, at=AT + 3_600))
    assert shown(own) == shown(later), "an own list comes before the anonymous one"


def test_a_list_of_after_a_purchase_is_not_shown_before_it(toy_bundle: Path, toy_opened: Bundle) -> None:
    store, asked = MemoryStore(), Request(("1000010",), AT, "u", None, 10, "r1")
    bought = [(AT - 9e6, ["1000005"], 1.0, 0.0), (AT - 1, ["1000003"], 1.0, 0.0)]
    store.write("u", UserRow(pack(make_row(bought), "u"), AT))
    cached, computed = (
        open_recommender(toy_bundle, store, answers=answers, open_bundle=lambda _: toy_opened)
        for answers in (AnswerCache(), None)
    )
    (after,), (before,) = (ask_all(cached, Counting(), replace(asked, at=at)) for at in (AT, AT - 2))
    assert shown(after) != shown(before) == shown(computed.recommend(replace(asked, at=AT - 2)))
    # An hour later the row is the same, and all of it lies before the request.
    (later,) = ask_all(cached, Counting(RankerUnavailable("gone")), replace(asked, at=AT + 3_598))
    assert (later.rung, shown(later)) == ("cached", shown(after))


def test_requests_with_and_without_a_key_count_once(cached: Recommender) -> None:
    labels = {"level": "process", "outcome": "refused"}
    before = metric("reco_cache_lookups_total", **labels)
    ask_all(cached, Counting(RankerUnavailable("gone")), replace(KNOWN, k=16))
    assert metric("reco_cache_lookups_total", **labels) == before + 1


def test_a_list_of_another_request_is_no_fallback(cached: Recommender) -> None:
    ask_all(cached, Counting(), NOBODY, KNOWN)
    broken = Counting(RankerUnavailable("gone"))
    for other in (replace(NOBODY, basket=("1000006",)), replace(NOBODY, store_id="store-2"),
                  replace(KNOWN, user_id="u2"), replace(NOBODY, k=16)):  # fmt: skip
        (answer,) = ask_all(cached, broken, other)
        assert answer.rung in ("segment", "popular")


def test_a_cached_list_is_shown_with_current_facts_fresh_or_stale(toy_bundle: Path, tmp_path: Path) -> None:
    facts = open_fact_store(f"sqlite:///{tmp_path / 'facts.db'}")
    log = PredictionLog(tmp_path / "log", DENSE_NAMES)
    recommender = open_recommender(toy_bundle, open_store("memory:"), log, facts=facts, answers=AnswerCache())
    (before,) = ask_all(recommender, Counting(), NOBODY)
    gone, cheaper = (item.item_id for item in before.items[:2])
    facts.write([Fact("f1", "stock", gone, 0.0, AT - 60), Fact("f2", "price", cheaper, 0.99, AT - 60)])
    code = recommender.bundle.statistics.codes([cheaper])
    eventually(lambda: recommender.facts.price(code, AT, None) == 0.99)  # taken in after the stock
    broken = Counting(RankerUnavailable("gone"))
    fresh = ask_all(recommender, broken, NOBODY)
    expire_all(recommender)
    answers = [*fresh, *ask_all(recommender, broken, NOBODY)]
    recommender.facts.close()
    log.close()
    assert [answer.rung for answer in answers] == ["full", "cached"]
    for answer in answers:
        assert len(answer.items) == NOBODY.k
        assert gone not in [item.item_id for item in answer.items]
        assert [item.price for item in answer.items if item.item_id == cheaper] == [0.99]
    record = read_log(tmp_path / "log").to_pylist()[-1]
    assert (record["rung"], record["degraded_reason"]) == ("cached", "ranker_unavailable")
    assert not record["features"]


def test_a_stale_list_with_too_few_items_left_is_replaced_by_best_sellers(cached: Recommender) -> None:
    ask_all(cached, Counting(), NOBODY)
    kept = only_list(cached)
    set_stock(cached, kept.codes[NOBODY.k - 1 :])
    (answer,) = ask_all(cached, Counting(RankerUnavailable("gone")), NOBODY)
    assert (answer.rung, len(answer.items)) == ("segment", NOBODY.k)


@pytest.mark.parametrize(("whole", "rung"), [(True, "cached"), (False, "segment")])
def test_a_short_stale_list_is_shown_if_it_is_complete(cached: Recommender, whole: bool, rung: str) -> None:
    ask_all(cached, Counting(), NOBODY)
    ((digest, kept),) = cached.answers._lists.items()  # type: ignore[union-attr]
    short = replace(kept.ranked.without(kept.ranked.codes[3:]), whole=whole)
    cached.answers._lists[digest] = kept._replace(ranked=short, expires_at=0.0)  # type: ignore[union-attr]
    (answer,) = ask_all(cached, Counting(RankerUnavailable("gone")), NOBODY)
    assert answer.rung == rung


def test_a_request_past_its_deadline_takes_a_cached_list(cached: Recommender) -> None:
    rank = Counting()
    ask_all(cached, rank, NOBODY)
    (answer,) = ask_all(cached, rank, NOBODY, limit_s=-1.0)
    assert (answer.rung, answer.degraded_reason) == ("cached", "deadline_exceeded")
    (known,) = ask_all(cached, rank, replace(NOBODY, user_id="u1"), limit_s=-1.0)
    assert known.rung == "cached", "the list of nobody: there was no time to read who it is"
    assert len(rank.turns) == 1


async def test_a_request_that_ranks_fewer_candidates_stores_no_list(cached: Recommender) -> None:
    rank = Counting()
    checkout = experienced(Checkout(cached, 1e9, rank), ranking_s=400.0)
    hurried, patient = call(200), call(2_000)
    first = await checkout.answer(NOBODY, hurried)
    assert len(cached.answers or ()) == 0
    whole, again = await checkout.answer(NOBODY, patient), await checkout.answer(NOBODY, hurried)
    assert (first.rung, first.degraded_reason) == ("fewer", "deadline_near")
    assert (whole.rung, again.rung, shown(again)) == ("full", "full", shown(whole))
    few, every = (len(turn.prepared.dense) for turn in rank.turns)  # type: ignore[union-attr]
    assert 90 < few <= 100 < every


def test_an_answer_that_begins_again_with_fewer_candidates_counts_once(
    cached: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retrieval takes 140 s once, by a clock that jumps; the rest has time for some candidates only."""
    find_in([140.0], cached, monkeypatch)
    monkeypatch.setattr("serving.checkout.admission.BURST_S", 500.0)

    async def ask() -> list[Response]:
        checkout = Checkout(cached, 170e3, user_limit_per_s=1 / 330)  # two answers at once would be too many
        experienced(checkout, ranking_s=64.0)
        return [await checkout.answer(KNOWN, call(170)) for _ in range(2)]

    first, second = asyncio.run(ask())
    assert (first.rung, first.degraded_reason) == ("fewer", "deadline_near")
    assert (second.rung, second.degraded_reason) == ("full", None)


@pytest.mark.parametrize("k", [4, 16], ids=["with a key", "without a key"])
async def test_the_time_of_a_row_that_is_read_is_not_needed_again(cached: Recommender, k: int) -> None:
    checkout = experienced(Checkout(cached, 1e9), features_s=1_000.0)
    assert (await checkout.answer(replace(KNOWN, k=k), call(900))).rung == "full"


@pytest.mark.parametrize("k", [4, 16], ids=["with a key", "without a key"])
async def test_the_read_of_the_row_counts_once_as_a_stage(
    cached: Recommender, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = cached.fetch

    async def slow(request: Request, by: float) -> Known:
        await asyncio.sleep(0.05)
        return await fetch(request, by)

    monkeypatch.setattr(cached, "fetch", slow)
    stage_ms = (await Checkout(cached, 1e9).answer(replace(KNOWN, k=k), call())).stage_ms
    assert stage_ms["features"] > 40
    assert min(stage_ms.values()) >= 0, "the rest of the time is the cache's"


async def test_hurried_requests_wait_for_a_shared_list_in_flight(cached: Recommender) -> None:
    rank = Counting(wait_s=0.2)
    checkout = experienced(Checkout(cached, 1e9, rank), ranking_s=400.0)
    calls = [call(2_000), *[call(200)] * 20]
    answers = await asyncio.gather(*(checkout.answer(NOBODY, call) for call in calls))
    assert {answer.rung for answer in answers} == {"full"}
    assert len(rank.turns) == 1


def test_a_forgotten_shopper_gets_no_cached_list(cached: Recommender) -> None:
    (before,) = ask_all(cached, Counting(), KNOWN)
    assert "history" in {item.source for item in before.items}
    cached._store = MemoryStore()
    for rank in (Counting(RankerUnavailable("gone")), Counting()):
        (answer,) = ask_all(cached, rank, KNOWN)
        (nobody,) = ask_all(cached, rank, replace(KNOWN, user_id=None))
        assert shown(answer) == shown(nobody)
        assert "history" not in {item.source for item in answer.items}
