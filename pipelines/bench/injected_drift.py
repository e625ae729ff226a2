"""A change of known size -> the days until the drift check alarms, and a change that no PSI shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import prepared_tasks, tasks_after
from components.evaluation.nightly import Nightly
from feature_repo.events import Dataset
from monitoring.drift import compare
from monitoring.psi import encode
from monitoring.shares import changed_shares
from monitoring.verdict import judge
from monitoring.windows import EventFrames, Window, event_tables, purchases
from pipelines.bench.report import picture
from serving.answer.recommender import Recommender
from serving.release.bundle import load_bundle
from serving.schemas import DEFAULT_K
from serving.stores.online_features import MemoryStore

LADDER = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # of lines, of the probability, or of purchases
DAYS = 14  # after the change
SLIDING = timedelta(days=7)  # the window of a check
SHARE_FACTORS = {"department": (1.0, 1.1, 1.2, 1.3, 1.5, 2.0), "store_id": (1.0, 1.3, 1.5, 2.0, 3.0)}
LARGEST, WEEKS = 8, 6  # levels whose share grows, and windows for each
SIGMAS = 3.0  # below the expected hits: the change is detected


def detection_delays(
    data: Dataset, reference: Window, ladder: Sequence[float] = LADDER
) -> list[dict[str, Any]]:
    """Return for each share the days until a daily check of the last week alarms; None: in none of the days.

    From the end of the reference on, the share of all lines turns into lines of its most common category.
    """
    assert reference.until is not None
    start, timezone = reference.until, str(data.manifest["timezone"])
    expected = EventFrames.of(purchases(data, reference), timezone)
    events = purchases(data, Window(start - SLIDING, start + timedelta(days=DAYS)))
    common = expected.lines["category"].mode()[0]
    chance = np.random.default_rng(0).random(len(events))  # a higher rung changes the same lines and more
    rows = []
    for share in ladder:
        is_hit = (events["at"] >= start).to_numpy() & (chance < share)
        changed = events.assign(category=events["category"].where(~is_hit, common))
        delay, psis = None, []
        for day in range(1, DAYS + 1):
            end = start + timedelta(days=day)
            found = EventFrames.of(changed[Window(end - SLIDING, end).holds(changed["at"])], timezone)
            tables = [table.only(["category"]) for table in event_tables(found, expected)]
            column = judge(compare(tables)).column("category")
            psis.append(column.psi)
            if column.status == "alarm":
                delay = day
                break
        rows.append({"share": share, "days": delay, "psi": psis[-1], "alarm_at": column.alarm_at})
    return rows


def draw_delays(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the days until the alarm against the size of the change; never is above the last day."""
    shares = [100 * row["share"] for row in rows]
    with picture(file, (6.0, 3.4)) as (_, axes):
        axis = axes[0, 0]
        for label, style, found in (("alarm", "o", True), ("no alarm", "^", False)):
            points = [
                (s, r["days"] or DAYS + 1)
                for s, r in zip(shares, rows, strict=True)
                if bool(r["days"]) == found
            ]
            color = "#33576b" if found else "grey"
            axis.plot(*zip(*points, strict=True), style, label=label, color=color) if points else None
        axis.set(xlabel="changed lines, %", ylabel="days until the alarm", ylim=(0, DAYS + 2))
        axis.legend(frameon=False)


def share_power(data: Dataset, reference: Window, weeks: int = WEEKS) -> list[dict[str, Any]]:
    """Return how often a share that grew is seen in one week: for each column, level and factor.

    The window is each of the weeks after the reference. Random rows of other levels turn into the level.
    """
    assert reference.until is not None
    timezone = str(data.manifest["timezone"])
    before = EventFrames.of(purchases(data, reference), timezone)
    rng, rows = np.random.default_rng(0), []
    ends = [reference.until + SLIDING * number for number in range(weeks + 1)]
    after = [EventFrames.of(purchases(data, Window(*span)), timezone) for span in pairwise(ends)]
    for column, factors in SHARE_FACTORS.items():
        frames = [each.lines if column == "department" else each.baskets for each in (before, *after)]
        expected, *windows = (frame[frame[column].notna() & (frame[column] != "")] for frame in frames)
        unit, week = pd.factorize(expected["basket_id"])[0], expected["week"].to_numpy()
        codes = [(encode(each[column], expected[column]), each["basket_id"].nunique()) for each in windows]
        for level, factor in product(range(min(LARGEST, expected[column].nunique())), factors):
            seen = []
            for code, units in codes:
                grown, others = code.current.copy(), np.flatnonzero(code.current != level)
                more = round((factor - 1) * (len(grown) - len(others)))
                grown[rng.permutation(others)[:more]] = level
                changes = changed_shares(replace(code, current=grown), unit, week, units)
                seen.append(code.labels[level] in [change.label for change in changes])
            label, share = codes[0][0].labels[level], float((codes[0][0].reference == level).mean())
            rows.append(
                {
                    "column": column,
                    "level": label,
                    "share": share,
                    "factor": factor,
                    "seen": float(np.mean(seen)),
                }
            )
    return rows


def prediction_drift(scores: np.ndarray) -> list[dict[str, float]]:
    """Return PSI and KL divergence of later probabilities against earlier ones, lowered by each share.

    Both are of the same bins: the deciles of the earlier probabilities.
    """
    earlier, later = np.array_split(scores.astype(np.float64), 2)
    rows = []
    for share in LADDER:
        bins = encode(pd.Series(later * (1 - share)), pd.Series(earlier)).histogram("score")
        rows.append({"share": share, "psi": bins.psi(), "kl": bins.kl()})
    return rows


def concept_drift(
    bundle_path: Path, data: Dataset, ladder: Sequence[float] = LADDER
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return hits where shoppers answer differently to the same requests; and all probabilities.

    Of the purchases of the later half of the test baskets, each share becomes another item of the catalogue,
    any with the same chance. Requests and probabilities stay, so that no PSI of them can move. Items are
    counted each night, as in a shop: with the counts of the cut, hits would fall without any change.
    """
    bundle = load_bundle(bundle_path)
    bought = purchases_of(data.events)
    tasks = tasks_after(bought, bundle.statistics, pd.Timestamp(bundle.manifest["cut"])).hidden
    recommender = Recommender(bundle, MemoryStore())
    shown, scores = [], []
    for _, prepared in prepared_tasks(bundle, tasks, DEFAULT_K, Nightly(bundle, bought)):
        answer = recommender.finish(prepared, recommender.rank(prepared.dense, prepared.categorical))
        shown.append(bundle.statistics.codes([item.item_id for item in answer.items]))
        scores.append([item.score for item in answer.items])
    half, rng = len(tasks) // 2, np.random.default_rng(0)
    chance = [rng.random(len(task.hidden)) for task in tasks]
    other = [rng.integers(len(bundle.statistics.item_ids), size=len(task.hidden)) for task in tasks]

    def hits(number: int, share: float) -> bool:
        changed = np.where(chance[number] < share, other[number], tasks[number].hidden)
        return bool(np.isin(changed, shown[number]).any())

    base = float(np.mean([hits(number, 0.0) for number in range(half)]))
    later = {share: [hits(number, share) for number in range(half, len(tasks))] for share in (0.0, *ladder)}
    rows = []
    for share in ladder:
        baskets = baskets_until_detected(later[share], base, later[0.0] if share else None)
        row = {"hit_ratio_at_10": float(np.mean(later[share])), "before": base, "baskets": baskets}
        rows.append({"share": share, **row})
    return rows, np.concatenate(scores)


def baskets_until_detected(
    found: Sequence[bool], base: float, control: Sequence[bool] | None = None
) -> int | None:
    """Return the number of baskets after which their hits are SIGMAS below a ratio; None: never.

    Args:
        found: whether each basket was hit.
        base: the ratio of hits before.
        control: the same baskets without the change: once they are below, too, a detection proves nothing.
    """
    count = np.arange(1, len(found) + 1)
    low = base * count - SIGMAS * np.sqrt(base * (1 - base) * count)
    below = np.cumsum(found) < low
    if control is not None:
        below &= ~np.logical_or.accumulate(np.cumsum(control) < low)
    return int(count[below][0]) if below.any() else None
