"""A home's prediction log and its purchases -> what recommendations earn, and what degraded answers cost."""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feature_repo.errors import USAGE, RecoError
from feature_repo.stream.archive import EVENTS, read_archive
from monitoring.drift import bundles_alike
from monitoring.kpi import (
    CUTS,
    WEEKS_BEFORE,
    AtRisk,
    Drop,
    Kpi,
    cost_since,
    exposure,
    find_drops,
    fit_drops,
    revenue_at_risk,
    summarise,
    summarise_by,
)
from monitoring.sessions import asked_at, make_sessions
from monitoring.windows import known_until
from serving.errors import BundleInvalid, NoChampion
from serving.prediction_log import STAMP, read_log
from serving.release.champion import read_champion
from serving.settings import Settings
from serving.shop.fact_store import all_facts, open_fact_store

COLUMNS = ["user_id", "basket_id", "item_id", "at", "quantity", "price"]
HOUR = pd.Timedelta(hours=1)
READ = timedelta(weeks=WEEKS_BEFORE + 2)  # of the log: the weeks before, the window, and late purchases


class NothingToJoin(RecoError):
    """There are no answers, or no purchases, to make figures from."""

    exit_code = USAGE


@dataclass(frozen=True)
class Earnings:
    """The figures of a window of answers; `until` is the time up to which purchases are known."""

    since: pd.Timestamp
    until: pd.Timestamp
    total: Kpi
    cuts: dict[str, dict[str, Kpi]]
    exposure: dict[str, float]
    at_risk: AtRisk
    drops: list[Drop]
    drift_cost: float | None  # an hour, against answers before a drift; None: no drift, or too few sessions

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON types."""
        return {**asdict(self), "since": self.since.isoformat(), "until": self.until.isoformat()}


def read_earnings(
    settings: Settings, dataset: Path | None, hours: float, drifted_since: datetime | None = None
) -> Earnings:
    """Join the last ten weeks of a home's log with the purchases that followed.

    Args:
        settings: of the endpoint whose log it is.
        dataset: a checked data set with the purchases; None reads the archive of the home's stream.
        hours: length of the window that is compared with the weeks before.
        drifted_since: when a drift of columns began; concept drift began in the window.

    Raises:
        NothingToJoin: the log or the purchases are empty.
    """
    log_dir, now = settings.prediction_log_dir, datetime.now(UTC)
    # An endpoint's clock may have been ahead: no answer is newer than now.
    answers = read_log(log_dir, _since(log_dir, now), now, features=False)
    if not len(answers):
        raise NothingToJoin(
            f"{log_dir} holds no answer: start `reco serve` or `reco up`, and ask it; "
            f"answers are written every {settings.log_segment_s:g} s"
        )
    purchases = read_purchases(settings.home, dataset)
    if not len(purchases):
        raise NothingToJoin("there is no purchase: start `reco stream`, or name a data set with --data")
    until = known_until(purchases["at"])
    sessions = make_sessions(answers, purchases, until, read_costs(settings))
    asked, answered = asked_at(answers), answers["answered_at"].to_pandas()
    # No question is newer than its answer: a till's clock may be ahead.
    asked = asked.where(asked < answered, answered)
    newest = asked.max()
    recent = answers.filter(pa.array(asked > newest - HOUR))
    per_hour = {str(r): float(n) for r, n in recent["rung"].to_pandas().value_counts().items()}
    last = sessions[sessions["at"] > newest - HOUR]
    ends = min(until, newest)
    drops, fit = find_drops(sessions, ends, hours), fit_drops(sessions, ends, hours, _alike(settings.home))
    if drifted_since is None and any(drop.dropped for drop in fit):
        drifted_since = ends - pd.Timedelta(hours=hours)
    cost = None if drifted_since is None else cost_since(sessions, pd.Timestamp(drifted_since), per_hour)
    return Earnings(
        since=asked.min(),
        until=until,
        total=summarise(sessions),
        cuts={cut: summarise_by(sessions, cut) for cut in CUTS},
        exposure=exposure(pc.list_flatten(answers["item_ids"]).to_pandas(), purchases["item_id"]),
        at_risk=revenue_at_risk(sessions, per_hour, float(last["wait_ms"].mean()) if len(last) else 0.0),
        drops=[*drops, *fit],
        drift_cost=cost,
    )


def _since(log_dir: Path, now: datetime) -> datetime | None:
    """Return where the weeks that are compared begin, before the newest segment; None for an unknown name.

    A segment whose name lies after now does not count.
    """
    stamps = (segment.name[:15] for segment in log_dir.glob("*.parquet"))
    newest = max((stamp for stamp in stamps if stamp <= f"{now:{STAMP}}"), default="")
    try:
        return datetime.strptime(newest, STAMP).replace(tzinfo=UTC) - READ
    except ValueError:
        return None


def _alike(home: Path) -> set[str]:
    """Return the ids of the bundles with the champion's ranker; none without a champion."""
    try:
        return bundles_alike(read_champion(home).bundle(home))
    except (NoChampion, BundleInvalid):
        return set()


def read_purchases(home: Path, dataset: Path | None) -> pd.DataFrame:
    """Return the purchased lines of a data set, or of the archive of a home's stream."""
    if dataset is None:
        bought = read_archive(home / "offline_store" / EVENTS, event_type="purchase")
    else:
        filters = pc.field("event_type") == "purchase"
        bought = pq.read_table(dataset / "events.parquet", columns=COLUMNS, filters=filters)
    return bought.select(COLUMNS).to_pandas()


def read_costs(settings: Settings) -> pd.Series | None:
    """Return the cost of one unit by item id, as the shop's facts have it; None without one."""
    if not settings.store_url and not Path(settings.fact_store_url.removeprefix("sqlite:///")).exists():
        return None
    with contextlib.closing(open_fact_store(settings.fact_store_url)) as store:
        facts = all_facts(store)
        costs = {fact.item_id: fact.value for fact in facts if fact.fact == "cost" and not fact.store_id}
    return pd.Series(costs, dtype=float) if costs else None
