"""The command that moves traffic: release."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from components.home import Conflict, read_running
from components.rollout import NAMESPACE
from pipelines.cli.options import (
    FILE,
    FOLDER,
    Context,
    FiniteRange,
    common_options,
    registry_options,
    trusted_keys_option,
)
from pipelines.run.launch import existing_registry, run_datasets

if TYPE_CHECKING:
    from collections.abc import Callable

    from components.rollout.catalogue import ModelCatalogue
    from components.rollout.plan import Pace, Release
    from components.rollout.release import Rollout

WATCH_S = 30.0


@click.command()
@click.argument("version", default="", metavar="[VERSION]")
@click.option(
    "--cluster", default="", metavar="URL", help="Kubernetes API.  [default: of `reco up`, or the pod]"
)
@click.option("--gateway", default="", metavar="URL", help="For golden requests.  [default: the route's]")
@click.option("--dataset", type=FOLDER, help="Data set of its evaluation.  [default: the runs']")
@click.option("--key", type=FILE, help="Private key: signs the way back.")
@click.option("--hold-s", type=FiniteRange(0, 1e9), help="Time with the old slot ready.  [default: 1800]")
@click.option("--deployer", default="", help="Its name; a Job's pods share one.  [default: host:process]")
@click.option("--resume", is_flag=True, help="Go on with an unfinished release; without one, start.")
@click.option("--guard", is_flag=True, help="End a release whose deployer is gone.")
@click.option("--watch", is_flag=True, help="Release each new challenger, until Ctrl-C.")
@click.option("--status", is_flag=True, help="Show the last release and the weights.")
@click.option("--dry-run", is_flag=True, help="Print each patch of route and slots; change nothing.")
@trusted_keys_option
@registry_options
@common_options
def release(
    context: Context,
    version: str,  # empty: the challenger, or with --resume the unfinished one
    cluster: str,
    gateway: str,
    dataset: Path | None,
    key: Path | None,
    hold_s: float | None,
    deployer: str,
    resume: bool,
    guard: bool,
    watch: bool,
    status: bool,
    dry_run: bool,
    trusted_keys: Path | None,
    tracking_uri: str,
    model_name: str,
) -> None:
    """Give a version the traffic in steps, or take it back.

    Without VERSION, the challenger. The gate, then shadow traffic, then 1, 5, 25, 50 and 100 %. A worse
    canary is aborted: exit code 1. Another release runs, or --resume finds another version: 4.
    """
    from components.release.registry import CHALLENGER
    from components.rollout.plan import Pace

    if sum((resume, guard, watch, status, dry_run)) > 1:
        raise click.UsageError("give one of --resume, --guard, --watch, --status and --dry-run")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if not (status or guard):  # on-call may look and end a release without the registry
        existing_registry(context.home, tracking_uri)
    pace = Pace() if hold_s is None else Pace(hold_s=hold_s)
    sends_golden = not any((status, guard, dry_run))
    where, registry = (cluster, gateway if sends_golden else None), (tracking_uri, model_name)

    def datasets() -> list[Path]:
        return [dataset] if dataset else run_datasets(context.home)

    rollout, catalogue = open_rollout(context, *where, datasets, registry, pace, trusted_keys, key, deployer)
    if status:
        show_release(context, *rollout.status())
    elif dry_run:
        planned = rollout.patches(version or CHALLENGER)
        patches = [{"object": name, "patch": patch} for name, patch in planned]
        text = "\n".join(f"# {one['object']}\n{json.dumps(one['patch'])}" for one in patches)
        context.answer(patches, text)
    elif guard:
        _guard(context, rollout, catalogue)
    elif watch:
        _follow(context, rollout, catalogue)
    else:
        _go(context, rollout, version, resume)


def _go(context: Context, rollout: Rollout, version: str, resume: bool) -> None:
    """Go on with an unfinished release, or begin one."""
    from components.release.registry import CHALLENGER
    from components.rollout.cluster import ClusterUnreachable
    from components.rollout.release import NoRelease

    try:
        if resume:
            with contextlib.suppress(NoRelease):
                rollout.resume(version)
                return
        rollout.start(version or CHALLENGER)
    finally:  # an aborted one, too: the table says why
        with contextlib.suppress(ClusterUnreachable):  # it would replace the release's own exit code
            show_release(context, *rollout.status())


def _guard(context: Context, rollout: Rollout, catalogue: ModelCatalogue) -> None:
    """End a release whose deployer is gone, and let this home's champion follow one that is over."""
    from feature_repo.errors import RecoError

    record = rollout.guard()
    show_release(context, record, rollout.status()[1])
    if record is not None:
        try:
            catalogue.follow_end(record)
        except RecoError as error:  # on-call may end a release without the registry
            context.say(f"the champion of {context.home} does not follow the release yet: {error}")


def open_rollout(
    context: Context,
    cluster: str,
    gateway: str | None,
    datasets: Callable[[], list[Path]],
    registry: tuple[str, str],
    pace: Pace,
    trusted_keys: Path | None = None,
    key: Path | None = None,
    deployer: str = "",
) -> tuple[Rollout, ModelCatalogue]:
    """Connect to a cluster; the registry is asked for when it is needed.

    The gateway is the route's host if it is empty, and the route must have one. None: a host is not needed.
    """
    import httpx

    from components.rollout.catalogue import ModelCatalogue
    from components.rollout.cluster import Cluster, connect
    from components.rollout.manifests import ROUTE, SLOTS, place_of_bundles, service
    from components.rollout.observe import Observer
    from components.rollout.release import Rollout

    running = read_running(context.home)
    if running is not None and not cluster:
        cluster, gateway = running.cluster, gateway or running.gateway
    there = Cluster(connect(cluster), NAMESPACE)
    route = there.get("HTTPRoute", ROUTE)
    slot = there.get("InferenceService", service(SLOTS[0]))
    hosts = route["spec"].get("hostnames")
    if gateway == "" and not hosts:
        raise click.UsageError("the HTTPRoute names no host: give the gateway's URL with --gateway")
    if not gateway and hosts:
        gateway = f"https://{hosts[0]}"
    token = context.settings().caller_tokens.partition(",")[0].strip()
    uri, model_name = registry
    catalogue = ModelCatalogue(
        context.home,
        lambda: existing_registry(context.home, uri),
        model_name,
        datasets,
        place_of_bundles(slot),
        trusted_keys,
        key,
    )
    address = (gateway or "").rstrip("/")
    observer = Observer(there, httpx.Client(trust_env=False), address, token, pace, time.time)
    holder = deployer or f"{socket.gethostname()}:{os.getpid()}"
    rollout = Rollout(there, observer, catalogue, pace, holder, time.time, time.sleep, context.say)
    return rollout, catalogue


def roll_back_traffic(
    context: Context,
    cluster: str,
    gateway: str,
    registry: tuple[str, str],
    trusted_keys: Path | None,
    key: Path | None,
) -> None:
    """Give the traffic of a cluster back to the version before.

    The gateway answers golden requests, which only a rollback after the hold sends.
    """
    from components.rollout.plan import Pace

    where = (cluster, gateway or None)
    rollout, _ = open_rollout(context, *where, list, registry, Pace(hold_s=0.0), trusted_keys, key)
    show_release(context, rollout.rollback(), rollout.status()[1])


def show_release(context: Context, record: Release | None, weights: dict[str, int]) -> None:
    """Answer with a release: its state, the weights, and the gate's tables."""
    from components.rollout.plan import name_of
    from pipelines.tables import table

    split = ", ".join(f"{slot} {weight} %" for slot, weight in weights.items())
    if record is None:
        context.answer({"release": None, "weights": weights}, f"no release yet; {split}")
        return
    rows = [
        ["release", f"version {record.version}, bundle {record.bundle_id}, to {record.canary}"],
        ["state", name_of(record)],
        ["weights", split],
        ["reason", record.reason],
    ]
    looks: list[list[Any]] = [
        [look["at"], row["share"], row["stable"], row["canary"], _percent(row["reveals"]), row["verdict"]]
        for look in record.gate
        for row in look["rows"]
    ]
    head = ["at", "share", "stable", "canary", "reveals (90 %)", "verdict"]
    text = f"{table(['', ''], rows)}\n\n{table(head, looks)}"
    context.answer({"release": asdict(record), "weights": weights}, text)


def _percent(share: float | None) -> str:
    return "nothing" if share is None else f"{share:.2%} or more"


def _follow(context: Context, rollout: Rollout, catalogue: ModelCatalogue) -> None:
    """Release each version that gets the alias challenger; an aborted one loses it."""
    from components.release.registry import CHALLENGER
    from components.rollout.release import Aborted
    from feature_repo.errors import RecoError

    refused: str | None = None
    while True:
        try:
            number = catalogue.challenger()
            record = rollout.status()[0] if number and number == refused else None
            if record and (record.version, record.state) == (refused, "aborted"):
                catalogue.undo(record)  # the registry was away when it ended: so it still has the alias
            elif number:
                context.say(f"version {number} is {CHALLENGER}")
                rollout.start(number)
            refused = None
        except (Aborted, Conflict) as error:  # a conflict, if it was rolled back by hand
            refused = number
            context.say(str(error))
        except RecoError as error:  # the registry or the cluster is away
            context.say(f"{error}; looking again in {WATCH_S:g} s")
        time.sleep(WATCH_S)


COMMANDS = (release,)
