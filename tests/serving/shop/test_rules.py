"""Rules over a small catalogue: their times and stores, and their effect on answers, which stay legal."""

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from feature_repo.facts import Fact
from serving.answer.recommender import Recommender, open_recommender
from serving.cache.answer_cache import AnswerCache
from serving.release.bundle import load_bundle
from serving.schemas import Request
from serving.shop.fact_store import SqliteFactStore
from serving.shop.facts import LiveFacts
from serving.shop.rules import Catalogue, Plan, Rules, RulesFile
from serving.shop.rules_file import parse_rules
from serving.stages.reranking import ANY, NEW, REPEAT
from serving.stores.online_features import open_store
from tests.chaos.procs import eventually
from tests.serving.conftest import Counting, ask_all, build_statistics, ids, shown
from tests.serving.shop.stock import set_stock

AT = 1_512_498_600.0  # 2017-12-05T18:30Z
STATISTICS, VOCABULARY = build_statistics()
MAKERS = np.arange(240) % 5  # 0 is unknown
MADE = replace(STATISTICS, manufacturer=MAKERS.astype(np.int32))
CATALOGUE = Catalogue(MADE, {**VOCABULARY, "manufacturer": ["", "Acme", "Beta", "Gamma", "Delta"]})


def bind(text: str) -> tuple[Rules, list[str]]:
    rules, problems = parse_rules(text)
    assert not [problem for problem in problems if problem.refused]
    bound, missing = CATALOGUE.bind(rules)
    return bound, [f"{problem.line}: {problem.text}" for problem in missing]


def plan(text: str, at: float = AT, store_id: str | None = None) -> Plan:
    return bind(text)[0].plan(at, store_id)


def item(code: int) -> str:
    return str(1_000_000 + code)


# ---------------------------------------------------------------------------------- choosing of items


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (f"items: [{item(7)}, {item(3)}]", {3, 7}),
        ("types: [Type 0]", set(range(0, 240, 12))),
        ("types: [type 0, type 1]", set(range(0, 240, 12)) | set(range(1, 240, 12))),
        ("categories: [category 3], departments: [household]", set(range(3, 240, 4))),
        ("departments: [grocery], types: [type 1]", set()),
        ("manufacturers: [ACME]", set(range(1, 240, 5))),
        ("own_brand: true, manufacturers: [acme]", set(range(6, 240, 15))),
        ("own_brand: false", set(range(240)) - set(range(0, 240, 3))),
    ],
)
def test_a_rule_applies_to_the_items_that_all_selectors_choose(chosen: str, expected: set[int]) -> None:
    found = plan(f"ban:\n  - {{name: a, {chosen}}}")
    assert found.banned.tolist() == sorted(expected)
    assert found.banned.dtype == np.int64


def test_unknown_catalogue_names_are_reported_and_skipped() -> None:
    bound, missing = bind(
        f"ban:\n  - {{name: a, items: [nothing, {item(3)}]}}\n  - {{name: b, types: [typ 1]}}\n"
        "  - {name: c, departments: [grocery], types: [type 1]}\npin:\n  - {name: d, item: gone, slot: 1}\n"
    )
    assert missing == [
        "2: of 2 items, 1 not in this catalogue: nothing; passed over, check the spelling",
        "3: of 1 types, 1 not in this catalogue: typ 1; passed over, did you mean 'type 1'?",
        "4: no item is chosen by all of its selectors",
        "6: of 1 items, 1 not in this catalogue: gone; passed over, check the spelling",
    ]
    assert bound.plan(AT, None).banned.tolist() == [3]
    assert bound.plan(AT, None).pins.tolist() == []


def test_the_watched_file_gets_hints_for_the_problems_that_it_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each hint compares a name with all of the catalogue, in the thread that reads the stock."""
    file, asked = tmp_path / "rules.yaml", list[str]()

    def did_you_mean(word: str, known: Iterable[str]) -> str:
        asked.append(word)
        return "did you mean another?"

    monkeypatch.setattr("serving.shop.rules.did_you_mean", did_you_mean)
    names = "".join(f"  - {{name: r{number}, types: [typ {number}]}}\n" for number in range(500))
    file.write_text(f"ban:\n{names}")
    watched = RulesFile(file, MADE, VOCABULARY)
    assert watched.changed() is None
    assert len(watched.changed() or ()) == 500
    assert asked == [f"typ {number}" for number in range(10)]
    (logged,) = caplog.messages
    assert logged.count("did you mean another?") == 10
    assert "; line 11: of 1 types, 1 not in this catalogue: typ 9; passed over" in logged
    bind(file.read_text())
    assert len(asked) == 510, "a check gives all of them"


def test_a_store_without_sales_is_reported() -> None:
    bound, missing = bind(f"ban:\n  - {{name: a, items: [{item(3)}], stores: [store-1, stor-1]}}\n")
    told = (
        "of 2 stores, 1 not in this catalogue: stor-1; the rule holds there all the same, check the spelling"
    )
    assert missing == [f"2: {told}"]
    assert bound.plan(AT, "stor-1").banned.tolist() == [3]


def test_a_ban_overrides_a_pin_and_is_reported() -> None:
    pin, ban = (
        "pin:\n  - {name: p, item: 1000013, slot: 1 WHEN}\n",
        "ban:\n  - {name: b, types: [type 1] WHEN}\n",
    )
    [told] = bind(pin.replace(" WHEN", "") + ban.replace(" WHEN", ""))[1]
    assert told == f"2: {item(13)} is pinned here and banned by 'b' (line 4): the ban wins, take the pin out"
    apart = pin.replace(" WHEN", ", stores: [s]") + ban.replace(" WHEN", ", stores: [t]")
    assert "banned by" not in "".join(bind(apart)[1])
    early, late = pin.replace(" WHEN", ", until: 2026-01-01"), ban.replace(" WHEN", ", from: 2026-01-01")
    assert bind(early + late)[1] == []


# -------------------------------------------------------------------------------------- time and place


def test_a_rule_holds_from_its_start_until_its_end_in_its_stores() -> None:
    text = f"ban:\n  - {{name: a, items: [{item(3)}], from: 2017-12-05, until: 2017-12-06, stores: [s1]}}\n"
    bound, _ = bind(text)
    day = AT // 86_400 * 86_400

    def banned(at: float, store: str | None) -> list[int]:
        return bound.plan(at, store).banned.tolist()

    assert banned(day, "s1") == banned(day + 86_399.9, "s1") == [3]
    assert banned(day - 0.1, "s1") == banned(day + 86_400, "s1") == []
    assert banned(AT, "s2") == banned(AT, None) == []
    assert bound.plan(AT, "s1") is bound.plan(AT + 1, "s1"), "made once"
    assert bound.plan(AT, "s2") is bound.plan(AT, None), "one for all stores that no rule names"


def test_stores_with_the_same_rules_share_a_plan() -> None:
    most = ", ".join(f"s{number}" for number in range(600))
    bound, _ = bind(
        f"ban:\n  - {{name: a, items: [{item(3)}], stores: [{most}]}}\n"
        f"  - {{name: b, items: [{item(4)}], stores: [s7], from: 2030-01-01}}\n"
    )
    plans = {id(bound.plan(AT, f"s{number}")) for number in range(600)}
    assert len(plans) == 2, "one of s7, one of the others"
    assert bound.plan(AT, "s600").banned.tolist() == []
    assert [bound.plan(later, "s7").banned.tolist() for later in (AT, 2e9)] == [[3], [3, 4]]


def test_plans_are_made_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, _ = bind(f"ban:\n  - {{name: a, items: [{item(3)}], stores: [s1, s2]}}\n")
    bound.make_plans(AT)
    monkeypatch.setattr(Rules, "_make", None)
    assert bound.plan(AT, "s2").banned.tolist() == [3]
    assert bound.plan(AT, None).banned.tolist() == []


def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.shop.rules.MAX_PLANS", 2)
    bound, _ = bind(
        "".join(["ban:\n", *(f"  - {{name: a, items: [{item(n)}], stores: [s{n}]}}\n" for n in range(3))])
    )
    for number in (0, 1, 2, 0):
        assert bound.plan(AT, f"s{number}").banned.tolist() == [number]
        assert len(bound._plans) <= 2


# ------------------------------------------------------------------------------------------- the plan


def test_boost_factors_multiply_and_the_largest_gives_the_reason() -> None:
    found = plan(
        f"boost:\n  - {{name: a, factor: 2, items: [{item(1)}, {item(2)}]}}\n"
        f"  - {{name: b, factor: 3, items: [{item(2)}]}}\n"
        f"bury:\n  - {{name: c, factor: 0.5, items: [{item(2)}, {item(5)}]}}\n"
    )
    assert found.weighed.tolist() == [1, 2, 5]
    assert found.factors.tolist() == [2.0, 3.0, 0.5]
    assert found.raised_by == ("a", "b", "")
    worth = found.weigh(np.array([9, 5, 2, 0, 1]), np.array([1.0, 1.0, 0.1, 1.0, 0.2]))
    assert worth.tolist() == pytest.approx([1.0, 0.5, 0.3, 1.0, 0.4])
    found = plan(
        f"boost:\n  - {{name: week, factor: 1.5, items: [{item(2)}]}}\n"
        f"bury:\n  - {{name: season, factor: 0.5, items: [{item(2)}]}}\n"
    )
    assert (found.factors.tolist(), found.raised_by) == ([0.75], ("",)), "it goes down: nothing raises it"


def test_slots_are_stored_by_number() -> None:
    found = plan(
        f"pin:\n  - {{name: p, item: {item(9)}, slot: 3}}\n  - {{name: q, item: {item(4)}, slot: 1}}\n"
        "slots:\n  - {name: n, repeat: [2], new: [4]}\n"
    )
    assert found.pins.tolist() == [4, -1, 9]
    assert found.pinned.tolist() == [4, 9]
    assert found.reserved.tolist() == [ANY, REPEAT, ANY, NEW]
    assert (found.pinned_because(9), found.pinned_because(8)) == ("pinned by p", "")


def test_the_digest_covers_only_rules_that_arrange_a_list() -> None:
    boost = f"boost:\n  - {{name: a, factor: 2, items: [{item(1)}]}}\n"
    ban = f"ban:\n  - {{name: a, items: [{item(1)}]}}\n"
    assert plan(ban).digest == plan("minimum_stock:\n  - {name: a, units: 3}\n").digest == b""
    assert plan(boost).digest == plan(boost + ban).digest == plan(boost.replace("name: a", "name: b")).digest
    others = [
        plan(boost).digest,
        plan(boost.replace("2", "3", 1)).digest,
        plan(f"pin:\n  - {{name: a, item: {item(1)}, slot: 1}}\n").digest,
        plan(f"pin:\n  - {{name: a, item: {item(1)}, slot: 2}}\n").digest,
        plan("slots:\n  - {name: a, new: [1]}\n").digest,
        plan("slots:\n  - {name: a, repeat: [1]}\n").digest,
    ]
    assert len({*others, b""}) == 7


# ------------------------------------------------------------------------------------ the served path

LOUD = Request((item(5),), AT, "u1", "store-1", 10, "r1")  # a shopper who has bought five items before
QUIET = Request((item(5),), AT, None, "store-1", 10, "r2")


def follow(recommender: Recommender, text: str) -> None:
    recommender.facts.rules = bind(text)[0]


@pytest.mark.parametrize("pinned", [3, 77, 239])
@pytest.mark.parametrize("slot", [1, 2, 10])
def test_a_pin_is_in_its_slot_on_every_rung_with_its_reason(
    recommender: Recommender, pinned: int, slot: int
) -> None:
    usual = recommender.recommend(LOUD)
    follow(recommender, f"pin:\n  - {{name: Christmas, item: {item(pinned)}, slot: {slot}}}\n")
    for answer in (recommender.recommend(LOUD), recommender.fallback(LOUD, "test")):
        assert len(set(ids(answer))) == 10
        assert answer.items[slot - 1].item_id == item(pinned)
        assert answer.items[slot - 1].reason == "pinned by Christmas"
        assert [one.item_id for one in answer.items if one.reason == "pinned by Christmas"] == [item(pinned)]
    answer = recommender.recommend(LOUD)
    others = [one for one in ids(answer) if one != item(pinned)]
    assert others[: slot - 1] == [one for one in ids(usual) if one != item(pinned)][: slot - 1]
    ranked = {one.item_id: one.score for one in recommender.recommend(replace(LOUD, k=100)).items}
    assert answer.items[slot - 1].score == ranked[item(pinned)] > 0, "it was ranked like the others"
    shorter = recommender.recommend(replace(LOUD, k=4))
    assert ids(shorter) == ids(answer)[:4]


@pytest.mark.parametrize("why", ["sold out", "premium"])
def test_a_pinned_item_that_is_excluded_is_not_shown(recommender: Recommender, why: str) -> None:
    """`premium` shows only the most expensive fifth: item 0 is outside it."""
    cheap = int(np.argmin(STATISTICS.price))
    follow(recommender, f"pin:\n  - {{name: Christmas, item: {item(cheap)}, slot: 1}}\n")
    asked = replace(LOUD, profile="premium") if why == "premium" else LOUD
    if why == "sold out":
        set_stock(recommender, [cheap])
    for answer in (recommender.recommend(asked), recommender.fallback(asked, "test")):
        assert item(cheap) not in ids(answer)
        assert len(answer.items) >= 5
        assert not [one for one in answer.items if "pinned" in one.reason]


def test_a_boost_lifts_a_low_item_and_gives_its_reason(recommender: Recommender) -> None:
    ranked = recommender.recommend(replace(LOUD, k=100))
    low = ranked.items[90]
    factor = 1.01 * ranked.items[0].score / low.score
    follow(recommender, f"boost:\n  - {{name: own week, factor: {factor}, items: [{low.item_id}]}}\n")
    answer = recommender.recommend(LOUD)
    assert answer.items[0].item_id == low.item_id
    assert answer.items[0].score == low.score, "the probability stays what it is"
    assert answer.items[0].reason == f"{low.reason}; raised by own week"


def test_reserved_slots_hold_their_kind_and_the_others_the_best(recommender: Recommender) -> None:
    before = {item(code) for code in (5, 50, 51, 120, 10)}
    usual = recommender.recommend(LOUD)
    assert set(ids(usual)[:4]) == before - {item(5)}, "this shop's model puts what was bought before first"
    follow(recommender, "slots:\n  - {name: something new, new: [1, 3], repeat: [9]}\n")
    answer = recommender.recommend(LOUD)
    assert answer.items[0].item_id not in before
    assert answer.items[2].item_id not in before
    assert answer.items[0].reason.endswith("; something new reserves this place for something new")
    # Slots 2, 4, 5 and 6 take the four items bought before: slot 9 finds no other.
    assert {answer.items[slot].item_id for slot in (1, 3, 4, 5)} == before - {item(5)}
    assert "reserves" not in "".join(answer.items[slot].reason for slot in (1, 3, 4, 5, 8))
    stranger = recommender.recommend(QUIET)
    recommender.facts.rules = Rules()
    assert shown(stranger) == shown(recommender.recommend(QUIET)), "to whom nobody knows all is alike"


def test_items_below_a_minimum_are_excluded_and_unknown_ones_are_not(
    toy_bundle: Path, toy_store: str, tmp_path: Path
) -> None:
    store = SqliteFactStore(tmp_path / "facts.db")
    recommender = open_recommender(toy_bundle, open_store(toy_store), facts=store, answers=AnswerCache())
    usual = ids(recommender.recommend(LOUD))
    few, enough, dear, cheap, loss = usual[:5]
    facts = [
        ("stock", few, 4.0, None), ("stock", enough, 4.0, None), ("stock", enough, 5.0, "store-1"),
        ("price", dear, 2.0, None), ("cost", dear, 1.7, None),  # earns 15 %
        ("price", cheap, 2.0, None), ("cost", cheap, 1.9, None),  # 5 %
        ("price", loss, 2.0, None), ("cost", loss, 1.7, None), ("promotion", loss, 0.1, None),  # 6 %
        ("cost", usual[5], 1.7, None), ("price", usual[6], 1.7, None),
    ]  # fmt: skip
    store.write(
        [Fact(f"f{n}", kind, one, value, AT - 60, where) for n, (kind, one, value, where) in enumerate(facts)]
    )
    earning = STATISTICS.codes(usual[2:5])
    eventually(lambda: bool((recommender.facts.margin(earning, AT, "store-1") < 1).all()))
    recommender.facts.rules = bind(
        "minimum_stock:\n  - {name: shelf, units: 5}\nminimum_margin:\n  - {name: earns, share: 0.1}\n"
    )[0]
    rank = Counting()
    answers = [
        recommender.recommend(LOUD),
        recommender.fallback(LOUD, "test"),
        *ask_all(recommender, rank, LOUD, LOUD),
    ]
    recommender.facts.close()
    for answer in answers:
        assert not {few, cheap, loss} & set(ids(answer))
        assert len(answer.items) == 10
    for answer in (answers[0], *answers[2:]):
        assert ids(answer)[:4] == [enough, dear, *usual[5:7]]
    codes = STATISTICS.codes([few, cheap, enough])
    found = recommender.facts.rules.plan(AT, "store-1")
    low = recommender.facts.below_minimum(codes, LOUD.at, LOUD.store_id, found)
    assert low.tolist() == [True, True, False]
    names = [recommender.facts.minimum_missed(code, LOUD.at, LOUD.store_id, found) for code in codes.tolist()]
    assert names == ["shelf", "earns", ""]


def test_the_strictest_of_several_minimums_applies() -> None:
    [found] = plan(
        "minimum_stock:\n  - {name: all, units: 3}\n"
        f"  - {{name: few, units: 2, items: [{item(1)}]}}\n"
        f"  - {{name: many, units: 9, items: [{item(2)}, {item(5)}]}}\n"
        f"  - {{name: some, units: 6, items: [{item(2)}, {item(4)}]}}\n"
    ).minimums
    codes = np.array([5, 4, 3, 2, 1, 0])
    assert found.of(codes).tolist() == [9, 6, 3, 9, 3, 3]
    assert [found.because(code) for code in codes.tolist()] == ["many", "some", "all", "many", "all", "all"]
    [found] = plan(f"minimum_margin:\n  - {{name: a, share: 0.1, items: [{item(2)}]}}\n").minimums
    assert found.of(codes).tolist() == [-np.inf, -np.inf, -np.inf, 0.1, -np.inf, -np.inf]


@pytest.mark.parametrize("most", [None, 10])
def test_candidates_below_a_minimum_are_replaced(toy_bundle: Path, toy_store: str, most: int | None) -> None:
    """All first candidates are below the minimum: later best sellers fill the answer, thinned or not."""
    recommender = open_recommender(toy_bundle, open_store(toy_store))
    profile = recommender.bundle.profiles["default"]
    quotas = replace(profile.quotas, total=30)
    recommender.bundle.profiles["default"] = replace(profile, quotas=quotas)
    low = recommender.prepare(LOUD).candidates.codes
    numbers = recommender.facts._numbers["stock"]
    numbers.add([(int(code), Fact(f"f{code}", "stock", item(code), 2.0, AT - 60, None)) for code in low])
    pin = f"pin:\n  - {{name: p, item: {item(low[0])}, slot: 1}}\n"
    follow(recommender, "minimum_stock:\n  - {name: shelf, units: 5}\n" + pin)
    asked = recommender.ask(LOUD)
    found = recommender.compose(asked, recommender.retrieve(asked), most)
    assert len(found.candidates.codes) == (most or 30)
    assert not set(found.candidates.codes.tolist()) & set(low.tolist())
    assert len(recommender.recommend(LOUD).items) == 10


def test_a_cached_list_follows_the_current_rules(toy_bundle: Path, toy_store: str) -> None:
    recommender = open_recommender(toy_bundle, open_store(toy_store), answers=AnswerCache())
    rank = Counting()
    usual = ids(*ask_all(recommender, rank, LOUD))
    low = recommender.recommend(replace(LOUD, k=100)).items[60].item_id
    follow(recommender, f"ban:\n  - {{name: recall, items: [{usual[0]}]}}\n")
    [answer] = ask_all(recommender, rank, LOUD)
    assert (ids(answer)[0], len(rank.turns)) == (usual[1], 1), "a ban is applied to the list that is kept"
    texts = [
        f"pin:\n  - {{name: p, item: {item(200)}, slot: 2}}\n",
        f"boost:\n  - {{name: b, factor: 900, items: [{low}]}}\n",
        "slots:\n  - {name: s, new: [1]}\n",
    ]
    for number, text in enumerate(texts, 2):
        follow(recommender, text)
        first, again = ask_all(recommender, rank, LOUD, LOUD)
        assert len(rank.turns) == number, "one list for each way of arranging it"
        assert shown(first) == shown(again) == shown(recommender.recommend(LOUD))
        assert ids(first) != usual
    recommender.facts.rules = Rules()
    assert ids(*ask_all(recommender, rank, LOUD)) == usual
    assert len(rank.turns) == 4, "and the first one is still there"


codes = st.integers(0, 239)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    basket=st.lists(codes, max_size=6, unique=True),
    banned=st.lists(codes, max_size=60, unique=True),
    pins=st.dictionaries(st.integers(1, 12), codes, max_size=4),
    weighed=st.lists(codes, max_size=20, unique=True),
    kept=st.dictionaries(st.integers(1, 12), st.sampled_from(["repeat", "new"]), max_size=5),
    k=st.integers(0, 15),
    user=st.sampled_from([None, "u1", "u2"]),
)
def test_an_answer_is_legal_under_any_rules(
    recommender: Recommender,
    basket: list[int],
    banned: list[int],
    pins: dict[int, int],
    weighed: list[int],
    kept: dict[int, str],
    k: int,
    user: str | None,
) -> None:
    """Never an item of the basket, banned, or twice; a pin in its slot or not at all; k items in all."""
    pins = {slot: code for slot, code in pins.items() if list(pins.values()).count(code) == 1}
    parts: dict[str, list[dict[str, Any]]] = {
        "ban": [{"name": "b", "items": [item(code) for code in banned]}] if banned else [],
        "pin": [{"name": "p", "item": item(code), "slot": slot} for slot, code in pins.items()],
        "boost": [{"name": "w", "factor": 5, "items": [item(code) for code in weighed]}] if weighed else [],
        "slots": [{"name": "s", kind: [slot]} for slot, kind in kept.items()],
    }
    follow(recommender, json.dumps(parts))  # JSON is YAML
    asked = Request(tuple(item(code) for code in basket), AT, user, "store-1", k, "r1")
    never = {item(code) for code in (*basket, *banned)}
    for answer in (recommender.recommend(asked), recommender.fallback(asked, "test")):
        found = ids(answer)
        assert len(found) == len(set(found)) == k
        assert not never & set(found)
        for slot, code in pins.items():
            if item(code) not in never and slot <= k:
                assert found[slot - 1] == item(code)
                assert answer.items[slot - 1].reason == "pinned by p"
            else:
                assert item(code) not in found
        assert all(one.reason for one in answer.items)


# ------------------------------------------------------------------------------------------- the file


class Noted:
    """A gauge that notes the values of one reader; others of this process may still be open."""

    def __init__(self, facts: LiveFacts) -> None:
        self.facts = facts
        self.values: list[float] = []

    def set(self, value: float) -> None:
        if threading.current_thread() is self.facts._thread:
            self.values.append(value)


def test_a_changed_file_is_followed_and_a_broken_one_changes_nothing(
    toy_bundle: Path,
    toy_store: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "rules.yaml"
    recommender = open_recommender(toy_bundle, open_store(toy_store), rules=file)
    usual = ids(recommender.recommend(LOUD))
    broken = Noted(recommender.facts)
    monkeypatch.setattr("serving.shop.facts.RULES_BROKEN", broken)

    def write(text: str) -> None:
        part = tmp_path / "rules.part"
        part.write_text(text)
        os.replace(part, file)

    write(f"ban:\n  - {{name: recall, items: [{usual[0]}, nothing]}}\n")
    eventually(lambda: ids(recommender.recommend(LOUD))[0] == usual[1])
    assert "line 2: of 2 items, 1 not in this catalogue: nothing" in caplog.text
    assert recommender.facts.state == "ready"
    eventually(lambda: broken.values[-1:] == [False])
    write("ban:\n  - {nam: recall}\n")
    eventually(lambda: broken.values[-1:] == [True])
    looks = len(broken.values)
    assert "line 2: a rule of ban has no 'nam': did you mean 'name'?" in caplog.text
    assert recommender.facts.state == "unavailable"
    assert ids(recommender.recommend(LOUD))[0] == usual[1]
    eventually(lambda: len(broken.values) > looks + 2)
    assert all(broken.values[looks:])
    write("")
    eventually(lambda: "the file is empty" in caplog.text)
    assert ids(recommender.recommend(LOUD))[0] == usual[1], "a save that failed half-way ends no ban"
    assert all(broken.values[looks:])
    file.unlink()
    eventually(lambda: ids(recommender.recommend(LOUD)) == usual)
    eventually(lambda: broken.values[-1:] == [False])
    assert recommender.facts.state == "ready"
    recommender.facts.close()


# ---------------------------------------------------------------------------------------- novel slots


def test_a_novel_slot_has_its_reason_with_and_without_the_cache(toy_bundle: Path, toy_store: str) -> None:
    bundle = load_bundle(toy_bundle)
    weighed = replace(bundle, settings=replace(bundle.settings, novelty=3.0, novel_slots=(3, 8)))
    recommender = Recommender(weighed, open_store(toy_store), answers=AnswerCache())
    usual = Recommender(bundle, open_store(toy_store)).recommend(LOUD)
    answer = recommender.recommend(LOUD)
    assert answer.items[:2] == usual.items[:2]
    novel, instead = (STATISTICS.code_of[one.items[2].item_id] for one in (answer, usual))
    assert STATISTICS.basket_count[novel] < STATISTICS.basket_count[instead]
    told = [one.reason.endswith("; a place for what is seldom bought") for one in answer.items]
    assert told == [slot in (3, 8) for slot in range(1, 11)]
    rank = Counting()
    first, again = ask_all(recommender, rank, LOUD, LOUD)
    assert shown(first) == shown(again) == shown(answer)
    assert len(rank.turns) == 1
