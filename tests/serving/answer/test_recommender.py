"""The whole path without a server: answers, their log, and the golden requests."""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest

from feature_repo.aggregates import UserEvents, pack
from feature_repo.facts import Fact
from feature_repo.kernels.pairs import find
from feature_repo.schema import DENSE_NAMES
from serving.answer.recommender import Recommender, answer_golden, open_recommender
from serving.errors import BundleInvalid
from serving.prediction_log import PredictionLog
from serving.release.bundle import Bundle
from serving.release.golden import GoldenRequest
from serving.schemas import Request
from serving.shop.fact_store import SqliteFactStore
from serving.stores.online_features import MemoryStore
from tests.serving.conftest import CUT

AT = CUT.timestamp()


def ask(*basket: str, user: str | None = "u1", k: int = 10) -> Request:
    return Request(basket, AT, user, "store-0", k, "r1")


def test_a_filter_costs_a_request_no_list_of_the_items_that_it_leaves_out(recommender: Recommender) -> None:
    """Of two million items it leaves out 1.6 million: a list of them took longer than all other work."""
    asked = recommender.ask(replace(ask("1000003"), profile="premium"))
    retrieved = recommender.retrieve(asked)
    offers = recommender.bundle.profiles["premium"].offers
    assert offers.sum() == len(offers) // 5
    assert len(retrieved.candidates.codes) > 0
    assert offers[retrieved.candidates.codes].all()
    assert len(retrieved.barred) == 0


def test_the_stage_times_add_up(recommender: Recommender) -> None:
    stages = recommender.recommend(ask("1000002")).stage_ms
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


def test_a_golden_request_is_answered_with_its_history(
    toy_opened: Bundle, row_of: Callable[..., UserEvents]
) -> None:
    row = pack(row_of([(AT - 86_400, ["1000050"], 3.0, 0.0)]), "u1")
    request = {"request_id": "golden-1", "user_id": "u1", "basket": ["1000010"], "at": CUT.isoformat()}
    golden = GoldenRequest(request, base64.b64encode(row).decode())
    nobody = answer_golden(toy_opened, replace(golden, history=None))
    assert answer_golden(toy_opened, golden) != nobody, "it makes a difference who asks"
    with pytest.raises(BundleInvalid, match=r"golden request golden-1 degraded \(features_invalid\)"):
        answer_golden(toy_opened, replace(golden, history=base64.b64encode(b"no row").decode()))


def test_no_dictionary_holds_the_catalogue(
    toy_bundle: Path, recommender: Recommender, tmp_path: Path
) -> None:
    """Of two million items it takes 240 MiB in each process."""
    facts, rules = SqliteFactStore(tmp_path / "facts.db"), tmp_path / "rules.yaml"
    facts.write([Fact("f1", "stock", item, 0.0, AT) for item in ("1000014", "gone")])
    rules.write_text("ban:\n  - {name: recall, items: ['1000017']}\n")
    request = replace(ask("1000010", "nonsense", user=None), explain=True)
    usual = recommender.recommend(request)
    opened = open_recommender(toy_bundle, MemoryStore(), facts=facts, rules=rules)
    try:
        assert opened.facts.lacks(opened.facts.known()) == []
        response = opened.recommend(request)
    finally:
        opened.facts.close()
    assert usual.unknown_items == response.unknown_items == 1
    assert {"1000014", "1000017"} <= {item.item_id for item in usual.items}
    assert not {"1000014", "1000017"} & {item.item_id for item in response.items}
    assert "code_of" not in vars(opened.bundle.statistics)
