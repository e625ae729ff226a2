"""`reco`: what a person types -> one call of the project; a command imports what it needs when it runs."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from components.home import read_champion, read_running
from feature_repo.spelling import closest
from serving.settings import SettingInvalid, Settings

if TYPE_CHECKING:
    from feature_repo.stream.kafka import KafkaSettings
    from pipelines.run.runs import Run
    from pipelines.run.submit import Mount

Command = TypeVar("Command", bound=Callable[..., Any])
MODEL_NAME = "checkout-recommender"
STATE = "/mnt/reco"
# What errors of other packages mean to a caller; ours carry their exit code.
EXIT_CODES = {
    "BundleInvalid": 1,
    "ContractViolation": 1,
    "EventsInvalid": 1,
    "SettingInvalid": 2,
    "InvalidRequest": 2,
    "ValueError": 2,
    "TypeError": 2,
    "FeaturesUnavailable": 3,
    "FactsUnavailable": 3,
    "MlflowException": 3,
    "DatabaseError": 3,  # of SQLAlchemy: what should be the registry is no database, or it is away
    "OSError": 3,
}


class Reco(click.Group):
    """Turns errors into one line and an exit code, and an unknown word into a suggestion."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which one needs them."""
        return list(self.commands)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Find the command; an unknown one is answered with the closest."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(
                f"no command {args[0]!r}: {closest(args[0], self.list_commands(ctx))}", ctx
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and answer for its errors."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            ctx.exit(130)
        except Exception as error:
            code = exit_code(error)
            if code is None or ctx.find_root().meta.get("debug"):
                raise
            click.echo(f"reco: {error}", err=True)
            ctx.exit(code)


def exit_code(error: Exception) -> int | None:
    """Return what an error means to a caller; None for one that nobody expected."""
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    return next(
        (EXIT_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in EXIT_CODES), None
    )


PORT = click.IntRange(0, 65_535)


class NoRegistry(Exception):
    """Nothing was registered where one looks."""

    exit_code = 2


class Context:
    """What every command is told: where the state lives, and how to answer."""

    def __init__(self, home: Path, output: str) -> None:
        self.home, self.output = home, output

    def settings(self, **given: Any) -> Settings:
        """Return the endpoint's settings for this home; while `reco up` runs here, its store is the store."""
        known = {name: value for name, value in given.items() if value is not None}
        settings = replace(Settings.from_env(), home=self.home, **known)
        if not settings.store_url and (running := read_running(self.home)):
            settings = replace(settings, store_url=running.store_url)
        return settings

    def kafka(self) -> KafkaSettings:
        """Return where the broker is; while `reco up` runs here, that is the one it uses."""
        from feature_repo.stream.kafka import VARIABLES, KafkaSettings

        settings = KafkaSettings.from_env()
        if not os.environ.get(VARIABLES["bootstrap"], "").strip() and (running := read_running(self.home)):
            settings = replace(settings, bootstrap=running.bootstrap)
        return settings

    def answer(self, document: Any, text: str) -> None:
        """Write the answer to stdout: as JSON or as text."""
        click.echo(json.dumps(document, indent=1, default=str) if self.output == "json" else text)


def command_options(command: Command) -> Command:
    """Add --home, --output and --debug to a command and hand it a `Context`."""

    @click.option(
        "--home", type=click.Path(path_type=Path), help="Folder of all state.  [default: .reco or RECO_HOME]"
    )
    @click.option(
        "--output", type=click.Choice(["text", "json"]), default="text", help="One JSON document on stdout."
    )
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @click.pass_context
    @functools.wraps(command)
    def wrapped(ctx: click.Context, /, home: Path | None, output: str, debug: bool, **options: Any) -> Any:
        root = ctx.find_root()
        root.meta["debug"] = debug or root.params.get("debug")
        chosen = home or root.params.get("home") or Path(os.environ.get("RECO_HOME") or Settings().home)
        return command(Context(chosen.absolute(), output), **options)

    return wrapped  # type: ignore[return-value]


registry_options = (
    click.option(
        "--tracking-uri", default="", help="MLflow: sqlite:///PATH or http(s)://…  [default: under home]"
    ),
    click.option("--model-name", default=MODEL_NAME, show_default=True, help="Registered model."),
)


def with_registry(command: Command) -> Command:
    """Add --tracking-uri and --model-name."""
    for option in registry_options:
        command = option(command)
    return command


@click.group(cls=Reco, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--home", type=click.Path(path_type=Path), help="Folder of all state.  [default: .reco or RECO_HOME]"
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name=MODEL_NAME, prog_name="reco")
def main(home: Path | None, debug: bool) -> None:
    """Recommend what goes with a basket: train, release, serve, watch and retrain."""


# ------------------------------------------------------------------------------------------ training


@main.command()
@click.option(
    "--data", default="complete-journey", show_default=True, help="complete-journey, toy, or a folder."
)
@click.option(
    "--train-until", default="", help="The cut, a date or time.  [default: five weeks before the end]"
)
@click.option("--fast", is_flag=True, help="The same steps with smaller models and fewer examples.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="e.g. student_params.epochs=2")
@click.option(
    "--resume", default="", metavar="RUN", help="Go on with a run after its last good step, or `last`."
)
@click.option("--only", default="", metavar="STEP", help="With --resume: repeat this step alone.")
@with_registry
@command_options
def run(
    context: Context,
    data: str,
    train_until: str,
    fast: bool,
    params: tuple[str, ...],
    resume: str,
    only: str,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Train here, to a promoted champion."""
    if resume:
        _check_alone(click.get_current_context(), "resume", "only", "home", "output", "debug")
        done = _resume(context, resume, only)
    elif only:
        raise click.UsageError("--only needs --resume RUN: the step's inputs come from that run")
    else:
        done = _start(context, data, train_until, fast, params, tracking_uri, model_name)
    promoted = done.outputs().get("promote-bundle")
    document = {**_run_row(done), "promoted": promoted.parameters["Output"] if promoted else None}
    context.answer(document, _promoted(context, done))


def _start(
    context: Context,
    data: str,
    train_until: str,
    fast: bool,
    params: tuple[str, ...],
    tracking_uri: str,
    model_name: str,
) -> Run:
    from pipelines.run.arguments import parse_params

    _check_data(data)
    _check_time(train_until)
    given = parse_params(params)
    given |= {"data": _absolute(data), "train_until": train_until, "model_name": model_name}
    return start_training(context.home, given, fast, tracking_uri, sys.stderr)


def start_training(home: Path, given: dict[str, Any], fast: bool, tracking_uri: str, stream: IO[str]) -> Run:
    """Run the training pipeline under a home; `fast` fills in what is not given."""
    from components.release.registry import default_tracking_uri
    from pipelines.run.arguments import complete_arguments
    from pipelines.run.graph import read_spec
    from pipelines.run.local_run import start_run
    from pipelines.training import faster, training_of
    from serving.redis.address import is_redis_url

    if fast:
        given = faster(given)
    given |= {"home": str(home), "tracking_uri": tracking_uri or default_tracking_uri(home)}
    running = read_running(home)
    served = Settings.from_env().store_url or (running.store_url if running else "")
    if is_redis_url(served):
        given.setdefault("online_store", served)
    spec = read_spec(training_of(fast))
    arguments = complete_arguments(spec, given)
    _check_online_store(arguments["online_store"])
    return start_run(home, "training", spec, arguments, fast, stream)


def _resume(context: Context, name: str, only: str) -> Run:
    from pipelines.run.graph import read_spec
    from pipelines.run.local_run import resume_run
    from pipelines.run.runs import find_run
    from pipelines.training import training_of

    run = find_run(context.home, name)
    return resume_run(context.home, run, read_spec(training_of(run.fast)), only, sys.stderr)


def _promoted(context: Context, done: Run) -> str:
    from pipelines.run.progress import duration

    promoted = done.outputs().get("promote-bundle")
    if promoted is None:
        return f"run {done.run_id}: {done.status}; go on with: reco run --resume {done.run_id}"
    result = promoted.parameters["Output"]
    verb = "is champion" if result["changed"] else "was champion already"
    took = f"{duration(done.seconds)}, at most {done.peak_memory_mib:,} MiB of memory"
    return (
        f"version {result['version']} (bundle {result['bundle_id']}) {verb}  [{took}]\n"
        "ask it: reco recommend --basket ITEM,ITEM    serve it: reco serve"
    )


def _check_alone(ctx: click.Context, option: str, *beside: str) -> None:
    """Refuse what would be ignored: options beside `option` that were given and mean nothing there."""
    for parameter in ctx.command.params:
        name = str(parameter.name)
        given = ctx.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
        if given and name not in (option, *beside):
            raise click.UsageError(
                f"{parameter.opts[0]} means nothing with --{option}: a run goes on with what it was asked for"
            )


def _check_data(data: str) -> None:
    """Tell a misspelt name before anything starts."""
    names = ("complete-journey", "toy")
    if not data.strip():
        raise click.UsageError(f"--data is empty: give a folder, {' or '.join(names)}")
    if data not in names and not Path(data).exists():
        raise click.UsageError(f"no data {data!r}: neither a folder nor a name; {closest(data, names)}")


def _check_online_store(url: str) -> None:
    """Refuse now what the last step would refuse after all the training."""
    from components.data.feast_store import redis_settings

    if url:
        redis_settings(url)


def _check_time(text: str) -> None:
    from datetime import datetime

    try:
        datetime.fromisoformat(text or "2017-11-27")
    except ValueError as error:
        example = "expected for example 2017-11-27 or 2017-11-27T05:00:00Z"
        raise click.UsageError(f"--train-until {text!r} is no date: {example}") from error


def _check_since(text: str) -> None:
    from feature_repo.events import EventsInvalid
    from feature_repo.stream.replay_events import moment

    try:
        moment("from", text)
    except EventsInvalid as error:
        raise click.UsageError(str(error)) from error


def _absolute(data: str) -> str:
    """Steps run elsewhere: a relative path would point at another folder there."""
    return str(Path(data).absolute()) if data and Path(data).exists() else data


def with_volume(command: Command) -> Command:
    """Add --volume and --state."""
    command = click.option(
        "--volume", default="", metavar="PVC", help="Volume claim that every step gets at --state."
    )(command)
    return click.option(
        "--state", default=STATE, show_default=True, help="The pipeline's home: a path in its pods."
    )(command)


def _mount(volume: str, state: str) -> Mount | None:
    from pipelines.run.submit import Mount

    if not state.startswith("/"):
        raise click.UsageError(f"--state {state!r} is a path in a pod: it begins with /")
    if not volume and state != STATE:
        raise click.UsageError("--state needs --volume PVC: without it nothing is mounted there")
    return Mount(volume, state) if volume else None


@main.command("compile")
@click.argument(
    "pipeline", type=click.Choice(["training", "watch"]), default="training", metavar="[PIPELINE]"
)
@click.option("-o", "--file", type=click.Path(path_type=Path), help="Where.  [default: PIPELINE.yaml]")
@click.option("--image", default="", help="Container image that holds this project.")
@with_volume
@command_options
def compile_(context: Context, pipeline: str, file: Path | None, image: str, volume: str, state: str) -> None:
    """Write a pipeline (training or watch) as Kubeflow IR YAML."""
    from importlib import import_module

    from pipelines.run.submit import write_ir

    file = file or Path(f"{pipeline}.yaml")
    mount = _mount(volume, state)
    steps = write_ir(getattr(import_module(f"pipelines.{pipeline}"), pipeline), file, image, mount)
    context.answer({"file": str(file), "steps": steps}, f"{file}: {steps} steps")


@main.command()
@click.option("--host", required=True, help="Root URL of the Kubeflow Pipelines API.")
@click.option(
    "--data", default="complete-journey", show_default=True, help="As a step sees it: a name or a folder."
)
@click.option("--train-until", default="", help="The cut.  [default: five weeks before the end]")
@click.option("--fast", is_flag=True, help="The same steps with smaller models and fewer examples.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="e.g. student_params.epochs=2")
@click.option(
    "--online-store", default="", metavar="URL", help="redis:// to fill.  [default: SQLite under --state]"
)
@with_volume
@click.option("--image", default="", help="Container image that holds this project.")
@click.option("--experiment", default=MODEL_NAME, show_default=True, help="Experiment the run belongs to.")
@click.option("--namespace", default="", help="Namespace, where the cluster has several users.")
@click.option(
    "--token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Bearer token."
)
@click.option("--wait", is_flag=True, help="Wait for the end; exit code 1 unless it succeeded.")
@with_registry
@command_options
def submit(
    context: Context,
    host: str,
    data: str,
    train_until: str,
    fast: bool,
    params: tuple[str, ...],
    online_store: str,
    volume: str,
    state: str,
    image: str,
    experiment: str,
    namespace: str,
    token_file: Path | None,
    wait: bool,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Run the training pipeline on a Kubeflow Pipelines API."""
    from pipelines.run.arguments import complete_arguments, parse_params
    from pipelines.run.graph import read_spec
    from pipelines.run.submit import submit_pipeline, wait_for_run
    from pipelines.training import faster, training_of

    if not tracking_uri.startswith(("http://", "https://")):
        raise click.UsageError(
            "a cluster needs --tracking-uri http(s)://…: its pods cannot reach a file of this machine"
        )
    if not volume:
        raise click.UsageError(
            "a cluster needs --volume PVC: champion and online store are files under --state, and without a "
            "volume there they end with the pod that wrote them"
        )
    mount = _mount(volume, state)
    given = parse_params(params)
    if fast:
        given = faster(given)
    given |= {"data": data, "train_until": train_until, "model_name": model_name}
    given |= {"home": state, "tracking_uri": tracking_uri}
    if online_store:
        given["online_store"] = online_store
    training = training_of(fast)
    arguments = complete_arguments(read_spec(training), given)
    _check_online_store(arguments["online_store"])
    token = token_file.read_text().strip() if token_file else ""
    submitted = submit_pipeline(training, host, arguments, image, experiment, namespace, token, mount)
    document = asdict(submitted)
    if wait:
        click.echo(f"{submitted.url}: waiting for its end", err=True)
        document["state"] = wait_for_run(host, submitted.run_id, token)
    context.answer(document, f"{document['url']}  {document['state'].lower()}")
    if wait and document["state"] != "SUCCEEDED":
        click.get_current_context().exit(1)


@main.command()
@click.argument("run", required=False, metavar="[RUN]")
@command_options
def runs(context: Context, run: str | None) -> None:
    """List past runs, or show one (`last`) with its steps."""
    from pipelines.run.progress import duration, summary
    from pipelines.run.runs import find_run, list_runs
    from pipelines.tables import table

    if run:
        found = find_run(context.home, run)
        rows = [
            [s.name, s.status, duration(s.seconds), summary(s.parameters) or s.error] for s in found.steps
        ]
        text = table(["step", "status", "time", "gave"], rows)
        context.answer(
            {
                **_run_row(found),
                "arguments": found.shown_arguments(),
                "steps": [asdict(s) for s in found.steps],
            },
            text,
        )
        return
    known = list(list_runs(context.home))
    cells = [[r.run_id, r.status, r.arguments.get("data", ""), duration(r.seconds), _done(r)] for r in known]
    text = table(["run", "status", "data", "time", "steps"], cells) if known else "no runs yet: reco run"
    context.answer([_run_row(found) for found in known], text)


def _done(run: Run) -> str:
    return f"{sum(step.status == 'done' for step in run.steps)}/{len(run.steps)}"


def _run_row(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "status": run.status,
        "created_at": run.created_at,
        "seconds": round(run.seconds, 1),
        "peak_memory_mib": run.peak_memory_mib,
        "folder": str(run.folder),
        "step_seconds": {step.name: step.seconds for step in run.steps},
    }


# ------------------------------------------------------------------------------------------- release


@main.group(invoke_without_command=True)
@with_registry
@command_options
@click.pass_context
def models(inner: click.Context, context: Context, tracking_uri: str, model_name: str) -> None:
    """List model versions with aliases and metrics; `models show VERSION` tells of one."""
    if inner.invoked_subcommand is not None:
        return
    from pipelines.tables import moment, size, table

    registry = _registry(context, tracking_uri, model_name)
    known = registry.versions()
    cells = [
        [
            v.version,
            ", ".join(v.aliases),
            v.bundle_id,
            *(v.metrics.get(metric, "") for metric in ("ndcg_at_10", "recall_at_20")),
            size(v.size_bytes),
            v.cut[:10],
            moment(v.created_at),
        ]
        for v in known
    ]
    head = [
        "version",
        "aliases",
        "bundle",
        "ndcg_at_10",
        "recall_at_20",
        "size",
        "trained until",
        "registered",
    ]
    context.answer([asdict(v) for v in known], table(head, cells) if known else "no versions yet: reco run")


@models.command("show")
@click.argument("version", metavar="VERSION")
@with_registry
@command_options
def show_model(context: Context, version: str, tracking_uri: str, model_name: str) -> None:
    """Show a version, or an alias: metrics, history, and the certificates from its teachers to its file."""
    import tempfile

    from components.release.model_card import chain_table
    from components.release.registry import RegistryUnreachable
    from pipelines.tables import size, table

    registry = _registry(context, tracking_uri, model_name)
    found = registry.version(version)
    history = [asdict(entry) for entry in registry.history() if entry.version == found.version]
    with tempfile.TemporaryDirectory() as scratch:
        try:
            file = registry.download(found, Path(scratch), "certificates.json")
            certificates = json.loads(file.read_bytes())
        except RegistryUnreachable as error:  # a bundle from before there were any, or its files are away
            certificates = []
            click.echo(f"no certificates: {error}", err=True)
    rows = [
        ["bundle", found.bundle_id],
        ["trained until", found.cut],
        ["aliases", ", ".join(found.aliases)],
        ["size", size(found.size_bytes)],
        *([name, value] for name, value in sorted(found.metrics.items())),
        *([f"{e['action']} {e['at']}", f"after version {e['previous'] or '-'}"] for e in history),
    ]
    text = table(["version", found.version], rows) + "\n\n" + "\n".join(chain_table(certificates))
    context.answer({**asdict(found), "history": history, "certificates": certificates}, text)


def _registry(context: Context, tracking_uri: str, model_name: str) -> Any:
    from components.release.registry import Registry

    return Registry(_existing(context, tracking_uri), model_name)


def _existing(context: Context, tracking_uri: str) -> str:
    """Return the registry's URI; MLflow would make a database, and folders, where there is none."""
    from components.release.registry import default_tracking_uri

    uri = tracking_uri or default_tracking_uri(context.home)
    file = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not (file.is_file() and file.stat().st_size):
        raise NoRegistry(f"{file} is no registry: train with `reco run`, or give --tracking-uri")
    return uri


@main.command()
@click.argument("version", default="challenger", metavar="[VERSION]")
@click.option(
    "--dataset", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Checked data set."
)
@click.option("--gate", "gate", multiple=True, metavar="NAME=VALUE", help="e.g. over_blend=1.1")
@click.option("--dry-run", is_flag=True, help="Compare and report; change nothing.")
@with_registry
@command_options
def promote(
    context: Context,
    version: str,
    dataset: Path | None,
    gate: tuple[str, ...],
    dry_run: bool,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Send the challenger, or VERSION, through the gate."""
    from components.release.promote_bundle import promote_bundle
    from pipelines.run.arguments import parse_params
    from pipelines.run.runs import list_runs
    from pipelines.tables import table

    wanted = parse_params(gate, "--gate")
    uri = _existing(context, tracking_uri)
    made = (run.artifacts("ingest-events") / "dataset" for run in list_runs(context.home))
    dataset = dataset or next((place for place in made if (place / "manifest.json").is_file()), None)
    result = promote_bundle(version, dataset, uri, model_name, str(context.home), wanted, dry_run)
    rows = [
        ["yes" if c["passed"] else "NO", c["metric"], c["got"], c["need"], c["reason"]]
        for c in result["checks"]
    ]
    text = table(["passed", "metric", "got", "needed", "why"], rows) + "\n" if rows else ""
    verb = (
        "is champion now"
        if result["changed"]
        else "would be compared, nothing was changed"
        if dry_run
        else "was it already"
    )
    context.answer(result, f"{text}version {result['version']} {verb}")
    if dry_run and not all(check["passed"] for check in result["checks"]):
        click.get_current_context().exit(1)


@main.command()
@click.option("--dry-run", is_flag=True, help="Say which version would come back; change nothing.")
@with_registry
@command_options
def rollback(context: Context, dry_run: bool, tracking_uri: str, model_name: str) -> None:
    """Go back to the champion before this one."""
    from components.release.promote_bundle import rollback as go_back

    uri = _existing(context, tracking_uri)
    result = go_back(uri, model_name, str(context.home), dry_run)
    verb = "would be champion again" if dry_run else "is champion again"
    context.answer(result, f"version {result['version']} {verb} (was: {result['previous']})")


@main.command()
@click.argument(
    "items",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=False,
    metavar="[ITEMS.csv]",
)
@click.option("--remove", default="", metavar="ID,ID", help="Items that are not sold any more.")
@with_registry
@command_options
def extend(context: Context, items: Path | None, remove: str, tracking_uri: str, model_name: str) -> None:
    """Register the champion with new items, and without removed ones, as the challenger: no training.

    ITEMS.csv has a header: item_id, and what is known of type, category, department, price, is_private.
    """
    import pandas as pd

    from components.release.register_bundle import register_bundle
    from components.retriever.extend_index import extend_index, read_new_items

    removed = [item.strip() for item in remove.split(",") if item.strip()]
    if items is None and not removed:
        raise click.UsageError("nothing to change: give ITEMS.csv, or --remove ID,ID")
    champion = read_champion(context.home)
    made = _champions_run(context)
    retriever = made.artifacts("train-retriever") / "checkpoint" if made else None
    if retriever is None or not retriever.is_dir():
        raise click.UsageError("the run that made the champion is not kept here: `reco run` makes a new one")
    new = read_new_items(items) if items else pd.DataFrame({"item_id": pd.Series(dtype=str)})
    place = context.home / "extended"
    bundle_id = extend_index(champion.bundle(context.home), retriever, place, new, removed)
    version = register_bundle(place, _existing(context, tracking_uri), model_name)
    document = {"version": version, "bundle_id": bundle_id, "new": len(new), "removed": len(removed)}
    text = (
        f"version {version} (bundle {bundle_id}) is challenger: {len(new)} new items, {len(removed)} removed"
    )
    context.answer(document, f"{text}\nsend it through the gate: reco promote")


# ------------------------------------------------------------------------------------------- serving


@main.command()
@click.option("--host", help="Address to listen on.")
@click.option("--http-port", type=PORT, help="REST; 0 lets the system choose.")
@click.option("--grpc-port", type=PORT, help="gRPC; likewise.")
@click.option(
    "--bundle", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Not the champion: this."
)
@command_options
def serve(
    context: Context, host: str | None, http_port: int | None, grpc_port: int | None, bundle: Path | None
) -> None:
    """Serve the champion, whoever it is: KServe REST and gRPC."""
    settings = context.settings(host=host, http_port=http_port, grpc_port=grpc_port)
    if bundle is None:
        read_champion(context.home)  # says how to get one if there is none
    served = ["--home", str(context.home)] if bundle is None else ["--bundle", str(bundle)]
    sys.stderr.flush()
    # The endpoint takes this process over: signals reach it, and nothing of this command stays in memory.
    arguments = [sys.executable, "-m", "serving.server", *served]
    os.execve(sys.executable, arguments, settings.to_env())


@main.command()
@click.option("--port", type=PORT, default=8080, show_default=True, help="REST; 0 is any free port.")
@click.option("--grpc-port", type=PORT, default=8081, show_default=True, help="gRPC; likewise.")
@click.option("--store-port", type=PORT, default=16379, show_default=True, help="Online store; likewise.")
@click.option("--broker-port", type=PORT, default=19092, show_default=True, help="Broker; likewise.")
@click.option(
    "--bootstrap",
    default="",
    envvar="RECO_KAFKA_BOOTSTRAP",
    metavar="HOST:PORT",
    help="Use this broker, start none.",
)
@click.option("--replay", "data", default="", metavar="DATA", help="Let this data set's shoppers come.")
@click.option("--speed", type=float, default=600.0, show_default=True, help="How fast their clock runs.")
@click.option("--from", "since", default="", help="Where the replay begins.  [default: the champion's cut]")
@command_options
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
    """Start store, broker, stream and endpoint as one group, until Ctrl-C."""
    from components.home import announced, locked
    from feature_repo.stream.kafka import KafkaSettings, create_topics
    from pipelines.live.supervisor import State, Supervisor
    from pipelines.live.up import Wanted, parts_of, used_by
    from pipelines.tables import table

    as_json = context.output == "json"

    def say(text: str) -> None:
        click.echo(json.dumps({"event": "said", "text": text}) if as_json else text, err=not as_json)

    def show(states: list[State]) -> None:
        if as_json:
            click.echo(json.dumps({"event": "parts", "parts": [asdict(state) for state in states]}))
            return
        rows = [[s.name, s.address, s.pid or "", s.health, s.restarts] for s in states]
        click.echo(table(["part", "address", "pid", "health", "restarts"], rows) + "\n")

    if data:
        _check_data(data)
        if not 0 <= speed < float("inf"):
            raise click.UsageError(
                f"--speed is {speed}, expected seconds of data per second, 0 for all at once"
            )
        if since:
            _check_since(since)
    champion = read_champion(context.home)
    made = _champions_run(context)
    features = made.artifacts("materialize-features") / "features" if made else None
    if features is not None and not features.is_dir():
        features = None
    wanted = Wanted(port, grpc_port, store_port, broker_port, bootstrap, _absolute(data), speed, since)
    settings, kafka = replace(Settings.from_env(), home=context.home), KafkaSettings.from_env()
    with locked(context.home / "up.lock", "running `reco up`"):
        (context.home / "up.json").unlink(missing_ok=True)  # of one that was killed
        if bootstrap:
            create_topics(replace(kafka, bootstrap=bootstrap))
        parts = parts_of(settings, kafka, champion, features, wanted, say)
        logs = context.home / "up"
        say(f"what each part says: {logs}")
        with announced(context.home, used_by(parts)):
            Supervisor(parts, logs, show, say).run()


@main.command()
@click.option("--user", help="Who buys.")
@click.option("--basket", default="", help="Item ids, separated by commas.")
@click.option("--store", help="Where.")
@click.option("--at", help="When, e.g. 2017-12-05T18:30:00Z.  [default: now]")
@click.option("-k", type=int, default=10, show_default=True, help="How many items.")
@click.option("--profile", help="How candidates are found: default, premium, clearance, or the bundle's own.")
@click.option(
    "--requests", type=click.File("rb"), help="Request lines (JSON), one response a line; - is stdin."
)
@command_options
def recommend(
    context: Context,
    user: str | None,
    basket: str,
    store: str | None,
    at: str | None,
    k: int,
    profile: str | None,
    requests: IO[bytes] | None,
) -> None:
    """Answer one basket, or a file of requests."""
    from pipelines.inspect.ask import answer_lines, open_champion

    recommender = open_champion(context.settings(), read_champion(context.home))
    if requests is not None:
        failed = 0
        for answer in answer_lines(recommender, requests):
            failed += "error" in answer
            click.echo(json.dumps(answer))
        if failed:
            click.echo(f"reco: {failed} lines were no requests; their answers say why", err=True)
            click.get_current_context().exit(1)
        return
    line = _request_line(user, basket, store, at, k, profile)
    [answer] = answer_lines(recommender, [json.dumps(line).encode()])
    if "error" in answer:
        raise click.UsageError(answer["error"])
    context.answer(answer, _shown(recommender, answer))


def _shown(recommender: Any, answer: dict[str, Any]) -> str:
    from pipelines.inspect.ask import item_names
    from pipelines.tables import table

    names = item_names(recommender, [item["item_id"] for item in answer["items"]])
    rows = [
        [
            number,
            item["item_id"],
            names[item["item_id"]].lower(),
            item["score"],
            item["source"],
            item["reason"],
        ]
        for number, item in enumerate(answer["items"], 1)
    ]
    notes = [
        f"bundle {answer['bundle_id']}",
        f"rung {answer['rung']}",
        f"{answer['stage_ms']['total']:.1f} ms",
    ]
    if answer["degraded"]:
        notes.append(f"degraded: {answer['degraded_reason']}")
    listed = (
        table(["#", "item", "what", "score", "source", "reason"], rows) if rows else "nothing to recommend"
    )
    return f"{listed}\n{', '.join(notes)}"


@main.command()
@click.argument("item")
@click.option("--user", help="Who buys.")
@click.option("--basket", default="", help="Item ids, separated by commas.")
@click.option("--store", help="Where.")
@click.option("--at", help="When, e.g. 2017-12-05T18:30:00Z.  [default: now]")
@click.option("-k", type=int, default=10, show_default=True, help="How many items.")
@click.option("--profile", help="How candidates are found: default, premium, clearance, or the bundle's own.")
@click.option("--request-id", help="Of an answer in the prediction log, in place of all the options above.")
@command_options
def why(
    context: Context,
    item: str,
    user: str | None,
    basket: str,
    store: str | None,
    at: str | None,
    k: int,
    profile: str | None,
    request_id: str | None,
) -> None:
    """Say why ITEM is in an answer, or where it was lost: not found, filtered, outscored, made room.

    The request is answered again with what is known now.
    """
    import time

    from pipelines.inspect.ask import open_champion
    from pipelines.inspect.why import explain, logged_answer, request_of, served
    from pipelines.tables import table
    from serving.schemas import parse_request

    settings = context.settings()
    record = None
    if request_id is None:
        line = _request_line(user, basket, store, at, k, profile)
    else:
        record = logged_answer(settings.prediction_log_dir, request_id)
        line = request_of(record)
    recommender = open_champion(settings, read_champion(context.home))
    profiles = recommender.bundle.profiles
    request = parse_request(line, now=time.time(), default_id="why", profiles=profiles)
    verdict, answer = explain(recommender, request, item)
    recommender.facts.close()
    document: dict[str, Any] = {"verdict": verdict.to_dict(), "answer": answer.to_dict()}
    lines = [
        f"{item}: "
        + (f"number {verdict.slot}: " if verdict.slot else f"lost in {verdict.step}: ")
        + verdict.why
    ]
    if verdict.rank is not None:
        lines.append(f"score {verdict.score}, number {verdict.rank} of {verdict.candidates} candidates")
    if record is not None:
        document["served"] = served(record, item, recommender.bundle.bundle_id)
        lines.append(document["served"])
    if answer.degraded:
        lines.append(f"answered without what usually is known: {answer.degraded_reason}")
    if verdict.places:
        lines.append(
            table(["source", "number", "brings"], [[p.source, p.rank, p.brings] for p in verdict.places])
        )
    context.answer(document, "\n".join(lines))


@main.group()
def rules() -> None:
    """Check the rules that a merchandiser writes, and see what they change."""


@rules.command("check")
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False, metavar="[FILE]"
)
@command_options
def check_rules(context: Context, file: Path | None) -> None:
    """Say what is wrong with a rules file, line by line; without FILE, with the one that is served.

    Exit code 1: the endpoint would not take it. Warnings are for a person to judge.
    """
    from pipelines.inspect.preview_rules import check_rules as check
    from pipelines.tables import table

    place = _rules_file(context, file)
    checked = check(place, context.home)
    rows = [[one.line, "error" if one.refused else "warning", one.text] for one in checked.problems]
    listed = table(["line", "", "what"], rows) + "\n" if rows else ""
    if checked.refused:
        said = "not taken: what was last read stays in force"
    else:
        said = ", ".join(f"{count} {name}" for name, count in checked.times().items())
        said = f"{len(checked.rules)} rules ({said})"
        said += "" if checked.bundle_id else "; no champion here, items and names were not looked up"
    context.answer(checked.to_dict(), f"{listed}{place}: {said}")
    if checked.refused:
        click.get_current_context().exit(1)


@rules.command("preview")
@click.option(
    "--file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Rules.  [default: those that are served]",
)
@click.option("--user", help="Who buys.")
@click.option("--basket", default="", help="Item ids, separated by commas.")
@click.option("--store", help="Where.")
@click.option("--at", help="When, e.g. 2017-12-05T18:30:00Z.  [default: now]")
@click.option("-k", type=int, default=10, show_default=True, help="How many items.")
@click.option("--profile", help="How candidates are found: default, premium, clearance, or the bundle's own.")
@command_options
def preview_rules(
    context: Context,
    file: Path | None,
    user: str | None,
    basket: str,
    store: str | None,
    at: str | None,
    k: int,
    profile: str | None,
) -> None:
    """Show an answer before and after the rules, and why each item is where it is."""
    import time

    from pipelines.inspect.ask import item_names, open_champion
    from pipelines.inspect.preview_rules import check_rules as check
    from pipelines.inspect.preview_rules import preview
    from pipelines.tables import table
    from serving.schemas import parse_request

    place = _rules_file(context, file)
    checked = check(place, context.home)
    if checked.refused:
        raise RefusedRules(f"{place} is not taken: `reco rules check {place}` says why")
    recommender = open_champion(context.settings(), read_champion(context.home))
    line = _request_line(user, basket, store, at, k, profile)
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


class RefusedRules(Exception):
    """A rules file that the endpoint would not take."""

    exit_code = 1


def _rules_file(context: Context, file: Path | None) -> Path:
    place = file or context.settings().rules_path
    if not place.is_file():
        raise click.UsageError(
            f"there is no {place}: name a file; the README's section Rules has one to begin with"
        )
    return place


def _request_line(
    user: str | None, basket: str, store: str | None, at: str | None, k: int, profile: str | None
) -> dict[str, Any]:
    """Return the request that a person's options mean."""
    given = {"user_id": user, "store_id": store, "at": at, "k": k, "profile": profile}
    line: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    line["basket"] = [item.strip() for item in basket.split(",") if item.strip()]
    return line


# -------------------------------------------------------------------------------------------- events


@main.command()
@command_options
def stream(context: Context) -> None:
    """Fold the broker's events and facts into the online store and the archive, until stopped.

    Start as many as there are partitions, at most: they share the work. One that is killed loses nothing.
    """
    import logging
    import os

    from pipelines.live.streaming import run_stream

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    kafka = context.kafka()

    def on_ready() -> None:
        line = {"event": "ready", "pid": os.getpid(), "broker": kafka.bootstrap, "topic": kafka.events_topic}
        click.echo(json.dumps(line), err=True)

    counts = run_stream(context.settings(), kafka, on_ready)
    context.answer(
        vars(counts), f"{counts.events} events, {counts.facts} facts, {counts.dead_letters} dead letters"
    )


@main.command()
@click.option("--once", is_flag=True, help="Send what is there, and end.")
@command_options
def feedback(context: Context, once: bool) -> None:
    """Send what shoppers were shown to the broker, as impressions, until stopped.

    They come from the log of answers. The next training learns from what was taken and what was left.
    """
    import logging

    from pipelines.live.feedback import send_impressions
    from pipelines.live.streaming import told_to_stop

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    counts = send_impressions(context.settings(), context.kafka(), told_to_stop(), once)
    text = (
        f"{counts.impressions} impressions of {counts.answers} answers, {counts.anonymous} of them to nobody"
    )
    context.answer(
        vars(counts),
        f"{text} we know" + f"; {counts.unreadable} segments cannot be read" * (counts.unreadable > 0),
    )


@main.command("replay")
@click.option("--last", type=click.IntRange(1), default=1_000, show_default=True, help="How many answers.")
@command_options
def replay_log(context: Context, last: int) -> None:
    """Compute the features of logged answers again from the archive, and compare them bit by bit."""
    from monitoring.skew import describe, replay_home

    champion = read_champion(context.home)
    found = replay_home(context.home, champion.bundle(context.home), last)
    context.answer(found.to_dict(), describe(found))
    if found.equal < found.compared:
        click.get_current_context().exit(1)


@main.command("replay-events")
@click.option(
    "--data", default="complete-journey", show_default=True, help="complete-journey, toy, or a data set."
)
@click.option(
    "--speed",
    type=float,
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
@click.option("--duplicates", type=float, default=0.0, help="Share of events that are sent twice.")
@click.option("--out-of-order", type=float, default=0.0, help="Share of events that are sent too late.")
@click.option("--within", type=int, default=1_000, show_default=True, help="By how many events at most.")
@click.option("--poison", type=float, default=0.0, help="Share of messages in between that are no events.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Which events these are.")
@command_options
def replay_data(
    context: Context,
    data: str,
    speed: float,
    since: str,
    until: str,
    limit: int,
    endpoint: str,
    duplicates: float,
    out_of_order: float,
    within: int,
    poison: float,
    seed: int,
) -> None:
    """Feed a data set's events to the broker, with the clock of the data."""
    import logging
    import time

    from feature_repo.events import read_dataset
    from feature_repo.stream.kafka import create_topics
    from feature_repo.stream.outbox import Outbox
    from feature_repo.stream.replay_events import Disturbance, Shopper, choose, replay_events

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    settings = context.kafka()
    disturbance = Disturbance(duplicates, out_of_order, poison, within, seed)
    shopper = Shopper(endpoint) if endpoint else None
    create_topics(settings)
    events = choose(read_dataset(_dataset(context, data)).events, since, until, limit)
    place = context.home / "outbox" / "replay"
    outbox = Outbox(place, settings)
    try:
        began = time.monotonic()
        counts = replay_events(
            events,
            settings.events_topic,
            outbox,
            speed,
            disturbance,
            shopper,
            lambda text: click.echo(text, err=True),
        )
        done = outbox.flush(60)
        seconds = time.monotonic() - began
    finally:
        outbox.close()
    document = {
        **asdict(counts),
        "events": len(events),
        "baskets": int(events["basket_id"].nunique()),
        "seconds": round(seconds, 2),
        "messages_per_second": round(counts.messages / seconds, 1),
        "dropped": outbox.dropped,
        "refused": outbox.refused,
        "unconfirmed_bytes": outbox.pending_bytes,
    }
    text = f"{counts.messages:,} messages in {seconds:.1f} s, {counts.messages / seconds:,.0f} a second"
    if endpoint:
        text += f"; asked {counts.asked:,}: {counts.degraded} degraded, {counts.errors} errors"
    context.answer(document, text)
    if outbox.dropped:
        click.echo(f"reco: {outbox.dropped:,} messages were dropped: {place} could not take them", err=True)
    if not done:
        click.echo(
            f"reco: the broker at {settings.bootstrap} has not confirmed everything; "
            f"the rest waits in {place} and goes out with the next replay",
            err=True,
        )
    unheard = bool(endpoint) and counts.errors > 0 and not counts.asked
    if unheard:
        click.echo(f"reco: {endpoint} answered no question: start it with `reco serve`", err=True)
    if outbox.dropped or not done or unheard:
        click.get_current_context().exit(3)


@main.command()
@click.argument("file", type=click.File("rb"), metavar="FILE")
@click.option("--dry-run", is_flag=True, help="Check the file; write nothing.")
@command_options
def facts(context: Context, file: IO[bytes], dry_run: bool) -> None:
    """Write prices, stock, bans, promotions and coupons, one JSON object a line; - is stdin.

    All or nothing: a line that breaks the contract is told with its number, and nothing is written.
    """
    from feature_repo.facts import parse_lines
    from feature_repo.stream.erasure import Forgotten
    from serving.shop.fact_store import open_fact_store

    found, refused = parse_lines(file)
    found = Forgotten.load(context.home).facts_that_count(found)
    document = {
        "facts": len(found),
        "refused": [{"line": number, "reason": reason} for number, reason in refused],
        "changed": None,
    }
    if refused:
        lines = [f"line {number}: {reason}" for number, reason in refused[:20]]
        lines += [f"… and {len(refused) - 20} more"] if len(refused) > 20 else []
        context.answer(
            document, "\n".join([*lines, f"{len(refused)} lines are no facts: nothing was written"])
        )
        click.get_current_context().exit(1)
    if dry_run:
        context.answer(document, f"{len(found)} facts keep the contract; nothing was written")
        return
    store = open_fact_store(context.settings().fact_store_url)
    document["changed"] = store.write(found)
    store.close()
    context.answer(document, f"{len(found)} facts read, {document['changed']} changed what stands")


@main.command()
@click.argument("user", metavar="USER")
@click.option("--dry-run", is_flag=True, help="Count what would go; change nothing.")
@command_options
def forget(context: Context, user: str, dry_run: bool) -> None:
    """Remove a shopper from every store and file; nothing of them up to now counts again. - is stdin.

    What cannot be reached is told, with exit code 3, and what another process holds, with 4: the rest is
    done, and the command is to be given again.
    """
    from components.privacy.forget_user import forget_user
    from pipelines.tables import table

    if user == "-":
        user = sys.stdin.read().rstrip("\r\n")
    report = forget_user(context.settings(), user, dry_run, lambda text: click.echo(text, err=True))
    rows = [(one.place, one.what, f"{one.removed:,}", one.state, one.note) for one in report.places]
    head = "nothing was changed; this would go" if dry_run else f"forgotten up to {report.until}"
    context.answer(report.to_dict(), f"{head}\n{table(('where', 'what', 'removed', 'state', ''), rows)}")
    if report.exit_code:
        click.get_current_context().exit(report.exit_code)


# --------------------------------------------------------------------------------------------- watch


@main.command()
@click.option(
    "--from", "since", default="", help="Where the window begins.  [default: the log's start; the cut]"
)
@click.option("--until", default="", help="Where it ends.  [default: open]")
@click.option(
    "--data", default="", help="Compare events instead of the log: complete-journey, toy, or a data set."
)
@click.option(
    "--reference-from", default="", help="Compare with this stretch of the same data, not with the bundle's."
)
@click.option("--reference-until", default="", help="Where that stretch ends.")
@click.option(
    "--report", type=click.Path(path_type=Path), help="HTML report.  [default: drift.html under home]"
)
@click.option("--quick", is_flag=True, help="No report; the same numbers without loading Evidently.")
@click.option("--retrain", is_flag=True, help="Start the training pipeline when it drifted.")
@command_options
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
    """Compare a window with what the champion was made from.

    The window is one of the prediction log, or of events (--data). Exit code 1: it drifted.
    """
    from monitoring.drift import drift_of_events, drift_of_log
    from monitoring.windows import Window
    from pipelines.tables import table

    champion = read_champion(context.home)
    bundle = champion.bundle(context.home)
    page = None if quick else report or context.home / "drift.html"
    if page and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise click.UsageError(f"--report {page} cannot be written: name a file in a folder that is there")
    if reference_from and not reference_until:
        raise click.UsageError("--reference-from needs --reference-until: the window would be part of it")
    place = _dataset(context, data) if data else None
    zone = str(json.loads((place / "manifest.json").read_bytes())["timezone"]) if place else "UTC"
    given = reference_from or reference_until
    reference = Window.parse(reference_from, reference_until, zone) if given else None
    if place:
        window = Window.parse(since or champion.cut, until, zone)
        verdict = drift_of_events(place, window, reference or bundle, page, quick)
    else:
        log_dir = context.settings().prediction_log_dir
        verdict = drift_of_log(bundle, log_dir, Window.parse(since, until), reference, page, quick)
    document: dict[str, Any] = {**verdict.to_dict(), "report": str(page) if page else None}
    rows = [
        [
            c.name,
            c.status,
            *("" if v is None else round(v, 4) for v in (c.psi, c.warn_at, c.alarm_at)),
            c.note,
        ]
        for c in verdict.columns
    ]
    text = f"{verdict.status}: {verdict.reason}" + (f"\nreport: {page}" if page else "")
    if any(column.psi is not None for column in verdict.columns):
        text = table(["column", "status", "psi", "warns at", "alarms at", "note"], rows) + f"\n{text}"
    if retrain:
        document["retrain"] = outcome = _retrain(context, verdict)
        text += f"\nretraining: {outcome['said']}"
    context.answer(document, text)
    if verdict.failed:
        click.get_current_context().exit(1)


def _dataset(context: Context, data: str) -> Path:
    """Return a checked data set: the folder given if it is one, else what is read now.

    What has a name never changes and may come from a run; a folder may have grown since.
    """
    from components.data.ingest_events import BUILT_IN, ingest_events
    from pipelines.run.runs import list_runs

    _check_data(data)
    if (Path(data) / "manifest.json").is_file():
        return Path(data)
    asked = _absolute(data)
    for known in list_runs(context.home) if asked in BUILT_IN else ():
        place = known.artifacts("ingest-events") / "dataset"
        if known.arguments.get("data") == asked and (place / "manifest.json").is_file():
            return place
    place = context.home / "datasets" / Path(asked).resolve().name
    ingest_events(asked, place, home=str(context.home))
    return place


def _retrain(context: Context, verdict: Any) -> dict[str, Any]:
    """Start the training pipeline, asked for as the champion's was, unless that was done for this already."""
    from datetime import UTC, datetime

    from components.home import Conflict
    from monitoring.retraining import claim_retrain, release_retrain
    from pipelines.run.local_run import StepFailed
    from pipelines.run.runs import list_runs

    decision = claim_retrain(verdict, context.home, datetime.now(UTC))
    if not decision.allowed:
        return {"started": False, "said": f"not started: {decision.reason}"}
    before = {run.run_id for run in list_runs(context.home)}
    try:
        made = _champions_run(context)
        if made is None:
            release_retrain(decision, context.home)
            return {"started": False, "said": _NO_RUN}
        given = {name: value for name, value in made.arguments.items() if name != "train_until"}
        done = start_training(context.home, given, made.fast, str(given.get("tracking_uri", "")), sys.stderr)
    except StepFailed as error:
        return {
            "started": True,
            "run_id": error.run.run_id,
            "promoted": False,
            "said": f"the champion stays: {error}",
        }
    except BaseException as error:
        # On a conflict the new run is somebody else's.
        if isinstance(error, Conflict) or before >= {run.run_id for run in list_runs(context.home)}:
            release_retrain(decision, context.home)
        raise
    return {"started": True, "run_id": done.run_id, "promoted": True, "said": _promoted(context, done)}


_NO_RUN = (
    "not started: no run recorded here promoted the champion, so that what it was asked for is not known; "
    "start one by hand: reco run --data complete-journey, or --data DIR"
)


def _champions_run(context: Context) -> Run | None:
    """Return the newest run that promoted the bundle which is champion now."""
    from pipelines.run.runs import list_runs

    bundle_id = read_champion(context.home).bundle_id
    for known in list_runs(context.home):
        for step in known.steps:
            given = step.parameters.get("Output")
            if step.name == "promote-bundle" and given and given["bundle_id"] == bundle_id:
                return known
    return None


@main.group()
def bench() -> None:
    """Measure, and write tables as JSON and Markdown."""
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")  # how far it is, on stderr


@bench.command("latency")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="How long each way of asking.")
@click.option(
    "--requests", type=click.File("rb"), help="Request lines.  [default: baskets of the evaluation]"
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_latency(context: Context, seconds: float, requests: IO[bytes] | None, out: Path | None) -> None:
    """Measure milliseconds per stage and in total.

    In process, and over HTTP one request at a time; under load it is `reco bench load` that measures.
    """
    from pipelines.bench.latency import bench_latency as measure
    from pipelines.bench.latency import latency_table
    from pipelines.inspect.ask import evaluation_requests

    bundle = read_champion(context.home).bundle(context.home)
    lines = (
        [json.loads(line) for line in requests if line.strip()]
        if requests
        else evaluation_requests(bundle, 2_000)
    )
    result = measure(bundle, lines, out or context.home / "bench", seconds, context.settings())
    context.answer(result, latency_table(result))


@bench.command("load")
@click.option(
    "--arm", "arms", multiple=True, help="Measure this one beside ours; may be repeated.  [default: all]"
)
@click.option(
    "--mixed", is_flag=True, help="Replay the questions of the baskets after the cut, in their order."
)
@click.option("--goal-ms", type=float, default=50.0, show_default=True, help="p99 that a capacity must keep.")
@click.option("--endurance", is_flag=True, help="Ask ours 60,000 requests, too, and watch its memory.")
@click.option(
    "--quick", is_flag=True, help="Seconds instead of half an hour: to see that it works, not to quote."
)
@click.option("--data", default="", help="With --mixed: the data set.  [default: the newest run's]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_load(
    context: Context,
    arms: tuple[str, ...],
    mixed: bool,
    goal_ms: float,
    endurance: bool,
    quick: bool,
    data: str,
    out: Path | None,
) -> None:
    """Measure capacity, tail and cost beside other ways to serve the same.

    Against our endpoint without each of its parts, plain FastAPI, the tutorials' stack, and a server that
    only burns time. Ours also under a crowd of prefetches, a swap and a canary. With a Redis of its own;
    about half an hour.
    """
    from components.data.fit_statistics import purchases_of
    from feature_repo.events import read_dataset
    from pipelines.bench.load.measure import QUICK, replayed_requests
    from pipelines.bench.load.measure import bench_load as measure
    from pipelines.bench.load.report import load_table
    from pipelines.inspect.ask import evaluation_requests

    champion = read_champion(context.home)
    if mixed:
        events = read_dataset(_dataset(context, data or _newest_data(context))).events
        requests = replayed_requests(purchases_of(events), champion.cut, 100_000)
    else:
        requests = evaluation_requests(champion.bundle(context.home), 2_000)
    result = measure(
        context.home,
        champion,
        requests,
        out or context.home / "bench",
        arms,
        QUICK if quick else None,
        goal_ms,
        endurance,
        context.settings().deadline_ms,  # and nothing else of this shell: the arms run as they ship
        mixed,
    )
    context.answer(result, load_table(result))


@bench.command("features")
@click.option("--data", default="", help="complete-journey, toy, or a data set.  [default: the newest run's]")
@click.option("--seconds", type=float, default=30.0, show_default=True, help="How long each load lasts.")
@click.option("--kills", type=click.IntRange(1), default=20, show_default=True, help="Of the stream.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_features(context: Context, data: str, seconds: float, kills: int, out: Path | None) -> None:
    """Measure reads, freshness, folding, recovery, replay and joins of features.

    With a Redis, a broker and streams of its own; what this home serves is left alone.
    """
    import logging

    from feature_repo.events import read_dataset
    from pipelines.bench.features import bench_features as measure
    from pipelines.bench.features import features_table

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("pipelines").setLevel(logging.INFO)
    bundle = read_champion(context.home).bundle(context.home)
    events = read_dataset(_dataset(context, data or _newest_data(context))).events
    result = measure(bundle, events, out or context.home / "bench", seconds, kills)
    context.answer(result, features_table(result))


@bench.command("quality")
@click.option("--data", default="", help="complete-journey, toy, or a data set.  [default: the newest run's]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_quality(context: Context, data: str, out: Path | None) -> None:
    """Measure the served path beside the baselines."""
    from pipelines.bench.quality import bench_quality as measure
    from pipelines.bench.quality import quality_table

    bundle = read_champion(context.home).bundle(context.home)
    results = measure(bundle, _dataset(context, data or _newest_data(context)), out or context.home / "bench")
    context.answer(results, quality_table(results))


@bench.command("rerank")
@click.option("--data", default="", help="complete-journey, toy, or a data set.  [default: the newest run's]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_rerank(context: Context, data: str, out: Path | None) -> None:
    """Measure what re-ranking brings and costs, its time, and how long rules take to load."""
    from pipelines.bench.rerank import bench_rerank as measure
    from pipelines.bench.rerank import rerank_table

    bundle = read_champion(context.home).bundle(context.home)
    results = measure(bundle, _dataset(context, data or _newest_data(context)), out or context.home / "bench")
    context.answer(results, rerank_table(results))


@bench.command("compression")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_compression(context: Context, out: Path | None) -> None:
    """Measure every ranker of the newest run: quality, bytes, milliseconds.

    Needs what the run left in its folder; trains what it did not: about a quarter of an hour in all.
    """
    from pipelines.bench.compression import bench_compression as measure
    from pipelines.bench.compression import compression_table
    from pipelines.run.runs import RunUnknown, list_runs

    run = next(
        (
            run
            for run in list_runs(context.home)
            if (run.artifacts("evaluate-bundle") / "evaluated" / "manifest.json").is_file()
        ),
        None,
    )
    if run is None:
        raise RunUnknown(f"no run under {context.home} holds an evaluated bundle: run `reco run` first")
    results = measure(_line_of(run), out or context.home / "bench")
    context.answer(results, compression_table(results))


@bench.command("scale")
@click.option("--items", type=int, default=2_000_000, show_default=True, help="Size of the catalogue.")
@click.option("--users", type=int, default=1_000_000, show_default=True, help="Number of shoppers.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_scale(context: Context, items: int, users: int, out: Path | None) -> None:
    """Run the steps on a synthetic shop of any size: seconds, memory, bytes in each precision.

    With the usual sizes it takes about an hour, 16 GiB of memory and 10 GB of disk.
    """
    from pipelines.bench.scale import bench_scale as measure
    from pipelines.bench.scale import scale_table

    results = measure(items, users, out or context.home / "bench")
    context.answer(results, scale_table(results))


@bench.command("retrieval")
@click.option(
    "--items", type=click.IntRange(1_000), default=2_000_000, show_default=True, help="Synthetic ones."
)
@click.option("--data", default="", help="complete-journey, toy, or a data set.  [default: the newest run's]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_retrieval(context: Context, items: int, data: str, out: Path | None) -> None:
    """Measure what each type of index finds, how fast, in how many bytes; and each profile.

    With the usual size it takes about half an hour and 5 GiB of memory.
    """
    from pipelines.bench.retrieval import bench_retrieval as measure
    from pipelines.bench.retrieval import retrieval_table

    bundle = read_champion(context.home).bundle(context.home)
    dataset = _dataset(context, data or _newest_data(context))
    results = measure(bundle, dataset, out or context.home / "bench", items)
    context.answer(results, retrieval_table(results))


@bench.command("drift")
@click.option("--data", default="", help="complete-journey, toy, or a data set.  [default: the newest run's]")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: bench under home]"
)
@command_options
def bench_drift(context: Context, data: str, out: Path | None) -> None:
    """Measure the drift of each week against the first weeks."""
    from pipelines.bench.drift import bench_drift as measure
    from pipelines.bench.drift import drift_table

    results = measure(_dataset(context, data or _newest_data(context)), out or context.home / "bench")
    context.answer(results, drift_table(results))


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listed", is_flag=True, help="Say what each drill proves and which figures it asks.")
@click.option(
    "--short", is_flag=True, help="Seconds a fault instead of ten: to see that it works, not to quote."
)
@click.option(
    "--data",
    type=click.Choice(["toy"]),
    help="Drill a toy shop, trained when first needed, not the champion.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder of the results.  [default: drills under home]"
)
@command_options
def drill(
    context: Context, names: tuple[str, ...], listed: bool, short: bool, data: str | None, out: Path | None
) -> None:
    """Break something in the really running system, under load, and judge what callers notice.

    NAME is one or more that --list tells, or all. With a Redis and an endpoint of its own; what this home
    serves is left alone. Exit code 1: a figure is not met.
    """
    import logging
    import signal

    from pipelines.drills.catalogue import DRILLS, choose_drills
    from pipelines.drills.report import drill_table, list_table
    from pipelines.drills.run import run_drills
    from pipelines.drills.system import SHORT
    from pipelines.inspect.ask import evaluation_requests

    if listed:
        chosen = choose_drills(names) if names else DRILLS
        context.answer([one.to_dict() for one in chosen], list_table(chosen))
        return
    if not names:
        raise click.UsageError("no drill named: give one or more of `reco drill --list`, or all")
    chosen = choose_drills(names)
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # how far it is, on stderr
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends with this
    home = _toy_home(context) if data else context.home
    bundle = read_champion(home).bundle(home)
    requests = evaluation_requests(bundle, 2_000)
    place = out or context.home / "drills"
    result = run_drills(chosen, bundle, home / "offline_store", requests, place, SHORT if short else None)
    context.answer(result, drill_table(result))
    if not result["passed"]:
        click.get_current_context().exit(1)


def _toy_home(context: Context) -> Path:
    """Return a home whose champion is a small model of the toy shop; it is trained if it is not there."""
    from components.home import NoChampion

    home = context.home / "toy"
    try:
        read_champion(home)
    except NoChampion:
        click.echo("training the toy shop first, which takes some minutes", err=True)
        # No store is named: whoever serves from a Redis shall not find the toy shop's users there.
        given = {"data": "toy", "train_until": "", "model_name": MODEL_NAME, "online_store": ""}
        start_training(home, given, True, "", sys.stderr)
    return home


def _line_of(run: Run) -> Any:
    """Return where a run of the training pipeline left its parts."""
    from pipelines.bench.compression import TrainingLine

    teachers = [
        run.artifacts(step.name) / "ranker" for step in run.steps if step.name.startswith("train-ranker")
    ]
    return TrainingLine(
        examples=run.artifacts("build-examples") / "examples",
        statistics=run.artifacts("fit-statistics") / "statistics",
        teachers=teachers,
        student=run.artifacts("distill-ranker") / "ranker",
        pruned=run.artifacts("prune-ranker") / "ranker",
        variants=run.artifacts("quantize-ranker") / "variants",
        compiled=run.artifacts("compile-ranker") / "ranker",
        bundle=run.artifacts("evaluate-bundle") / "evaluated",
        dataset=run.artifacts("ingest-events") / "dataset",
        ranker_params=run.arguments["ranker_params"],
    )


def _newest_data(context: Context) -> str:
    """Return the newest run's checked data set; what it was made from when that is gone."""
    from pipelines.run.runs import list_runs

    newest = next(list_runs(context.home), None)
    if newest is None:
        return "complete-journey"
    place = newest.artifacts("ingest-events") / "dataset"
    return str(place if (place / "manifest.json").is_file() else newest.arguments["data"])


@main.command()
@command_options
def doctor(context: Context) -> None:
    """Say what is missing or broken, and how to mend it."""
    from pipelines.inspect.doctor import examine

    try:
        findings = examine(context.settings())
    except SettingInvalid as error:
        raise click.UsageError(str(error)) from error
    marks = {"ok": "ok  ", "warn": "note", "fail": "FAIL"}
    lines = [
        f"{marks[f.status]}  {f.name:<13} {f.found}" + (f"\n{'':<20}-> {f.mend}" if f.mend else "")
        for f in findings
    ]
    context.answer([asdict(finding) for finding in findings], "\n".join(lines))
    if any(finding.status == "fail" for finding in findings):
        click.get_current_context().exit(1)


if __name__ == "__main__":
    main()
