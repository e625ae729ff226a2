"""Commands that train: check, run, compile, submit, schedule, runs, params."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from components.home import MODEL_NAME, command
from feature_repo.ids import closest
from pipelines.cli.options import (
    DATA,
    FILE,
    Command,
    Context,
    check_alone,
    common_options,
    read_token,
    registry_options,
    stacked,
    train_until_option,
    training_options,
)

if TYPE_CHECKING:
    from pipelines.run.runs import Run, Size
    from pipelines.run.submit import Mount

STATE = "/mnt/reco"
CRON_FIELDS = 6  # of Kubeflow Pipelines
OF_OPTIONS = {  # parameters of the pipeline that an option sets, also by its default
    "data": "--data",
    "train_until": "--train-until",
    "model_name": "--model-name",
    "tracking_uri": "--tracking-uri",
    "home": "--home, or --state of submit",
}


@click.command()
@click.argument("data", metavar="DIR")
@train_until_option
@common_options
def check(context: Context, data: str, train_until: str) -> None:
    """Check a folder of data without starting a run.

    Exit code 1: a run would stop, because the data cannot be read, too many of their rows are invalid, they
    are too few to learn from, or the cut is impossible.
    """
    from pipelines.inspect.check_data import inspect_data, report

    found = inspect_data(data, train_until, context.say)
    context.answer(found, report(found), 0 if found["ok"] else 1)


@click.command()
@click.option("--data", default="complete-journey", show_default=True, help=DATA)
@training_options
@click.option("--full", is_flag=True, help="Train all five teachers, as `reco submit` does.")
@click.option("--resume", metavar="RUN", help="Go on with a run after its last good step, or `last`.")
@click.option("--only", default="", metavar="STEP", help="With --resume: repeat this step alone.")
@click.option("--jobs", type=click.IntRange(min=1), help="Steps at once.  [default: one for each core]")
@registry_options
@common_options
def run(
    context: Context,
    data: str,
    train_until: str,
    fast: bool,
    params: tuple[str, ...],
    full: bool,
    resume: str | None,
    only: str,
    jobs: int | None,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Train here, to a promoted champion."""
    from pipelines.run.launch import promoted, resume_training, start_training

    if resume is not None:
        if not resume:
            raise click.UsageError("--resume is empty: name a run or `last`")
        check_alone("--resume", "a run keeps the arguments it began with", "only", "jobs")
        done = resume_training(context.home, resume, only, sys.stderr, jobs or 0)
    elif only:
        raise click.UsageError("--only needs --resume RUN: the step's inputs come from that run")
    elif fast and full:
        raise click.UsageError("--fast and --full contradict each other: give one")
    else:
        given = _parse(params)
        given |= {"data": data, "train_until": train_until, "model_name": model_name}
        size: Size = "fast" if fast else "full" if full else "default"
        done = start_training(context.home, given, size, tracking_uri, sys.stderr, jobs or 0)
    step = done.outputs().get("promote-bundle")
    document = {**_run_row(done), "promoted": step.parameters["Output"] if step else None}
    context.answer(document, promoted(done))


def _parse(params: tuple[str, ...]) -> dict[str, Any]:
    from pipelines.run.arguments import parse_params

    given = parse_params(params)
    for name in given.keys() & OF_OPTIONS.keys():
        raise click.UsageError(f"--param {name}: give {OF_OPTIONS[name]}")
    return given


volume_options: Callable[[Command], Command] = stacked(
    click.option(
        "--state", default=STATE, show_default=True, help="The pipeline's home: a path in its pods."
    ),
    click.option("--volume", default="", metavar="PVC", help="Volume claim that every step gets at --state."),
)
secret_option: Callable[[Command], Command] = click.option(
    "--secret", default="", metavar="NAME", help="Secret with the passwords of store and MLflow."
)
api_options: Callable[[Command], Command] = stacked(
    click.option("--image", default="", help="Container image that holds this project."),
    click.option(
        "--experiment", default=MODEL_NAME, show_default=True, help="Experiment the run belongs to."
    ),
    click.option("--namespace", default="", help="Namespace, where the cluster has several users."),
    click.option("--token-file", type=FILE, help="File that holds the bearer token."),
)


def _mount(volume: str, state: str) -> Mount | None:
    from pipelines.run.submit import Mount

    if not state.startswith("/"):
        raise click.UsageError(f"--state {state!r} is a path in a pod: it begins with /")
    if not volume and state != STATE:
        raise click.UsageError("--state needs --volume PVC: without it nothing is mounted there")
    return Mount(volume, state) if volume else None


def _check_reachable(tracking_uri: str, volume: str) -> None:
    if not tracking_uri.startswith(("http://", "https://")):
        raise click.UsageError(
            "a cluster needs --tracking-uri http(s)://…: its pods cannot reach a file of this machine"
        )
    if not volume:
        raise click.UsageError(
            "a cluster needs --volume PVC: champion and online store are files under --state, and without a "
            "volume there they end with the pod that wrote them"
        )


def _refuse_passwords(urls: Mapping[str, str]) -> None:
    from pipelines.run.submit import PASSWORDS

    for option, url in urls.items():
        if re.search(r"://[^/@]*:[^/@]+@|password=", url):
            raise click.UsageError(
                f"{option} holds a password, and every user of the cluster can read a run's parameters: "
                f"put it into a Secret with a key of {', '.join(PASSWORDS)}, and give --secret NAME; "
                "a token for the API comes with --token-file"
            )


def _check_release(changes_gate: bool, model_name: str) -> None:
    if changes_gate:
        raise click.UsageError(
            "--release takes neither --fast nor gate_params: the Job's gate has limits of its own"
        )
    if model_name != MODEL_NAME:
        raise click.UsageError(
            f"--release takes no --model-name: guard and rollback of the cluster ask for {MODEL_NAME} alone"
        )


def _tokens_of(file: Path | None, token: str) -> Callable[[], str]:
    """Return a function that reads the token; while its file is being replaced, the last one holds."""

    def now() -> str:
        nonlocal token
        with contextlib.suppress(OSError, ValueError):
            token = read_token(file) or token
        return token

    return now


@click.command("compile")
@click.argument(
    "pipeline", type=click.Choice(["training", "watch"]), default="training", metavar="[PIPELINE]"
)
@click.option("-o", "--file", type=click.Path(path_type=Path), help="Where.  [default: PIPELINE.yaml]")
@click.option("--image", default="", help="Container image that holds this project.")
@volume_options
@secret_option
@common_options
def compile_(
    context: Context, pipeline: str, file: Path | None, image: str, volume: str, state: str, secret: str
) -> None:
    """Write the training or watch pipeline as Kubeflow YAML."""
    from pipelines.run.submit import equipped, write_ir
    from pipelines.training import training_of
    from pipelines.watch import watch

    file = file or Path(f"{pipeline}.yaml")
    mount = _mount(volume, state)
    written = watch if pipeline == "watch" else training_of("full")
    steps = write_ir(equipped(written, image, mount, secret), file)
    context.answer({"file": str(file), "steps": steps}, f"{file}: {steps} steps")


@click.command()
@click.option("--host", required=True, help="Root URL of the Kubeflow Pipelines API.")
@click.option(
    "--data", default="complete-journey", show_default=True, help="As a step sees it: a name or a folder."
)
@training_options
@click.option(
    "--online-store", default="", metavar="URL", help="redis:// to fill.  [default: SQLite under --state]"
)
@volume_options
@secret_option
@api_options
@click.option("--wait", is_flag=True, help="Wait for the end; exit code 1 unless it succeeded.")
@click.option("--release", is_flag=True, help="Release by a canary on the cluster, by the Job `release`.")
@registry_options
@common_options
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
    secret: str,
    image: str,
    experiment: str,
    namespace: str,
    token_file: Path | None,
    wait: bool,
    release: bool,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Run the training pipeline on Kubeflow Pipelines."""
    from components.release.registry import check_registry
    from pipelines.run.arguments import check_hyper_parameters, complete_arguments
    from pipelines.run.graph import read_spec
    from pipelines.run.launch import check_online_store, check_train_until
    from pipelines.run.submit import Kubeflow, equipped, submit_pipeline, wait_for_run
    from pipelines.training import arguments_of, training_of

    _check_reachable(tracking_uri, volume)
    mount = _mount(volume, state)
    given = _parse(params)
    size: Size = "fast" if fast else "full"
    check_hyper_parameters(given)
    check_train_until(train_until)
    given = arguments_of(size, given)
    given |= {"data": data, "train_until": train_until, "model_name": model_name}
    given |= {"home": state, "tracking_uri": tracking_uri}
    if online_store:
        given["online_store"] = online_store
    if release:
        _check_release(fast or "gate_params" in given, model_name)
    training = training_of(size, by_canary=release)
    arguments = complete_arguments(read_spec(training), given)
    _refuse_passwords(
        {"--online-store": arguments["online_store"], "--tracking-uri": tracking_uri, "--host": host}
    )
    check_online_store(arguments["online_store"])
    check_registry(tracking_uri, model_name)
    token = read_token(token_file)
    cluster = Kubeflow(host, experiment, namespace, token)
    submitted = submit_pipeline(equipped(training, image, mount, secret), cluster, arguments)
    document = asdict(submitted)
    if wait:
        context.say(f"{submitted.url}: waiting for its end")
        document["state"] = wait_for_run(host, submitted.run_id, _tokens_of(token_file, token))
    failed = wait and document["state"] != "SUCCEEDED"
    context.answer(document, f"{document['url']}  {document['state'].lower()}", int(failed))


@click.command()
@click.option("--host", required=True, help="Root URL of the Kubeflow Pipelines API.")
@click.option("--cron", default="0 0 6 * * *", show_default=True, help="Six fields, seconds first.")
@click.option("--data", required=True, help="A folder of events that grows, as a step sees it.")
@click.option("--log", default="", help="The prediction log, as a step sees it: for drift of labels.")
@volume_options
@api_options
@common_options
def schedule(
    context: Context,
    host: str,
    cron: str,
    data: str,
    log: str,
    volume: str,
    state: str,
    image: str,
    experiment: str,
    namespace: str,
    token_file: Path | None,
) -> None:
    """Let Kubeflow Pipelines look for drift by the clock.

    Each run compares the last week of the data with the champion under --state, and the lists of --log with
    the purchases that followed. It fails if there is drift. It also lists items that jump, which fail no run.
    A second call replaces the schedule of the first.
    """
    from pipelines.run.submit import Kubeflow, equipped, schedule_pipeline
    from pipelines.watch import watch

    if len(cron.split()) != CRON_FIELDS:
        raise click.UsageError(f"--cron {cron!r} has {len(cron.split())} fields, expected six: seconds first")
    if not volume:
        raise click.UsageError("a cluster needs --volume PVC: the champion is a file under --state")
    cluster = Kubeflow(host, experiment, namespace, read_token(token_file))
    arguments = {"bundle": state, "data": data, "log": log}
    made = schedule_pipeline(equipped(watch, image, _mount(volume, state)), cluster, arguments, cron)
    context.answer(made, f"{made['url']}  {cron}, in place of {made['replaced']} earlier")


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@common_options
def runs(context: Context, run: str | None) -> None:
    """List past runs, or show one (`last`) with its steps."""
    from pipelines.run.progress import duration, summary
    from pipelines.run.runs import find_run, list_runs
    from pipelines.tables import table

    if run:
        shown = find_run(context.home, run)
        rows = [
            [
                step.name,
                step.status,
                duration(step.seconds),
                f"{step.memory_mib:,} MiB",
                summary(step.parameters) or step.error,
            ]
            for step in shown.steps
        ]
        document = {
            **_run_row(shown),
            "arguments": shown.shown_arguments(),
            "steps": [asdict(s) for s in shown.steps],
        }
        context.answer(document, table(["step", "status", "time", "memory", "gave"], rows))
        return
    past = list(list_runs(context.home))
    cells = [[r.run_id, r.status, r.arguments.get("data", ""), duration(r.seconds), _done(r)] for r in past]
    first = f"no runs yet: {command(context.home, 'run')}"
    text = table(["run", "status", "data", "time", "steps"], cells) if past else first
    context.answer([_run_row(row) for row in past], text)


@click.command()
@click.argument("name", required=False, default="", metavar="[NAME]")
@common_options
def params(context: Context, name: str) -> None:
    """List hyper-parameters, or those of one group.

    NAME is a group such as student_params, or ranker_params.wide_deep.
    """
    from components.hyper_parameters import GROUPS, RANKERS, describe
    from pipelines.tables import shortened, table

    known = [*GROUPS, *(f"ranker_params.{ranker}" for ranker in RANKERS)]
    if name and name not in known:
        raise click.UsageError(f"no group {name!r}: {closest(name, known)}")
    rows = [row for group in ([name] if name else GROUPS) for row in describe(group)]
    cells = [[row.name, shortened(str(row.default)), row.kind, row.meaning] for row in rows]
    context.answer([asdict(row) for row in rows], table(["--param", "default", "type", "meaning"], cells))


def _done(run: Run) -> str:
    return f"{sum(step.status == 'done' for step in run.steps)}/{len(run.steps)}"


def _run_row(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "status": run.status,
        "created_at": run.created_at,
        "size": run.size,
        "seconds": round(run.seconds, 1),
        "peak_memory_mib": run.peak_memory_mib,
        "folder": str(run.folder),
        "step_seconds": {step.name: step.seconds for step in run.steps},
    }


COMMANDS = (check, run, compile_, submit, schedule, runs, params)
