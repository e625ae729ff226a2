"""A ranked list -> the items of the answer: their reasons, and the terms that hold now."""

from dataclasses import replace

import numpy as np
import pytest

from serving.answer.presentation import POPULAR, explained, terms
from serving.answer.recommender import Recommender
from serving.schemas import REASON_CODES, Recommendation, Request, Response
from serving.shop.rules import Plan
from serving.stages.retrieval import SOURCES

REQUEST = Request(("1000005",), 1_512_498_600.0, "u1", None, 10, "r1")


def test_a_row_that_was_cut_off_counts_at_least(
    recommender: Recommender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said() -> set[str]:
        items = recommender.recommend(replace(REQUEST, k=30)).items
        return {item.reason.partition(" before")[0] for item in items if item.source == "history"}

    exact, lines = said(), len(recommender.read(REQUEST).events or ())
    assert not any("at least" in reason for reason in exact)
    monkeypatch.setattr("feature_repo.aggregates.MAX_PURCHASES", lines + 1)
    assert said() == exact
    monkeypatch.setattr("feature_repo.aggregates.MAX_PURCHASES", lines)
    assert said() == {reason.replace("bought ", "bought at least ") for reason in exact}


def test_every_source_has_a_reason() -> None:
    assert set(SOURCES) - {"history", "together"} == set(POPULAR)


def test_an_explained_answer_has_names_codes_and_the_number_of_unknown_items(
    recommender: Recommender,
) -> None:
    plain = recommender.recommend(REQUEST)
    asked = replace(REQUEST, basket=(*REQUEST.basket, "no such item"), k=30, explain=True)
    answer = recommender.recommend(asked)
    assert answer.unknown_items == 1
    for item in answer.items:
        assert item.name == f"type {(int(item.item_id) - 1_000_000) % 12}"
        assert (item.reason_code == "bought_before") == (item.source == "history")
        if item.source == "together":
            assert item.reason == "often bought together with 1000005 type 5"
    assert {item.reason_code for item in answer.items} <= set(REASON_CODES)
    assert {"name", "reason_code", "unknown_items"}.isdisjoint(
        {*plain.to_dict(), *plain.to_dict()["items"][0]}
    )
    last = recommender.fallback(asked, "overloaded")
    assert (last.unknown_items, {item.reason_code for item in last.items}) == (1, {"popular"})
    assert recommender.fallback(REQUEST, "overloaded").unknown_items is None


def test_a_pinned_item_has_its_own_code(recommender: Recommender) -> None:
    plan = Plan(pins=np.array([200]), pinned_by=("Christmas",))
    pinned = Recommendation("1000200", 0.5, "history", "pinned by Christmas")
    bought = Recommendation("1000200", 0.5, "history", "bought 2 times before")
    response = Response("r1", (pinned, bought), "b")
    found = explained(recommender.bundle, REQUEST, plan, response)
    assert [item.reason_code for item in found.items] == ["pinned", "bought_before"]


def test_terms_without_a_fact_are_null(recommender: Recommender) -> None:
    assert terms(recommender.facts, np.arange(2), REQUEST) == ([None, None], [None, None], [None, None])
