import math
from typing import Any

import pytest

from components.hyper_parameters import GateParams
from components.release.gate import GateFailed, compare, enforce, gain, sales_lost_share


def evaluation(ndcg: float | None = 0.16, blend: float = 0.13, tower: float = 0.07) -> dict[str, Any]:
    served = {"recall_at_20": 0.29} | ({} if ndcg is None else {"ndcg_at_10": ndcg})
    baselines = {"blend": {"ndcg_at_10": blend}, "two_tower": {"ndcg_at_10": tower}}
    index = {"recall": 0.98, "k": 500, "quota": {"recall": 0.99, "k": 60}}
    return {"baskets": 8_000, "served": served, "baselines": baselines, "index": index}


def failed(found: dict[str, Any], champion: dict[str, Any] | None = None) -> list[str]:
    return [check.metric for check in compare(found, champion) if not check.passed]


def test_a_good_challenger_passes() -> None:
    assert failed(evaluation()) == []
    enforce(compare(evaluation(), evaluation(0.161)))


@pytest.mark.parametrize(
    ("found", "champion", "metric"),
    [
        (evaluation(None), None, "ndcg_at_10"),
        (evaluation(math.nan), None, "ndcg_at_10"),
        (evaluation(0.0), None, "ndcg_at_10"),
        (evaluation(0.155), None, "ndcg_at_10 against blend"),
        (evaluation(0.16, 0.13, 0.09), None, "ndcg_at_10 against two_tower"),
        (evaluation(0.16), evaluation(0.17), "ndcg_at_10 against champion"),
        ({}, None, "baskets"),
        (evaluation() | {"baskets": 99}, None, "baskets"),
        (evaluation() | {"index": {"recall": 0.96}}, None, "index_recall"),
        (evaluation() | {"index": {}}, None, "index_recall"),
        (evaluation() | {"index": {"recall": 0.98, "quota": {"recall": 0.9}}}, None, "index_recall_at_quota"),
        (evaluation() | {"index": {"recall": 0.98}}, None, "index_recall_at_quota"),
        (evaluation() | {"baselines": {}}, None, "ndcg_at_10 against blend"),
        (evaluation() | {"served": {"ndcg_at_10": 0.2}}, None, "recall_at_20"),
    ],
)
def test_a_missing_or_low_metric_fails(found: dict, champion: dict | None, metric: str) -> None:
    assert failed(found, champion)[0] == metric


def test_the_error_names_metric_got_and_need() -> None:
    with pytest.raises(GateFailed) as caught:
        enforce(compare(evaluation(0.15), evaluation(0.2)))
    error = caught.value
    assert (error.metric, error.got) == ("ndcg_at_10 against blend", 0.15)
    assert error.need == pytest.approx(1.2 * 0.13)
    assert str(error) == (
        "ndcg_at_10 against blend is 0.1500, needed 0.1560: 1.2 x better than blend, it reaches 0.1300 "
        "in the same run; bundle not promoted (1 more checks failed)"
    )


def test_a_champion_without_a_metric_cannot_stand_in_the_way() -> None:
    assert failed(evaluation(), {"served": {}}) == []


def test_one_per_cent_under_the_champion_is_noise() -> None:
    assert failed(evaluation(0.1585), evaluation(0.16)) == []
    assert failed(evaluation(0.1583), evaluation(0.16)) == ["ndcg_at_10 against champion"]


@pytest.mark.parametrize(
    ("baseline", "ratio", "needed"),
    [(0.13, 1.2, 0.156), (0.07, 2.0, 0.14), (0.9, 1.2, 1 - 0.1 / 1.2), (1.0, 2.0, 1.0)],
)
def test_a_good_baseline_needs_its_error_cut_instead(baseline: float, ratio: float, needed: float) -> None:
    assert gain(baseline, ratio) == pytest.approx(needed)


def test_the_needed_ratios_are_parameters() -> None:
    weak = evaluation(0.131)
    checks = compare(weak, None, GateParams(over_blend=1.0, over_two_tower=1.0))
    assert all(check.passed for check in checks)


@pytest.mark.parametrize("value", [-0.1, float("inf"), float("nan")])
def test_a_gate_that_lets_all_through_or_nothing_is_refused(value: float) -> None:
    with pytest.raises(TypeError, match=r"over_blend is .*, expected 0"):
        GateParams(over_blend=value)


def test_a_ratio_of_nothing_asks_for_nothing() -> None:
    found = compare(evaluation(0.05), None, GateParams(over_blend=0, over_two_tower=0))
    assert all(check.passed for check in found)


@pytest.mark.parametrize(
    ("added_ms", "lost"),
    [(0.0, 0.0), (100.0, 0.01), (30.0, 0.003), (1.0, 0.0001), (-50.0, 0.0), (20_000.0, 1.0)],
)
def test_the_cost_of_a_later_answer(added_ms: float, lost: float) -> None:
    assert sales_lost_share(added_ms, 0.01) == pytest.approx(lost)


@pytest.mark.parametrize(
    ("added_ms", "left", "refused"),
    [
        (0.0, 0.16, []),
        # 50 ms cost 0.5 %: 0.16 x 0.995 = 0.1592; asked for are 0.99 x 0.16 = 0.1584.
        (50.0, 0.1592, []),
        # 120 ms cost 1.2 %: 0.16 x 0.988 = 0.15808.
        (120.0, 0.15808, ["ndcg_at_10 less latency against champion"]),
        (-120.0, 0.16, []),
    ],
)
def test_added_latency_is_paid_for_in_sales(added_ms: float, left: float, refused: list[str]) -> None:
    checks = compare(evaluation(0.16), evaluation(0.16), None, added_ms)
    assert checks[-1].metric == "ndcg_at_10 less latency against champion"
    assert checks[-1].got == pytest.approx(left)
    assert checks[-1].need == pytest.approx(0.1584)
    assert [check.metric for check in checks if not check.passed] == refused


def test_the_reason_names_the_cost_of_the_latency() -> None:
    with pytest.raises(
        GateFailed, match=r"less latency against champion is 0\.1581, needed 0\.1584"
    ) as caught:
        enforce(compare(evaluation(0.16), evaluation(0.16), None, 120.0))
    assert "with 1.20% of sales lost to the +120.0 ms that an answer takes" in str(caught.value)


def test_a_better_challenger_may_take_longer_and_a_quicker_one_may_not_be_worse() -> None:
    # 3 % better, 200 ms later: 0.1648 x 0.98 = 0.161504, more than 0.1584.
    assert all(check.passed for check in compare(evaluation(0.1648), evaluation(0.16), None, 200.0))
    checks = compare(evaluation(0.1583), evaluation(0.16), None, -1_000.0)
    assert "ndcg_at_10 against champion" in [check.metric for check in checks if not check.passed]


def test_the_price_of_latency_is_a_parameter() -> None:
    free = compare(evaluation(0.16), evaluation(0.16), GateParams(sales_lost_per_100_ms=0), 10_000.0)
    assert all(check.passed for check in free)
    dear = compare(evaluation(0.16), evaluation(0.16), GateParams(sales_lost_per_100_ms=0.1), 20.0)
    assert dear[-1].got == pytest.approx(0.16 * 0.98)  # 20 ms cost 2 %
    assert not dear[-1].passed


def test_an_unmeasured_latency_stops_no_promotion() -> None:
    checks = compare(evaluation(0.16), evaluation(0.16))
    assert all(check.passed for check in checks)
    assert checks[-1].metric == "ndcg_at_10 against champion"
    assert checks[-1].reason.endswith("its latency beside the champion's was not measured")


def test_without_a_champion_there_is_nothing_to_be_slower_than() -> None:
    assert not [check for check in compare(evaluation(), None, None, 1_000.0) if "champion" in check.metric]
