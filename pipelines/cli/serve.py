"""Commands that serve and explain answers: serve, up, recommend, why, rules."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from pipelines.cli.options import FILE, FOLDER, PORT, Context, common_options, question_options
from pipelines.run.launch import absolute, champions_run, check_data
from serving.release.champion import read_champion
from serving.settings import Settings

if TYPE_CHECKING:
    from pipelines.live.supervisor import State


@click.command()
@click.option("--host", help="Address to listen on.")
@click.option("--http-port", type=PORT, help="REST; 0 is any free port.")
@click.option("--grpc-port", type=PORT, help="gRPC; 0 is any free port.")
@click.option("--bundle", type=FOLDER, help="Serve this bundle instead of the champion.")
@common_options
def serve(
    context: Context, host: str | None, http_port: int | None, grpc_port: int | None, bundle: Path | None
) -> None:
    """Serve the current champion: KServe REST and gRPC."""
    settings = context.settings(host=host, http_port=http_port, grpc_port=grpc_port)
    if bundle is None:
        read_champion(context.home)  # its error says how to get one
    served = ["--home", str(context.home)] if bundle is None else ["--bundle", str(bundle)]
    sys.stderr.flush()
    # The endpoint replaces this process: signals reach it, and this command leaves nothing in memory.
    arguments = [sys.executable, "-m", "serving.server", *served]
    os.execve(sys.executable, arguments, settings.to_env())


@click.command()
@click.option("--port", type=PORT, default=8080, show_default=True, help="REST; 0 is any free port.")
@click.option("--grpc-port", type=PORT, default=8081, show_default=True, help="gRPC; 0 is any free port.")
@click.option(
    "--store-port", type=PORT, default=16379, show_default=True, help="Online store; 0 is any free port."
)
@click.option(
    "--broker-port", type=PORT, default=19092, show_default=True, help="Broker; 0 is any free port."
)
@click.option(
    "--bootstrap",
    default="",
    envvar="RECO_KAFKA_BOOTSTRAP",
    metavar="HOST:PORT",
    help="Use this broker, start none.",
)
@click.option("--replay", "data", default="", metavar="DATA", help="Replay this data set's shoppers.")
@click.option("--speed", type=float, default=600.0, show_default=True, help="Seconds of data per second.")
@click.option("--from", "since", default="", help="Where the replay begins.  [default: the champion's cut]")
@common_options
def up(
    context: Context,
    port: int,
    grpc_port: int,
    store_port: int,
    broker_port: int,
    bootstrap: str,
    data: str,
    speed: float,
    since: str,
) -> None:
    """Start store, broker, stream and endpoint, until Ctrl-C."""
    from components.home import announced, locked
    from feature_repo.stream.kafka import KafkaSettings, create_topics
    from pipelines.live.supervisor import Supervisor
    from pipelines.live.up import Wanted, parts_of, used_by

    if data:
        _check_replay(data, speed, since)
    champion = read_champion(context.home)
    origin = champions_run(context.home)
    features = origin.artifacts("materialize-features") / "features" if origin else None
    if features is not None and not features.is_dir():
        features = None
    wanted = Wanted(port, grpc_port, store_port, broker_port, bootstrap, absolute(data), speed, since)
    settings, kafka = replace(Settings.from_env(), home=context.home), KafkaSettings.from_env()
    report = PartsReport(context.output == "json")
    with locked(context.home / "up.lock", "running `reco up`"):
        (context.home / "up.json").unlink(missing_ok=True)  # left by a killed `reco up`
        if bootstrap:
            create_topics(replace(kafka, bootstrap=bootstrap))
        parts = parts_of(settings, kafka, champion, features, wanted, report.say)
        logs = context.home / "up"
        report.say(f"logs of the parts: {logs}")
        with announced(context.home, used_by(parts)):
            Supervisor(parts, logs, report.show, report.say).run()


class PartsReport:
    """Prints the parts of `reco up` and their changes, as JSON lines or for people."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, text: str) -> None:
        """Print one line."""
        click.echo(
            json.dumps({"event": "said", "text": text}) if self.as_json else text, err=not self.as_json
        )

    def show(self, states: list[State]) -> None:
        """Print the state of each part."""
        from pipelines.tables import table

        if self.as_json:
            click.echo(json.dumps({"event": "parts", "parts": [asdict(state) for state in states]}))
            return
        rows = [[s.name, s.address, s.pid or "", s.health, s.restarts] for s in states]
        click.echo(table(["part", "address", "pid", "health", "restarts"], rows) + "\n")


def _check_replay(data: str, speed: float, since: str) -> None:
    """Refuse a replay that would fail only after store and broker have started."""
    from feature_repo.events import EventsInvalid
    from feature_repo.stream.replay_events import moment

    check_data(data)
    if not 0 <= speed < float("inf"):
        raise click.UsageError(f"--speed is {speed}, expected seconds of data per second, 0 for all at once")
    if since:
        try:
            moment("from", since)
        except EventsInvalid as error:
            raise click.UsageError(str(error)) from error


@click.command()
@question_options
@click.option(
    "--requests", type=click.File("rb"), help="Request lines (JSON), one response a line; - is stdin."
)
@common_options
def recommend(context: Context, line: dict[str, Any], requests: IO[bytes] | None) -> None:
    """Answer one basket, or a file of requests."""
    from pipelines.inspect.ask import answer_lines, open_champion

    recommender = open_champion(context.settings(), read_champion(context.home))
    if requests is not None:
        failed = 0
        for answer in answer_lines(recommender, requests):
            failed += "error" in answer
            click.echo(json.dumps(answer))
        if failed:
            click.echo(f"reco: {failed} lines are invalid requests; their answers say why", err=True)
            click.get_current_context().exit(1)
        return
    [answer] = answer_lines(recommender, [json.dumps(line).encode()])
    if "error" in answer:
        raise click.UsageError(answer["error"])
    context.answer(answer, _shown(recommender, answer))


def _shown(recommender: Any, answer: dict[str, Any]) -> str:
    from pipelines.inspect.ask import item_names
    from pipelines.tables import table

    names = item_names(recommender, [item["item_id"] for item in answer["items"]])
    rows = [
        [number, i["item_id"], names[i["item_id"]].lower(), i["score"], i["source"], i["reason"]]
        for number, i in enumerate(answer["items"], 1)
    ]
    notes = [f"bundle {answer['bundle_id']}", f"rung {answer['rung']}"]
    notes.append(f"{answer['stage_ms']['total']:.1f} ms")
    if answer["degraded"]:
        notes.append(f"degraded: {answer['degraded_reason']}")
    head = ["#", "item", "what", "score", "source", "reason"]
    return f"{table(head, rows) if rows else 'nothing to recommend'}\n{', '.join(notes)}"


@click.command()
@click.argument("item")
@question_options
@click.option("--request-id", help="Of an answer in the prediction log, in place of all the options above.")
@common_options
def why(context: Context, item: str, line: dict[str, Any], request_id: str | None) -> None:
    """Explain why ITEM is in an answer, or where it was lost.

    It was not found, or filtered, outscored, or made room for others. The request is answered again with the
    features and facts of now.
    """
    import time

    from pipelines.inspect.ask import open_champion
    from pipelines.inspect.why import explain, logged_answer, request_of, served
    from pipelines.tables import table
    from serving.schemas import parse_request

    settings = context.settings()
    record = None
    if request_id is not None:
        record = logged_answer(settings.prediction_log_dir, request_id)
        line = request_of(record)
    recommender = open_champion(settings, read_champion(context.home))
    profiles = recommender.bundle.profiles
    request = parse_request(line, now=time.time(), default_id="why", profiles=profiles)
    verdict, answer = explain(recommender, request, item)
    recommender.facts.close()
    document: dict[str, Any] = {"verdict": verdict.to_dict(), "answer": answer.to_dict()}
    place = f"number {verdict.slot}" if verdict.slot else f"lost in {verdict.step}"
    lines = [f"{item}: {place}: {verdict.why}"]
    if verdict.rank is not None:
        lines.append(f"score {verdict.score}, number {verdict.rank} of {verdict.candidates} candidates")
    if record is not None:
        document["served"] = served(record, item, recommender.bundle.bundle_id)
        lines.append(document["served"])
    if answer.degraded:
        lines.append(f"degraded answer: {answer.degraded_reason}")
    if verdict.places:
        rows = [[p.source, p.rank, p.brings] for p in verdict.places]
        lines.append(table(["source", "number", "brings"], rows))
    context.answer(document, "\n".join(lines))


@click.group()
def rules() -> None:
    """Check a merchandiser's rules, and preview their effect."""


@rules.command("check")
@click.argument("file", type=FILE, required=False, metavar="[FILE]")
@common_options
def check_rules(context: Context, file: Path | None) -> None:
    """List the errors of a rules file, by line.

    Without FILE, of the file that is served. Exit code 1: the endpoint would refuse it. Warnings are for a
    person to judge.
    """
    from pipelines.inspect.preview_rules import check_rules as check
    from pipelines.tables import table

    path = _rules_file(context, file)
    checked = check(path, context.home)
    rows = [[p.line, "error" if p.refused else "warning", p.text] for p in checked.problems]
    listed = table(["line", "", "what"], rows) + "\n" if rows else ""
    if checked.refused:
        said = "not taken: the rules that were last read stay in force"
    else:
        counts = ", ".join(f"{count} {name}" for name, count in checked.times().items())
        said = f"{len(checked.rules)} rules ({counts})"
        said += "" if checked.bundle_id else "; no champion here, items and names were not looked up"
    context.answer(checked.to_dict(), f"{listed}{path}: {said}")
    if checked.refused:
        click.get_current_context().exit(1)


@rules.command("preview")
@click.option("--file", type=FILE, help="Rules.  [default: those that are served]")
@question_options
@common_options
def preview_rules(context: Context, file: Path | None, line: dict[str, Any]) -> None:
    """Show an answer before and after the rules.

    With the reason for each item's place.
    """
    import time

    from pipelines.inspect.ask import item_names, open_champion
    from pipelines.inspect.preview_rules import RulesRefused, preview
    from pipelines.inspect.preview_rules import check_rules as check
    from pipelines.tables import table
    from serving.schemas import parse_request

    path = _rules_file(context, file)
    checked = check(path, context.home)
    if checked.refused:
        raise RulesRefused(f"{path} is not taken: `reco rules check {path}` says why")
    recommender = open_champion(context.settings(), read_champion(context.home))
    profiles = recommender.bundle.profiles
    request = parse_request(line, now=time.time(), default_id="preview", profiles=profiles)
    document = preview(recommender, checked.rules, request)
    recommender.facts.close()
    names = item_names(recommender, [item["item_id"] for item in document["items"]])
    rows = [
        [
            item["slot"] or "-",
            item["slot_before"] or "-",
            item["item_id"],
            names[item["item_id"]].lower(),
            item["score"],
            item["reason"],
        ]
        for item in document["items"]
    ]
    context.answer(document, table(["slot", "before", "item", "what", "score", "why"], rows))


def _rules_file(context: Context, file: Path | None) -> Path:
    path = file or context.settings().rules_path
    if not path.is_file():
        raise click.UsageError(
            f"there is no {path}: name a file; docs/how-to/own-rules.md has one to begin with"
        )
    return path


COMMANDS = (serve, up, recommend, why, rules)
