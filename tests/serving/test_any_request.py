"""Any request of any shopper at any moment: what holds of every answer, whoever asks at the same time."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_repo.aggregates import UserEvents, pack
from serving.availability import AvailabilityFile
from serving.bundle import Bundle, load_bundle
from serving.calls import Call
from serving.checkout import Checkout, find_together, rank_together
from serving.facts import LiveFacts
from serving.online_features import MemoryStore, UserRow
from serving.recommender import Recommender
from serving.schemas import NOTHING_LEFT, REASONS, Request, Response

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


@pytest.fixture(scope="module")
def bundle(toy_bundle: Path) -> Bundle:
    return load_bundle(toy_bundle)


@pytest.fixture(scope="module")
def store(row_of: Callable[..., UserEvents]) -> MemoryStore:
    """Shoppers with a few, with many and with the same purchases again and again."""
    made, rng = MemoryStore(), random.Random(1)
    for name, baskets in (("u0", 1), ("u1", 40), ("u2", 300)):
        rows = [
            (AT - (baskets - n) * DAY_S, sorted(rng.sample(ITEMS[:80], rng.randint(1, 12))), 20.0, 2.0)
            for n in range(baskets)
        ]
        made.write(name, UserRow(pack(row_of(rows)), AT))
    return made


def check(request: Request, response: Response, excluded: set[str]) -> None:
    shown = [item.item_id for item in response.items]
    scores = np.array([item.score for item in response.items])
    assert len(shown) == len(set(shown)) <= request.k
    assert not set(shown) & set(request.basket)
    assert not set(shown) & excluded
    assert set(shown) <= set(ITEMS)
    assert np.isfinite(scores).all()
    assert ((scores >= 0) & (scores <= 1)).all()
    assert all(item.source and item.reason for item in response.items)
    assert response.rung == "full" or response.degraded_reason
    assert response.degraded == (response.degraded_reason not in {None, NOTHING_LEFT})
    json.dumps(response.to_dict(), allow_nan=False)


@PATIENT
@given(request_=requests, excluded=some_items)
def test_no_answer_holds_what_is_in_the_basket_sold_out_or_there_already(
    bundle: Bundle,
    store: MemoryStore,
    tmp_path_factory: pytest.TempPathFactory,
    request_: Request,
    excluded: list[str],
) -> None:
    file = tmp_path_factory.getbasetemp() / "sold-out.json"
    half = len(excluded) // 2
    file.write_text(json.dumps({"out_of_stock": excluded[:half], "banned": excluded[half:]}))
    facts = LiveFacts(bundle.statistics, None, AvailabilityFile(file))
    try:
        recommender = Recommender(bundle, store, facts=facts)
        check(request_, recommender.recommend(request_), set(excluded))
        check(request_, recommender.fallback(request_, "test"), set(excluded))
    finally:
        facts.close()


@pytest.mark.parametrize("user_id", [None, "u1"])
@pytest.mark.parametrize("why", ["in the basket", "sold out", "banned"])
def test_where_nothing_is_left_the_answer_is_empty_and_says_so(
    bundle: Bundle, store: MemoryStore, tmp_path: Path, why: str, user_id: str | None
) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps(
            {"out_of_stock": ITEMS if why == "sold out" else [], "banned": ITEMS if why == "banned" else []}
        )
    )
    facts = LiveFacts(bundle.statistics, None, AvailabilityFile(tmp_path / "a.json"))
    try:
        recommender = Recommender(bundle, store, facts=facts)
        request = Request(tuple(ITEMS) if why == "in the basket" else (), AT, user_id)
        checkout = Checkout(recommender, 60_000.0, observers=())
        now = time.perf_counter()
        computed = asyncio.run(checkout.answer(request, Call(now, now + 60, "given")))
        late = asyncio.run(checkout.answer(request, Call(now, now, "given")))
        for answer in (computed, recommender.recommend(request)):
            assert (answer.items, answer.rung) == ((), "empty")
            assert (answer.degraded, answer.degraded_reason) == (False, NOTHING_LEFT)
        assert NOTHING_LEFT in REASONS
        assert (late.items, late.rung) == ((), "empty")
        assert (late.degraded, late.degraded_reason) == (True, "deadline_exceeded")
        assert recommender.recommend(replace(request, k=0)).rung == "full"  # nothing was asked for
    finally:
        facts.close()


@settings(PATIENT, max_examples=40)
@given(asked=st.lists(requests, min_size=2, max_size=12), seed=st.integers(0, 1_000))
def test_an_answer_does_not_depend_on_who_asks_at_the_same_time(
    bundle: Bundle, store: MemoryStore, asked: list[Request], seed: int
) -> None:
    recommender = Recommender(bundle, store)
    alone = [recommender.recommend(request) for request in asked]
    order = list(range(len(asked)))
    random.Random(seed).shuffle(order)

    async def together() -> list[Response]:
        checkout = Checkout(
            recommender, 60_000.0, rank_together(1e3, 5.0, 8_192), find_together(1e3, 5.0, 8_192), ()
        )
        began = time.perf_counter()
        call = Call(began, began + 60.0, "r")
        return await asyncio.gather(*(checkout.answer(asked[number], call) for number in order))

    for number, answer in zip(order, asyncio.run(together()), strict=True):
        assert not answer.degraded or alone[number].degraded
        assert [item.item_id for item in answer.items] == [item.item_id for item in alone[number].items]
        assert [item.score for item in answer.items] == pytest.approx(
            [item.score for item in alone[number].items], abs=1e-6
        )
        check(asked[number], answer, set())
