"""Commands that measure and break: bench, figures, drill. They need a clone, not the wheel."""

from __future__ import annotations

import functools
import importlib.util
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pipelines.cli.options import Command, Context, common_options, results_folder, stacked
from pipelines.run.launch import dataset_of, evaluated_run, newest_data, train_toy_shop
from serving.release.champion import read_champion

if TYPE_CHECKING:
    from pipelines.bench.compression import TrainingLine
    from pipelines.drills.canary import Case
    from pipelines.live.monitors import Programs

RELEASE_DRILL = "release"


def _require_instruments(package: str) -> None:
    """Refuse to go on without a package that the wheel leaves out; show progress on stderr.

    SIGTERM and a terminal that closes end a command as Ctrl-C does, so that the servers of a bench or a drill
    end with it, and its folders of shoppers' rows. Under `nohup` a terminal may close.
    """
    if importlib.util.find_spec(package) is None:
        raise click.UsageError(
            f"{package} is not installed: benches and drills run from a clone of the repository, "
            "see docs/how-to/install.md"
        )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # of libraries
    for ours in ("components", "monitoring", "pipelines"):
        logging.getLogger(ours).setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the command once: a terminal may send two signals, and the second would interrupt the end."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: None)  # not SIG_IGN, which servers that start now would inherit
    raise KeyboardInterrupt


data_option: Callable[[Command], Command] = click.option(
    "--data", default="", help="complete-journey, toy, or a data set.  [default: the newest run's]"
)


def _bundle(context: Context) -> Path:
    return read_champion(context.home).bundle(context.home)


def _dataset(context: Context, data: str) -> Path:
    return dataset_of(context.home, data or newest_data(context.home))


def _requests(bundle: Path) -> list[dict[str, Any]]:
    """Return real baskets of the bundle's evaluation."""
    from pipelines.inspect.ask import evaluation_requests

    return evaluation_requests(bundle, 2_000)


@click.group()
def bench() -> None:
    """Measure, and write tables as JSON and Markdown."""
    _require_instruments("pipelines.bench")


def _measures(*options: Callable[[Command], Command]) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function `bench_NAME` that writes NAME.json and NAME.md and returns the first."""

    def decorate(measure: Callable[..., Any]) -> click.Command:
        name = measure.__name__.removeprefix("bench_")

        @functools.wraps(measure)
        def command(context: Context, out: Path, **given: Any) -> None:
            result = measure(context, out, **given)
            context.answer(result, (out / f"{name}.md").read_text(encoding="utf-8"))

        run: Any = common_options(command)
        return bench.command(name)(stacked(*options, results_folder("bench"))(run))

    return decorate


@_measures(
    click.option(
        "--seconds", type=float, default=20.0, show_default=True, help="How long each way of asking."
    ),
)
def bench_latency(context: Context, out: Path, seconds: float) -> Any:
    """Measure milliseconds per stage and in total.

    In process, and over HTTP one request at a time. For latency under load see `reco bench load`.
    """
    from pipelines.bench.latency import bench_latency as measure

    bundle = _bundle(context)
    return measure(bundle, _requests(bundle), out, seconds, context.settings())


@_measures(
    click.option("--endurance", is_flag=True, help="Ask ours 60,000 requests, too, and watch its memory."),
    click.option(
        "--quick", is_flag=True, help="Seconds instead of half an hour: to see that it works, not to quote."
    ),
)
def bench_load(context: Context, out: Path, endurance: bool, quick: bool) -> Any:
    """Measure capacity, tail and cost beside other servers.

    Each runs beside our endpoint: KServe's own server, the ranker as exported, and plain FastAPI with
    PyTorch. With a Redis of its own; about half an hour.
    """
    from pipelines.bench.load.measure import QUICK
    from pipelines.bench.load.measure import bench_load as measure

    champion, effort = read_champion(context.home), QUICK if quick else None
    deadline_ms = context.settings().deadline_ms  # the only setting of this shell: the arms run as they ship
    requests = _requests(champion.bundle(context.home))
    return measure(
        context.home, champion, requests, out, effort=effort, endurance=endurance, deadline_ms=deadline_ms
    )


@_measures(
    data_option,
    click.option("--seconds", type=float, default=30.0, show_default=True, help="How long each load lasts."),
    click.option("--kills", type=click.IntRange(1), default=20, show_default=True, help="Of the stream."),
)
def bench_features(context: Context, out: Path, data: str, seconds: float, kills: int) -> Any:
    """Measure reads, freshness, folding, recovery and replay of features.

    With a Redis, a broker and streams of its own; those of this home stay untouched.
    """
    from feature_repo.events import read_dataset
    from pipelines.bench.features import bench_features as measure

    return measure(_bundle(context), read_dataset(_dataset(context, data)).events, out, seconds, kills)


@_measures(
    data_option,
    click.option(
        "--ceiling", is_flag=True, help="Also measure how good a list of these candidates could be."
    ),
)
def bench_quality(context: Context, out: Path, data: str, ceiling: bool) -> Any:
    """Measure the served path beside the baselines.

    Also two stages against the ranker over the whole catalogue, and items that the catalogue lacks.
    """
    from pipelines.bench.quality import bench_quality as measure
    from pipelines.cli.release import champions_retriever

    retriever = champions_retriever(context)
    return measure(_bundle(context), _dataset(context, data), retriever, out, ceiling)


@_measures(data_option)
def bench_rerank(context: Context, out: Path, data: str) -> Any:
    """Measure the gain and the cost of re-ranking."""
    from pipelines.bench.rerank import bench_rerank as measure

    return measure(_bundle(context), _dataset(context, data), out)


@_measures()
def bench_compression(context: Context, out: Path) -> Any:
    """Measure every ranker of the champion's run.

    Quality, bytes, milliseconds. Needs the artifacts of that run; trains the models it did not train: about a
    quarter of an hour in all.
    """
    from pipelines.bench.compression import bench_compression as measure

    return measure(_training_line(context), out)


@_measures()
def bench_peers(context: Context, out: Path) -> Any:
    """Compare published methods with the champion.

    Personal frequency, item-kNN, EASE, UP-CF, TIFU-kNN, ALS, BPR, SASRec and LightGBM, tuned on the weeks
    before the cut. Takes about an hour.
    """
    from pipelines.bench.peers.compare import bench_peers as measure

    return measure(_training_line(context), out)


def _training_line(context: Context) -> TrainingLine:
    """Return the artifacts of the run that trained the champion, with the champion's bundle."""
    from pipelines.bench.compression import TrainingLine

    run, bundle = evaluated_run(context.home)
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
        bundle=bundle,
        dataset=run.artifacts("ingest-events") / "dataset",
        ranker_params=run.arguments["ranker_params"],
    )


@_measures(
    click.option("--items", type=int, default=2_000_000, show_default=True, help="Size of the catalogue."),
    click.option("--users", type=int, default=1_000_000, show_default=True, help="Number of shoppers."),
)
def bench_scale(context: Context, out: Path, items: int, users: int) -> Any:
    """Run the steps on a synthetic shop of any size.

    Seconds, memory, bytes in each precision. With the usual sizes it takes about an hour, 16 GiB of memory
    and 10 GB of disk.
    """
    from pipelines.bench.scale import bench_scale as measure

    return measure(items, users, out)


@_measures(
    click.option(
        "--items", type=click.IntRange(1_000), default=2_000_000, show_default=True, help="Synthetic ones."
    ),
)
def bench_retrieval(context: Context, out: Path, items: int) -> Any:
    """Measure each type of index.

    Recall, time and bytes. With the usual size it takes about six minutes and 2 GiB of memory.
    """
    from pipelines.bench.retrieval import bench_retrieval as measure

    return measure(_bundle(context), out, items)


@_measures(data_option)
def bench_drift(context: Context, out: Path, data: str) -> Any:
    """Measure the drift of each week against the first weeks.

    Also injected changes: the days until the alarm, PSI and KL of predictions, concept drift.
    """
    from pipelines.bench.drift import bench_drift as measure

    return measure(_bundle(context), _dataset(context, data), out)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listed", is_flag=True, help="Show the plan: each result, its minutes, its state.")
@click.option(
    "--short", is_flag=True, help="Seconds each, into OUT/short: to see that it works, not to quote."
)
@results_folder("figures")
@common_options
def figures(context: Context, names: tuple[str, ...], listed: bool, short: bool, out: Path) -> None:
    """Measure the results that the docs publish.

    NAME is one or more of --list; without, all but `peers` and `alerts`, in about 80 minutes. Measures the
    champion of this home on this commit. Skips results of the same commit, champion and processor.
    """
    _require_instruments("pipelines.bench")
    from pipelines.bench.figures import measure_figures, plan_table

    if not listed:
        measure_figures(context.home, out, names, short)
    context.answer(str(out), plan_table(context.home, out / "short" if short else out))


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--list", "listed", is_flag=True, help="List each drill with its claim; a single NAME with its figures."
)
@click.option(
    "--short", is_flag=True, help="Seconds a fault instead of ten: to see that it works, not to quote."
)
@click.option(
    "--data",
    type=click.Choice(["toy"]),
    help="Drill a toy shop, trained when first needed, not the champion.",
)
@click.option(
    "--with-alerts", is_flag=True, help="Watch with Prometheus and Alertmanager, and judge the pages, too."
)
@results_folder("drills")
@common_options
def drill(
    context: Context,
    names: tuple[str, ...],
    listed: bool,
    short: bool,
    data: str | None,
    with_alerts: bool,
    out: Path,
) -> None:
    """Break parts of the running system under load, and judge.

    NAME is one or more of --list, or all. Or it is `release`: a canary in each way it can go; cases may
    follow, but not --list, --short or --with-alerts. With a Redis and an endpoint of its own; those of this
    home stay untouched. Exit code 1: a figure is not met.
    """
    _require_instruments("pipelines.drills")
    from pipelines.drills.catalogue import DRILLS, choose_drills
    from pipelines.drills.report import list_table
    from pipelines.drills.run import ALERTS, REPORT, run_drills
    from pipelines.drills.system import SHORT

    is_release = names[:1] == (RELEASE_DRILL,)
    if is_release and any((short, with_alerts, listed)):
        raise click.UsageError(f"the drill {RELEASE_DRILL} takes no --short, --with-alerts or --list")
    if listed:
        drills = choose_drills(names) if names else DRILLS
        context.answer([each.to_dict() for each in drills], list_table(drills))
        return
    if not names:
        raise click.UsageError("no drill named: give one or more that --list shows, or all")
    chosen: Any = _cases(names[1:]) if is_release else choose_drills(names)
    programs = _programs() if with_alerts else None
    home = train_toy_shop(context.home, sys.stderr) if data else context.home
    bundle = _bundle(Context(home, context.output))
    parts = bundle, home / "offline_store", _requests(bundle), out
    if is_release:
        from pipelines.drills.canary_run import drill_release

        result, report = drill_release(*parts, chosen), RELEASE_DRILL
    else:
        result = run_drills(chosen, *parts, SHORT if short else None, programs=programs)
        report = ALERTS if with_alerts else REPORT
    page = (out / f"{report}.md").read_text(encoding="utf-8")
    context.answer(result, page, 0 if result["passed"] else 1)


def _cases(names: tuple[str, ...]) -> list[Case]:
    """Return the cases of these names of the drill `release`; none: all."""
    from feature_repo.ids import closest
    from pipelines.drills.canary import CASES

    known = [case.name for case in CASES]
    for name in names:
        if name not in known:
            raise click.UsageError(f"no case {name!r} of the drill {RELEASE_DRILL}: {closest(name, known)}")
    return [case for case in CASES if not names or case.name in names]


def _programs() -> Programs:
    from pipelines.live.monitors import INSTALL, monitor_programs

    programs = monitor_programs()
    if programs is None:
        raise click.UsageError(f"prometheus or alertmanager is not on the PATH, expected both: {INSTALL}")
    return programs


COMMANDS = (bench, figures, drill)
