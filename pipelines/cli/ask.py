"""Commands that answer and explain: try, recommend, why, items, best-sellers."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import click

from components.home import command
from pipelines.cli.options import Context, check_alone, common_options, question_options
from pipelines.tables import counted
from serving.release.champion import read_champion


@click.command("try")
@common_options
def try_toy_shop(context: Context) -> None:
    """Show an answer of a small synthetic shop, within a minute.

    The first call trains tiny models in one process and keeps them in `trial` under the home. They are
    never registered or promoted.
    """
    from pipelines.inspect.ask import answer_lines
    from pipelines.inspect.items import named
    from pipelines.trial import EXPECTED, QUESTION, open_trial

    recommender = open_trial(context.home, context.say)
    [answer] = answer_lines(recommender, [json.dumps(QUESTION).encode()])
    bundle = recommender.bundle
    items, cut = len(bundle.statistics.item_ids), bundle.manifest["cut"][:10]
    text = f"""
The toy shop sells {items} items. Its purchases until {cut} trained this trial.
The shopper {QUESTION["user_id"]} pays for {", ".join(named(bundle, item) for item in QUESTION["basket"])}.
These are favourites of this shopper. One favourite is missing: {named(bundle, EXPECTED)}.

{_shown(answer)}

A trial has tiny models and passes no gate. Go on with:
  {command(context.home, "run --data toy --fast")}   every step, on the same shop
  {command(context.home, "run")}                     real purchases, and a champion to serve
"""
    context.answer({"request": QUESTION, "expected": EXPECTED, "answer": answer}, text.strip("\n"))


@click.command()
@question_options
@click.option(
    "--requests", type=click.File("rb"), help="Request lines (JSON), one response a line; - is stdin."
)
@common_options
def recommend(context: Context, line: dict[str, Any], requests: IO[bytes] | None) -> None:
    """Answer one basket, or a file of requests.

    Of one basket, a line on stderr names a shopper without a history and an unknown store.
    """
    from pipelines.inspect.ask import answer_lines, notes_on, open_champion

    if requests is not None:
        check_alone("--requests", "a line of the file is a whole request")
        recommender, failed = open_champion(context.settings()), 0
        for answer in answer_lines(recommender, requests):
            failed += "error" in answer
            click.echo(json.dumps(answer))
        if failed:
            context.say(f"reco: {counted(failed, 'invalid request')}; the answers say why")
            click.get_current_context().exit(1)
        return
    recommender = open_champion(context.settings(), line)
    [answer] = answer_lines(recommender, [json.dumps({**line, "explain": True}).encode()])
    if "error" in answer:
        raise click.UsageError(answer["error"])
    context.answer(answer, _shown(answer))
    for note in notes_on(recommender, line):
        context.say(note)


def _shown(answer: dict[str, Any]) -> str:
    from pipelines.tables import table

    rows = [
        [number, i["item_id"], i["name"].lower(), i["score"], i["source"], i["reason"]]
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
    from pipelines.inspect.ask import open_champion
    from pipelines.inspect.why import explain, logged_answer, request_of, served
    from pipelines.tables import table
    from serving.schemas import parse_request

    settings = context.settings()
    record = None
    if request_id is not None:
        check_alone("--request-id", "the request is that of the log")
        record = logged_answer(settings.prediction_log_dir, request_id)
        line = request_of(record)
    recommender = open_champion(settings, line if record is None else None)
    profiles = recommender.bundle.profiles
    request = parse_request(line, now=time.time(), default_id="why", profiles=profiles)
    verdict, answer = explain(recommender, request, item)
    document: dict[str, Any] = {"verdict": asdict(verdict), "answer": answer.to_dict()}
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
        lines.append(table(["source", "item's place", "quota"], rows))
    context.answer(document, "\n".join(lines))


@click.command("items")
@click.argument("words", nargs=-1, required=True)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Rows at most.")
@common_options
def find_items(context: Context, words: tuple[str, ...], limit: int) -> None:
    """Find items by words.

    WORDS are parts of an item's name, category or department, or begin its id; all must match. Best
    sellers come first. The price is the mean that shoppers paid before the cut.
    """
    from pipelines.inspect.items import find_items as find
    from pipelines.inspect.items import has_names
    from pipelines.tables import table
    from serving.release.bundle import load_bundle

    bundle = load_bundle(read_champion(context.home).bundle(context.home))
    found = find(bundle, words, limit)
    text = table(list(found[0]), [list(row.values()) for row in found]) if found else "no such item"
    if not has_names(bundle):
        text += "\nthis data set names no items: add type, category or department to its table of items"
    context.answer(found, text, 0 if found else 1)


@click.command("best-sellers")
@click.option(
    "-o", "--out", "file", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON file."
)
@common_options
def best_sellers(context: Context, file: Path) -> None:
    """Write the fallback file of the clients.

    It holds the champion's best sellers, best first. A client offers them when the endpoint gives no
    answer. Items that facts or rules exclude now, in every store, are left out.
    """
    from pipelines.inspect.ask import open_champion
    from serving.errors import FactsUnavailable
    from serving.release.best_sellers import write_best_sellers

    recommender = open_champion(context.settings())
    now, facts = time.time(), recommender.facts
    if facts.state != "ready":
        raise FactsUnavailable(
            "the facts cannot be read: expected those of now, or sold-out and recalled items would be in "
            f"{file}; start the fact store, `{command(context.home, 'doctor')}` names its fault"
        )
    count = write_best_sellers(recommender.bundle, file, facts.hidden(now, None, facts.rules.plan(now, None)))
    context.answer({"file": str(file), "items": count}, f"{count} best sellers written to {file}")


COMMANDS = (recommend, why, find_items, best_sellers)
