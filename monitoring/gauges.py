"""Verdicts and KPIs -> gauges for Prometheus, so that alerts and dashboards have them.

Each has the value of the last look. `reco_watch_success_timestamp_seconds` says when that was.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Gauge

from monitoring.kpi import AtRisk, Drop, Kpi
from monitoring.verdict import DriftVerdict


class WatchGauges:
    """The gauges of one process that watches; `registry` holds them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = self._gauge
        self.success = made("watch_success_timestamp_seconds", "When a look last succeeded.", "look")
        self.drifted = made("drift_found", "1 if the last look found drift, else 0.", "look")
        self.psi = made("drift_psi_ratio", "PSI of a column over its alarm line.", "look", "column")
        self._columns: dict[str, set[str]] = {}  # look -> the columns whose PSI is shown
        self.raised = made("items_raised", "Items whose share jumped in the last window.", "look")
        self.retraining = made("retraining_failed", "1 if the last retraining failed, else 0.")
        self.failed_at: datetime | None = None  # since when `retraining` is 1
        self.sessions = made("kpi_sessions", "Complete sessions.", "rung")
        self.conversion = made("kpi_conversion_ratio", "Share of sessions with an accepted item.", "rung")
        self.revenue = made("kpi_revenue_per_session", "Value of accepted items, shop's currency.", "rung")
        self.loss = made("kpi_loss_per_answer", "Value lost against a full answer.", "rung")
        self.dropped = made("kpi_dropped", "1 if a figure fell below the weeks before, else 0.", "figure")
        self.change = made("kpi_change_ratio", "Change of a figure against the weeks before.", "figure")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"reco_{name}", text, labels, registry=self.registry)

    def show_drift(self, look: str, verdict: DriftVerdict | None) -> None:
        """Set the gauges of one verdict; a column that was not compared keeps no old value.

        Args:
            look: answers, purchases or labels.
            verdict: None if there was too little data; no old verdict stays.
        """
        self.drifted.labels(look).set(float(verdict is not None and verdict.failed))
        values = {
            column.name: column.psi / column.alarm_at
            for column in (verdict.columns if verdict else ())
            if column.psi is not None and column.alarm_at and column.pages
        }
        with _one_process():
            for name in self._columns.get(look, set()) - set(values):
                self.psi.remove(look, name)
        for name, value in values.items():
            self.psi.labels(look, name).set(value)
        self._columns[look] = set(values)
        self.success.labels(look).set(time.time())

    def show_retraining(self, went_well: bool) -> None:
        """Set the gauge of the last retraining, and remember when it began to fail."""
        self.failed_at = None if went_well else self.failed_at or datetime.now(UTC)
        self.retraining.set(float(not went_well))

    def show_kpi(self, by_rung: Mapping[str, Kpi], at_risk: AtRisk, drops: list[Drop]) -> None:
        """Set the gauges of the KPIs; a figure without data keeps no old value."""
        with _one_process():
            for gauge in (self.sessions, self.conversion, self.revenue, self.loss, self.dropped, self.change):
                gauge.clear()
        for rung, kpi in by_rung.items():
            self.sessions.labels(rung).set(kpi.sessions)
            if kpi.conversion is not None and kpi.revenue_per_session is not None:
                self.conversion.labels(rung).set(kpi.conversion)
                self.revenue.labels(rung).set(kpi.revenue_per_session)
        for rung, loss in at_risk.loss_per_answer.items():
            self.loss.labels(rung).set(loss)
        for drop in drops:
            self.dropped.labels(drop.figure).set(float(drop.dropped))
            self.change.labels(drop.figure).set(drop.change)
        self.success.labels("kpi").set(time.time())


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Remove values without a warning: Feast, once loaded, sets the variable of several processes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
