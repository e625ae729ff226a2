"""An endpoint's metrics, read twice -> the alerts whose lines they cross now, with the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.parser import text_string_to_metric_families

from pipelines.live.ports import page

BETWEEN_S = 2.0  # the two readings
ANSWER_S = 5.0
NO_FAULT = ("none", "nothing_left", "user_over_limit")  # reasons of answers that are as they must be
OUR_OWN = ("overloaded", "user_over_limit", "client_gone", "connections", "not_ready")  # and of refusals
Labels = dict[str, str]
Samples = dict[str, list[tuple[Labels, float]]]


def read_samples(url: str, wait_s: float = ANSWER_S) -> Samples:
    """Return the samples of a page of metrics, by name.

    Raises:
        OSError: it cannot be read.
    """
    text = page(url, wait_s).decode()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return samples


def watch(url: str) -> list[tuple[str, str]]:
    """Read a page of metrics twice; return alerts and figures.

    Raises:
        OSError: it cannot be read.
    """
    before = read_samples(url)
    time.sleep(BETWEEN_S)
    return list(crossed(before, read_samples(url), time.time()))


def crossed(before: Samples, after: Samples, now: float) -> Iterator[tuple[str, str]]:
    """Yield each alert whose line is crossed, with its figure; the lines are those of `slo.yaml`."""

    def grown(name: str, keep: Callable[[Labels], bool] = lambda labels: True) -> float:
        ends = [sum(v for labels, v in samples.get(name, ()) if keep(labels)) for samples in (before, after)]
        return ends[1] - ends[0]

    answers, faults = grown("reco_responses_total"), grown("reco_faults_total")
    timed, lags = grown("reco_answer_seconds_count"), grown("reco_loop_lag_seconds_count")
    in_time = grown("reco_answer_seconds_bucket", lambda labels: labels["le"] == "0.05")
    prompt = grown("reco_loop_lag_seconds_bucket", lambda labels: labels["le"] == "0.02")
    degraded = grown("reco_responses_total", lambda labels: labels["degraded_reason"] not in NO_FAULT)
    stale = grown("reco_responses_total", lambda labels: labels["degraded_reason"] == "stale_features")
    late = _stale(after, stale, answers)  # FeaturesStale holds CheckoutDegraded back
    rejected = grown("reco_rejected_total", lambda labels: labels["reason"] not in OUR_OWN)
    shares = (
        ("CheckoutUnavailable", faults, answers + faults, 0.001, "requests without an answer"),
        ("CheckoutSlow", timed - in_time, timed, 0.01, "answers later than 50 ms"),
        ("CheckoutDegraded", 0.0 if late else degraded, answers, 0.05, "degraded answers"),
        ("CheckoutSaturated", lags - prompt, lags, 0.01, "turns of the event loop more than 20 ms late"),
        ("RequestsRejected", rejected, answers + grown("reco_rejected_total"), 0.05, "rejected requests"),
    )
    yield from late
    for alert, bad, of, line, what in shares:
        if of and bad / of > line:
            yield alert, f"{bad:,.0f} of {of:,.0f}: {what}"
    if lost := grown("reco_log_records_total", lambda labels: labels["outcome"] == "dropped"):
        yield "LogLoses", f"{lost:,.0f} records dropped"
    yield from _states(after, now)


def _stale(samples: Samples, stale: float, answers: float) -> list[tuple[str, str]]:
    if answers and stale / answers > 0.2:
        return [("FeaturesStale", f"{stale:,.0f} of {answers:,.0f}: answers from stale features")]
    # While the store is skipped, no heartbeat is read: the age says nothing of the stream.
    breakers = samples.get("reco_breaker_open", ())
    if any(labels["dependency"] == "online_store" and value for labels, value in breakers):
        return []
    silent_s = max((value for _, value in samples.get("reco_features_age_seconds", ())), default=0.0)
    return [("FeaturesStale", f"the stream has been silent for {silent_s:,.0f} s")] if silent_s > 120 else []


def _states(samples: Samples, now: float) -> Iterator[tuple[str, str]]:
    values = {name: max(value for _, value in rows) for name, rows in samples.items()}
    age_s = {
        name: now - min(value for _, value in rows)
        for name, rows in samples.items()
        if name.endswith("_timestamp_seconds") and all(value > 0 for _, value in rows)
    }
    if (old_s := age_s.get("reco_facts_read_timestamp_seconds", 0.0)) > 60:
        yield "FactsStale", f"facts were read {old_s:,.0f} s ago"
    if (behind_s := age_s.get("reco_facts_complete_timestamp_seconds", 0.0)) > 60:
        yield "FactsStale", f"facts are complete until {behind_s:,.0f} s ago"
    if (unread_s := age_s.get("reco_champion_read_timestamp_seconds")) is not None:
        if unread_s > 120:
            yield "ChampionUnread", f"champion.json was read {unread_s:,.0f} s ago"
        if not values.get("reco_champion_served", 1.0):
            yield "ChampionNotServed", "another bundle than the champion answers"
    if (deaths := values.get("reco_process_deaths_total", 0.0)) > 2:
        yield "ProcessesDie", f"{deaths:,.0f} processes died since the start"
    if values.get("reco_rules_broken"):
        yield "RulesBroken", "the rules file is invalid"
    for labels, value in samples.get("reco_breaker_open", ()):
        if value:
            yield "DependencySkipped", f"{labels['dependency']} is skipped"
