"""An outcome of known figures -> each goal is reached or missed accordingly."""

from typing import Any

import pytest

from pipelines.bench.load.goals import Goal
from pipelines.drills import goals
from pipelines.drills.catalogue import Drill
from pipelines.drills.outcome import CLIENT, RAW


def tally(**changed: Any) -> dict[str, Any]:
    names = ("requests", "failed", "degraded", "late", "unlabelled", "invalid", "from_client")
    return {
        **dict.fromkeys(names, 0),
        "requests": 100,
        "reasons": {},
        "bundles": ["b1"],
        "p50_ms": 3.0,
        "p95_ms": 7.0,
        "p99_ms": 8.0,
        "max_ms": 9.0,
        "features_max_ms": 6.0,
        "moved": 0.0,
        **changed,
    }


def phases(**changed: Any) -> dict[str, Any]:
    return {CLIENT: tally(**changed), RAW: tally()}


def outcome(**changed: Any) -> dict[str, Any]:
    during = changed.get("during", phases())
    fault = {"name": "broken", "seconds": 10.0, "during": during, "after": phases()}
    return {
        **{phase: phases() for phase in ("before", "during", "after", "all")},
        "faults": [{**fault, "told_s": 0.2, "recovery_s": 0.5}],
        "recovery_s": 0.5,
        "notes": {},
        **changed,
    }


def missed(found: dict[str, Any], raw_suffers: bool = False) -> list[str]:
    drill = Drill("any", "anything", {}, raw_suffers=raw_suffers)
    judged = [goal.judge(found) for goal in drill.goals()]
    return [goal["name"] for goal in judged if not goal["reached"]]


def test_a_drill_without_any_effect_reaches_all_goals() -> None:
    assert missed(outcome()) == []


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"all": phases(failed=1)}, "answers that failed at the client"),
        ({"all": phases(late=1)}, "answers later than the deadline + 5 ms"),
        ({"all": phases(unlabelled=1)}, "fallbacks that do not say so"),
        ({"all": phases(invalid=1)}, "lists that cannot be shown"),
        ({"all": phases(reasons={"preprocess_error": 1})}, "answers of a lower rung because of a bug"),
        ({"all": phases(reasons={"predict_error": 1})}, "answers of a lower rung because of a bug"),
        ({"all": phases(reasons={"postprocess_error": 1})}, "answers of a lower rung because of a bug"),
        ({"recovery_s": 3.1}, "until answers are whole again"),
        ({"recovery_s": None}, "until answers are whole again"),
    ],
)
def test_one_bad_answer_of_a_thousand_misses_the_goal(changed: dict[str, Any], name: str) -> None:
    assert missed(outcome(**changed)) == [name]


def test_raw_callers_need_labelled_fallbacks_unless_the_fault_hits_them() -> None:
    hurt = outcome(all={CLIENT: tally(), RAW: tally(unlabelled=3)})
    assert missed(hurt) == ["fallbacks that do not say so"]
    assert missed(hurt, raw_suffers=True) == []


def test_waiting_for_the_store_misses_its_goals() -> None:
    def reached(during: dict[str, Any], told_s: float = 0.2) -> list[bool]:
        found = outcome(during=during)
        found["faults"][0]["told_s"] = told_s
        return [goal.judge(found)["reached"] for goal in goals.store_goals("broken")]

    assert reached(phases(p99_ms=14.0)) == [True, True, True]
    assert reached(phases(features_max_ms=15.1)) == [False, True, True]
    assert reached(phases(p99_ms=14.1)) == [True, False, True]
    assert reached(phases(), told_s=1.1) == [True, True, False]


def test_shares_are_per_cent_of_the_requests() -> None:
    found = outcome(during={CLIENT: tally(degraded=3, from_client=1), RAW: tally(degraded=1, requests=300)})
    assert goals.share("degraded", "broken")(found) == pytest.approx(1.0)
    assert goals.share("degraded")(found) == pytest.approx(1.0)
    assert goals.share("degraded", streams=(CLIENT,))(found) == pytest.approx(3.0)
    assert goals.served(found) == pytest.approx(99.0)
    nobody = outcome(during={CLIENT: tally(requests=0), RAW: tally(requests=0)})
    assert goals.share("degraded", "broken")(nobody) is None
    assert goals.served(nobody) is None


def test_goodput_is_the_full_answers_of_both_callers_per_capacity() -> None:
    found = outcome(during={CLIENT: tally(degraded=20), RAW: tally(failed=30)})
    found["notes"] = {"capacity": 100.0, "good_per_s": 60.0}
    assert goals.goodput(found) == pytest.approx(100 * ((80 + 70) / 10.0 + 60.0) / 100.0)


def test_notes_are_read_by_name() -> None:
    found = outcome(notes={"back_s": [3.0, 4.0], "half": {"crowd": 9, "left": 2}, "swap_s": []})
    assert goals.most("back_s")(found) == 4.0
    assert goals.most("swap_s")(found) is None
    assert goals.count("back_s")(found) == 2.0
    assert goals.note("half", "left")(found) == 2.0
    assert goals.note("half", "unknown")(found) is None


def test_a_goal_without_a_figure_is_neither_reached_nor_missed() -> None:
    judged = Goal("seconds", "<=", 5, " s", goals.most("back_s")).judge(outcome())
    assert (judged["reached"], judged["goal"]) == (None, "<= 5 s")


def test_the_bundles_of_all_callers_are_counted() -> None:
    seen = {CLIENT: tally(bundles=["b1", "b2"]), RAW: tally(bundles=["b2", "b3"])}
    assert goals.bundles(outcome(all=seen)) == 3.0


def test_latencies_are_compared_with_those_before_not_with_the_aftermath() -> None:
    found = outcome(during=phases(p95_ms=10.5, p99_ms=12.0), after=phases(p95_ms=60.0, p99_ms=60.0))
    assert goals.times_before("broken")(found) == pytest.approx(1.5)
    assert goals.over_healthy("broken")(found) == pytest.approx(4.0)
    assert goals.of_fault("broken", "during", CLIENT, "p99_ms")(found) == 12.0


def test_answers_beyond_the_number_of_requests_are_counted_as_retries() -> None:
    found = outcome(
        all=phases(requests=150),
        before=phases(requests=50),
        notes={"more_answers": 110.0},
    )
    assert goals.asked_again(found) == pytest.approx(10.0)  # of 150 - 50 and 100 - 100
    fewer = outcome(all=phases(requests=150), before=phases(requests=50), notes={"more_answers": 90.0})
    assert goals.asked_again(fewer) == 0.0


def test_answers_are_counted_by_their_reason() -> None:
    found = outcome(during=phases(reasons={"features_invalid": 3, "overloaded": 2}))
    assert goals.told("during", "features_invalid")(found) == 3.0
    assert goals.told("during", "overloaded", "features_invalid")(found) == 5.0
    assert goals.told("all", "features_invalid")(found) == 0.0


def test_a_page_that_is_missing_late_or_wrong_misses_its_goal() -> None:
    def judged(*pages: dict[str, Any]) -> dict[str, Any]:
        found = outcome(pages=pages)
        every = [goal.judge(found) for goal in Drill("any", "anything", {}, pages={"f": "A"}).goals(True)]
        return {goal["name"]: goal["reached"] for goal in every if "page" in goal["name"]}

    good = {"expected": "A", "paged_s": 44.0, "resolved_s": 200.0, "wrong": []}
    quiet: dict[str, Any] = {"expected": "", "paged_s": None, "resolved_s": None, "wrong": []}
    assert set(judged(good, quiet).values()) == {True}
    missing = judged(good, good | {"paged_s": None, "resolved_s": None})
    assert missing == {
        "until the right page": False,
        "until the page is resolved": False,
        "wrong pages": True,
    }
    assert judged(good | {"paged_s": 61.0})["until the right page"] is False
    assert judged(good, quiet | {"wrong": ["B"]})["wrong pages"] is False
    assert [goal.name for goal in Drill("any", "anything", {}).goals(True)][-2:] == [
        "until answers are whole again",
        "wrong pages",
    ]


def test_the_answers_of_one_shopper_are_a_share_of_its_requests() -> None:
    assert goals.computed_for_one(outcome(notes={"whole": 30, "asked": 120})) == pytest.approx(25.0)
    assert goals.computed_for_one(outcome(notes={"whole": 0, "asked": 0})) is None
