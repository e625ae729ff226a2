"""The list of drills is complete, and each has a figure for its proof."""

import pytest

from monitoring.alerting import read_slo, rules
from pipelines.drills.catalogue import DRILLS, Drill, choose_drills

WANTED = {
    *("store-killed", "store-frozen", "store-slow", "half-answers", "ranker-killed", "worker-killed"),
    *("corrupt-bundle", "stale-features", "cold-herd", "overload", "poisoned-row", "slow-clients"),
    *("bundle-swap", "disk-full", "clock-jump", "service-gone", "greedy-shopper", "processors-taken"),
    "workers-killed",
}


def test_every_drill_exists_once() -> None:
    names = [drill.name for drill in DRILLS]
    assert len(names) == len(set(names))
    assert set(names) == WANTED


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_each_drill_has_a_fault_and_goals_of_its_own(drill: Drill) -> None:
    assert drill.breaks
    assert drill.own_goals
    goals = [goal.name for goal in drill.goals()]
    assert len(goals) == len(set(goals)), "a figure that is asked twice"
    told = drill.to_dict()
    assert [figure["name"] for figure in told["figures"]] == goals
    assert told["faults"] == list(drill.breaks)


def test_each_page_of_a_drill_is_of_its_faults_and_of_an_alert_that_pages() -> None:
    pages = {
        alert["alert"]
        for group in rules(read_slo())["groups"]
        for alert in group["rules"]
        if "alert" in alert
    }
    assert {alert for drill in DRILLS for alert in drill.pages.values()} <= pages
    for drill in DRILLS:
        assert drill.pages.keys() <= drill.breaks.keys()
        assert ("wrong pages" in {goal.name for goal in drill.goals(with_alerts=True)}) is True


def test_drills_are_chosen_by_name_in_their_own_order() -> None:
    assert [drill.name for drill in choose_drills(["overload", "store-killed"])] == [
        "store-killed",
        "overload",
    ]
    assert choose_drills(["all"]) == DRILLS
    assert choose_drills(["overload", "all"]) == DRILLS


def test_an_unknown_name_gets_the_closest_name_as_a_hint() -> None:
    with pytest.raises(ValueError, match=r"no drill 'store-frosen'.*store-frozen"):
        choose_drills(["store-frosen"])
