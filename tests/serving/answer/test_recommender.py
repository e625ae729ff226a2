"""The whole path without a server: answers, fallbacks, and items that must not be shown."""

import base64
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_repo.aggregates import UserEvents, pack
from feature_repo.kernels.candidates import find
from feature_repo.schema import DENSE_NAMES
from feature_repo.toy_shop import request_basket, user_name
from serving.answer.recommender import Recommender, answer_golden, open_recommender
from serving.errors import BundleInvalid, FeaturesUnavailable
from serving.prediction_log import PredictionLog, read_log
from serving.release.bundle import load_bundle
from serving.release.golden import read_golden
from serving.schemas import Request
from serving.stores.online_features import MemoryStore, UserRow, open_store

pytestmark = pytest.mark.slow
AT = 1_717_977_600.0  # the toy shop's cut
ITEMS = [f"item-{n:03d}" for n in range(80)]


class BrokenStore(MemoryStore):
    """A store that never answers."""

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        raise FeaturesUnavailable("the store is down")


class GarbageStore(MemoryStore):
    """A store with a row that is no history."""

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        return UserRow(b"\x00" * 7, AT)


@pytest.fixture(scope="module")
def recommender(toy_line: Path) -> Iterator[Recommender]:
    store = open_store(f"sqlite:///{toy_line}/home/online_store.db")
    yield open_recommender(toy_line / "evaluated", store)
    store.close()


def ask(basket: list[str], user: int | None = 0, k: int = 10, store: str | None = "store-0") -> Request:
    return Request(tuple(basket), AT, None if user is None else user_name(user), store, k, "r1")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    basket=st.lists(st.sampled_from([*ITEMS, "unknown", "item-0000"]), max_size=90, unique=True),
    user=st.sampled_from([None, 0, 7, 59, 999]),
    k=st.integers(0, 100),
    store=st.sampled_from([None, "store-1", "nowhere"]),
)
def test_every_answer_is_legal(
    recommender: Recommender, basket: list[str], user: int | None, k: int, store: str | None
) -> None:
    response = recommender.recommend(ask(basket, user, k, store))
    shown = [item.item_id for item in response.items]
    scores = np.array([item.score for item in response.items])
    assert len(shown) == len(set(shown)) <= k
    assert not set(shown) & set(basket)
    assert set(shown) <= set(ITEMS)
    assert np.isfinite(scores).all()
    assert (scores >= 0).all()
    assert (scores <= 1).all()
    assert len(scores) == 0 or scores[0] == scores.max()  # later ones make room for other types
    assert all(item.reason and item.source for item in response.items)
    assert len(shown) == min(k, len(set(ITEMS) - set(basket)))


def test_the_same_request_gets_the_same_answer(recommender: Recommender) -> None:
    first, second = (recommender.recommend(ask(request_basket(3), 3)) for _ in range(2))
    assert first.items == second.items


def test_the_stage_times_add_up(recommender: Recommender) -> None:
    stages = recommender.recommend(ask(["item-002"])).stage_ms
    assert set(stages) == {"features", "retrieval", "ranking", "reranking", "total"}
    assert stages["total"] == pytest.approx(sum(ms for name, ms in stages.items() if name != "total"))


def test_the_first_recorded_answer_compiles_nothing(
    toy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types: list[tuple[numba.types.Type, ...]] = []

    def found(*arguments: np.ndarray) -> np.ndarray:
        types.append(tuple(numba.typeof(argument) for argument in arguments))
        places: np.ndarray = find(*arguments)
        return places

    monkeypatch.setattr("feature_repo.statistics.find", found)
    log = PredictionLog(tmp_path, DENSE_NAMES)
    recommender = open_recommender(toy_bundle, MemoryStore(), log)
    at_start = set(types)
    recommender.recommend(Request(("apple",), AT, None, None, 10, "r1"))
    log.close()
    assert at_start
    assert set(types) == at_start


@pytest.mark.parametrize(
    ("store", "reason"), [(BrokenStore(), "features_unavailable"), (GarbageStore(), "features_invalid")]
)
def test_a_broken_store_loses_the_history_not_the_answer(
    toy_line: Path, store: MemoryStore, reason: str
) -> None:
    recommender = open_recommender(toy_line / "evaluated", store)
    response = recommender.recommend(ask(["item-002", "item-004"]))
    assert (response.degraded, response.degraded_reason) == (True, reason)
    stranger = recommender.recommend(ask(["item-002", "item-004"], user=None))
    assert not stranger.degraded
    assert [item.item_id for item in response.items] == [item.item_id for item in stranger.items]


def test_out_of_stock_and_banned_items_disappear_and_come_back(toy_line: Path, tmp_path: Path) -> None:
    file = tmp_path / "availability.json"
    recommender = open_recommender(toy_line / "evaluated", MemoryStore(), availability=file)
    request = ask(["item-002", "item-004"], user=None)
    before = [item.item_id for item in recommender.recommend(request).items]
    file.write_text(json.dumps({"out_of_stock": before[:2], "banned": [before[2], "unknown"]}))
    time.sleep(0.6)
    after = [item.item_id for item in recommender.recommend(request).items]
    assert not set(before[:3]) & set(after)
    assert not set(before[:3]) & {item.item_id for item in recommender.fallback(request, "test").items}
    file.write_text("{broken")
    time.sleep(0.6)
    assert [item.item_id for item in recommender.recommend(request).items] == after
    file.unlink()
    time.sleep(0.6)
    assert [item.item_id for item in recommender.recommend(request).items] == before
    recommender.facts.close()


def test_the_fallback_needs_no_model_and_names_its_rung(recommender: Recommender) -> None:
    in_store = recommender.fallback(ask(["item-002"], k=3), "deadline")
    assert (in_store.rung, in_store.degraded, in_store.degraded_reason) == ("segment", True, "deadline")
    assert len(in_store.items) == 3
    assert recommender.fallback(ask([], store=None), "deadline").rung == "popular"
    assert recommender.fallback(ask(ITEMS, store=None), "deadline").rung == "empty"


def test_the_reasons_match_the_sources(recommender: Recommender, row_of: Callable[..., UserEvents]) -> None:
    store = MemoryStore()
    row = row_of([(AT - 3 * 86_400 - 60, ["item-006"], 1.0, 0.0)])
    store.write("new", UserRow(pack(row), AT))
    response = Recommender(recommender.bundle, store).recommend(Request(("item-002",), AT, "new", None, 80))
    by_id = {item.item_id: item for item in response.items}
    assert by_id["item-006"].reason == "bought 1 time before, last 3 days ago"
    together = [item for item in response.items if item.source == "together"]
    statistics = recommender.bundle.statistics
    assert together
    for item in together:
        partners = statistics.item_ids[statistics.neighbours[statistics.code_of["item-002"]]]
        assert item.reason.split("; ")[0] == "often bought together with item-002"
        assert item.item_id in partners


def test_each_answer_logs_one_record_with_the_rankers_features(toy_line: Path, tmp_path: Path) -> None:
    log = PredictionLog(tmp_path / "log", DENSE_NAMES)
    recommender = open_recommender(toy_line / "evaluated", MemoryStore(), log)
    request = ask(["item-002"], user=None, k=4)
    response = recommender.recommend(request)
    log.close()
    record = read_log(tmp_path / "log").to_pylist()[0]
    assert record["item_ids"] == [item.item_id for item in response.items]
    assert record["bundle_id"] == response.bundle_id
    prepared = recommender.prepare(request)
    codes = prepared.candidates.codes.tolist()
    rows = [codes.index(recommender.bundle.statistics.code_of[item]) for item in record["item_ids"]]
    np.testing.assert_array_equal(
        np.array(record["features"], np.float32).reshape(4, -1), prepared.dense[rows]
    )


def test_golden_requests_are_answered_with_their_history(toy_line: Path) -> None:
    known = [golden for golden in read_golden(toy_line / "bundle") if golden.history]
    bundle = load_bundle(toy_line / "bundle")
    nobody = [answer_golden(bundle, replace(golden, history=None)) for golden in known]
    same = [
        golden.expected == [list(one) for one in answer] for golden, answer in zip(known, nobody, strict=True)
    ]
    assert np.mean(same) < 0.5, "it makes a difference who asks"
    with pytest.raises(BundleInvalid, match=r"golden request golden-\d+ degraded \(features_invalid\)"):
        answer_golden(bundle, replace(known[0], history=base64.b64encode(b"no row").decode()))
