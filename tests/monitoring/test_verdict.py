import json
from dataclasses import replace

import numpy as np
import pytest

from monitoring.psi import Histogram
from monitoring.verdict import RULES, SPREADS_ALARM, ColumnDrift, ColumnRule, Comparison, DriftVerdict, judge
from monitoring.windows import Window

ROW = ColumnDrift("category", "ok", True, "", 900, 900, 0.0, 0.0)
SAME = np.array([50, 50])


def comparison(
    name: str = "category", noise: tuple[float, float] = (0.01, 0.001), **row: object
) -> Comparison:
    rule = RULES.get(name, ColumnRule())
    histogram = Histogram(name, ("a", "b"), SAME, SAME)
    return Comparison(replace(ROW, name=name, pages=rule.pages, **row), histogram, noise, rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("psi", "column", "status"),
    [(0.02, "ok", "ok"), (0.07, "warn", "warn"), (0.0999, "warn", "warn"), (0.1, "alarm", "drifted")],
)
def test_the_lines_stand_above_the_noise(psi: float, column: str, status: str) -> None:
    verdict = judge([comparison()], {"category": psi})
    assert (verdict.column("category").status, verdict.status) == (column, status)
    assert (verdict.columns[0].warn_at, verdict.columns[0].alarm_at) == (0.06, 0.1)


def test_a_wide_spread_lifts_the_lines() -> None:
    verdict = judge([comparison(noise=(0.05, 0.03))], {"category": 0.2})
    assert verdict.columns[0].alarm_at == pytest.approx(0.05 + SPREADS_ALARM * 0.03)
    assert verdict.status == "warn"


def test_a_column_that_is_only_shown_never_pages() -> None:
    verdict = judge([comparison("hour")], {"hour": 1.07})
    assert (verdict.column("hour").status, verdict.status, verdict.failed) == ("alarm", "warn", False)
    assert "shown only" in verdict.reason


def test_lost_values_are_a_separate_signal() -> None:
    some = judge([comparison(missing_reference=0.02, missing_current=0.08)], {"category": 0.0})
    assert (some.status, some.reason) == ("warn", "category: rows without a value: 2.0% -> 8.0%")
    many = judge([comparison(missing_reference=0.02, missing_current=0.4)], {"category": 0.0})
    assert many.status == "drifted"
    assert judge([comparison(missing_reference=0.4)], {"category": 0.0}).status == "ok"


def test_changed_columns_come_before_drift_and_both_are_named() -> None:
    gone = Comparison(replace(ROW, name="price", status="schema_change", note="the column is gone"))
    verdict = judge([comparison(), gone], {"category": 0.5})
    assert (verdict.status, verdict.failed) == ("schema_change", True)
    assert verdict.reason.startswith("price: the column is gone; category PSI 0.500")


def test_too_little_data_is_no_verdict_about_drift() -> None:
    few = Comparison(replace(ROW, status="insufficient_data", note="3 baskets"))
    assert (judge([few]).status, judge([few]).reason) == ("insufficient_data", "3 baskets")
    assert judge([few, comparison("hour")]).status == "ok"  # one thin column does not hide the others
    assert judge([]).status == "insufficient_data"


def test_the_most_urgent_column_comes_first_and_is_named_with_its_moved_bins() -> None:
    moved = replace(comparison(), histogram=Histogram("category", ("pies", "milk"), np.array([30, 70]), SAME))
    verdict = judge(
        [comparison("hour"), comparison("item_price"), moved],
        {"hour": 2, "item_price": 0.07, "category": 0.17},
    )
    assert [column.name for column in verdict.columns] == ["category", "hour", "item_price"]
    assert verdict.reason.startswith(
        "category PSI 0.170 (alarm line 0.100, noise 0.010): share of 'pies' 50.00% -> 30.00%; "
    )


def test_a_verdict_is_json() -> None:
    verdict = judge([comparison(), Comparison(replace(ROW, name="x", status="schema_change", note="new"))])
    read = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert read["window"] == {"since": None, "until": None}
    assert {"name", "psi", "noise_floor", "warn_at", "alarm_at", "missing_current", "n_current"} <= set(
        read["columns"][0]
    )
    assert DriftVerdict("ok", "", "", Window(), Window(), ()).to_dict()["columns"] == []
