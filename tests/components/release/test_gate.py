import math
import re
from typing import Any

import pytest

from components.hyper_parameters import GateParams
from components.release.gate import Check, GateFailed, compare, enforce, gain

PAID = "ndcg_at_10 less latency against champion"


def measured(
    ndcg: float | None = 0.16,
    champion: float | None = None,
    added_ms: float = 0.0,
    p99_ms: tuple[float, float] = (2.0, 2.0),
    **fields: Any,
) -> dict[str, Any]:
    """A challenger as it was measured, beside a champion if there is one."""
    served = {"recall_at_20": 0.29, "error": 0.002} | ({} if ndcg is None else {"ndcg_at_10": ndcg})
    found: dict[str, Any] = {
        "verdicts": {"readable": ""},
        "baskets": 8_000,
        "served": served,
        "stated": {"ndcg_at_10": ndcg},
        "blend": {"ndcg_at_10": 0.13},
        "two_tower": {"ndcg_at_10": 0.07},
        "index_recall": 0.98,
        "chain": 0.99,
        "latency": {"challenger": {"p99_ms": p99_ms[0]}},
    }
    if champion is not None:
        found["champion"] = {"ndcg_at_10": champion}
        found["known"] = {"challenger": 0.9, "champion": 0.94}
        found["latency"] |= {"champion": {"p99_ms": p99_ms[1]}, "added_ms": added_ms}
    return found | fields


def failed(found: dict[str, Any], **params: Any) -> list[str]:
    return [check.metric for check in compare(found, GateParams(**params)) if not check.passed]


def test_a_good_challenger_passes() -> None:
    assert failed(measured()) == []
    enforce(compare(measured(champion=0.161)))


@pytest.mark.parametrize(
    ("found", "metric"),
    [
        (measured(None), "ndcg_at_10"),
        (measured(math.nan), "ndcg_at_10"),
        (measured(0.0), "ndcg_at_10"),
        (measured(0.155), "ndcg_at_10 against blend"),
        (measured(two_tower={"ndcg_at_10": 0.09}), "ndcg_at_10 against two_tower"),
        (measured(champion=0.17), "ndcg_at_10 against champion"),
        (measured(champion=math.nan), "ndcg_at_10 against champion"),
        (measured(champion=0.16) | {"champion": {}}, "ndcg_at_10 against champion"),
        ({}, "baskets"),
        (measured(baskets=99), "baskets"),
        (measured(index_recall=0.96), "index_recall"),
        (measured(index_recall=None), "index_recall"),
        (measured(blend=None), "ndcg_at_10 against blend"),
        (measured(served={"ndcg_at_10": 0.2}), "recall_at_20"),
        (measured(chain=0.97), "quality of the teachers"),
        (measured(stated={"ndcg_at_10": 0.18}), "ndcg_at_10 beside evaluation.json"),
        (measured(stated={}), "ndcg_at_10 beside evaluation.json"),
        (measured(champion=0.16, p99_ms=(2.41, 2.0)), "p99_ms against champion"),
        (measured(champion=0.16, latency={}), PAID),
        # It forgot a part of the catalogue: of the items that it knows its NDCG@10 is as good as before.
        (measured(champion=0.16, known={"challenger": 0.5, "champion": 0.94}), "catalogue against champion"),
        (measured(champion=0.16, known={}), "catalogue against champion"),
        (measured(verdicts={"readable": "torn", "certificates": ""}), "readable"),
    ],
)
def test_a_missing_or_low_metric_fails(found: dict[str, Any], metric: str) -> None:
    assert failed(found)[0] == metric


def test_what_cannot_be_read_has_no_other_checks() -> None:
    checks = compare(measured(verdicts={"files": "", "readable": "torn"}))
    assert [(check.metric, check.passed) for check in checks] == [("files", True), ("readable", False)]
    with pytest.raises(GateFailed, match=r"^readable: torn; bundle not promoted$"):
        enforce(checks)


def test_a_sample_may_differ_from_the_evaluation_by_chance() -> None:
    # 4 standard errors of 0.002, and 0.005: 0.013 to either side.
    for stated, passes in ((0.1729, True), (0.1471, True), (0.1731, False), (0.1469, False)):
        assert (failed(measured(stated={"ndcg_at_10": stated})) == []) is passes


def test_the_error_names_metric_got_and_need() -> None:
    with pytest.raises(GateFailed) as caught:
        enforce(compare(measured(0.15, champion=0.2)))
    assert str(caught.value) == (
        "ndcg_at_10 against blend is 0.1500, needed 0.1560: 1.2 x better than blend, which reaches 0.1300 "
        "on the same baskets; bundle not promoted (2 more checks failed)"
    )
    with pytest.raises(GateFailed, match=r"^ndcg_at_10 beside evaluation\.json is 0\.0200, allowed 0\.0130"):
        enforce(compare(measured(stated={"ndcg_at_10": 0.18})))


def test_the_error_has_as_many_places_as_the_two_differ_in() -> None:
    close = Check("ndcg_at_10 against champion", 0.73019, 0.730191, "1 x the champion's 0.7302")
    with pytest.raises(GateFailed, match=r"champion is 0\.7301900000, needed 0\.7301910000: 1 x"):
        enforce([close])


@pytest.mark.parametrize(
    ("interval", "says"),
    [
        ([0.97, 1.004], " (basket by basket 0.970 to 1.004 x the champion's: a difference of 0 is possible)"),
        ([0.97, None], ""),
        ([0.97, 0.996], " (basket by basket 0.970 to 0.996 x the champion's: the difference is not chance)"),
    ],
)
def test_a_refusal_says_whether_it_may_be_chance(interval: list[float | None], says: str) -> None:
    found = measured(0.1583, champion=0.16)
    found["champion"]["interval"] = interval
    with pytest.raises(GateFailed, match=re.escape(f"on the same baskets{says}; bundle not promoted")):
        enforce(compare(found))


@pytest.mark.parametrize(
    ("found", "limits", "refused"),
    [
        # At their own values: 1 % under the champion is noise, the tail may be a fifth longer.
        (measured(0.1585, champion=0.16), {}, []),
        (measured(champion=0.16, p99_ms=(2.4, 2.0)), {}, []),
        (measured(champion=0.16, p99_ms=(2.4, 2.0)), {"p99_over_champion": 1.1}, ["p99_ms against champion"]),
        (measured(champion=0.16, p99_ms=(9.0, 2.0)), {"p99_over_champion": 0.0}, []),
        (measured(0.131), {"over_blend": 1.0, "over_two_tower": 1.0}, []),
        (measured(0.05), {"over_blend": 0, "over_two_tower": 0}, []),
        (measured(champion=0.16, known={"challenger": 0, "champion": 1}), {"catalogue_of_champion": 0.0}, []),
        (measured(0.16, 0.16, 10_000.0), {"sales_lost_per_100_ms": 0}, []),
        # 20 ms cost 2 %: 0.16 x 0.98 = 0.1568, less than 0.1584.
        (measured(0.16, 0.16, 20.0), {"sales_lost_per_100_ms": 0.1}, [PAID]),
    ],
)
def test_the_limits_are_parameters_and_0_asks_for_nothing(
    found: dict[str, Any], limits: dict[str, float], refused: list[str]
) -> None:
    assert failed(found, **limits) == refused


@pytest.mark.parametrize(
    ("baseline", "ratio", "needed"),
    [
        *((0.13, 1.2, 0.156), (0.07, 2.0, 0.14), (0.9, 1.2, 1 - 0.1 / 1.2), (1.0, 2.0, 1.0)),
        *((0.1, 0.9, 0.09), (0.3, 0.5, 0.15), (0.3, 0.0, 0.0)),
    ],
)
def test_a_good_baseline_needs_its_error_cut_instead(baseline: float, ratio: float, needed: float) -> None:
    assert gain(baseline, ratio) == pytest.approx(needed)


@pytest.mark.parametrize(
    ("added_ms", "left", "refused"),
    [
        (0.0, 0.16, []),
        # 50 ms cost 0.5 %: 0.16 x 0.995 = 0.1592; asked for are 0.99 x 0.16 = 0.1584.
        (50.0, 0.1592, []),
        # 120 ms cost 1.2 %: 0.16 x 0.988 = 0.15808.
        (120.0, 0.15808, [PAID]),
        (20_000.0, 0.0, [PAID]),
        (-120.0, 0.16, []),
    ],
)
def test_added_latency_is_paid_for_in_sales(added_ms: float, left: float, refused: list[str]) -> None:
    checks = compare(measured(0.16, 0.16, added_ms))
    [paid] = [check for check in checks if check.metric == PAID]
    assert paid.got == pytest.approx(left)
    assert paid.need == pytest.approx(0.1584)
    assert [check.metric for check in checks if not check.passed] == refused


def test_an_answer_that_takes_as_long_as_before_shows_no_minus() -> None:
    [paid] = [check for check in compare(measured(0.16, 0.16, -0.04)) if check.metric == PAID]
    assert "0.00% of sales lost to the +0.0 ms that an answer takes" in paid.reason


def test_a_better_challenger_may_take_longer_and_a_quicker_one_may_not_be_worse() -> None:
    # 3 % better, 200 ms later: 0.1648 x 0.98 = 0.161504, more than 0.1584.
    assert failed(measured(0.1648, 0.16, 200.0)) == []
    assert "ndcg_at_10 against champion" in failed(measured(0.1583, 0.16, -1_000.0))


def test_without_a_champion_there_is_nothing_to_be_slower_than() -> None:
    assert not [check for check in compare(measured()) if "champion" in check.metric]
