"""`reco why` on the toy shop, whose right answers are known: each step of the path loses an item."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feature_repo.facts import Fact
from feature_repo.queries import Query
from feature_repo.schema import DENSE_NAMES
from feature_repo.toy_shop import held_out, item_name, request_basket, user_name
from pipelines.inspect.items import ItemUnknown
from pipelines.inspect.why import SourcePlace, Verdict, _percent, explain, served
from serving.answer.recommender import Recommender, open_recommender
from serving.prediction_log import PredictionLog
from serving.schemas import Request
from serving.shop.fact_store import SqliteFactStore
from serving.shop.rules import Catalogue
from serving.shop.rules_file import parse_rules
from serving.stores.online_features import MemoryStore, SqliteStore
from tests.pipelines.cli.conftest import reco

AT = 1_718_186_400.0  # in the toy shop's test weeks
PLAIN: dict[str, Any] = {"type_penalty": 1.0, "exposure": 0.0, "novelty": 0.0}
WHOLE = [item_name(code) for code in range(80)]


@pytest.fixture(scope="module")
def store(toy_line: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(toy_line / "home" / "online_store.db", timeout_ms=5_000)
    yield store
    store.close()


@pytest.fixture
def recommender(toy_line: Path, store: SqliteStore) -> Recommender:
    return settled(open_recommender(toy_line / "evaluated", store), **PLAIN)


def ask(user: int | None = 3, k: int = 10, basket: list[str] | None = None) -> Request:
    given = request_basket(3) if basket is None else basket
    return Request(tuple(given), AT, None if user is None else user_name(user), "store-0", k, "r1")


def why(recommender: Recommender, item: str, request: Request | None = None) -> Verdict:
    return explain(recommender, request or ask(), item)[0]


def narrowed(recommender: Recommender, finder: Any = None, **quotas: int) -> Recommender:
    """The same shop with sources that bring less."""
    profile = recommender.bundle.profiles["default"]
    profile = replace(profile, quotas=replace(profile.quotas, **quotas), tower=finder or profile.tower)
    recommender.bundle.profiles["default"] = profile
    return recommender


def settled(recommender: Recommender, **settings: Any) -> Recommender:
    bundle = recommender.bundle
    recommender.bundle = replace(bundle, settings=replace(bundle.settings, **settings))
    return recommender


def test_a_shown_item_has_its_reason(recommender: Recommender) -> None:
    verdict, answer = explain(recommender, ask(), held_out(3))
    assert (verdict.step, verdict.slot, verdict.rank) == ("shown", 1, 1)
    assert verdict.why == answer.items[0].reason
    assert verdict.score == round(answer.items[0].score, 6)
    assert "history" in [place.source for place in verdict.places]


def test_an_unknown_item_and_one_in_the_basket_are_explained(recommender: Recommender) -> None:
    with pytest.raises(ItemUnknown, match=r"no item 'item-0033' in .*; did you mean item-033 batteries"):
        why(recommender, "item-0033")
    verdict = why(recommender, request_basket(3)[0])
    assert (verdict.step, verdict.why) == ("request", "it is in the basket")


def test_an_excluded_item_names_the_cause(toy_line: Path, tmp_path: Path) -> None:
    store, rules = SqliteFactStore(tmp_path / "facts.db"), tmp_path / "rules.yaml"
    store.write([Fact("f", "stock", WHOLE[1], 0.0, at=1.7e9)])
    rules.write_text(f"ban:\n  - {{name: recall, items: [{WHOLE[3]}]}}\n")
    recommender = open_recommender(toy_line / "evaluated", MemoryStore(), facts=store, rules=rules)
    verdict = why(recommender, WHOLE[1])
    assert (verdict.step, verdict.why) == ("facts", "sold out")
    verdict = why(recommender, WHOLE[3])
    assert (verdict.step, verdict.why) == ("rules", "banned by recall")
    recommender.facts.close()


def test_an_item_outside_every_source_has_its_distance(recommender: Recommender) -> None:
    """Without user and basket only best sellers are candidates: the sixth is not among five."""
    request = replace(ask(None, basket=[]), store_id=None)
    narrowed(recommender, week=0, total=5)
    statistics = recommender.bundle.statistics
    verdict = why(recommender, statistics.item_ids[statistics.popular[5]], request)
    assert verdict.step == "retrieval"
    assert verdict.places[-1] == SourcePlace("popular", 6, 5)
    assert verdict.why == "no source brings it: the nearest is popular, where it is number 6 and 5 come"
    assert verdict.candidates == 5
    last = why(recommender, statistics.item_ids[statistics.popular[4]], request)
    assert (last.step, last.places[-1]) == ("shown", SourcePlace("popular", 5, 5))


def test_an_item_cut_from_the_candidates_is_explained(recommender: Recommender) -> None:
    """A shopper with a long history fills all places with it; the tower's nearest item finds no room."""
    narrowed(recommender, total=2)
    lost = [verdict for verdict in (why(recommender, item) for item in WHOLE) if verdict.step == "retrieval"]
    full = [verdict for verdict in lost if verdict.why.endswith("when 2 candidates were there already")]
    assert full
    assert all(any(place.rank <= place.brings for place in verdict.places) for verdict in full)


def test_an_item_missed_by_the_index_is_explained(recommender: Recommender) -> None:
    real = recommender.bundle.profiles["default"].tower

    class Blind:
        """Finds nothing unless all items are requested."""

        def search(self, query: Query, k: int) -> np.ndarray:
            found = real.search(query, k)
            return found if k == 80 else found[:0]

    narrowed(recommender, Blind(), history=0, together=0, week=0, store=0, total=0, tower=3)
    first = real.search(recommender.ask(ask()).query, 80)
    code = next(code for code in first.tolist() if WHOLE[code] not in ask().basket)
    rank = first.tolist().index(code) + 1
    verdict = why(recommender, recommender.bundle.statistics.item_ids[code])
    assert verdict.step == "retrieval"
    assert f"it is number {rank} of an exact search" in verdict.why


@pytest.mark.parametrize("penalty", [0.01, 1.0])
def test_an_item_lost_to_diversity_would_be_shown_without_it(
    recommender: Recommender, penalty: float
) -> None:
    settled(recommender, type_penalty=penalty)
    shown = {item.item_id for item in recommender.recommend(ask()).items}
    lost = {item: verdict for item in WHOLE if (verdict := why(recommender, item)).step == "reranking"}
    settled(recommender, type_penalty=1.0)
    plainly = {item.item_id for item in recommender.recommend(ask()).items}
    assert lost.keys() == set(WHOLE) - shown - set(ask().basket)
    for item, verdict in lost.items():
        assert verdict.why.startswith("makes room for other types: item-") == (item in plainly - shown)
        assert verdict.why.startswith("outscored: ") == (item not in plainly)
    assert bool(plainly - shown) == (penalty < 1)


def test_an_outscored_item_has_the_missing_score(recommender: Recommender) -> None:
    answer = recommender.recommend(ask())
    asked = recommender.prepare(ask())
    scores = recommender.rank(asked.dense, asked.categorical)
    order = np.argsort(-scores, kind="stable")
    eleventh, tenth = int(order[10]), answer.items[-1]
    verdict = why(recommender, recommender.bundle.statistics.item_ids[asked.candidates.codes[eleventh]])
    assert verdict.step == "reranking"
    assert verdict.why.startswith(
        f"outscored: {_percent(scores[eleventh])} against {_percent(tenth.score)} of {tenth.item_id}, "
    )
    assert verdict.why.endswith(f"{tenth.score / scores[eleventh]:.1f} x as much")


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.15734, "15.73%"), (6.1081e-6, "0.000611%"), (1e-9, "less than 0.0001%"), (0.0, "0.00%")],
)
def test_a_small_score_is_not_shown_as_none(share: float, text: str) -> None:
    assert _percent(share) == text


def test_an_item_displaced_by_rules_or_weights_is_explained(
    toy_line: Path, store: SqliteStore, tmp_path: Path
) -> None:
    plain = settled(open_recommender(toy_line / "evaluated", store), **PLAIN)
    before = [item.item_id for item in plain.recommend(ask()).items]
    pinned = next(item for item in WHOLE if item not in before and item not in ask().basket)
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"pin:\n  - {{name: week 24, item: {pinned}, slot: 1}}\n")
    ruled = settled(open_recommender(toy_line / "evaluated", store, rules=rules), **PLAIN)
    verdict = why(ruled, before[-1])
    assert (verdict.step, verdict.why) == (
        "reranking",
        "makes room for what rules raise, pin or reserve a place for",
    )
    verdict = why(ruled, pinned)
    assert (verdict.slot, verdict.why) == (1, "pinned by week 24")
    ruled.facts.close()
    asked = [ask(user) for user in range(20)]  # some lists hold seldom shown items anyway
    lists = [[item.item_id for item in plain.recommend(request).items] for request in asked]
    rare = settled(plain, novelty=3.0, novel_slots=(9, 10))
    displaced = [
        (item, request)
        for before, request in zip(lists, asked, strict=True)
        for item in set(before) - {one.item_id for one in rare.recommend(request).items}
    ]
    assert why(rare, *displaced[0]).why.startswith("makes room for what is seldom shown")


def test_an_item_lost_to_two_causes_is_not_called_outscored(recommender: Recommender) -> None:
    """Diversity drops it, and so do pins in its slot and all later ones: each cause alone suffices."""
    plainly = [one.item_id for one in recommender.recommend(ask()).items]
    settled(recommender, type_penalty=0.01)
    varied = [one.item_id for one in recommender.recommend(ask()).items]
    lost = next(item for item in plainly if item not in varied)
    free = [item for item in WHOLE if item not in {*plainly, *varied, *ask().basket}]
    slots = range(plainly.index(lost) + 1, 11)
    pins = [f"  - {{name: p, item: {item}, slot: {slot}}}\n" for slot, item in zip(slots, free, strict=False)]
    rules, _ = parse_rules("pin:\n" + "".join(pins))
    bundle = recommender.bundle
    recommender.facts.rules, _ = Catalogue(bundle.statistics, bundle.vocabulary).bind(rules)
    verdict = why(recommender, lost)
    assert verdict.slot is None
    assert verdict.why.endswith("several of these act together, without one of them it is still lost")


def test_a_degraded_answer_names_the_missing_part() -> None:
    record: dict[str, Any] = {"item_ids": [], "rung": "full", "bundle_id": "b", "place_explored": None}
    record["degraded_reason"] = "features_unavailable"
    said = "then: not shown, rung full"
    assert served(record, "x", "b") == f"{said} (features_unavailable): what it lacks was dropped by that"
    assert served({**record, "degraded_reason": None}, "x", "b") == said
    empty = {**record, "rung": "empty", "degraded_reason": "nothing_left"}
    assert served(empty, "x", "b") == "then: not shown, rung empty (nothing_left): there was no other item"


def test_a_request_for_no_items_is_explained(recommender: Recommender) -> None:
    assert why(recommender, held_out(3), ask(k=0)).why == "nothing was asked for: k is 0"


def reco_why(home: Path, *arguments: str) -> tuple[int, str]:
    done = reco(home, "why", *arguments)
    return done.exit_code, done.output


def test_the_command_explains_an_answer_to_a_basket(home: Path) -> None:
    asked = ("--user", user_name(3), "--basket", ",".join(request_basket(3)), "--at", "2024-06-12T10:00:00Z")
    code, said = reco_why(home, held_out(3), *asked)
    assert code == 0
    assert said.startswith(f"{held_out(3)}: number 1: ")
    assert re.search(r"\nsource +item's place +quota\n", said)
    code, said = reco_why(home, request_basket(3)[0], *asked, "--output", "json")
    verdict = json.loads(said)["verdict"]
    assert (code, verdict["step"], verdict["slot"]) == (0, "request", None)


def test_the_command_explains_a_logged_request(home: Path, toy_line: Path, store: SqliteStore) -> None:
    log = PredictionLog(home / "prediction_log", DENSE_NAMES)
    recommender = open_recommender(toy_line / "evaluated", store, log)
    recommender.recommend(ask())
    recommender.fallback(replace(ask(), request_id="late"), "deadline_exceeded")
    log.close()
    code, said = reco_why(home, held_out(3), "--request-id", "r1")
    assert code == 0
    assert "then: shown as number 1, rung full\n" in said
    code, said = reco_why(home, held_out(3), "--request-id", "late")
    assert code == 0
    assert said.startswith(f"{held_out(3)}: number 1: ")
    assert "(deadline_exceeded): what it lacks was dropped by that" in said
    code, said = reco_why(home, held_out(3), "--request-id", "nobody")
    assert code == 2
    assert "holds no answer to request 'nobody'" in said
