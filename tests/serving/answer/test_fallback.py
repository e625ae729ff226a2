"""The lowest rungs: best sellers of the store, then of the chain."""

from dataclasses import replace

from serving.answer.recommender import Recommender
from serving.schemas import Request

REQUEST = Request(("1000005",), 1_512_498_600.0, "u1", None, 4, "r1")


def test_best_sellers_of_the_chain_follow_those_of_the_store(recommender: Recommender) -> None:
    chain = recommender.fallback(REQUEST, "test").items
    assert [item.item_id for item in chain] == ["1000000", "1000001", "1000002", "1000003"]
    statistics = recommender.bundle.statistics
    of_store = statistics.best_of_store("store-1")
    assert of_store is not None
    basket = tuple(statistics.item_ids[of_store[2:]].tolist())
    request = replace(REQUEST, store_id="store-1", basket=basket)
    answer = recommender.fallback(request, "test")
    rest = [code for code in statistics.popular.tolist() if code not in of_store]
    expected = [*of_store[:2].tolist(), *rest][: request.k]
    assert len(expected) > 2, "the chain sells something else"
    assert [item.item_id for item in answer.items] == statistics.item_ids[expected].tolist()
    assert [item.source for item in answer.items] == ["store"] * 2 + ["popular"] * (len(expected) - 2)
    assert (answer.items[1].reason, answer.items[2].reason) == ("popular in this store", "popular now")
    assert answer.rung == "segment"
