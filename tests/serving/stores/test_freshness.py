"""A silent stream makes answers stale, with a label; a store without a stream never ages."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from feature_repo.aggregates import pack
from feature_repo.snapshots import HEARTBEAT, PARTITIONS, USER_TTL_DAYS, pack_times
from serving.answer.recommender import Recommender
from serving.errors import FeaturesUnavailable
from serving.release.bundle import Bundle
from serving.schemas import Request
from serving.stores import freshness as module
from serving.stores.freshness import Freshness
from serving.stores.online_features import MemoryStore, UserRow
from tests.chaos.procs import eventually
from tests.serving.conftest import metric


class Broken(MemoryStore):
    """An unavailable store."""

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        raise FeaturesUnavailable("away")


def beat(store: MemoryStore, age_s: float) -> None:
    store.write(HEARTBEAT, UserRow(b"alive", time.time() - age_s))


def test_without_a_store_or_without_a_stream_nothing_is_stale() -> None:
    assert Freshness().reason is None
    before = metric("reco_features_age_seconds")
    alone = Freshness(MemoryStore(), 1.0)
    alone.close()
    assert metric("reco_features_age_seconds") == before
    assert alone.reason is None


@pytest.mark.parametrize(("age_s", "expected"), [(0.0, None), (59.0, None), (61.0, "stale_features")])
def test_the_age_of_the_heartbeat_decides(age_s: float, expected: str | None) -> None:
    store = MemoryStore()
    beat(store, age_s)
    found = Freshness(store, 60.0)
    assert found.reason == expected
    assert metric("reco_features_age_seconds") == pytest.approx(age_s, abs=5)
    found.close()


def test_a_partition_that_lags_makes_rows_stale() -> None:
    """Times of partitions that are damaged do not make them fresh again: the last time goes on ageing."""
    store = MemoryStore()
    beat(store, 1.0)
    until = {0: time.time() - 1, 1: time.time() - 90}
    store.write(PARTITIONS, UserRow(pack_times(until), time.time()))
    found = Freshness(store, 60.0)
    found.close()
    assert found.reason == "stale_features"
    store.write(PARTITIONS, UserRow(b"damaged", time.time()))
    found._look()
    assert found.reason == "stale_features", "a damaged beat is none"


def test_a_returning_stream_is_fresh_and_a_lost_store_keeps_ageing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    store = MemoryStore()
    beat(store, 100.0)
    found = Freshness(store, 60.0)
    assert found.reason == "stale_features"
    beat(store, 0.0)
    eventually(lambda: found.reason is None)
    found._store = Broken()

    def aged() -> str | None:
        found._beat_at = time.time() - 61  # again: a last look at the other store may still go on
        return found.reason

    assert eventually(aged) == "stale_features"
    found.close()


def test_an_error_of_ours_does_not_end_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else answers would stay fresh with a dead stream, or stale with one that is back."""
    monkeypatch.setattr(module, "POLL_S", 0.01)
    store = MemoryStore()
    beat(store, 100.0)
    found, read, faults = Freshness(store, 60.0), store.read, list(range(3))

    def failing(user_id: str, deadline: float = math.inf) -> UserRow | None:
        if faults:
            faults.pop()
            raise RuntimeError("can't start new thread")
        return read(user_id, deadline)

    monkeypatch.setattr(store, "read", failing)
    beat(store, 0.0)
    eventually(lambda: found.reason is None)
    assert not faults
    found.close()


def test_stale_features_are_used_and_labelled(toy_opened: Bundle, row_of: Callable[..., Any]) -> None:
    at = 1_720_000_000.0
    row = pack(row_of([(at - 86_400, ["1000006"], 3.0, 0.0)]))
    store = MemoryStore()
    store.write("ann", UserRow(row, at - 86_400))
    beat(store, 100.0)
    silent = Freshness(store, 60.0)
    asked = Request(("1000002",), at, "ann", None, 20)
    stale = Recommender(toy_opened, store, freshness=silent).recommend(asked)
    fresh = Recommender(toy_opened, store).recommend(asked)
    silent.close()
    assert (stale.degraded, stale.degraded_reason) == (True, "stale_features")
    assert (fresh.degraded, fresh.degraded_reason) == (False, None)
    assert [item.item_id for item in stale.items] == [item.item_id for item in fresh.items]


def test_a_row_older_than_its_ttl_is_ignored(toy_opened: Bundle, row_of: Callable[..., Any]) -> None:
    store, at = MemoryStore(), 1_720_000_000.0
    asked = Request(("1000002",), at, "ann", None, 20)
    path = Recommender(toy_opened, store)
    nobody = path.recommend(asked)
    bought = at - USER_TTL_DAYS * 86_400
    for written_at, expected in ((bought - 1, "stale_features"), (bought + 1, None)):
        store.write("ann", UserRow(pack(row_of([(written_at - 1, ["1000006"], 3.0, 0.0)])), written_at))
        found = path.recommend(asked)
        assert found.degraded_reason == expected
        same = [i.item_id for i in found.items] == [i.item_id for i in nobody.items]
        assert same == (expected is not None)
