"""Sessions worked out by hand: the basket of an answer, and the shown items in it."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from monitoring.sessions import ANSWERED_S, _keys, make_sessions
from serving.prediction_log import RECORD_SCHEMA

NOON = pd.Timestamp("2024-01-01 12:00", tz="UTC")
UNTIL = NOON + pd.Timedelta(days=1)


def _at(minutes: float) -> pd.Timestamp:
    return NOON + pd.Timedelta(minutes=minutes)


def _answers(*rows: tuple[str | None, float, list[str]], rung: str = "full") -> pa.Table:
    log: dict[str, Any] = {name: [None] * len(rows) for name in RECORD_SCHEMA.names}
    log |= {
        "user_id": [user for user, _, _ in rows],
        "at": [_at(minutes) for _, minutes, _ in rows],
        "answered_at": [_at(minutes) for _, minutes, _ in rows],
        "item_ids": [items for _, _, items in rows],
        "rung": [rung] * len(rows),
        "stage_ms": [[("ranking", 2.0), ("features", 1.0), ("total", 3.0)]] * len(rows),
    }
    return pa.table(log, schema=RECORD_SCHEMA)


def _purchases(*rows: tuple[str, str, str, float, float]) -> pd.DataFrame:
    lines = pd.DataFrame(rows, columns=["user_id", "basket_id", "item_id", "minutes", "price"])
    at = NOON + pd.to_timedelta(lines.pop("minutes").astype(float), unit="min")
    return lines.assign(at=at, quantity=2)


def test_answers_before_one_payment_are_one_session_and_each_shown_item_counts_once() -> None:
    answers = _answers(("ann", 0, ["milk", "tea"]), ("ann", 2, ["milk", "jam"]))
    purchases = _purchases(("ann", "b1", "milk", 5, 1.5), ("ann", "b1", "bread", 5, 3.0))
    (session,) = make_sessions(answers, purchases, UNTIL).to_dict("records")
    assert (session["answers"], session["shown"], session["accepted"]) == (2, 3, 1)
    assert session["accepted_value"] == 3.0  # two units of milk
    assert session["basket_value"] == 9.0
    assert session["wait_ms"] == 3.0
    assert session["paid"]
    assert session["complete"]


def test_the_wait_of_a_fallback_holds_what_was_tried_before() -> None:
    full, fallback = (
        [("ranking", 2.0), ("features", 1.0), ("total", 3.0)],
        [("fallback", 0.5), ("total", 41.0)],
    )
    answers = _answers(("ann", 0, ["milk"]), ("bob", 0, ["milk"]))
    stages = pa.array([full, fallback], RECORD_SCHEMA.field("stage_ms").type)
    answers = answers.set_column(RECORD_SCHEMA.get_field_index("stage_ms"), "stage_ms", stages)
    sessions = make_sessions(answers, _purchases(("ann", "b1", "milk", 5, 1.5)), UNTIL)
    assert sessions["wait_ms"].tolist() == [3.0, 41.0]


def test_a_payment_or_a_pause_of_half_an_hour_ends_a_session() -> None:
    answers = _answers(("ann", 0, ["milk"]), ("ann", 10, ["milk"]), ("ann", 50, ["milk"]))
    purchases = _purchases(("ann", "b1", "milk", 5, 1.0))
    sessions = make_sessions(answers, purchases, UNTIL)
    assert sessions["accepted"].tolist() == [1, 0, 0]
    assert sessions["paid"].tolist() == [True, False, False]


def test_a_payment_after_the_window_and_one_of_another_shopper_belong_to_no_answer() -> None:
    answers = _answers(("ann", 0, ["milk"]), ("bob", 0, ["milk"]))
    purchases = _purchases(("ann", "b1", "milk", 31, 1.0), ("cem", "b2", "milk", 1, 1.0))
    sessions = make_sessions(answers, purchases, UNTIL)
    assert sessions["paid"].tolist() == [False, False]
    assert sessions["accepted"].tolist() == [0, 0]


def test_a_purchase_before_the_answer_makes_an_item_a_repeat() -> None:
    answers = _answers(("ann", 0, ["milk", "tea"]))
    purchases = _purchases(
        ("ann", "b0", "milk", -600, 1.0), ("ann", "b1", "milk", 1, 1.0), ("ann", "b1", "tea", 1, 1.0)
    )
    (session,) = make_sessions(answers, purchases, UNTIL).to_dict("records")
    assert (session["accepted"], session["accepted_new"]) == (2, 1)


def test_a_session_is_complete_when_its_window_is_over() -> None:
    answers = _answers(("ann", 0, ["milk"]), ("bob", 40, ["milk"]))
    sessions = make_sessions(answers, _purchases(("ann", "b1", "milk", 1, 1.0)), _at(60))
    assert sessions["complete"].tolist() == [True, False]


def test_each_of_many_shoppers_has_keys_of_their_own() -> None:
    users, times = pd.Index(np.arange(2**22 + 1)), pd.Series([NOON, NOON + pd.Timedelta(days=63)])
    keys = _keys(users, pd.Series([0, 2**22, 0]), pd.Series([NOON, NOON, times[1]]), times)
    assert len(set(keys)) == 3
    assert keys[1] - keys[2] > ANSWERED_S * 1_000, "another shopper's answer is further away than a pause"


def test_answers_without_a_shopper_or_without_items_do_no_harm() -> None:
    answers = _answers((None, 0, ["milk"]), ("ann", 0, []))
    (session,) = make_sessions(answers, _purchases(("ann", "b1", "milk", 1, 1.0)), UNTIL).to_dict("records")
    assert (session["shown"], session["accepted"], session["paid"]) == (0, 0, True)


@pytest.mark.parametrize("answers", [_answers(), _answers((None, 0, ["milk"]))])
def test_no_sessions_are_no_error(answers: pa.Table) -> None:
    assert len(make_sessions(answers, _purchases(("ann", "b1", "milk", 1, 1.0)), UNTIL)) == 0
    assert len(make_sessions(answers, _purchases(), UNTIL)) == 0


def test_margin_is_value_less_cost_where_cost_is_known() -> None:
    answers = _answers(("ann", 0, ["milk", "tea"]), ("bob", 0, ["tea"]))
    purchases = _purchases(
        ("ann", "b1", "milk", 1, 1.5), ("ann", "b1", "tea", 1, 4.0), ("bob", "b2", "tea", 1, 4.0)
    )
    sessions = make_sessions(answers, purchases, UNTIL, pd.Series({"milk": 1.0}))
    assert sessions["accepted_margin"].tolist()[0] == 1.0  # 2 x (1.5 - 1.0); the cost of tea is unknown
    assert sessions["accepted_value"].tolist() == [11.0, 8.0]
