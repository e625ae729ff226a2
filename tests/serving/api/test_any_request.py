"""Rules that hold for every answer: any request, shopper and time, with any concurrent requests."""

import asyncio
import contextlib
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_repo.aggregates import UserEvents, pack
from feature_repo.facts import Fact
from serving.answer.recommender import Recommender
from serving.cache.answer_cache import AnswerCache
from serving.checkout.checkout import Checkout, Turn, rank_here
from serving.errors import RankerUnavailable
from serving.metrics import STAGES
from serving.release.bundle import Bundle
from serving.schemas import NOTHING_LEFT, REASONS, RUNGS, Request, Response
from serving.shop.fact_store import SqliteFactStore
from serving.shop.facts import LiveFacts
from serving.stores.online_features import MemoryStore, UserRow
from tests.serving.checkout.joined_ranker import joined_ranker
from tests.serving.conftest import call, experienced
from tests.serving.shop.stock import set_stock

AT = 1_512_498_600.0
ITEMS = [str(1_000_000 + n) for n in range(240)]
DAY_S = 86_400.0
PATIENT = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

some_items = st.lists(st.sampled_from([*ITEMS[:60], *ITEMS[200:], "unknown", "⚡"]), max_size=30, unique=True)
requests = st.builds(
    Request,
    basket=some_items.map(tuple),
    at=st.floats(AT - 400 * DAY_S, AT + 20 * DAY_S),
    user_id=st.sampled_from([None, "u0", "u1", "u2", "nobody"]),
    store_id=st.sampled_from([None, "store-0", "store-2", "nowhere"]),
    k=st.integers(0, 100),
    request_id=st.just("r"),
    profile=st.sampled_from(["default", "premium"]),
)


def made_up() -> dict[str, list[tuple[float, list[str]]]]:
    """Shopper -> time and items of each basket: few baskets, many, and the same one repeated."""
    rng = random.Random(1)
    return {
        name: [
            (AT - (baskets - n) * DAY_S, sorted(rng.sample(ITEMS[:80], rng.randint(1, 12))))
            for n in range(baskets)
        ]
        for name, baskets in (("u0", 1), ("u1", 40), ("u2", 300))
    }


BOUGHT = made_up()


@pytest.fixture(scope="module")
def store(row_of: Callable[..., UserEvents]) -> MemoryStore:
    made = MemoryStore()
    for name, baskets in BOUGHT.items():
        made.write(name, UserRow(pack(row_of([(at, items, 20.0, 2.0) for at, items in baskets])), AT))
    return made


def check(recommender: Recommender, request: Request, response: Response, excluded: set[str]) -> None:
    """Check an answer of a recommender without rules and without weights for new and rare items."""
    shown = [item.item_id for item in response.items]
    scores = np.array([item.score for item in response.items])
    assert len(shown) == len(set(shown)) <= request.k
    assert not set(shown) & set(request.basket)
    assert not set(shown) & excluded
    assert set(shown) <= set(ITEMS)
    assert np.isfinite(scores).all()
    assert ((scores >= 0) & (scores <= 1)).all()
    assert response.rung in RUNGS
    assert response.rung in {"full", "empty"} or response.degraded
    assert response.rung != "empty" or response.degraded_reason or not request.k
    assert response.degraded_reason in {*REASONS, None}
    assert response.degraded == (response.degraded_reason not in {None, NOTHING_LEFT})
    assert set(response.stage_ms) <= {*STAGES, "total"}
    json.dumps(response.to_dict(), allow_nan=False)
    check_order(recommender.bundle, request, response)
    check_reasons(recommender, request, response)


def check_order(bundle: Bundle, request: Request, response: Response) -> None:
    """Best first: by score after the penalty for earlier items of the type, or in best-seller order."""
    statistics = bundle.statistics
    codes = statistics.codes([item.item_id for item in response.items])
    if response.rung in {"segment", "popular"}:
        sellers = sellers_of(bundle, request)
        places = [sellers.index(code) for code in codes.tolist()]
        assert places == sorted(places)
        return
    types = statistics.categorical[codes, 0].tolist()
    worth = [
        item.score * bundle.settings.type_penalty ** types[:slot].count(types[slot])
        for slot, item in enumerate(response.items)
    ]
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(worth))


def check_reasons(recommender: Recommender, request: Request, response: Response) -> None:
    """Each reason is true for this shopper, basket and store, computed independently of our code."""
    statistics = recommender.bundle.statistics
    for item in response.items:
        code = statistics.code_of[item.item_id]
        if item.source == "history":
            times = [
                at for at, items in BOUGHT[str(request.user_id)] if at < request.at and item.item_id in items
            ]
            unit = "time" if len(times) == 1 else "times"
            days = int((request.at - max(times)) // DAY_S)
            ago = "day" if days == 1 else "days"
            assert item.reason == f"bought {len(times)} {unit} before, last {days} {ago} ago"
        elif item.source == "together":
            partner = item.reason.removeprefix("often bought together with ")
            assert partner in request.basket
            assert code in statistics.neighbours[statistics.code_of[partner]]
        elif item.source == "store":
            assert item.reason == "popular in this store"
            assert code in statistics.store_popular[statistics.store_row[str(request.store_id)]]
        elif item.source == "popular":
            assert item.reason == "popular now"
            assert code in statistics.popular
        else:
            assert (item.source, item.reason) == ("tower", "fits this basket and shopper")
            assert code in near_of(recommender, request)


def sellers_of(bundle: Bundle, request: Request) -> list[int]:
    row = bundle.statistics.store_row.get(str(request.store_id))
    of_store = [] if row is None else bundle.statistics.store_popular[row].tolist()
    return list(dict.fromkeys([*of_store, *bundle.statistics.popular.tolist()]))


def near_of(recommender: Recommender, request: Request) -> np.ndarray:
    """Codes that the two-tower search finds for the shopper with the basket, and for the basket alone."""
    asked = [recommender.ask(one) for one in (request, replace(request, user_id=None))]
    return np.concatenate([recommender.near(one) for one in asked])


@contextlib.contextmanager
def without(bundle: Bundle, sold_out: list[str], banned: list[str]) -> Iterator[LiveFacts]:
    """Facts, from a store of their own, that exclude these items."""
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteFactStore(Path(folder) / "facts.db")
        store.write([Fact("f", "stock", item, 0.0, AT) for item in sold_out])
        store.write([Fact("f", "ban", item, 1.0, AT) for item in banned])
        with contextlib.closing(LiveFacts(bundle.statistics, store)) as facts:
            yield facts


@pytest.mark.parametrize("user_id", [None, "u1"])
@pytest.mark.parametrize("why", ["in the basket", "sold out", "banned"])
def test_without_any_item_left_the_answer_is_empty_with_its_reason(
    toy_opened: Bundle, store: MemoryStore, why: str, user_id: str | None
) -> None:
    sold_out, banned = (ITEMS if why == cause else [] for cause in ("sold out", "banned"))
    with without(toy_opened, sold_out, banned) as facts:
        recommender = Recommender(toy_opened, store, facts=facts)
        request = Request(tuple(ITEMS) if why == "in the basket" else (), AT, user_id)
        checkout = Checkout(recommender, 60_000.0, observers=())
        computed, late = (asyncio.run(checkout.answer(request, call(limit_s))) for limit_s in (60.0, 0.0))
        for answer in (computed, recommender.recommend(request)):
            assert (answer.items, answer.rung) == ((), "empty")
            assert (answer.degraded, answer.degraded_reason) == (False, NOTHING_LEFT)
        assert NOTHING_LEFT in REASONS
        assert (late.items, late.rung) == ((), "empty")
        assert (late.degraded, late.degraded_reason) == (True, "deadline_exceeded")
        assert recommender.recommend(replace(request, k=0)).rung == "full"  # nothing was asked for


def test_an_answer_does_not_depend_on_concurrent_requests(toy_opened: Bundle, store: MemoryStore) -> None:
    recommender = Recommender(toy_opened, store)
    sizes: list[int] = []

    async def together(asked: list[Request]) -> list[Response]:
        checkout = Checkout(recommender, 60_000.0, joined_ranker(sizes), observers=())
        given = call(60.0)
        return await asyncio.gather(*(checkout.answer(request, given) for request in asked))

    @settings(PATIENT, max_examples=40)
    @given(asked=st.lists(requests, min_size=2, max_size=12), seed=st.integers(0, 1_000))
    def holds(asked: list[Request], seed: int) -> None:
        alone = [(request, recommender.recommend(request)) for request in asked]
        random.Random(seed).shuffle(alone)
        answers = asyncio.run(together([request for request, _ in alone]))
        for (request, expected), answer in zip(alone, answers, strict=True):
            assert not answer.degraded or expected.degraded
            assert [item.item_id for item in answer.items] == [item.item_id for item in expected.items]
            assert [item.score for item in answer.items] == pytest.approx(
                [item.score for item in expected.items], abs=1e-6
            )
            check(recommender, request, answer, set())

    holds()
    assert max(sizes) > 1, "calls were shared"


async def gone(turn: Turn) -> np.ndarray:
    raise RankerUnavailable("it is not there")


def answer_when(happens: str, recommender: Recommender, request: Request, excluded: list[str]) -> Response:
    """Answer after a fault that rules out some rungs, with some items sold out or banned in the meantime."""
    if happens == "it was kept":
        answers = recommender.answers = AnswerCache()
        asyncio.run(Checkout(recommender, 1e6).answer(request, call()))
        for digest, cached in list(answers._lists.items()):
            answers._lists[digest] = cached._replace(expires_at=0.0)
    half = len(excluded) // 2
    set_stock(recommender, recommender.bundle.statistics.codes(excluded[:half]))
    recommender.facts._take([Fact("ban", "ban", item, 1.0, AT) for item in excluded[half:]])
    is_there = happens in {"nothing", "time is short"}
    checkout = Checkout(recommender, 1e6, rank_here if is_there else gone, observers=())
    if happens == "all is broken":
        recommender.bundle = replace(recommender.bundle, statistics=None)  # type: ignore[arg-type]
    if happens == "time is short":
        return asyncio.run(experienced(checkout, ranking_s=1_000.0).answer(request, call(600.0)))
    return asyncio.run(checkout.answer(request, call()))


@pytest.mark.parametrize(
    ("happens", "rungs"),
    [
        ("nothing", {"full"}),
        ("time is short", {"fewer"}),
        ("it was kept", {"cached"}),
        ("the ranker is gone", {"segment", "popular"}),
        ("all is broken", {"empty"}),
    ],
)
@pytest.mark.parametrize("penalty", [1.0, 0.3])
def test_the_rules_of_an_answer_hold_on_every_rung(
    toy_opened: Bundle, store: MemoryStore, happens: str, rungs: set[str], penalty: float
) -> None:
    weighed = replace(toy_opened, settings=replace(toy_opened.settings, type_penalty=penalty))
    seen: set[str] = set()

    @settings(PATIENT, max_examples=40)
    @given(request_=requests, excluded=some_items)
    def holds(request_: Request, excluded: list[str]) -> None:
        if happens == "it was kept":
            request_ = replace(request_, k=request_.k % 16)  # a longer list is never cached
        answer = answer_when(happens, Recommender(weighed, store), request_, excluded)
        check(Recommender(weighed, store), request_, answer, set(excluded))
        seen.add(answer.rung)

    holds()
    assert rungs <= seen
