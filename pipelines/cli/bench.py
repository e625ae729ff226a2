"""Commands that measure and break: bench, drill. They need a clone; the wheel leaves their modules out."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from pipelines.cli.options import Command, Context, common_options, results_folder
from pipelines.run.launch import dataset_of, evaluated_run, newest_data, train_toy_shop
from serving.release.champion import read_champion

if TYPE_CHECKING:
    from pipelines.bench.compression import TrainingLine
    from pipelines.run.runs import Run


def _require_instruments(package: str) -> None:
    """Refuse to go on without a package that the wheel leaves out."""
    if importlib.util.find_spec(package) is None:
        raise click.UsageError(
            f"{package} is not installed: benches and drills run from a clone of the repository, "
            "see docs/development.md"
        )


data_option: Callable[[Command], Command] = click.option(
    "--data", default="", help="complete-journey, toy, or a data set.  [default: the newest run's]"
)
requests_option: Callable[[Command], Command] = click.option(
    "--requests", type=click.File("rb"), help="Request lines.  [default: baskets of the evaluation]"
)


def _bundle(context: Context) -> Path:
    return read_champion(context.home).bundle(context.home)


def _dataset(context: Context, data: str) -> Path:
    return dataset_of(context.home, data or newest_data(context.home))


def _lines(requests: IO[bytes] | None, bundle: Path, limit: int) -> list[dict[str, Any]]:
    """Return the given request lines, or real baskets of the bundle's evaluation."""
    from pipelines.inspect.ask import evaluation_requests

    if requests:
        return [json.loads(line) for line in requests if line.strip()]
    return evaluation_requests(bundle, limit)


@click.group()
def bench() -> None:
    """Measure, and write tables as JSON and Markdown."""
    import logging

    _require_instruments("pipelines.bench")
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # progress, on stderr


@bench.command("latency")
@click.option("--seconds", type=float, default=20.0, show_default=True, help="How long each way of asking.")
@requests_option
@results_folder("bench")
@common_options
def bench_latency(context: Context, seconds: float, requests: IO[bytes] | None, out: Path) -> None:
    """Measure milliseconds per stage and in total.

    In process, and over HTTP one request at a time. For latency under load see `reco bench load`.
    """
    from pipelines.bench.latency import bench_latency as measure
    from pipelines.bench.latency import latency_table

    bundle = _bundle(context)
    result = measure(bundle, _lines(requests, bundle, 2_000), out, seconds, context.settings())
    context.answer(result, latency_table(result))


@bench.command("load")
@click.option(
    "--arm", "arms", multiple=True, help="Measure this one beside ours; may be repeated.  [default: all]"
)
@click.option("--goal-ms", type=float, default=50.0, show_default=True, help="p99 that a capacity must keep.")
@click.option("--endurance", is_flag=True, help="Ask ours 60,000 requests, too, and watch its memory.")
@click.option(
    "--quick", is_flag=True, help="Seconds instead of half an hour: to see that it works, not to quote."
)
@results_folder("bench")
@common_options
def bench_load(
    context: Context,
    arms: tuple[str, ...],
    goal_ms: float,
    endurance: bool,
    quick: bool,
    out: Path,
) -> None:
    """Measure capacity, tail and cost beside other servers.

    Each runs beside our endpoint: KServe's own server, Feast's SDK as the store, the ranker as exported,
    plain FastAPI with PyTorch, and a server that only burns time. Ours also under a crowd of prefetches, a
    swap and a canary. With a Redis of its own; about half an hour.
    """
    from pipelines.bench.load.measure import QUICK
    from pipelines.bench.load.measure import bench_load as measure
    from pipelines.bench.load.report import load_table
    from pipelines.inspect.ask import evaluation_requests

    champion = read_champion(context.home)
    requests = evaluation_requests(champion.bundle(context.home), 2_000)
    result = measure(
        context.home,
        champion,
        requests,
        out,
        arms,
        QUICK if quick else None,
        goal_ms,
        endurance,
        context.settings().deadline_ms,  # the only setting of this shell: the arms run as they ship
    )
    context.answer(result, load_table(result))


@bench.command("features")
@data_option
@click.option("--seconds", type=float, default=30.0, show_default=True, help="How long each load lasts.")
@click.option("--kills", type=click.IntRange(1), default=20, show_default=True, help="Of the stream.")
@results_folder("bench")
@common_options
def bench_features(context: Context, data: str, seconds: float, kills: int, out: Path) -> None:
    """Measure reads, freshness, recovery and joins of features.

    And folding and replay. With a Redis, a broker and streams of its own; those of this home stay untouched.
    """
    import logging

    from feature_repo.events import read_dataset
    from pipelines.bench.features import bench_features as measure
    from pipelines.bench.features import features_table

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("pipelines").setLevel(logging.INFO)
    bundle = _bundle(context)
    events = read_dataset(_dataset(context, data)).events
    result = measure(bundle, events, out, seconds, kills)
    context.answer(result, features_table(result))


@bench.command("quality")
@data_option
@results_folder("bench")
@common_options
def bench_quality(context: Context, data: str, out: Path) -> None:
    """Measure the served path beside the baselines."""
    from pipelines.bench.quality import bench_quality as measure
    from pipelines.bench.quality import quality_table

    results = measure(_bundle(context), _dataset(context, data), out)
    context.answer(results, quality_table(results))


@bench.command("rerank")
@data_option
@results_folder("bench")
@common_options
def bench_rerank(context: Context, data: str, out: Path) -> None:
    """Measure the gain, cost and time of re-ranking.

    And how long rules take to load.
    """
    from pipelines.bench.rerank import bench_rerank as measure
    from pipelines.bench.rerank import rerank_table

    results = measure(_bundle(context), _dataset(context, data), out)
    context.answer(results, rerank_table(results))


@bench.command("compression")
@results_folder("bench")
@common_options
def bench_compression(context: Context, out: Path) -> None:
    """Measure every ranker of the newest run.

    Quality, bytes, milliseconds. Needs the artifacts of that run; trains the models it did not train: about a
    quarter of an hour in all.
    """
    from pipelines.bench.compression import bench_compression as measure
    from pipelines.bench.compression import compression_table

    results = measure(_line_of(evaluated_run(context.home)), out)
    context.answer(results, compression_table(results))


def _line_of(run: Run) -> TrainingLine:
    """Return the artifacts of a run of the training pipeline."""
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


@bench.command("scale")
@click.option("--items", type=int, default=2_000_000, show_default=True, help="Size of the catalogue.")
@click.option("--users", type=int, default=1_000_000, show_default=True, help="Number of shoppers.")
@results_folder("bench")
@common_options
def bench_scale(context: Context, items: int, users: int, out: Path) -> None:
    """Run the steps on a synthetic shop of any size.

    Seconds, memory, bytes in each precision. With the usual sizes it takes about an hour, 16 GiB of memory
    and 10 GB of disk.
    """
    from pipelines.bench.scale import bench_scale as measure
    from pipelines.bench.scale import scale_table

    results = measure(items, users, out)
    context.answer(results, scale_table(results))


@bench.command("retrieval")
@click.option(
    "--items", type=click.IntRange(1_000), default=2_000_000, show_default=True, help="Synthetic ones."
)
@data_option
@results_folder("bench")
@common_options
def bench_retrieval(context: Context, items: int, data: str, out: Path) -> None:
    """Measure each type of index, and each profile.

    Recall, time and bytes. With the usual size it takes about half an hour and 5 GiB of memory.
    """
    from pipelines.bench.retrieval import bench_retrieval as measure
    from pipelines.bench.retrieval import retrieval_table

    results = measure(_bundle(context), _dataset(context, data), out, items)
    context.answer(results, retrieval_table(results))


@bench.command("drift")
@data_option
@results_folder("bench")
@common_options
def bench_drift(context: Context, data: str, out: Path) -> None:
    """Measure the drift of each week against the first weeks."""
    from pipelines.bench.drift import bench_drift as measure
    from pipelines.bench.drift import drift_table

    results = measure(_dataset(context, data), out)
    context.answer(results, drift_table(results))


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listed", is_flag=True, help="List each drill with its claim and its figures.")
@click.option(
    "--short", is_flag=True, help="Seconds a fault instead of ten: to see that it works, not to quote."
)
@click.option(
    "--data",
    type=click.Choice(["toy"]),
    help="Drill a toy shop, trained when first needed, not the champion.",
)
@results_folder("drills")
@common_options
def drill(
    context: Context, names: tuple[str, ...], listed: bool, short: bool, data: str | None, out: Path
) -> None:
    """Break parts of the running system under load, and judge.

    NAME is one or more of --list, or all. With a Redis and an endpoint of its own; those of this home stay
    untouched. Exit code 1: a figure is not met.
    """
    import logging
    import signal

    _require_instruments("pipelines.drills")
    from pipelines.drills.catalogue import DRILLS, choose_drills
    from pipelines.drills.report import drill_table, list_table
    from pipelines.drills.run import run_drills
    from pipelines.drills.system import SHORT
    from pipelines.inspect.ask import evaluation_requests

    if listed:
        drills = choose_drills(names) if names else DRILLS
        context.answer([each.to_dict() for each in drills], list_table(drills))
        return
    if not names:
        raise click.UsageError("no drill named: give one or more of `reco drill --list`, or all")
    drills = choose_drills(names)
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # progress, on stderr
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the processes of the drill end too
    home = train_toy_shop(context.home, sys.stderr) if data else context.home
    bundle = _bundle(Context(home, context.output))
    requests = evaluation_requests(bundle, 2_000)
    result = run_drills(drills, bundle, home / "offline_store", requests, out, SHORT if short else None)
    context.answer(result, drill_table(result))
    if not result["passed"]:
        click.get_current_context().exit(1)


COMMANDS = (bench, drill)
