"""A request to train, retrain or read data -> checked arguments and a run; a scheduler can call this too."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shlex
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from components.home import (
    MODEL_NAME,
    Conflict,
    command,
    dataset_lock,
    default_tracking_uri,
    read_running,
    registry_command,
)
from feature_repo.errors import USAGE, RecoError
from feature_repo.ids import closest
from pipelines.run.arguments import ArgumentsInvalid, check_hyper_parameters, complete_arguments
from pipelines.run.progress import duration
from pipelines.run.runs import (
    Run,
    RunUnknown,
    Size,
    champions_run,
    evaluated_runs,
    find_run,
    lineage,
    list_runs,
    promoted_runs,
    shops_run,
)
from serving.errors import NoChampion
from serving.release.champion import read_champion
from serving.settings import Settings

if TYPE_CHECKING:
    from monitoring.verdict import DriftVerdict
    from pipelines.run.submit import Kubeflow

DATA_NAMES = ("complete-journey", "toy")
log = logging.getLogger(__name__)


class NoRegistry(RecoError):
    """There is no model registry at the given address."""

    exit_code = USAGE


def check_data(data: str) -> None:
    """Refuse unknown data before anything starts; warn of a folder that has the name of a data set.

    Raises:
        ArgumentsInvalid: neither a folder nor the name of a data set.
    """
    if not data.strip():
        raise ArgumentsInvalid(f"--data is empty: give a folder, {' or '.join(DATA_NAMES)}")
    if data in DATA_NAMES:
        if Path(data).exists():
            log.warning("%s is the built-in data set; for the folder here give ./%s", data, data)
    elif not Path(data).exists():
        raise ArgumentsInvalid(f"no data {data!r}: neither a folder nor a name; {closest(data, DATA_NAMES)}")


def check_champions_data(home: Path, data: str) -> None:
    """Refuse to replace a champion of your own data by a built-in shop's; warn if it is of the other one.

    The gate measures both models on the new data, of which the old one knows no item, so it passes the new
    one. A `reco run` that lacks its --data would replace a shop's champion.

    Raises:
        ArgumentsInvalid: naming the data of the champion's run.
    """
    if data not in DATA_NAMES or (origin := shops_run(home)) is None:
        return
    runs = promoted_runs(home)
    back_from_origin = runs[[run.run_id for run in runs].index(origin.run_id) :]  # newest first
    sources = [str(run.arguments.get("data") or data) for run in back_from_origin]
    # A run on the home's own archive names no shop. An earlier run does: its events began the archive.
    shop = next((one for one in sources if not Path(one).is_relative_to(home.absolute())), sources[0])
    if data == shop:
        return
    learnt, cure = sources[0], f"give {data} a home of its own with --home"
    if shop not in DATA_NAMES:
        raise ArgumentsInvalid(
            f"--data {data}: the champion learnt from {learnt}, and this model would replace it: "
            f"train with --data {shlex.quote(learnt)}, or {cure}"
        )
    log.warning(
        "the champion learnt from %s, and a model of %s replaces it; to keep both, %s", shop, data, cure
    )


def check_online_store(url: str) -> None:
    """Refuse now the URL that the last step would refuse after all the training."""
    from components.data.feast_store import redis_settings

    if url:
        redis_settings(url)


def check_train_until(text: str) -> None:
    """Refuse a cut that is not a date or time; an empty one means the default."""
    try:
        datetime.fromisoformat(text or "2017-11-27")
    except ValueError as error:
        example = "expected for example 2017-11-27 or 2017-11-27T05:00:00Z"
        raise ArgumentsInvalid(f"--train-until {text!r} is no date: {example}") from error


def absolute(data: str) -> str:
    """Return a folder's absolute path: steps run elsewhere, where a relative path names another folder.

    The name of a data set stays one, also beside a folder with that name: a run repeated elsewhere reads the
    same data.
    """
    if not data or data in DATA_NAMES or not Path(data).exists():
        return data
    return str(Path(data).absolute())


def existing_registry(home: Path, tracking_uri: str) -> str:
    """Return the registry's URI; without this check MLflow would create a missing database, and folders.

    Raises:
        NoRegistry: it is a file that does not exist or is empty.
    """
    uri = tracking_uri or default_tracking_uri(home)
    file = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not (file.is_file() and file.stat().st_size):
        raise NoRegistry(
            f"{file} is no registry: train with `{command(home, 'run --data DIR')}`, or give --tracking-uri"
        )
    return uri


def compare_again(run: Run) -> str:
    """Return the command that compares the version of a run that the gate refused."""
    uri, name = (str(run.arguments.get(key, "")) for key in ("tracking_uri", "model_name"))
    gate = run.arguments.get("gate_params", {})  # the defaults may judge otherwise
    words = " ".join(["promote --dry-run", *(f"--gate {key}={value}" for key, value in gate.items())])
    return registry_command(run.folder.parents[1], uri, name, words)


def start_training(
    home: Path, given: dict[str, Any], size: Size, tracking_uri: str, stream: IO[str], jobs: int = 0
) -> Run:
    """Run the training pipeline under a home.

    What `given` leaves out has the defaults of the size. An empty tracking URI is the registry of the home;
    0 jobs are as many as cores.

    Raises:
        ArgumentsInvalid: an argument that the pipeline does not take.
        RegistryRefused: a tracking URI or model name that only a late step would refuse.
        ValueError: RECO_STORE_URL names a file that no run fills.
        StepFailed: a step raised or died.
        Conflict: another run works under this home.
    """
    data = given.get("data", DATA_NAMES[0])
    check_data(data)
    check_champions_data(home, data)
    check_hyper_parameters(given)
    check_train_until(given.get("train_until", ""))
    # These load KFP: the errors above come at once.
    from components.data.feast_store import check_file
    from components.release.registry import check_registry
    from pipelines.run.graph import read_spec
    from pipelines.run.local_run import start_run
    from pipelines.training import arguments_of, training_of
    from serving.redis.address import is_redis_url

    given = {**arguments_of(size, given), "data": absolute(data)}
    given |= {"home": str(home), "tracking_uri": tracking_uri or default_tracking_uri(home)}
    running = read_running(home)
    served = Settings.from_env().store_url or (running.store_url if running else "")
    if "online_store" not in given:
        check_file(home, served)
        given["online_store"] = served if is_redis_url(served) else ""
    spec = read_spec(training_of(size))
    arguments = complete_arguments(spec, given)
    check_online_store(arguments["online_store"])
    check_registry(arguments["tracking_uri"], arguments["model_name"])
    return start_run(home, "training", spec, arguments, size, stream, jobs)


def resume_training(home: Path, name: str, only: str, stream: IO[str], jobs: int = 0) -> Run:
    """Resume a run, by its id or `last`, after its last good step; with `only`, repeat that step alone."""
    from pipelines.run.graph import read_spec
    from pipelines.run.local_run import resume_run
    from pipelines.training import training_of

    run = find_run(home, name)
    if not only:
        check_champions_data(home, str(run.arguments.get("data", "")))
    return resume_run(home, run, read_spec(training_of(run.size)), only, stream, jobs)


def promoted(run: Run) -> str:
    """Return the text about the version that a run promoted, or how to go on without one."""
    step = run.outputs().get("promote-bundle")
    home = run.folder.parents[1]
    if step is None:
        return f"run {run.run_id}: {run.status}; go on with: {command(home, f'run --resume {run.run_id}')}"
    result = step.parameters["Output"]
    verb = "is champion" if result["changed"] else "was champion already"
    if (champion := read_champion(home)).bundle_id != result["bundle_id"]:
        verb = f"was promoted; champion is version {champion.version}"
    took = f"{duration(run.seconds)}, at most {run.peak_memory_mib:,} MiB of memory"
    return (
        f"version {result['version']} (bundle {result['bundle_id']}) {verb}  [{took}]\n"
        f"ask it: {command(home, 'recommend')}    serve it: {command(home, 'serve')}"
    )


def retrain(home: Path, verdict: DriftVerdict, stream: IO[str], cool_down: timedelta) -> dict[str, Any]:
    """Start the training pipeline for a drift verdict, with the arguments of the champion's run.

    The cut and the online store are not repeated: they follow from the present data and settings. Nothing is
    started if this window has started a run already, or during the cool-down.

    Returns:
        `started`, `said`, and of a started run `run_id` and `promoted`; `failed` is the step that failed.
        `promoted` is false, too, where no run can ever start.

    Raises:
        Conflict: another run works under this home.
    """
    from monitoring.retraining import claim_retrain, note_run, release_retrain
    from pipelines.run.local_run import StepFailed

    before = {run.run_id for run in list_runs(home)}  # an error here must leave no claim
    decision = claim_retrain(verdict, home, datetime.now(UTC), cool_down)
    if not decision.allowed:
        return {"started": False, "said": f"not started: {decision.reason}"}
    try:
        origin = champions_run(home)
        if origin is None:
            release_retrain(decision, home)
            by_hand = command(home, "run --data complete-journey")
            said = "not started: no run recorded here promoted the champion, so its arguments are unknown"
            said = f"{said}; start one by hand: {by_hand}, or --data DIR"
            return {"started": False, "promoted": False, "said": said}
        not_repeated = ("train_until", "online_store")
        given = {name: value for name, value in origin.arguments.items() if name not in not_repeated}
        run = start_training(home, given, origin.size, str(given.get("tracking_uri", "")), stream)
    except StepFailed as error:
        note_run(decision, home, error.run.run_id)
        outcome = {"started": True, "run_id": error.run.run_id, "failed": error.step}
        if step := error.run.outputs().get("promote-bundle"):
            version = step.parameters["Output"]["version"]
            said = f"version {version} is champion, but a later step failed: {error}"
            return {**outcome, "promoted": True, "said": said}
        return {**outcome, "promoted": False, "said": f"the champion stays: {error}"}
    except BaseException as error:
        # On a conflict the new run is not ours. A stopped one may be tried again, unless it has promoted.
        new = [run for run in list_runs(home) if run.run_id not in before]
        promoted_any = any(run.outputs().get("promote-bundle") for run in new)
        stopped = isinstance(error, KeyboardInterrupt)
        if isinstance(error, Conflict) or not new or (stopped and not promoted_any):
            release_retrain(decision, home)
        elif not stopped:
            note_run(decision, home, new[0].run_id)
        raise
    return {"started": True, "run_id": run.run_id, "promoted": True, "said": promoted(run)}


def retrain_on_cluster(
    home: Path, verdict: DriftVerdict, cluster: Kubeflow, cool_down: timedelta
) -> dict[str, Any]:
    """Run the last good training of a cluster again for a drift verdict; see `retrain` and `repeat_training`.

    The result of the run is not known yet: the outcome has no `promoted`, see `retraining_result`.
    """
    from monitoring.retraining import claim_retrain, note_run, release_retrain
    from pipelines.run.submit import repeat_training

    decision = claim_retrain(verdict, home, datetime.now(UTC), cool_down)
    if not decision.allowed:
        return {"started": False, "said": f"not started: {decision.reason}"}
    try:
        submitted = repeat_training(cluster)
    except BaseException:
        release_retrain(decision, home)
        raise
    note_run(decision, home, submitted.run_id)
    return {"started": True, "run_id": submitted.run_id, "said": f"submitted: {submitted.url}"}


def retraining_result(home: Path, cluster: Kubeflow | None, failed_at: datetime | None) -> bool | None:
    """Return whether the newest training since the last retraining went well; None: none has ended.

    It may be one that a person started or resumed. `failed_at` is when the retraining was refused, if it was.
    Without a cluster it is the retraining of `retrain`, whose run is noted only if it failed.
    """
    from monitoring.retraining import newest_result, started_run
    from pipelines.run.submit import training_since

    run_id = started_run(home)
    if not run_id and failed_at is None:
        return None
    if cluster:
        return training_since(cluster, run_id, failed_at)
    went_well = {"done": True, "failed": False}  # a run that was stopped says nothing
    noted = {**went_well, "stopped": False, "waiting": False}  # with no step, its runner failed
    # A resumed run is as new as its last step.
    runs = sorted(list_runs(home), key=lambda run: run.saved_at, reverse=True)
    results = (
        (
            run.run_id,
            datetime.fromtimestamp(run.saved_at, UTC),
            (noted if run.run_id == run_id else went_well).get(run.status),
        )
        for run in runs
    )
    return newest_result(results, run_id, failed_at)


def train_toy_shop(home: Path, stream: IO[str]) -> Path:
    """Return a home whose champion is a small model of the toy shop; train it if it is missing."""
    home = home / "toy"
    try:
        read_champion(home)
    except NoChampion:
        stream.write("training the toy shop first, which takes some minutes\n")
        # The empty store keeps the toy shop's users out of the Redis that this machine serves from.
        given = {"data": "toy", "train_until": "", "model_name": MODEL_NAME, "online_store": ""}
        start_training(home, given, "fast", "", stream)
    return home


def evaluated_run(home: Path) -> tuple[Run, Path]:
    """Return the run that made the champion or its ancestor, and the champion's bundle.

    Without such a run it is the newest one that still holds an evaluated bundle, with this bundle.

    Raises:
        RunUnknown: no run holds one.
    """
    found = list(evaluated_runs(home))
    if not found:
        raise RunUnknown(f"no run under {home} holds an evaluated bundle: run `reco run` first")
    newest = found[0][1]
    with contextlib.suppress(NoChampion):
        champion, runs = read_champion(home), dict(reversed(found))  # of two the newest
        for bundle_id in lineage(home, champion.bundle_id):
            if bundle_id in runs:
                return runs[bundle_id], champion.bundle(home)
        log.warning(
            "no run under %s holds the champion's training: the newest, %s, is taken, with its own bundle",
            *(home, newest.run_id),
        )
    return newest, newest.artifacts("evaluate-bundle") / "evaluated"


def run_datasets(home: Path, data: str = "") -> list[Path]:
    """Return the checked data sets that runs still hold, newest first; with `data`, those read from it.

    Without, those under `datasets/` follow: `dataset_of` and `deploy_endpoint` write them.
    """
    runs = (run for run in list_runs(home) if not data or run.arguments.get("data") == data)
    folders = [run.artifacts("ingest-events") / "dataset" for run in runs]
    folders += [] if data else sorted((home / "datasets").glob("[!.]*"))
    half = (".part", ".old")  # of a folder that is being replaced
    return [one for one in folders if one.suffix not in half and (one / "manifest.json").is_file()]


def dataset_of(home: Path, data: str) -> Path:
    """Return a checked data set: `data` if it is one, else what reading `data` gives now.

    A data set with a name never changes and may come from a run; a folder may have grown since.

    Raises:
        ArgumentsInvalid: neither a folder nor the name of a data set.
    """
    from components.data.ingest_events import BUILT_IN, NO_CUT, ingest_events
    from feature_repo.stream.erasure import stamp

    check_data(data)
    source = absolute(data)
    if source in BUILT_IN:
        if existing := run_datasets(home, source):
            return existing[0]
    elif (Path(data) / "manifest.json").is_file():
        return Path(data)
    path = Path(source).resolve()
    number = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]  # folders elsewhere may have the same name
    folder = home / "datasets" / (source if source in BUILT_IN else f"{path.name}-{number}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with dataset_lock(folder):  # two watches may read the same folder
        while True:
            seen = stamp(home)
            ingest_events(source, folder, allowed_ratio(home, source), NO_CUT, str(home))
            if stamp(home) == seen:
                return folder
            shutil.rmtree(folder)  # an erasure was requested meanwhile


def data_to_replay(home: Path, data: str, option: str) -> Path:
    """Return a checked data set; refuse a shop of which the champion knows no item.

    The archive of the home would hold two shops.

    Raises:
        ArgumentsInvalid: the champion knows none of its items, or is of the other built-in shop.
    """
    from feature_repo.events import read_dataset

    folder = dataset_of(home, data)
    known, items = champions_items(home), set(read_dataset(folder).events["item_id"])
    origin = shops_run(home)  # also where the bundle cannot be read
    names = {data, origin.arguments.get("data", data) if origin else data}
    if (known and known.isdisjoint(items)) or names == set(DATA_NAMES):
        raise ArgumentsInvalid(
            f"{option} {shlex.quote(data)}: the champion knows none of its {len(items):,} items, so it is "
            "another shop, and a training on this home's archive would mix both: "
            "give it a home of its own with --home"
        )
    return folder


def champions_items(home: Path) -> set[str]:
    """Return the ids of the items that the champion knows; none without a readable bundle."""
    from feature_repo.statistics import read_statistics

    try:
        return set(read_statistics(read_champion(home).bundle(home) / "statistics").item_ids.tolist())
    except (RecoError, OSError, ValueError):  # facts and events may come before a champion
        return set()


def allowed_ratio(home: Path, source: str) -> float:
    """Return the share of bad rows that the newest training with this data allowed; the usual one without."""
    from components.data.ingest_events import QUARANTINE_LIMIT

    trained = (run.arguments for run in list_runs(home) if run.arguments.get("data") == source)
    return float(next(trained, {}).get("max_quarantine_ratio", QUARANTINE_LIMIT))


def newest_data(home: Path) -> str:
    """Return the newest run's checked data set; if that was removed, the `data` of the run."""
    newest = next(list_runs(home), None)
    if newest is None:
        return DATA_NAMES[0]
    folder = newest.artifacts("ingest-events") / "dataset"
    return str(folder if (folder / "manifest.json").is_file() else newest.arguments["data"])
