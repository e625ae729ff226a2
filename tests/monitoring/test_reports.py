from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from monitoring.drift import compare
from monitoring.reports import Measured, evidently_psi, write_report
from monitoring.verdict import judge
from monitoring.windows import TablePair

SCRIPT = "</script><script>alert('x')</script>"


def tables() -> list[TablePair]:
    rng = np.random.default_rng(0)

    def frame(rows: int, shift: float) -> pd.DataFrame:
        return pd.DataFrame(
            {
                "normal": rng.normal(shift, size=rows).astype(np.float32),
                "count": rng.poisson(2 + shift, rows),
                "spend": np.where(rng.random(rows) < 0.1, np.nan, rng.lognormal(shift, 2, rows)),
                "constant": 1.0 + shift,
                "category": rng.choice([f"c{n}" for n in range(300)], rows, p=weights(shift)),
                SCRIPT: rng.choice([SCRIPT, "fine"], rows),
            }
        )

    # Different lengths on purpose: Evidently gets all columns in one frame.
    small = pd.DataFrame({"store": ["a", "b"] * 150})
    return [
        TablePair(frame(3_000, 0.3), frame(9_000, 0)),
        TablePair(small.assign(store=lambda f: f["store"].replace("a", "new")), small),
    ]


def weights(shift: float) -> np.ndarray:
    raw = 1 / np.arange(3, 303) ** (1 + shift)
    return raw / raw.sum()


@pytest.fixture(scope="module")
def measured() -> Measured:
    return evidently_psi([c.histogram for c in compare(tables()) if c.histogram is not None])


def verdict() -> dict[str, Any]:
    return judge(compare(tables())).to_dict()


@pytest.mark.slow
def test_evidently_and_our_own_psi_agree(measured: Measured) -> None:
    own = {c.row.name: c.histogram.psi() for c in compare(tables()) if c.histogram is not None}
    assert measured.psi.keys() == own.keys()
    assert min(own.values()) < 0.01 < max(own.values())
    for name, psi in own.items():
        assert measured.psi[name] == pytest.approx(psi, rel=1e-9, abs=1e-12), name


@pytest.mark.slow
def test_the_page_has_the_verdict_on_top_and_charts_below_that_need_no_network(
    measured: Measured, tmp_path: Path
) -> None:
    write_report(tmp_path / "reports" / "report.html", verdict(), measured.charts)
    page = (tmp_path / "reports" / "report.html").read_text()
    assert page.index("<h1") < page.index("nearest to their alarm lines") < page.index("all 7 columns")
    assert len(page) > 1_000_000  # plotly is inlined
    assert '<script src="http' not in page
    assert SCRIPT not in page, "HTML in the data does not run"
    assert "alert('x')" in page


def test_a_column_that_was_not_compared_has_dashes(tmp_path: Path) -> None:
    gone = judge(compare([TablePair(tables()[0].current.drop(columns="count"), tables()[0].reference)]))
    write_report(tmp_path / "report.html", gone.to_dict())
    page = (tmp_path / "report.html").read_text()
    assert "schema change" in page
    assert "<td>–</td>" in page
    assert "the column is gone" in page
