"""Commands that watch: drift, kpi, watch, doctor."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from components.home import MODEL_NAME
from feature_repo.errors import USAGE
from pipelines.cli.options import FILE, PORT, Context, FiniteRange, common_options, read_token
from serving.release.champion import read_champion
from serving.settings import SettingInvalid

if TYPE_CHECKING:
    from datetime import datetime

    from monitoring.verdict import DriftVerdict
    from pipelines.inspect.earnings import Earnings

SHOWN_ROWS = 30
WEEK_HOURS = 168
# Heading -> figure of a `Kpi`, and its form.
KPI_COLUMNS = {
    "conversion": ("conversion", ".3f"),
    "acceptance": ("acceptance", ".3f"),
    "revenue": ("revenue_per_session", ",.2f"),
    "margin": ("margin_per_session", ",.2f"),
    "basket": ("basket_value", ",.2f"),
    "new": ("new_ratio", ".3f"),
    "ms": ("wait_ms", ".1f"),
}


@click.command()
@click.option(
    "--from", "since", default="", help="Where the window begins.  [default: the log's start; the cut]"
)
@click.option("--until", default="", help="Where it ends.  [default: open]")
@click.option(
    "--data", default="", help="Compare events instead of the log: complete-journey, toy, or a data set."
)
@click.option(
    "--reference-from", default="", help="Compare with this window of the same data, not the bundle's."
)
@click.option("--reference-until", default="", help="Where that window ends.")
@click.option(
    "--report", type=click.Path(path_type=Path), help="HTML report.  [default: drift.html under home]"
)
@click.option("--quick", is_flag=True, help="No report; the same numbers without loading Evidently.")
@click.option("--retrain", is_flag=True, help="Start the training pipeline when it drifted.")
@common_options
def drift(
    context: Context,
    since: str,
    until: str,
    data: str,
    reference_from: str,
    reference_until: str,
    report: Path | None,
    quick: bool,
    retrain: bool,
) -> None:
    """Compare a window with the champion's training data.

    The window is one of the prediction log, or of events (--data). Exit code 1: it drifted; 2: the
    window is too short or too small to judge. With --retrain the verdict comes first,
    then the result of the training.
    """
    from monitoring.retraining import COOL_DOWN
    from pipelines.run import launch

    page = None if quick else report or context.home / "drift.html"
    if reference_from and not reference_until:
        raise click.UsageError("--reference-from needs --reference-until: the window would be part of it")
    verdict = _verdict(context, (since, until), data, (reference_from, reference_until), page)
    document: dict[str, Any] = {**verdict.to_dict(), "report": str(page) if page else None}
    text = _drift_text(verdict, page)
    if retrain:
        if context.output == "text":  # before the training, which takes minutes or fails
            click.echo(text)
        document["retrain"] = outcome = launch.retrain(context.home, verdict, sys.stderr, COOL_DOWN)
        text = f"retraining: {outcome['said']}"
    code = 1 if verdict.failed else USAGE if verdict.status == "insufficient_data" else 0
    context.answer(document, text, code)


def _verdict(
    context: Context, window: tuple[str, str], data: str, reference: tuple[str, str], page: Path | None
) -> DriftVerdict:
    """Compare a window of the log or, with `data`, of events; a `page` of None makes no report."""
    from feature_repo.events import read_dataset
    from monitoring.drift import drift_of_events, drift_of_log
    from monitoring.windows import Window
    from pipelines.run.launch import dataset_of

    champion = read_champion(context.home)
    bundle = champion.bundle(context.home)
    if page and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise click.UsageError(f"{page} cannot be written: name a file in an existing folder with --report")
    events = read_dataset(dataset_of(context.home, data)) if data else None
    zone = str(events.manifest["timezone"]) if events else "UTC"
    other = Window.parse(*reference, zone) if any(reference) else None
    since, until = window
    if events:
        asked = Window.parse(since or champion.cut, until, zone)
        return drift_of_events(events, asked, other or bundle, page)
    log_dir = context.settings().prediction_log_dir
    return drift_of_log(bundle, log_dir, Window.parse(since, until), other, page)


def _drift_text(verdict: DriftVerdict, page: Path | None) -> str:
    from pipelines.tables import table

    text = f"{verdict.status}: {verdict.reason}" + (f"\nreport: {page}" if page else "")
    if all(column.psi is None for column in verdict.columns):
        return text
    rows = []
    for column in verdict.columns:
        figures = (column.psi, column.warn_at, column.alarm_at)
        rounded = ["" if figure is None else round(figure, 4) for figure in figures]
        status = column.status if column.pages else f"{column.status}, shown only"
        rows.append([column.name, status, *rounded, column.note])
    return table(["column", "status", "psi", "warns at", "alarms at", "note"], rows) + f"\n{text}"


@click.command()
@click.option("--data", default="", help="Where the purchases are.  [default: the archive of `reco stream`]")
@click.option(
    "--hours",
    type=FiniteRange(0, WEEK_HOURS, min_open=True),
    default=24.0,
    show_default=True,
    help="Window that is compared with weeks before.",
)
@common_options
def kpi(context: Context, data: str, hours: float) -> None:
    """Show the earnings, and the cost of degraded answers.

    Joins the log of answers with the purchases that followed within 30 minutes. Exit code 1: a figure fell
    below the same hours of the weeks before.
    """
    from pipelines.inspect.earnings import read_earnings
    from pipelines.run.launch import dataset_of

    dataset = dataset_of(context.home, data) if data else None
    earnings = read_earnings(context.settings(), dataset, hours)
    dropped = any(drop.dropped for drop in earnings.drops)
    context.answer(earnings.to_dict(), _kpi_text(earnings), int(dropped))


def _kpi_text(earnings: Earnings) -> str:
    from pipelines.tables import table

    rows = [("all", "", earnings.total)]
    rows += [(cut, name or "(none)", k) for cut, group in earnings.cuts.items() for name, k in group.items()]
    risk, total = earnings.at_risk, earnings.total
    columns, money = dict(KPI_COLUMNS), "revenue and margin are"
    if total.margin_per_session is None:
        del columns["margin"]
        # Without sessions there is no margin either, whatever the facts give.
        missing = "no fact gives the cost of an item, so there is no margin; " if total.sessions else ""
        money = f"{missing}revenue is"
    cells = []
    for cut, name, k in rows[:SHOWN_ROWS]:
        figures = [
            "" if (found := getattr(k, figure)) is None else f"{found:>{len(head)}{form}}"
            for head, (figure, form) in columns.items()
        ]
        cells.append([cut, name, k.sessions, *figures])
    text = table(["by", "value", "sessions", *columns], cells)
    if len(rows) > SHOWN_ROWS:
        text += f"\n({len(rows) - SHOWN_ROWS} more rows with --output json)"
    text += (
        f"\nanswers from {earnings.since:%Y-%m-%d %H:%M}, purchases until {earnings.until:%Y-%m-%d %H:%M}; "
        f"{total.completeness:.1%} of the sessions are complete\n"
        f"{money} of accepted items, for each session; they may have been bought anyway\n"
        f"shown: {earnings.exposure['coverage']:.1%} of the items shown or sold; the most shown tenth takes "
        f"{earnings.exposure['top_tenth']:.1%} of the places\n"
        f"at risk: {risk.degraded:.2f} an hour by degraded answers, {risk.waiting:.2f} by waiting"
    )
    if risk.at_most:
        text += f" (at most: too few sessions of {', '.join(risk.at_most)})"
    for drop in earnings.drops:
        verdict = "DROPPED" if drop.dropped else "no drop"
        text += (
            f"\n{drop.figure}: {drop.change:+z.1%} ± {drop.margin:.1%} against the weeks before: {verdict}"
        )
    if not earnings.drops:
        text += (
            "\nno comparison with the weeks before: fewer than 200 complete sessions in one of nine windows"
        )
    return text


@click.command()
@click.option(
    "--every",
    "every_s",
    type=FiniteRange(0.1, 7_200.0),
    default=3_600.0,
    show_default=True,
    help="Seconds between two looks; at most two hours, as WatchSilent opens a ticket after three hours.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of /metrics.")
@click.option("--port", type=PORT, default=9_103, show_default=True, help="Port of /metrics.")
@click.option("--retrain", is_flag=True, help="Start the training pipeline when it drifted.")
@click.option(
    "--pipelines", default="", metavar="URL", help="With --retrain: train on this Kubeflow Pipelines API."
)
@click.option("--experiment", default=MODEL_NAME, show_default=True, help="Whose last good run runs again.")
@click.option("--namespace", default="", help="Namespace, where the cluster has several users.")
@click.option("--token-file", type=FILE, help="File that holds the bearer token; read for each run.")
@common_options
def watch(
    context: Context,
    every_s: float,
    host: str,
    port: int,
    retrain: bool,
    pipelines: str,
    experiment: str,
    namespace: str,
    token_file: Path | None,
) -> None:
    """Look for drift, jumping items and KPIs each hour.

    /metrics has the results of the last look. At most one run starts in a week. With --pipelines the last
    training of the cluster that succeeded runs again there, unless one works already.
    """
    from pipelines.live.ports import claim_port
    from pipelines.live.watching import REST, watch_home
    from pipelines.run import launch
    from pipelines.run.stopping import on_stop
    from pipelines.run.submit import Kubeflow

    if pipelines and not retrain:
        raise click.UsageError("--pipelines needs --retrain: without it nothing trains")
    if pipelines and not pipelines.startswith(("http://", "https://")):
        raise click.UsageError(f"--pipelines is {pipelines!r}, expected http(s)://…")

    def cluster() -> Kubeflow:
        return Kubeflow(pipelines, experiment, namespace, read_token(token_file))

    def start(verdict: DriftVerdict) -> dict[str, Any]:
        if not pipelines:
            return launch.retrain(context.home, verdict, sys.stderr, REST)
        return launch.retrain_on_cluster(context.home, verdict, cluster(), REST)

    def result(failed_at: datetime | None) -> bool | None:
        return launch.retraining_result(context.home, cluster() if pipelines else None, failed_at)

    stop = threading.Event()
    with on_stop(stop.set):
        looks = watch_home(
            context.settings(),
            every_s,
            (host, claim_port(port, "--port")),
            start if retrain else None,
            stop,
            context.say,
            result if retrain else None,
        )
    context.answer({"looks": looks}, f"{looks} looks")


@click.command()
@common_options
def doctor(context: Context) -> None:
    """Report missing or broken parts, and how to fix them."""
    from pipelines.inspect.doctor import examine

    try:
        findings = examine(context.settings())
    except SettingInvalid as error:
        raise click.UsageError(str(error)) from error
    marks = {"ok": "ok  ", "warn": "note", "fail": "FAIL"}
    lines = []
    for f in findings:
        lines.append(f"{marks[f.status]}  {f.name:<13} {f.found}")
        page = f"runbook: docs/runbooks/{f.runbook}.md" if f.runbook else ""
        lines += [f"{'':<20}-> {text}" for text in (f.mend, page) if text]
    is_broken = any(finding.status == "fail" for finding in findings)
    context.answer([asdict(finding) for finding in findings], "\n".join(lines), int(is_broken))


COMMANDS = (drift, kpi, watch, doctor)
