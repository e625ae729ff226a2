"""Answers and faults at known times -> counts, times and recoveries computed by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from pipelines.bench.load.connections import OK, UNANSWERED
from pipelines.bench.load.generator import Load
from pipelines.drills.outcome import (
    CLIENT,
    RAW,
    WHOLE,
    Answer,
    Fault,
    answers_of,
    outcome_of,
    recovery_s,
    tally,
    told_s,
)
from serving.client.client import SOURCE


def document(scores: Sequence[float] = (0.9, 0.5), **changed: Any) -> dict[str, Any]:
    """A full answer; with a `reason` it is degraded."""
    items = [
        {"item_id": f"item-{n}", "score": score, "source": changed.get("source", "history")}
        for n, score in enumerate(scores)
    ]
    reason = changed.get("reason")
    return {
        "items": changed.get("items", items),
        "rung": changed.get("rung", "full"),
        "degraded": reason is not None,
        "degraded_reason": changed.get("degraded_reason", reason),
        "bundle_id": changed.get("bundle_id", "b1"),
        "stage_ms": {"features": changed.get("features_ms", 0.5)},
    }


def answer(due: float, ms: float = 4.0, question: int = 0, ok: bool = True, **changed: Any) -> Answer:
    return Answer(question, due, ms, changed.pop("took_ms", ms), ok, document(**changed) if ok else {})


FAULT = Fault("killed", 10.0, 19.0, 20.0)


def test_answers_keep_their_request_time_and_content() -> None:
    client, raw = document(), {"predictions": [document(reason="features_unavailable")]}
    load = Load(
        due_s=np.array([0.5, 1.0, 1.5]),
        client_ms=np.array([4.0, 6.0, 900.0]),
        late_ms=np.array([1.0, 0.0, 0.0]),
        status=np.array([OK, OK, UNANSWERED]),
        degraded=np.zeros(3, bool),
        answers=[orjson.dumps(client), orjson.dumps(raw), b""],
        began_s=100.0,
    )
    first, second, third = answers_of(load, 2)
    assert (first.question, second.question, third.question) == (0, 1, 0)
    assert (first.due, first.ms, first.took_ms) == (100.5, 4.0, 3.0)
    assert first.done == pytest.approx(100.504)
    assert first.whole
    assert not second.whole
    assert second.labelled
    assert not third.status_ok
    assert not third.whole


@pytest.mark.parametrize(
    ("changed", "labelled"),
    [
        ({}, True),
        ({"reason": "overloaded", "rung": "popular"}, True),
        ({"degraded_reason": "nothing_left", "rung": "empty"}, True),
        ({"rung": "popular"}, False),
        ({"source": SOURCE, "bundle_id": ""}, False),
        ({"source": SOURCE, "bundle_id": "", "reason": "connection_failed"}, True),
        ({"reason": "", "rung": "popular"}, False),
    ],
)
def test_a_degraded_answer_needs_a_label_and_a_reason(changed: dict[str, Any], labelled: bool) -> None:
    assert answer(0.0, **changed).labelled is labelled
    assert tally([answer(0.0, **changed)], 50.0)["unlabelled"] == int(not labelled)


def test_a_different_answer_without_a_label_counts_as_unlabelled() -> None:
    expected = {0: answer(0.0), 1: answer(0.0, question=1)}
    same, moved = answer(1.0), answer(1.0, scores=(0.9, 0.51))
    others = answer(1.0, question=1, items=[{"item_id": "item-9", "score": 0.9, "source": "popular"}])
    told = answer(1.0, scores=(0.1,), reason="features_unavailable")
    found = tally([same, moved, others, told], 50.0, expected)
    assert found["unlabelled"] == 2
    assert found["moved"] == pytest.approx(0.01), "other items are no distance"


def test_a_list_that_cannot_be_shown_is_counted() -> None:
    twice = [{"item_id": "a", "score": 0.5, "source": "popular"}] * 2
    endless = [{"item_id": "a", "score": float("nan"), "source": "popular"}]
    assert tally([answer(0.0, items=twice), answer(0.0, items=endless), answer(0.0)], 50.0)["invalid"] == 2


def test_lateness_counts_from_the_send_time_not_from_the_due_time() -> None:
    answers = [answer(0.0, ms=80.0, took_ms=54.0), answer(0.0, ms=56.0, took_ms=56.0), answer(0.0, ok=False)]
    found = tally(answers, 50.0)
    assert (found["requests"], found["failed"], found["late"]) == (3, 1, 1)
    assert found["max_ms"] == 80.0


def test_percentiles_are_values_that_were_measured() -> None:
    found = tally([answer(0.0, ms=float(ms)) for ms in range(1, 101)], 1_000.0)
    assert (found["p50_ms"], found["p95_ms"], found["p99_ms"], found["max_ms"]) == (51.0, 96.0, 100.0, 100.0)
    assert tally([], 50.0)["p99_ms"] is None


def test_each_phase_has_the_answers_in_flight_during_it() -> None:
    answers = [
        answer(5.0),  # before
        answer(9.99, ms=30.0, reason="features_unavailable"),  # sent before the fault, answered during it
        answer(15.0, reason="features_unavailable"),
        answer(16.0),  # a full answer during the fault
        answer(19.99, ms=30.0),  # during: it was sent before the fault ended, while the repair was running
        *(answer(20.5 + n / 10) for n in range(WHOLE)),
        answer(29.999, ms=50.0),  # its cause is unknown
    ]
    outcome = outcome_of({CLIENT: answers, RAW: []}, [FAULT], 30.0, 50.0)
    counts = [outcome[phase][CLIENT]["requests"] for phase in ("before", "during", "after", "all")]
    assert counts == [1, 4, WHOLE, len(answers)]
    assert outcome["during"][CLIENT]["reasons"] == {"features_unavailable": 2}
    assert outcome["recovery_s"] == pytest.approx(0.5)
    [row] = outcome["faults"]
    assert row["seconds"] == 10.0
    assert row["told_s"] == pytest.approx(6.0), "the last whole answer before it was mended"
    orjson.dumps(outcome)


def test_a_second_fault_begins_a_phase_of_its_own() -> None:
    faults = [FAULT, Fault("frozen", 30.0, 40.0, 40.0)]
    answers = [answer(5.0), answer(15.0), *(answer(20.0 + n) for n in range(WHOLE)), answer(35.0)]
    answers += [answer(40.0 + n / 10, reason="features_unavailable") for n in range(9)]
    outcome = outcome_of({CLIENT: answers, RAW: answers}, faults, 50.0, 50.0)
    assert [row["after"][CLIENT]["requests"] for row in outcome["faults"]] == [WHOLE, 9]
    assert outcome["faults"][0]["recovery_s"] == 0.0
    assert outcome["faults"][1]["recovery_s"] is None
    assert outcome["recovery_s"] is None, "one that never ends is not hidden by one that does"
    assert outcome["during"][RAW]["requests"] == 2


def test_recovery_is_the_first_of_enough_full_answers_in_a_row() -> None:
    bad = [answer(20.0 + n / 10, reason="overloaded") for n in range(3)]
    good = [answer(21.0 + n / 10) for n in range(WHOLE)]
    assert recovery_s([*bad, *good], 20.0) == pytest.approx(1.0)
    assert recovery_s([good[0], *bad, *good[1:]], 20.0) is None, "one good answer is no recovery"
    assert recovery_s(good, 21.0) == 0.0


def test_the_fault_is_reported_after_the_last_full_answer() -> None:
    answers = [answer(10.2), answer(10.7), answer(11.0, reason="features_unavailable")]
    assert told_s(answers, FAULT) == pytest.approx(0.7)
    assert told_s(answers[2:], FAULT) == 0.0


def test_all_the_time_of_a_fallback_counts_as_waiting_for_features() -> None:
    late = answer(0.0, reason="deadline_exceeded", rung="popular")
    late = Answer(0, 0.0, 60.0, 60.0, True, {**late.document, "stage_ms": {"fallback": 0.2, "total": 57.0}})
    found = tally([answer(0.0, features_ms=6.0), late], 50.0)
    assert found["features_max_ms"] == 57.0


def test_a_missing_answer_may_have_waited_until_the_callers_timeout() -> None:
    gave_up = answer(0.0, ms=53.0, took_ms=50.4, reason="deadline_exceeded", rung="popular", source=SOURCE)
    gave_up = replace(gave_up, document={**gave_up.document, "bundle_id": "", "stage_ms": {}})
    assert tally([answer(0.1, features_ms=6.0), gave_up], 50.0)["features_max_ms"] == 50.4
