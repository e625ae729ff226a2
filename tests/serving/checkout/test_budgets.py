"""Known stage times -> the budgets that follow them, and the requests that these admit."""

from collections.abc import Iterable

import numpy as np
import pytest

from serving.checkout.budgets import FIRST, QUICK, SCALE, UNSEEN_S, Budget, Budgets
from tests.serving.conftest import metric


def learnt(times_s: Iterable[float], candidates: int = 0, budget: Budget | None = None) -> Budget:
    budget = Budget("ranking") if budget is None else budget
    for time_s in times_s:
        budget.learn(float(time_s), 0.0, candidates)
    return budget


def test_a_stage_has_no_budget_before_enough_calls() -> None:
    assert learnt([9.0] * (FIRST - 1)).of() == 0
    assert learnt([9.0] * FIRST).of() == 9.0


def test_the_first_times_of_a_process_do_not_shape_the_budget() -> None:
    assert learnt([*[3.0] * (FIRST // 2 - 1), *[0.002] * (FIRST // 2 + 1)]).of() == 0.002


@pytest.mark.parametrize("candidates", [0, 50, 150, 500, 2_000])
def test_the_budget_is_the_95th_percentile(candidates: int) -> None:
    times = np.random.default_rng(candidates).lognormal(np.log(0.002), 0.5, 4_000)
    budget = learnt(times[:2_000], candidates)
    within = 0
    for time_s in times[2_000:]:
        within += time_s <= budget.of(candidates)
        learnt([time_s], candidates, budget)
    assert 0.91 < within / 2_000 < 0.97


def test_one_pause_counts_like_any_late_answer() -> None:
    budget = learnt([0.002] * 50)
    usual = budget.of()
    assert learnt([60.0], budget=budget).of() < 1.1 * usual


@pytest.mark.parametrize("candidates", [0, 150, 500])
def test_the_budget_follows_a_stage_that_slows_and_recovers(candidates: int) -> None:
    rng = np.random.default_rng(1)
    budget = learnt(rng.normal(0.002, 0.0002, 200), candidates)
    assert learnt(rng.normal(0.02, 0.002, 60), candidates, budget).of(candidates) > 0.018
    assert learnt(rng.normal(0.002, 0.0002, QUICK + 60), candidates, budget).of(candidates) < 0.003


def test_the_cost_per_candidate_is_learnt_from_varying_numbers() -> None:
    budget, rng = Budget("ranking"), np.random.default_rng(2)
    for candidates in rng.choice([50, 150, 300, 500], 4_000).tolist():
        budget.learn((0.001 + 4e-6 * candidates) * rng.uniform(0.95, 1.0), 0.0, candidates)
    for candidates in (50, 150, 300, 500):
        assert budget.of(candidates) == pytest.approx(0.001 + 4e-6 * candidates, rel=0.15)


def test_the_budget_limits_the_number_of_candidates() -> None:
    budget = learnt([0.005] * 100, SCALE)
    most = budget.most(0.002)
    assert 0 < most < SCALE
    assert budget.of(most) <= 0.002 < budget.of(most + 1)
    assert learnt([0.005] * 100).most(0.002) == 0, "it does not depend on them"


def test_a_budget_that_refuses_all_requests_decays_until_the_next_sample() -> None:
    budget, now = learnt([0.03] * 100), 0.0
    usual = budget.of()
    for _ in range(20):
        now += 2 * UNSEEN_S
        budget.believe_less(now)
    assert budget.of() < 0.02 * usual
    budget.learn(0.03, now)  # it was right all the time
    assert budget.of() == pytest.approx(usual, rel=0.1)
    for _ in range(20):
        now += 2 * UNSEEN_S
        budget.believe_less(now)
    budget.learn(0.0001, now)  # it was slow, and is quick now
    assert budget.of() < 0.02 * usual


def test_a_budget_that_decays_for_long_still_answers_and_learns() -> None:
    budget, now = learnt([0.03] * 100, SCALE), 0.0
    for _ in range(4_000):
        now += 2 * UNSEEN_S
        budget.believe_less(now)
    assert 0 < budget.of(SCALE) < 1e-4
    assert budget.most(-0.001) < 0
    budget.learn(0.03, now, SCALE)
    assert budget.of(SCALE) == pytest.approx(0.03, rel=0.2)


def test_a_budget_with_recent_samples_does_not_decay() -> None:
    budget, now = learnt([0.03] * 100), 0.0
    for _ in range(100):
        now += UNSEEN_S / 2
        budget.learn(0.03, now)
        budget.believe_less(now)
    assert budget.of() == pytest.approx(0.03, rel=0.15)


def all_learnt() -> Budgets:
    """Features 1 ms, retrieval 2, ranking 10 for 500 candidates, reranking 1."""
    budgets = Budgets()
    for _ in range(FIRST):
        budgets.features.learn(0.001, 0.0)
        budgets.retrieval.learn(0.002, 0.0)
        budgets.ranking.learn(0.010, 0.0, 500)
        budgets.reranking.learn(0.001, 0.0)
    return budgets


def test_without_samples_every_request_fits() -> None:
    assert Budgets().has_room(1e-9, 500, is_read=False)
    assert Budgets().most(1e-9, 500, 50, 0.0) == 500


def test_ranking_elsewhere_must_leave_its_margin() -> None:
    """A ranker that gives up before its budget is over would be taken for a quick one."""
    budgets = Budgets(margin_s=0.002)
    for left_s, most in ((0.0021, 500), (0.0019, 0)):
        assert budgets.has_room(left_s, 500, is_read=False) == bool(most)
        assert budgets.most(left_s, 500, 50, 0.0) == most


@pytest.mark.parametrize(
    ("left_s", "candidates", "is_read", "has_room"),
    [
        (0.0141, 500, False, True),
        (0.0139, 500, False, False),
        (0.0139, 500, True, True),
        (0.0051, 50, False, True),
        (0.0049, 50, False, False),
    ],
)
def test_an_answer_fits_if_all_its_stages_fit(
    left_s: float, candidates: int, is_read: bool, has_room: bool
) -> None:
    assert all_learnt().has_room(left_s, candidates, is_read) == has_room


@pytest.mark.parametrize(
    ("left_s", "most"), [(0.0111, 500), (0.00605, 252), (0.00205, 52), (0.0019, 0), (0.0, 0), (-1.0, 0)]
)
def test_the_time_left_decides_the_number_of_candidates(left_s: float, most: int) -> None:
    assert all_learnt().most(left_s, 500, 50, 0.0) == most


def test_few_candidates_are_ranked_all_or_not_at_all() -> None:
    assert all_learnt().most(0.0015, 20, 20, 0.0) == 20
    assert all_learnt().most(0.0013, 20, 20, 0.0) == 0
    assert all_learnt().most(0.0013, 0, 0, 0.0) == 0


def test_the_budget_of_each_stage_is_shown() -> None:
    budgets = all_learnt()
    budgets.retrieval.learn(0.002, 0.0)
    budgets.ranking.learn(0.010, 0.0, 500)
    for stage, expected in (("retrieval", 0.002), ("ranking", 0.010)):
        assert metric("reco_stage_budget_seconds", stage=stage) == pytest.approx(expected, rel=0.05)
