"""Commands for a merchandiser's rules: init, check, preview."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import click

from components.home import command
from feature_repo.atomic_files import write_file
from pipelines.cli.options import FILE, Context, common_options, question_options


@click.group()
def rules() -> None:
    """Begin, check and preview a merchandiser's rules."""


@rules.command("init")
@click.argument("file", type=click.Path(path_type=Path), required=False, metavar="[FILE]")
@common_options
def init_rules(context: Context, file: Path | None) -> None:
    """Write a commented rules file to begin with.

    Without FILE, to the place that the endpoint reads. A ban of the champion's age-restricted goods is
    active in it. All other rules are comments. An existing file is never overwritten.
    """
    from pipelines.inspect.first_rules import first_rules

    path = file or context.settings().rules_path
    text = first_rules(context.home)
    if path.exists() or path.is_symlink():
        raise click.UsageError(f"{path} exists: edit it, or name another file")
    write_file(path, text)  # never a part of it: the ban of age-restricted goods would be missing
    said = f"{path} written; edit it, then: {command(context.home, f'rules check {shlex.quote(str(path))}')}"
    context.answer({"file": str(path)}, said)


@rules.command("check")
@click.argument("file", type=FILE, required=False, metavar="[FILE]")
@common_options
def check_rules(context: Context, file: Path | None) -> None:
    """List the errors of a rules file, by line.

    Without FILE, of the file that is served. FILE may be a pipe. Exit code 1: the endpoint would refuse the
    file. Warnings alone end with exit code 0: a person judges them.
    """
    from pipelines.inspect.preview_rules import check_rules as check
    from pipelines.tables import counted, table

    path = _rules_file(context, file)
    checked = check(path, context.home)
    rows = [[p.line, "error" if p.refused else "warning", p.text] for p in checked.problems]
    listed = table(["line", "", "what"], rows) + "\n" if rows else ""
    if checked.refused:
        said = "not taken: the rules that were last read stay in force"
    else:
        counts = ", ".join(f"{count} {name}" for name, count in checked.times().items())
        said = f"{counted(len(checked.rules), 'rule')} ({counts})"
        said += "" if checked.bundle_id else "; no champion here, items and names were not looked up"
    context.answer(checked.to_dict(), f"{listed}{path}: {said}", int(checked.refused))


@rules.command("preview")
@click.option("--file", type=FILE, help="Rules.  [default: those that are served]")
@question_options
@common_options
def preview_rules(context: Context, file: Path | None, line: dict[str, Any]) -> None:
    """Show an answer before and after the rules.

    With the reason for each item's place.
    """
    from pipelines.inspect.ask import open_champion
    from pipelines.inspect.preview_rules import RulesRefused, preview
    from pipelines.inspect.preview_rules import check_rules as check
    from pipelines.tables import table
    from serving.schemas import parse_request

    path = _rules_file(context, file)
    checked = check(path, context.home)
    if checked.refused:
        check_it = command(context.home, f"rules check {shlex.quote(str(path))}")
        raise RulesRefused(f"{path} is not taken: `{check_it}` says why")
    recommender = open_champion(context.settings(), line, own_rules=True)
    profiles = recommender.bundle.profiles
    request = parse_request(
        {**line, "explain": True}, now=time.time(), default_id="preview", profiles=profiles
    )
    document = preview(recommender, checked.rules, request)
    rows = [
        [
            item["slot"] or "-",
            item["slot_before"] or "-",
            item["item_id"],
            item["name"].lower(),
            item["score"],
            item["reason"],
        ]
        for item in document["items"]
    ]
    context.answer(document, table(["slot", "before", "item", "what", "score", "why"], rows))


def _rules_file(context: Context, file: Path | None) -> Path:
    path = file or context.settings().rules_path
    if not path.exists():
        init = command(context.home, "rules init")
        raise click.UsageError(f"there is no {path}: name a file, or write one with `{init}`")
    return path


COMMANDS = (rules,)
