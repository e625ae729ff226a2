"""Sessions -> the earnings of recommendations, the loss by degraded answers, and figures that dropped.

Revenue at risk of an hour is the sum over rungs of (answers an hour at this rung) x (loss of an answer). The
loss is the accepted value for each answer of the rung `full`, less that of this rung, both from complete
sessions. It compares shoppers who met the rung with others: a rung that strangers meet more often looks more
expensive than it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from feature_repo.events import read_dataset
from monitoring.drift import bundles_alike, served_bundle
from monitoring.reports import show_numbers
from monitoring.sessions import make_sessions
from monitoring.verdict import DriftVerdict, Status
from monitoring.windows import DAY, Window, known_until
from serving.prediction_log import read_log
from serving.schemas import RUNGS

CUTS = ("rung", "bundle_id", "store_id", "profile")
LEAST_SESSIONS = 200  # complete ones; with fewer, a figure is chance
SALES_LOST_PER_100_MS = 0.01
KPI_HOURS = 24.0  # the window whose figures are compared with the weeks before
WEEKS_BEFORE = 8  # a drop is measured against the same hours of so many weeks
DROP = 0.05  # a smaller drop needs no action
T_LIMIT = 4.785  # Student's t, 7 degrees of freedom: a figure seems to drop by chance once in 1,000 windows
FIGURES = {
    "conversion": ("accepted_any", "sessions"),
    "acceptance": ("accepted", "shown"),
    "revenue_per_session": ("accepted_value", "sessions"),
    "basket_value": ("basket_value", "paid"),
    "ndcg": ("gain", "best_gain"),
    "calibration": ("hits", "expected"),
}
# Of one bundle: they fall where shoppers answer differently to the same requests.
CONCEPT = ("ndcg", "calibration")
EARNED = tuple(name for name in FIGURES if name not in CONCEPT)


@dataclass(frozen=True)
class Kpi:
    """The figures of some sessions; money in the shop's currency.

    `completeness` is the share of sessions whose attribution window is over. All others are of those:
    `conversion` is the share with an accepted item, `acceptance` the accepted share of the shown items.
    `revenue_per_session` and `margin_per_session` are of accepted items, `basket_value` of paid baskets.
    `new_ratio` is the share of accepted items that the shopper never bought before, `wait_ms` the mean time
    of an answer. A figure is None without data.
    """

    sessions: int
    answers: int
    completeness: float
    conversion: float | None
    acceptance: float | None
    revenue_per_session: float | None
    revenue_error: float | None  # standard error of revenue_per_session
    margin_per_session: float | None
    basket_value: float | None
    new_ratio: float | None
    wait_ms: float | None


@dataclass(frozen=True)
class Drop:
    """One figure of a window against the same hours of the weeks before."""

    figure: str
    now: float
    before: float
    change: float  # relative
    margin: float  # half of the width of the interval of `change`
    dropped: bool


@dataclass(frozen=True)
class AtRisk:
    """The price of the present degradation in an hour; `at_most` names rungs too rare to measure."""

    degraded: float  # an hour, in the shop's currency
    waiting: float  # an hour: 1 % of the accepted value for each 100 ms
    loss_per_answer: dict[str, float]
    at_most: tuple[str, ...]


def summarise(sessions: pd.DataFrame) -> Kpi:
    """Return the figures of sessions, see `monitoring.sessions`."""
    done = sessions[sessions["complete"]]
    n, value = len(done), done["accepted_value"].to_numpy()
    return Kpi(
        sessions=n,
        answers=int(done["answers"].sum()),
        completeness=round(n / len(sessions), 4) if len(sessions) else 0.0,
        conversion=_ratio(np.count_nonzero(done["accepted"]), n),
        acceptance=_ratio(done["accepted"].sum(), done["shown"].sum()),
        revenue_per_session=_ratio(value.sum(), n),
        revenue_error=float(value.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        margin_per_session=_ratio(done["accepted_margin"].sum(min_count=1), n),
        basket_value=_ratio(done["basket_value"].sum(), np.count_nonzero(done["paid"])),
        new_ratio=_ratio(done["accepted_new"].sum(), done["accepted"].sum()),
        wait_ms=_ratio((done["wait_ms"] * done["answers"]).sum(), done["answers"].sum()),
    )


def summarise_by(sessions: pd.DataFrame, cut: str) -> dict[str, Kpi]:
    """Return the figures of each value of a column, the most frequent first; "" stands for a missing one."""
    groups = {str(name): summarise(rows) for name, rows in sessions.fillna({cut: ""}).groupby(cut)}
    return dict(sorted(groups.items(), key=lambda group: -group[1].sessions))


def exposure(shown: pd.Series, sold: pd.Series) -> dict[str, float]:
    """Return how many of the items that were shown or sold are shown, and how evenly.

    Args:
        shown: the item of each shown place.
        sold: the item of each purchase.

    Returns:
        `coverage`, the share of the items shown at least once, and `top_tenth`, the share of all places that
        the most shown tenth of the items takes.
    """
    counts = shown.value_counts()
    items = len(counts.index.union(sold.unique()))
    places, top = counts.sum(), counts.iloc[: max(1, items // 10)].sum()
    return {"coverage": len(counts) / max(items, 1), "top_tenth": float(top / places) if places else 0.0}


def loss_per_answer(sessions: pd.DataFrame) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return what an answer of each rung loses against a full one, and the rungs too rare to measure.

    The loss of a rung with fewer than LEAST_SESSIONS sessions is the whole value of a full answer: at most
    that. Without enough full sessions nothing is known, and the losses are empty.
    """
    by_rung = summarise_by(sessions, "rung")
    value = {
        rung: kpi.revenue_per_session * kpi.sessions / kpi.answers
        for rung, kpi in by_rung.items()
        if kpi.revenue_per_session is not None and kpi.sessions >= LEAST_SESSIONS
    }
    if "full" not in value:
        return {}, RUNGS
    full = value["full"]
    rare = tuple(rung for rung in RUNGS if rung not in value)
    return {rung: max(0.0, full - value.get(rung, 0.0)) for rung in RUNGS}, rare


def revenue_at_risk(
    sessions: pd.DataFrame, answers_per_hour: Mapping[str, float], wait_ms: float = 0.0
) -> AtRisk:
    """Return the price of the present degradation in an hour.

    Args:
        sessions: of a past long enough to know each rung, some weeks.
        answers_per_hour: the present answers by rung.
        wait_ms: how long an answer takes now.
    """
    loss, rare = loss_per_answer(sessions)
    degraded = sum(rate * loss.get(rung, 0.0) for rung, rate in answers_per_hour.items())
    kpi = summarise(sessions[sessions["rung"] == "full"])
    full = (kpi.revenue_per_session or 0.0) * kpi.sessions / max(kpi.answers, 1)
    waiting = SALES_LOST_PER_100_MS * wait_ms / 100 * full * sum(answers_per_hour.values())
    return AtRisk(degraded, waiting, loss, tuple(r for r in rare if answers_per_hour.get(r, 0) > 0))


def cost_since(
    sessions: pd.DataFrame, since: pd.Timestamp, answers_per_hour: Mapping[str, float]
) -> float | None:
    """Return the accepted value that full answers lose in an hour against those before a moment.

    The formula of `revenue_at_risk`, with time in place of the rung. None: too few sessions on a side.
    """
    full = sessions[sessions["complete"] & (sessions["rung"] == "full")]
    sides = [full[full["at"] < since], full[full["at"] >= since]]
    if min(map(len, sides)) < LEAST_SESSIONS:
        return None
    before, now = (float(side["accepted_value"].sum() / side["answers"].sum()) for side in sides)
    return max(0.0, before - now) * answers_per_hour.get("full", 0.0)


def concept_drift(drops: list[Drop], window: Window) -> DriftVerdict | None:
    """Return the verdict on how well lists fit the baskets that followed; None: too few sessions to know.

    Shoppers may answer differently to the same requests. No column of the log moves then, but these figures
    fall below the same hours of the weeks before.
    """
    concept_drops = [drop for drop in drops if drop.figure in CONCEPT]
    if not concept_drops:
        return None
    said = "; ".join(
        f"{drop.figure} {drop.before:.3f} -> {drop.now:.3f} ({drop.change:+z.0%} ± {drop.margin:.0%})"
        for drop in concept_drops
    )
    status: Status = "drifted" if any(drop.dropped for drop in concept_drops) else "ok"
    compared = f"lists and the purchases that followed with those of the {WEEKS_BEFORE} weeks before"
    return DriftVerdict(status, said, compared, window, Window(), (), since=window.since)


def fit_drops(
    sessions: pd.DataFrame, until: pd.Timestamp, hours: float, alike: Collection[str] = ()
) -> list[Drop]:
    """Compare how well lists fit the baskets that followed; within the newest bundle, see `find_drops`.

    A new ranker scores on a scale of its own. Bundles in `alike` have one ranker, see `drift.bundles_alike`.
    """
    if not len(sessions):
        return []
    newest = sessions.loc[sessions["at"].idxmax(), "bundle_id"]
    own = sessions["bundle_id"].isin(alike if newest in alike else [newest])
    return find_drops(sessions[own], until, hours, CONCEPT)


def measure_labels(log_dir: str, dataset: Path, bundle: Path, numbers: Any) -> dict[str, Any]:
    """Look for concept drift in the last day, for a pipeline; return the verdict's status and reason.

    Args:
        log_dir: the prediction log; "" if no step can read it.
        dataset: the purchases that followed.
        bundle: the one that serves, or a home; those beside it with the same ranker are compared, too.
        numbers: KFP's artifact `Metrics`, gets the change of each figure.

    Raises:
        FileNotFoundError: the log that was named has no segment.
    """
    drops: list[Drop] = []
    why = "no log was named"
    if log_dir:
        if not list(Path(log_dir).glob("*.parquet")):
            raise FileNotFoundError(
                f"{log_dir} holds no segment of a prediction log: is the endpoint's volume mounted there?"
            )
        events = read_dataset(dataset).events
        bought = events[events["event_type"] == "purchase"]
        if bought.empty:
            show_numbers({}, numbers)
            return {"status": "insufficient_data", "reason": "labels: the data hold no purchase"}
        end = known_until(bought["at"])
        since = (end - timedelta(weeks=WEEKS_BEFORE + 1)).to_pydatetime()
        answers = read_log(Path(log_dir), since, features=False)
        sessions = make_sessions(answers, bought, end)
        last = sessions["at"].max()
        why = "no answer to a known shopper"
        if len(sessions) and end - last > DAY:
            why = f"the last session began at {last:%Y-%m-%d %H:%M}, purchases end at {end:%Y-%m-%d %H:%M}"
        elif len(sessions):
            alike, why = bundles_alike(served_bundle(bundle)), "too few sessions"
            drops = fit_drops(sessions, min(end, last), KPI_HOURS, alike)
    show_numbers({f"change.{drop.figure}": drop.change for drop in drops}, numbers)
    verdict = concept_drift(drops, Window())
    if verdict is None:
        return {"status": "insufficient_data", "reason": f"labels: {why}"}
    return {
        "status": verdict.status,
        "reason": f"labels of the day before {end:%Y-%m-%d %H:%M}: {verdict.reason}",
    }


def find_drops(
    sessions: pd.DataFrame, until: pd.Timestamp, hours: float, figures: Sequence[str] = EARNED
) -> list[Drop]:
    """Compare the last `hours` before `until` with the same hours of the weeks before.

    A figure dropped if its whole interval lies more than DROP below the mean of those weeks. The interval has
    the chance within the window, by the delta method, and how much the weeks differ from each other. A figure
    with too few sessions in one of the windows is left out.
    """
    done = sessions[sessions["complete"]]
    length, week = pd.Timedelta(hours=hours), pd.Timedelta(weeks=1)
    windows = []
    for weeks in range(WEEKS_BEFORE + 1):
        end = until - weeks * week
        windows.append(_sums(done[(done["at"] > end - length) & (done["at"] <= end)]))
    if min(len(window) for window in windows) < LEAST_SESSIONS:
        return []
    return [drop for name in figures if (drop := _drop(name, windows)) is not None]


def _sums(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.assign(sessions=1.0, accepted_any=rows["accepted"] > 0).fillna({"basket_value": 0.0})


def _drop(name: str, windows: list[pd.DataFrame]) -> Drop | None:
    above, below = FIGURES[name]
    values, variances = [], []
    for window in windows:
        top, bottom = window[above].to_numpy(float), window[below].to_numpy(float)
        if bottom.sum() == 0:
            return None
        ratio = float(top.sum() / bottom.sum())
        values.append(ratio)
        variances.append(float(((top - ratio * bottom) ** 2).sum() / bottom.sum() ** 2))
    now, before = values[0], float(np.mean(values[1:]))
    if before == 0:
        return None
    # Weeks differ by chance and by more: the spread that was seen, and at least the chance of now.
    noise = max(float(np.var(values[1:], ddof=1)), variances[0])
    spread = math.sqrt(noise * (1 + 1 / WEEKS_BEFORE))
    change, margin = now / before - 1, T_LIMIT * spread / before
    return Drop(name, now, before, change, margin, dropped=bool(change + margin < -DROP))


def _ratio(top: Any, bottom: Any) -> float | None:
    return float(top) / float(bottom) if bottom and not pd.isna(top) else None
