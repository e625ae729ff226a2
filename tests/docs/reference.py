"""The code -> the reference pages: commands, settings, metrics, errors, pipeline parameters."""

import ast
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import click
from prometheus_client import REGISTRY

from components.hyper_parameters import GROUPS, RANKERS, describe
from feature_repo.schema import CATEGORICAL, FRESH, ITEM, REQUEST, USER
from feature_repo.snapshots import ITEM_COLUMNS, ITEM_VIEW, USER_COLUMNS, USER_VIEW
from feature_repo.stream.configuration import CONFIG, DOTENV_FILE, NO_FILE, TOML_FILE
from feature_repo.stream.kafka import VARIABLES as KAFKA_VARIABLES
from feature_repo.stream.kafka import KafkaSettings
from pipelines.bench.report import table as markdown_table
from serving.settings import Settings, variable
from tests.docs.source import (
    ROOT,
    constant,
    exit_code,
    expected_errors,
    first_line,
    tree,
)

HEAD = "<!-- Written by `python -m tests.docs.generate`: change the code, not this page. -->\n\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(markdown_table(header, [[cell(text) for text in row] for row in rows])) + "\n"


def cell(text: str) -> str:
    """Return text for a table cell: one line, bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Return text as code; empty text stays empty."""
    return f"`{text}`" if text else ""


# ------------------------------------------------------------------------------------------- commands


def program() -> click.Group:
    """Return the command group that `reco` runs."""
    group = import_module("pipelines.cli.shell").main
    assert isinstance(group, click.Group)
    return group


def commands(
    group: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command with the words that call it, groups opened."""
    if not isinstance(group, click.Group) or group.invoke_without_command:
        yield path, group
    if isinstance(group, click.Group):
        context = click.Context(group)
        for word in group.list_commands(context):
            command = group.get_command(context, word)
            assert command is not None, word
            if not command.hidden:
                yield from commands(command, (*path, word))


def commands_page() -> str:
    """Return the page of commands, with each option and its default."""
    every = list(commands(program()))
    page = HEAD + (
        "# Commands\n\n"
        "The command is `.venv/bin/reco`, or `reco` after `source .venv/bin/activate`. All state "
        "is in one\n"
        "folder: that of `--home`, else that of `RECO_HOME`, else `.reco`.\n\n"
        "- `--output json` prints one JSON document on stdout. Progress and errors go to stderr.\n"
        "- `--debug` shows the traceback of an error.\n"
        '- For completion in bash, put `eval "$(_RECO_COMPLETE=bash_source reco)"` into `~/.bashrc`.\n'
        "  For zsh the word is `zsh_source`, for fish `fish_source`.\n\n"
    )
    rows = [
        (f"[`reco {' '.join(path)}`](#{anchor(path)})", command.get_short_help_str(200))
        for path, command in every
    ]
    page += table(("command", "effect"), rows)
    page += "\n" + "\n".join(command_section(path, command) for path, command in every)
    return page + "\n" + exit_codes()


def anchor(path: tuple[str, ...]) -> str:
    """Return the anchor of a command's heading."""
    return f"reco-{'-'.join(path)}"


def command_section(path: tuple[str, ...], command: click.Command) -> str:
    """Return the heading, the help text and the options of one command."""
    arguments = [
        p.make_metavar(click.Context(command)) for p in command.params if isinstance(p, click.Argument)
    ]
    lines = [f"## `reco {' '.join(path)}`\n"]
    if arguments:
        lines.append(f"Usage: `reco {' '.join(path)} {' '.join(arguments)}`\n")
    lines.append(paragraphs(command.help or "") + "\n")
    shared = {"home", "output", "debug", "help"}
    options = [
        p for p in command.params if isinstance(p, click.Option) and not p.hidden and p.name not in shared
    ]
    if options:
        rows = [(option_words(option), shown_default(option), meaning(option)) for option in options]
        lines.append(table(("option", "default", "meaning"), rows))
    return "\n".join(lines)


def paragraphs(text: str) -> str:
    """Return a help text as Markdown paragraphs: no indentation, blocks that click keeps stay blocks."""
    blocks = re.split(r"\n\s*\n", text.strip())
    written = []
    for block in blocks:
        if block.lstrip().startswith("\b"):
            rows = block.replace("\b", "").strip("\n").splitlines()
            written.append("```text\n" + "\n".join(rows) + "\n```")
        else:
            written.append(" ".join(block.split()).replace("<", "&lt;"))
    return "\n\n".join(written)


def option_words(option: click.Option) -> str:
    """Return the names of an option and the kind of its value."""
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.is_flag or option.count:
        return names
    metavar = option.metavar or option.make_metavar(click.Context(click.Command("reco")))
    return f"{names} {metavar}"


def shown_default(option: click.Option) -> str:
    """Return an option's default as code; empty text without a default and for a switch that is off."""
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.default
    if callable(value) or value in (None, "", (), False) or "Sentinel" in type(value).__name__:
        return ""
    return code(str(value))


def meaning(option: click.Option) -> str:
    """Return the help of an option, which ends with `Required.` for one that must be given."""
    text = (option.help or "").replace("<", "&lt;")
    return f"{text} Required." if option.required else text


def exit_codes() -> str:
    """Return the table of exit codes."""
    return (
        "## Exit codes\n\n"
        + table(
            ("code", "meaning"),
            [
                ("0", "done"),
                ("1", "a check or a gate refused; drift was found"),
                ("2", "wrong usage or configuration"),
                ("3", "a dependency cannot be reached"),
                ("4", "conflict with a running or existing thing"),
                ("130", "stopped by Ctrl-C"),
            ],
        )
        + "\nThe [list of errors](errors.md#errors-of-the-command) says which error ends with which code.\n"
    )


# ------------------------------------------------------------------------------------------- settings


def settings_rows(kind: type, variables: dict[str, str]) -> list[tuple[str, ...]]:
    """Return (variable, default, values, meaning) for each field of a settings class."""
    return [
        (
            code(variables.get(field.name) or variable(field.name)),
            code(shown(field.default)),
            values(field.metadata),
            field.metadata["description"],
        )
        for field in dataclasses.fields(kind)
    ]


def values(metadata: Mapping[str, Any]) -> str:
    """Return the values that a setting can take; empty for free text."""
    limits = metadata["limits"]
    if {"ge", "le"} <= limits.keys():
        return f"{limits['ge']:,} to {limits['le']:,.10g}"
    return "" if metadata["expected"] == "text" else metadata["expected"]


def sentence(text: str) -> str:
    """Return a meaning with a capital letter at the start, unless it starts with a name or with code."""
    head = text.split(" ", 1)[0].rstrip(",;")
    return text[:1].upper() + text[1:] if head.isalpha() and head.islower() else text


def shown(default: object) -> str:
    """Return a default as a person writes it: a switch is on or off, 50.0 is 50."""
    match default:
        case None:
            return ""
        case bool():
            return "on" if default else "off"
        case float():
            return f"{default:g}"
        case _:
            return str(default)


def settings_page() -> str:
    """Return the page of settings."""
    return HEAD + (
        "# Settings\n\n"
        "A setting changes speed or place; the models and their parameters are in the bundle.\n"
        "These settings change answers, too:\n\n"
        "- `RECO_REASONS`: the text of a reason.\n"
        "- `RECO_EXPLORE_SHARE`: in so many answers one place is drawn by chance.\n"
        "- `RECO_DEADLINE_MS`: with too short a deadline fewer candidates are ranked.\n"
        "- `RECO_USER_LIMIT_PER_S`: requests of a shopper above it get a lower rung.\n"
        "- `RECO_ANSWER_CACHE`: some features of a known shopper may be older than the request.\n\n"
        + sources()
        + "## Endpoint\n\n"
        + table(("variable", "default", "values", "meaning"), settings_rows(Settings, {}))
        + "\nOther forms of `RECO_STORE_URL`, for Redis Cluster, Sentinel and TLS:\n"
        "[Use your own Redis and Kafka](../how-to/own-redis-and-kafka.md#redis).\n"
        + "\n## Broker of the events\n\n"
        + table(
            ("variable", "default", "values", "meaning"), settings_rows(KafkaSettings, dict(KAFKA_VARIABLES))
        )
    )


def sources() -> str:
    """Return the sources of settings."""
    return (
        "A process reads its settings once, when it starts. The first place that names a setting wins: the\n"
        f"environment, `{DOTENV_FILE}`, then `{TOML_FILE}`, both in the working directory.\n"
        f"`{CONFIG}=FILE` names another TOML file, `{CONFIG}={NO_FILE}` means that neither file is read.\n"
        "A key of the TOML file is the variable without `RECO_`, in lower case. The broker's settings are\n"
        "in its table `[kafka]`, without `KAFKA_`. `reco up` reads `RECO_KAFKA_BOOTSTRAP` from the\n"
        "environment alone. Unknown keys are refused, unknown `RECO_` variables cause a warning. Secrets\n"
        "are never printed.\n\n"
    )


# ------------------------------------------------------------------------------------------- metrics


def metrics_page() -> str:
    """Return the page of Prometheus metrics."""
    rows = []
    for metric in exposed_metrics():
        for family in metric.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in getattr(metric, "_labelnames", ()))
            rows.append((code(name), family.type, labels, family.documentation))
    return HEAD + (
        "# Metrics\n\n"
        "`GET /metrics` of the endpoint shows them in Prometheus' text format or as OpenMetrics.\n"
        "`RECO_METRICS_ADDRESS` moves the page to its own port. With several processes a counter is the sum\n"
        "of all, and so is a gauge that counts something. Every other gauge is that of the worst living\n"
        "process. No label names an item or a shopper. `reco watch` shows its metrics on a port of its own:\n"
        "`reco_drift_*`, `reco_kpi_*`, `reco_watch_*`, `reco_items_raised` and `reco_retraining_failed`.\n\n"
        + table(("metric", "type", "labels", "meaning"), sorted(rows))
    )


def exposed_metrics() -> list[Any]:
    """Return the collectors of the endpoint and of `reco watch`."""
    values = vars(import_module("serving.metrics")).values()
    ours = {id(value) for value in values}
    served = [collector for collector in REGISTRY._collector_to_names if id(collector) in ours]
    return served + list(import_module("monitoring.gauges").WatchGauges().registry._collector_to_names)


# -------------------------------------------------------------------------------------------- errors


def refusals() -> str:
    """Return the errors that the endpoint answers with a status, from its table."""
    table_of = import_module("serving.api.endpoint")._REFUSALS
    by_status: dict[tuple[int, str], list[str]] = {}
    for kind, (status, grpc_status, _reason) in table_of.items():
        by_status.setdefault((status, grpc_status.name), []).append(kind.__name__)
    return table(
        ("status", "gRPC", "errors"),
        [
            (str(status), code(name), ", ".join(map(code, kinds)))
            for (status, name), kinds in sorted(by_status.items())
        ],
    )


def reasons() -> str:
    """Return each `degraded_reason` that an error class names, with the class's own words."""
    path = ROOT / "serving" / "errors.py"
    rows = [
        (code(str(constant(node, "reason"))), first_line(node))
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and constant(node, "reason")
    ]
    return table(("`degraded_reason`", "cause"), rows)


def rejected() -> str:
    """Return the sentence with the values of the label `reason` of reco_rejected_total."""
    words = ", ".join(map(code, import_module("serving.metrics").REFUSALS))
    return f"`reco_rejected_total` counts refusals by `reason`: {words}.\n"


def command_errors() -> str:
    """Return every expected error with its exit code, meaning and file."""
    rows = [
        (str(exit_code(name)), code(name), first_line(node), code(path.relative_to(ROOT).as_posix()))
        for name, node, path in expected_errors()
    ]
    return table(("exit code", "error", "meaning", "file"), sorted(rows))


# ------------------------------------------------------------------------------------------- drills


def drill_proofs() -> str:
    """Return what each drill proves, and its faults."""
    drills = import_module("pipelines.drills.catalogue").DRILLS
    rows = [
        (
            code(drill.name),
            drill.proves,
            ", ".join(drill.breaks),
            ", ".join(map(code, sorted(set(drill.pages.values())))) or "none",
        )
        for drill in drills
    ]
    return table(("drill", "proves", "faults", "pages"), rows)


def drill_results() -> str:
    """Return the table of the last full run of all drills."""
    result = json.loads((ROOT / "docs" / "figures" / "drills.json").read_text(encoding="utf-8"))
    rows = "\n".join(import_module("pipelines.drills.report").drill_rows(result)) + "\n"
    drills = import_module("pipelines.drills.catalogue").DRILLS
    newer = [code(drill.name) for drill in drills if drill.name not in result["drills"]]
    return rows + (f"\nNewer than that run, and not in it: {', '.join(newer)}.\n" if newer else "")


def drill_pages() -> str:
    """Return the pages of the last run of all drills with alerts."""
    result = json.loads((ROOT / "docs" / "figures" / "alerts.json").read_text(encoding="utf-8"))
    report = import_module("pipelines.drills.report")
    rows = "\n".join(report.page_rows(result["drills"]))
    return f"{report.alerts_verdict(result['drills'])}\n\n{rows}\n"


# ---------------------------------------------------------------------------------------- parameters


def parameters_page() -> str:
    """Return the page of pipeline parameters."""
    text = HEAD + (
        "# Pipeline parameters\n\n"
        "`reco run --param NAME=VALUE` and `reco submit --param NAME=VALUE` set one parameter. A "
        "dot opens a group:\n"
        "`--param student_params.epochs=2`. A wrong name is refused with the closest right one.\n"
        "`reco params` prints the groups.\n\n"
        "The defaults are those of `reco run --full` and `reco submit`. Smaller runs have others:\n\n"
        + smaller_runs()
        + "\n## Arguments of the pipeline\n\n"
        "Options set `home`, `tracking_uri`, `data`, `train_until` and `model_name`: `--param` refuses "
        "these.\n\n"
    )
    rows = [(code(name), code(default)) for name, default in pipeline_arguments()]
    text += table(("argument", "default"), rows)
    for name, kind in GROUPS.items():
        text += f"\n## `{name}`\n\n{(kind.__doc__ or '').splitlines()[0]}\n\n"
        rows3 = [
            (code(one.name.partition(".")[2]), code(str(one.default)), sentence(one.meaning))
            for one in describe(name)
        ]
        text += table(("parameter", "default", "meaning"), rows3)
        if name == "ranker_params":
            text += "\n" + rankers_text()
        if name == "gate_params":
            text += "\nFor these, `reco promote --gate NAME=VALUE` does the same.\n"
    return text


def smaller_runs() -> str:
    """Return the defaults of the runs that do less than the whole pipeline."""
    training = import_module("pipelines.training")
    sizes = {
        "`reco run`": training.LAPTOP,
        "`reco run --fast`, `reco submit --fast`": training.FAST,
    }
    return table(
        ("run", "its defaults"), [(name, ", ".join(as_params(size))) for name, size in sizes.items()]
    )


def as_params(values: Mapping[str, Any], group: str = "") -> Iterator[str]:
    """Yield each value of nested parameters as `--param` takes it."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from as_params(value, f"{group}{name}.")
        else:
            yield code(f"{group}{name}={json.dumps(value)}")


def pipeline_arguments() -> list[tuple[str, str]]:
    """Return (name, default) of each argument of the training pipeline that is not a group."""
    [function] = [
        node
        for node in ast.walk(tree(ROOT / "pipelines" / "training.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "training"
    ]
    names = [argument.arg for argument in function.args.args]
    defaults = [None] * (len(names) - len(function.args.defaults)) + [*function.args.defaults]
    return [
        (name, "" if default is None else ast.unparse(default).strip("'"))
        for name, default in zip(names, defaults, strict=True)
        if not name.endswith("_params")
    ]


def rankers_text() -> str:
    """Return which rankers take these parameters, and the size of each."""
    rows = []
    for ranker in RANKERS:
        given = [(one.name.split(".")[2:], one.default) for one in describe(f"ranker_params.{ranker}")]
        own, sizes = (
            ", ".join(f"`{name[-1]}={value}`" for name, value in given if len(name) == count)
            for count in (1, 2)
        )
        rows.append((code(ranker), own, sizes))
    return (
        "Each ranker has its own group: `--param ranker_params.dlrm.epochs=1`. `size` holds the "
        "arguments of its class:\n\n" + table(("ranker", "defaults", "`size`"), rows)
    )


# ------------------------------------------------------------------------------------------- features


def features_page() -> str:
    """Return every input of the model with its meaning, and the Feast view that has it."""
    views = dict.fromkeys(USER_COLUMNS.names, USER_VIEW) | dict.fromkeys(ITEM_COLUMNS.names, ITEM_VIEW)
    rows = [
        (code(feature.__name__), of, code(views.get(feature.__name__, "")), first_sentence(feature))
        for of, features in (("user", USER), ("item", ITEM), ("item", FRESH), ("request", REQUEST))
        for feature in features
    ]
    return (
        f"{HEAD}# Features\n\n"
        f"The {len(rows)} dense inputs of a ranker, in their order. `feature_repo/schema.py` lists them.\n"
        f"Beside them a ranker reads {len(CATEGORICAL)} codes of the candidate: {', '.join(CATEGORICAL)}.\n\n"
        f"The {len(REQUEST)} of a request depend on its basket, or on shopper and candidate together:\n"
        "no store can hold all pairs. The same functions compute them in training and in the endpoint, from\n"
        "the rows of both views. An on-demand view of Feast would be a second definition, which neither\n"
        "would use.\n\n" + table(("feature", "of", "Feast view", "meaning"), rows)
    )


def first_sentence(feature: Any) -> str:
    """Return the first line of a feature's docstring."""
    return str(feature.__doc__).splitlines()[0]
