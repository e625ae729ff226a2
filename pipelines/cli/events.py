"""Commands for events and facts: stream, feedback, replay, replay-events, facts, forget."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from pipelines.cli.options import Context, FiniteRange, common_options
from pipelines.tables import counted
from serving.release.champion import read_champion

if TYPE_CHECKING:
    from feature_repo.facts import Fact
    from feature_repo.stream.replay_events import ReplayCounts, Shopper

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
CONFIRM_S = 60  # to wait for the broker's confirmations at the end of a replay
SHOWN_LINES = 20
NAMED_ITEMS = 5


@click.command()
@common_options
def stream(context: Context) -> None:
    """Fold events and facts into the stores, until stopped.

    From the broker into the online store and the archive. Start at most as many as there are partitions: they
    share the work. A killed one loses nothing.
    """
    from pipelines.live.streaming import run_stream

    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    kafka = context.kafka()

    def on_ready() -> None:
        line = {"event": "ready", "pid": os.getpid(), "broker": kafka.bootstrap, "topic": kafka.events_topic}
        context.say(json.dumps(line))

    counts = run_stream(context.settings(), kafka, on_ready)
    text = f"{counted(counts.events, 'event')}, {counted(counts.facts, 'fact')}"
    text += f", {counted(counts.dead_letters, 'dead letter')}"
    context.answer(vars(counts), text)


@click.command()
@click.option("--once", is_flag=True, help="Send the log as it is now, and end.")
@click.option(
    "--keep-days",
    type=click.IntRange(64),  # `reco kpi` compares nine weeks
    help="Delete older parts of the log, once they were sent.  [default: keep all]",
)
@common_options
def feedback(context: Context, once: bool, keep_days: int | None) -> None:
    """Send logged answers to the broker, as impressions.

    From the log of answers, until stopped. The next training learns which of the shown items were bought.
    """
    from pipelines.live.feedback import send_impressions
    from pipelines.run.stopping import on_stop

    logging.basicConfig(level=logging.WARNING, format=LOG_FORMAT)
    stop = threading.Event()
    with on_stop(stop.set):
        counts = send_impressions(context.settings(), context.kafka(), stop, once, keep_days)
    text = f"{counted(counts.impressions, 'impression')} of {counted(counts.answers, 'answer')}"
    text += f", {counts.anonymous:,} without a user"
    text += f"; not readable: {counted(counts.unreadable, 'segment')}" if counts.unreadable else ""
    text += f"; deleted: {counted(counts.deleted, 'old segment')}" if counts.deleted else ""
    context.answer(vars(counts), text)


@click.command("replay")
@click.option("--last", type=click.IntRange(1), default=1_000, show_default=True, help="How many answers.")
@common_options
def replay_log(context: Context, last: int) -> None:
    """Recompute the features of logged answers, and compare.

    From the archive, bit by bit. Exit code 1: some differ, or there is nothing to compare.
    """
    from monitoring.skew import describe, replay_home

    champion = read_champion(context.home)
    comparison = replay_home(context.home, champion.bundle(context.home), last)
    is_equal = 0 < comparison.compared == comparison.equal
    context.answer(comparison.to_dict(), describe(comparison), 0 if is_equal else 1)


@click.command("replay-events")
@click.option(
    "--data", default="complete-journey", show_default=True, help="complete-journey, toy, or a data set."
)
@click.option(
    "--speed",
    type=FiniteRange(0),
    default=0.0,
    show_default=True,
    help="Seconds of data per second; 0 is as fast as possible.",
)
@click.option("--from", "since", default="", help="First time.  [default: the data's start]")
@click.option("--until", default="", help="The time it ends before.  [default: the data's end]")
@click.option("--limit", type=click.IntRange(0), default=0, help="At most so many events.  [default: all]")
@click.option(
    "--endpoint", default="", metavar="URL", help="Ask it before each basket, as the shopper would."
)
@click.option(
    "--duplicates", type=FiniteRange(0, 1), default=0.0, help="Share of events that are sent twice."
)
@click.option(
    "--out-of-order", type=FiniteRange(0, 1), default=0.0, help="Share of events that are sent too late."
)
@click.option(
    "--within", type=click.IntRange(1), default=1_000, show_default=True, help="By how many events at most."
)
@click.option("--poison", type=FiniteRange(0, 1), default=0.0, help="Share of invalid messages in between.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Chooses these events.")
@common_options
def replay_data(
    context: Context,
    data: str,
    speed: float,
    since: str,
    until: str,
    limit: int,
    endpoint: str,
    **disturbance: Any,
) -> None:
    """Send a data set's events to the broker, at their times."""
    from feature_repo.events import read_dataset
    from feature_repo.stream.delivery import Delivery
    from feature_repo.stream.kafka import create_topics
    from feature_repo.stream.replay_events import Disturbance, Shopper, choose, replay_events
    from pipelines.run.launch import data_to_replay

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = context.kafka()
    disturbed = Disturbance(**disturbance)
    token = context.settings().caller_tokens.partition(",")[0].strip()
    shopper = Shopper(endpoint, token) if endpoint else None
    events = read_dataset(data_to_replay(context.home, data, "--data")).events
    events = choose(events, since, until, limit)
    create_topics(settings)
    with contextlib.closing(Delivery(settings)) as delivery:
        started_at = time.monotonic()
        counts = replay_events(
            events, settings.events_topic, delivery, speed, disturbed, shopper, context.say
        )
        confirmed = delivery.flush(CONFIRM_S)
        seconds = time.monotonic() - started_at
    document = {
        **asdict(counts),
        "events": len(events),
        "baskets": int(events.loc[events["event_type"] == "purchase", "basket_id"].nunique()),
        "seconds": round(seconds, 2),
        "messages_per_second": round(counts.messages / seconds, 1),
        "refused": delivery.refused,
        "unconfirmed_bytes": delivery.pending_bytes,
    }
    text = (
        f"{counted(counts.messages, 'message')} in {seconds:.1f} s, {counts.messages / seconds:,.0f} a second"
    )
    if endpoint:
        text += f"; asked {counts.asked:,}: {counts.degraded} degraded, {counted(counts.errors, 'error')}"
    context.answer(document, text)
    failures = _failures(counts, confirmed, settings.bootstrap, shopper)
    for failure in failures:
        context.say(f"reco: {failure}")
    if failures:
        click.get_current_context().exit(3)


def _failures(counts: ReplayCounts, confirmed: bool, bootstrap: str, shopper: Shopper | None) -> list[str]:
    """Return what kept a replay from reaching broker or endpoint, as lines."""
    failures = []
    if not confirmed:
        failures.append(
            f"the broker at {bootstrap} has not confirmed everything: replay the data again, "
            "events that arrive twice count once"
        )
    if shopper and counts.errors > 0 and not counts.asked:
        cure = "start it with `reco serve`"
        if shopper.fault.startswith("status 401"):
            cure = "give one of its tokens in RECO_CALLER_TOKENS"
        failures.append(f"{shopper.url} answered no question ({shopper.fault}): {cure}")
    return failures


@click.command()
@click.argument("file", type=click.File("rb"), metavar="FILE")
@click.option("--dry-run", is_flag=True, help="Check the file; write nothing.")
@common_options
def facts(context: Context, file: IO[bytes], dry_run: bool) -> None:
    """Write prices, stock, bans, promotions and coupons.

    One JSON object a line; - is stdin. All or nothing: an invalid line is reported with its number, and
    nothing is written. Facts of items that the champion does not know are written, and a line on stderr
    names these items.
    """
    from feature_repo.facts import parse_lines
    from feature_repo.stream.erasure import Forgotten
    from serving.shop.fact_store import open_fact_store

    parsed, refused = parse_lines(file)
    parsed = Forgotten.load(context.home).facts_that_count(parsed)
    document = {
        "facts": len(parsed),
        "refused": [{"line": number, "reason": reason} for number, reason in refused],
        "changed": None,
    }
    if refused:
        lines = [f"line {number}: {reason}" for number, reason in refused[:SHOWN_LINES]]
        lines += [f"… and {len(refused) - SHOWN_LINES} more"] if len(refused) > SHOWN_LINES else []
        lines.append(f"nothing was written; invalid lines: {len(refused)}")
        context.answer(document, "\n".join(lines), 1)
    if unknown := _unknown_items(context.home, parsed):
        named = ", ".join(unknown[:NAMED_ITEMS]) + (", …" if len(unknown) > NAMED_ITEMS else "")
        context.say(f"{counted(len(unknown), 'item')} of the file not in the champion's bundle: {named}")
    if dry_run:
        context.answer(document, f"{counted(len(parsed), 'valid fact')}; nothing was written")
        return
    store = open_fact_store(context.settings().fact_store_url)
    document["changed"] = store.write(parsed)
    store.close()
    context.answer(
        document, f"{counted(len(parsed), 'fact')} read, {document['changed']:,} changed a stored value"
    )


def _unknown_items(home: Path, facts: list[Fact]) -> list[str]:
    """Return the ids that the champion's bundle lacks, which may be typos; none without a readable bundle."""
    from pipelines.run.launch import champions_items

    known = champions_items(home)
    return [
        item_id for item_id in dict.fromkeys(fact.item_id for fact in facts) if known and item_id not in known
    ]


@click.command()
@click.argument("user", metavar="USER")
@click.option("--dry-run", is_flag=True, help="Count what would be removed; change nothing.")
@common_options
def forget(context: Context, user: str, dry_run: bool) -> None:
    """Remove a shopper from every store and file.

    Events of the shopper up to now never count again. - is stdin. If a store cannot be reached, the exit code
    is 3; if another process holds a file, it is 4. The rest is done: repeat the command.
    """
    from components.privacy.forget_user import DONE, forget_user
    from pipelines.tables import table

    if user == "-":
        user = sys.stdin.read().rstrip("\r\n")
    report = forget_user(context.settings(), user, dry_run, context.say)
    head, removed, done = f"forgotten up to {report.until}", "removed", DONE
    if dry_run:
        head, removed, done = "nothing was changed", "would remove", "counted"
    rows = [
        (p.place, p.what, f"{p.removed:,}", done if p.state == DONE else p.state, p.note)
        for p in report.places
    ]
    text = f"{head}\n{table(('where', 'what', removed, 'state', ''), rows)}"
    context.answer(report.to_dict(), text, report.exit_code)


COMMANDS = (stream, feedback, replay_log, replay_data, facts, forget)
