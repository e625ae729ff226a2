"""What a certificate measures, by hand on tiny lists; and what its readers refuse."""

import copy
import math
import re
import tomllib
import tracemalloc
from typing import Any

import numpy as np
import pytest

from components.data.examples import RankerExamples
from components.ranker.certificate import (
    DRAWS,
    TOLERANCES,
    ParityFailed,
    _delta,
    certify,
    check,
    check_chain,
    enforce,
)
from feature_repo.schema import BASKET_LENGTH, DENSE_NAMES, HISTORY_LENGTH

SECTIONS = tomllib.loads(TOLERANCES.read_text())
SOLD, BASKET_SIZE = DENSE_NAMES.index("item_purchases_13w"), DENSE_NAMES.index("basket_size")


def lists(*labels: list[int]) -> RankerExamples:
    """Lists with these labels, all of known users with small baskets."""
    label = np.array([one for each in labels for one in each], np.int8)
    history = np.zeros((len(labels), HISTORY_LENGTH), np.int32)
    history[:, 0] = 1
    return RankerExamples(
        dense=np.ones((len(label), len(DENSE_NAMES)), np.float32),
        categorical=np.zeros((len(label), 4), np.int32),
        label=label,
        start=np.cumsum([0, *(len(each) for each in labels)]),
        history=history,
        history_weight=np.zeros(history.shape, np.float16),
        basket=np.zeros((len(labels), BASKET_LENGTH), np.int32),
    )


def certified(data: RankerExamples, ours: list[float], theirs: list[float], **more: Any) -> dict[str, Any]:
    child = ("child", np.array(ours, np.float32))
    return certify("prune_ranker", "prune", child, ["parent"], np.array(theirs, np.float32), data, **more)


# ---------------------------------------------------------------------------------------- the numbers


def test_ndcg_and_auc_by_hand() -> None:
    """List one: bought are places 1 and 3 of 4; list two: place 2 of 2; list three has no purchase."""
    data = lists([1, 0, 1, 0], [0, 1], [0, 0])
    found = certified(
        data, [0.9, 0.5, 0.4, 0.1, 0.6, 0.3, 0.2, 0.1], [0.9, 0.4, 0.5, 0.1, 0.3, 0.6, 0.2, 0.1]
    )
    first = (1 + 1 / math.log2(4)) / (1 + 1 / math.log2(3))
    second = 1 / math.log2(3)
    assert found["ndcg_at_10"]["child"] == pytest.approx((first + second) / 2)
    assert found["ndcg_at_10"]["parent"] == 1.0
    assert found["ndcg_at_10"]["ratio"] == pytest.approx((first + second) / 2)
    assert found["auc"]["child"] == pytest.approx((3 / 4 + 0) / 2)
    assert found["auc"]["parent"] == 1.0
    assert (found["lists"], found["lists_with_purchase"]) == (3, 2)


def test_only_ten_places_count() -> None:
    data = lists([0] * 10 + [1])
    falling = np.linspace(0.9, 0.1, 11).tolist()
    found = certified(data, falling, falling[::-1])
    assert found["ndcg_at_10"]["child"] == 0.0
    assert found["ndcg_at_10"]["parent"] == 1.0


def test_a_list_bought_whole_does_not_count() -> None:
    found = certified(lists([1, 1], [0, 1]), [0.1, 0.2, 0.1, 0.9], [0.1, 0.2, 0.1, 0.9])
    assert found["lists_with_purchase"] == 1
    assert found["ndcg_at_10"]["child"] == 1.0


def test_log_loss_by_hand() -> None:
    """The mean over lists of the mean over a list's candidates; an empty list adds nothing."""
    data = lists([1, 0], [], [1])
    found = certified(data, [0.8, 0.4, 0.5], [0.5, 0.5, 0.5])
    ours = [-(math.log(0.8) + math.log(0.6)) / 2, 0.0, -math.log(0.5)]
    theirs = [math.log(2), 0.0, math.log(2)]
    assert found["logloss"]["child"] == pytest.approx(np.mean(ours))
    assert found["logloss"]["delta"] == pytest.approx(np.mean(ours) - np.mean(theirs))


def test_scores_of_zero_and_one_have_a_finite_loss() -> None:
    found = certified(lists([1, 0]), [0.0, 1.0], [0.5, 0.5])
    assert 13 < found["logloss"]["child"] < 28


def test_differences_by_hand() -> None:
    found = certified(lists([1, 0], [0]), [0.5, 0.4, 0.3], [0.5, 0.5, 0.1])
    assert found["difference"]["max"] == pytest.approx(0.2)
    assert found["difference"]["mean"] == pytest.approx(0.1)


def test_overlap_is_the_share_of_the_ten_best_that_both_name() -> None:
    """Of twelve candidates the child's ten best leave out the last two, the parent's the first two."""
    falling = np.linspace(0.9, 0.1, 12).tolist()
    found = certified(lists([1] + [0] * 11, [1, 0]), [*falling, 0.2, 0.1], [*falling[::-1], 0.1, 0.2])
    assert found["top_10_overlap"] == pytest.approx((0.8 + 1.0) / 2)


def test_the_interval_takes_memory_for_one_draw_and_is_that_of_all_at_once() -> None:
    ours, theirs = np.random.default_rng(1).random((2, 3_000))
    tracemalloc.start()
    low, high = _delta(ours, theirs)["interval"]
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 10 * ours.nbytes
    draws = np.random.default_rng(0).integers(0, len(ours), (DRAWS, len(ours)))
    assert [low, high] == np.percentile((ours - theirs)[draws].mean(1), [2.5, 97.5]).tolist()


def test_the_interval_is_paired_and_holds_the_difference() -> None:
    rng = np.random.default_rng(0)
    data = lists(*[[1] + [0] * 9] * 200)
    theirs = rng.random(2_000)
    theirs[::10] += 0.5
    ours = theirs + rng.normal(0, 0.2, 2_000)
    found = certified(data, (ours / 4 + 0.25).tolist(), (theirs / 4 + 0.25).tolist())["ndcg_at_10"]
    low, high = found["interval"]
    assert low < found["delta"] < high
    assert high - low < 0.2
    same = certified(data, theirs.tolist(), theirs.tolist())["ndcg_at_10"]
    assert same["interval"] == [0.0, 0.0]
    assert same["ratio"] == 1.0


def test_segments_hold_the_lists_they_are_named_after() -> None:
    data = lists([1, 0], [1, 0], [1, 0], [1, 0])
    data.history[0] = 0
    data.dense[2:4, BASKET_SIZE] = 10
    data.dense[:, SOLD] = np.array([50, 50, 50, 50, 1, 50, 50, 50])
    found = certified(data, [0.1, 0.9, 0.9, 0.1, 0.9, 0.1, 0.9, 0.1], [0.9, 0.1] * 4)["segments"]
    assert set(found) == {"new users", "long baskets", "tail items"}
    assert all(segment["lists_with_purchase"] == 1 for segment in found.values())
    assert found["new users"]["ndcg_at_10"]["child"] == pytest.approx(1 / math.log2(3))
    assert found["long baskets"]["ndcg_at_10"]["child"] == 1.0


def test_an_empty_segment_is_left_out_and_empty_lists_do_no_harm() -> None:
    assert "new users" not in certified(lists([1, 0]), [0.9, 0.1], [0.9, 0.1])["segments"]
    nothing = certified(lists(), [], [])
    assert nothing["lists"] == 0
    assert nothing["ndcg_at_10"]["ratio"] == 1.0
    assert certified(lists([]), [], [])["difference"]["max"] == 0.0


# -------------------------------------------------------------------------------------------- the gate


@pytest.fixture
def good() -> dict[str, Any]:
    """A certificate of 120 lists of new users: the order stayed, a score moved by more than rounding."""
    data = lists(*[[1, 0]] * 120)
    data.history[:] = 0
    scores = [0.8, 0.2] * 120
    found = certified(data, scores, scores)
    found["difference"]["max"] = 1e-4
    exported = {**copy.deepcopy(found), "step": "export_ranker", "tolerance": "train"}
    return {**found, "export": exported}


def test_an_equal_ranker_is_within_every_tolerance(good: dict[str, Any]) -> None:
    assert [check({**good, "tolerance": section}) for section in SECTIONS] == [[]] * len(SECTIONS)
    enforce(good)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (("ndcg_at_10", "child"), 0.98, r"^ndcg_at_10 is 0.9800 of the parent's, needed 0.99$"),
        (("auc", "child"), 0.98, r"^auc is 0.9800"),
        (("logloss", "child"), 1.1 * -math.log(0.8), r"^logloss is 1.1000 of the parent's, allowed 1.02$"),
        (("ndcg_at_10", "child"), math.nan, "^ndcg_at_10 is nan"),
        (("logloss", "child"), math.nan, "^logloss is nan"),
        (("difference", "max"), math.nan, "^a score moved by nan"),
        (("export", "difference", "max"), 0.5, "^its graph: a score moved by 0.5, allowed 0.001"),
    ],
)
def test_measurements_outside_the_tolerance_are_named(
    good: dict[str, Any], place: tuple[str, ...], value: Any, told: str
) -> None:
    inner = good
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (reason,) = check(good)
    assert re.search(told, reason)
    with pytest.raises(ParityFailed, match="prune_ranker made child too far from its parent"):
        enforce(good)


def test_a_segment_that_surely_loses_is_named_and_one_that_may_by_chance_is_not(good: dict[str, Any]) -> None:
    measured = good["segments"]["new users"]["ndcg_at_10"]
    measured |= {"child": 0.9, "interval": [-0.15, -0.01]}
    assert check(good) == ["ndcg_at_10 of segment new users is 0.9000 of the parent's, needed 0.97"]
    measured["interval"] = [-0.2, 0.01]
    assert check(good) == []
    measured["child"], measured["interval"] = math.nan, [math.nan, math.nan]
    assert check(good) == ["ndcg_at_10 of segment new users is nan of the parent's, needed 0.97"]


def test_a_small_segment_proves_nothing(good: dict[str, Any]) -> None:
    segment = good["segments"]["new users"]
    segment["ndcg_at_10"] |= {"child": 0.1, "interval": [-0.9, -0.8]}
    segment["lists_with_purchase"] = 99
    assert check(good) == []


def test_as_good_as_equal_scores_may_change_places() -> None:
    """The graph of a training once failed by one such pair at the top of one of 1,231 lists."""
    data = lists(*[[1, 0]] * 120)
    theirs, ours = [0.03832802, 0.03832797] * 120, [0.03832799, 0.03832802] * 120
    found = certified(data, ours, theirs) | {"tolerance": "train"}
    assert found["ndcg_at_10"]["ratio"] < 0.7
    assert check(found) == []
    other = certified(data, [0.0381, 0.0382] * 120, theirs) | {"tolerance": "train"}
    assert {reason.split()[0] for reason in check(other)} == {"ndcg_at_10", "auc", "logloss"}


# ------------------------------------------------------------------------------------------- the chain


@pytest.fixture
def chain(good: dict[str, Any]) -> list[dict[str, Any]]:
    def link(step: str, made: str, *parents: str) -> dict[str, Any]:
        return {**good, "step": f"{step}_ranker", "tolerance": step, "id": made, "parents": list(parents)}

    return [link("train", "a"), link("train", "b"), link("distill", "c", "a", "b"), link("compile", "d", "c")]


@pytest.mark.parametrize(
    ("order", "graph", "told"),
    [
        ((0, 1, 2, 3), "d", []),
        ((), "d", ["there is no certificate at all"]),
        ((0, 1, 2, 3), "e", ["the last certificate is of d, the graph is e"]),
        ((0, 2, 3), "d", ["distill_ranker -> c: no certificate of its parent b"]),
        ((0, 1, 3), "d", ["compile_ranker -> d: no certificate of its parent c"]),
        (
            (2, 0, 1, 3),
            "d",
            [f"distill_ranker -> c: no certificate of its parent {parent}" for parent in "ab"],
        ),
    ],
    ids=["whole", "empty", "to another graph", "a parent less", "a link less", "a parent too late"],
)
def test_a_chain_is_whole_and_each_parent_comes_first(
    chain: list[dict[str, Any]], order: tuple[int, ...], graph: str, told: list[str]
) -> None:
    assert check_chain([chain[i] for i in order], graph) == told


@pytest.mark.parametrize(("number", "parents"), [(0, ["b"]), (2, [])])
def test_only_a_trained_ranker_has_no_parent(
    chain: list[dict[str, Any]], number: int, parents: list[str]
) -> None:
    chain[number]["parents"] = parents
    assert any("a trained ranker has no parent" in fault for fault in check_chain(chain, chain[-1]["id"]))


def test_all_links_are_measured_on_the_same_lists(chain: list[dict[str, Any]]) -> None:
    chain[3]["lists_hash"] = "other"
    assert check_chain(chain, "d") == ["compile_ranker -> d: it was measured on other lists than the first"]


NO_INTERVAL = {"new users": {"ndcg_at_10": {"child": 1.0, "parent": 1.0, "interval": []}}}


@pytest.mark.parametrize(
    "broken",
    [
        *(None, {}, {"tolerance": "any"}, {"parents": None}),
        *({"segments": []}, {"segments": NO_INTERVAL}),
    ],
)
def test_what_is_no_certificate_is_reported(chain: list[dict[str, Any]], broken: Any) -> None:
    chain[2] = {**chain[2], **broken} if broken else broken
    assert check_chain(chain, "d")[0].startswith("it is no chain of certificates")


def test_a_link_outside_its_tolerance_is_refused(chain: list[dict[str, Any]]) -> None:
    chain[2]["ndcg_at_10"] = {**chain[2]["ndcg_at_10"], "child": 0.5}
    (wrong,) = check_chain(chain, "d")
    assert wrong.startswith("distill_ranker -> c: ndcg_at_10 is 0.5000 of the parent's")


# -------------------------------------------------------------------------------------- the tolerances


@pytest.mark.parametrize("name", SECTIONS)
def test_each_tolerance_is_whole_and_has_a_reason(name: str) -> None:
    section = SECTIONS[name]
    assert set(section) == {
        "ndcg_ratio",
        "auc_ratio",
        "segment_ratio",
        "logloss_ratio",
        "difference",
        "reason",
    }
    assert len(section["reason"]) > 10
    assert 0.9 < section["segment_ratio"] <= section["ndcg_ratio"] <= 1
    assert 0.9 < section["auc_ratio"] <= 1
    assert 1 < section["logloss_ratio"] <= 1.05
    assert 0 < section["difference"] <= 1


def test_the_whole_chain_stays_within_the_tolerances_of_its_links() -> None:
    """The worst that a chain of certificates lets pass: the product of its ratios."""
    path = math.prod(
        SECTIONS[name]["ndcg_ratio"] for name in ("train", "distill", "prune", "int4", "compile")
    )
    assert path == pytest.approx(0.957, abs=0.0005)
