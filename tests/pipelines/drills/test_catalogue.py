"""The list of drills is complete; some of them, without the effect of their fault, miss a figure."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from monitoring.alerting import read_slo, rules
from pipelines.drills.catalogue import DRILLS, Drill, choose_drills
from pipelines.drills.outcome import CLIENT, RAW


def test_every_name_is_of_one_drill() -> None:
    assert len({drill.name for drill in DRILLS}) == len(DRILLS)


@pytest.mark.parametrize("drill", DRILLS, ids=lambda drill: drill.name)
def test_each_drill_has_a_fault_and_goals_of_its_own(drill: Drill) -> None:
    assert drill.breaks
    assert drill.own_goals
    goals = [goal.name for goal in drill.goals()]
    assert len(goals) == len(set(goals)), "a figure that is asked twice"
    told = drill.to_dict()
    assert [figure["name"] for figure in told["figures"]] == goals
    assert told["faults"] == list(drill.breaks)


PUBLISHED = json.loads((Path(__file__).parents[3] / "docs" / "figures" / "drills.json").read_bytes())[
    "drills"
]


def outcome_of(drill: str, fault: str, found: Any, *note: str) -> dict[str, Any]:
    """Return a published outcome with another note, or with these reasons in both streams of a fault."""
    outcome = copy.deepcopy(PUBLISHED[drill])
    if note:
        place = outcome["notes"]
        for name in note[:-1]:
            place = place.setdefault(name, {})
        place[note[-1]] = found
        return outcome
    [row] = [row for row in outcome["faults"] if row["name"] == fault]
    for phase in (row["during"], outcome["during"], outcome["all"]):
        for stream in (CLIENT, RAW):
            phase[stream]["degraded"] = sum(found.values())
            phase[stream]["reasons"] = found
    row["told_s"] = 0.1 if found else row["seconds"]
    return outcome


@pytest.mark.parametrize(
    ("drill", "fault", "held", "idle", "note"),
    [
        ("poisoned-row", "a sixth of each kind", {"features_invalid": 90}, {}, ()),
        ("store-slow", "one in 50 after 200 ms", {"features_unavailable": 7}, {}, ()),
        ("clock-jump", "400 days on", {"stale_features": 190}, {}, ()),
        ("clock-jump", "an hour back", -3_600.4, -0.4, ("clock_s", "-3600")),
        ("half-answers", "reset", 40, 0, ("opened_again",)),
        ("processors-taken", "two for each", 71.0, 0.0, ("taken",)),
        ("cold-herd", "for one list", 1, 0, ("one_list", "computed")),
        ("cold-herd", "for many lists", 250, 0, ("many_lists", "computed")),
        ("service-gone", "no such name", 356, 0, ("nameless", "degraded")),
    ],
)
def test_a_fault_that_did_nothing_or_too_much_misses_a_figure(
    drill: str, fault: str, held: Any, idle: Any, note: tuple[str, ...]
) -> None:
    [one] = choose_drills([drill])
    assert fault in one.breaks
    with_fault, without = (
        {
            goal.name
            for goal in one.goals()
            if not goal.judge(outcome_of(drill, fault, found, *note))["reached"]
        }
        for found in (held, idle)
    )
    assert len(without - with_fault) == 1
    assert with_fault < without


def test_each_page_of_a_drill_is_of_its_faults_and_of_an_alert_that_pages() -> None:
    ours = [rule for group in rules(read_slo())["groups"] for rule in group["rules"]]
    pages = {rule["alert"] for rule in ours if "alert" in rule}
    assert {alert for drill in DRILLS for alert in drill.pages.values()} <= pages
    for drill in DRILLS:
        assert drill.pages.keys() <= drill.breaks.keys()


def test_drills_are_chosen_by_name_in_their_own_order() -> None:
    chosen = choose_drills(["overload", "store-killed"])
    assert [drill.name for drill in chosen] == ["store-killed", "overload"]
    assert choose_drills(["all"]) == DRILLS
    assert choose_drills(["overload", "all"]) == DRILLS
