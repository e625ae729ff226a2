"""This machine and a home -> missing or broken parts, and how to mend them; in seconds, changing nothing.

A check imports the libraries it needs itself: a missing one must not hide the other checks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import psutil

from components.home import command, read_running
from feature_repo.stream.publication import FILE as PUBLICATION
from feature_repo.stream.publication import PublicationDamaged, read_publication
from pipelines.run.launch import DATA_NAMES, compare_again
from pipelines.run.runs import champions_run, list_runs, shops_run
from pipelines.tables import counted
from serving.errors import BundleInvalid, NoChampion
from serving.redis.address import host_port
from serving.release.champion import FILE as POINTER
from serving.release.champion import Champion, read_champion
from serving.release.manifest import read_manifest
from serving.settings import Settings, unknown_variables, variable

LEAST_DISK_BYTES = 5 << 30  # a run on Complete Journey leaves 1 to 2 GB
LEAST_MEMORY_BYTES = 4 << 30
BROKER_SILENT_S = 5.0
OLD_DAYS = 30  # since the end of the data: a shop's range and seasons change in a month
DISTRIBUTION = "checkout-recommender"
# The runbook of docs/runbooks that fits a finding which is not ok.
RUNBOOKS = {
    "champion": "ChampionNotServed",
    "model age": "BundleOld",
    "online store": "DependencySkipped",
    "stream": "FeaturesStale",
    "facts": "FactsStale",
    "rules": "RulesBroken",
    "disk": "LogLoses",
    "endpoint": "CheckoutGone",
}
_COMMAND = r"('[^']*')|(?<![\w/.-])reco (?=[a-z]+\b(?!/))"  # a quoted path stays as it is


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""
    runbook: str = ""  # page of docs/runbooks


def examine(settings: Settings) -> list[Finding]:
    """Check everything that `reco` needs; the checks are independent, so that one fault hides no other."""
    looks: list[Callable[[Settings], Iterator[Finding]]] = [
        _packages,
        _home,
        _champion,
        _age,
        _online_store,
        _stream,
        _facts,
        _registry,
        _ports,
        _runs,
        _settings,
        _rules,
    ]
    findings: list[Finding] = []
    for look in looks:
        try:
            findings += look(settings)
        except Exception as error:  # noqa: BLE001 - whatever is broken, the other checks must run
            findings.append(Finding(look.__name__.strip("_"), "fail", f"{type(error).__name__}: {error}"))
    reco = command(settings.home, "")
    return [
        replace(
            one,
            mend=re.sub(_COMMAND, lambda match: match[1] or reco, one.mend),
            runbook="" if one.status == "ok" else one.runbook or RUNBOOKS.get(one.name, ""),
        )
        for one in findings
    ]


def _packages(settings: Settings) -> Iterator[Finding]:
    """Ask for the distributions by name; importing them would take half a minute."""
    instead = {"onnxruntime": "onnxruntime-gpu", "faiss-cpu": "faiss-gpu"}
    missing = []
    for line in requires(DISTRIBUTION) or []:
        name = re.split(r"[^\w.-]", line)[0]
        extra = re.search(r'extra == "(\w+)"', line)
        needed = extra is None or extra[1] in ("cpu", "stream", "train")
        if needed and not _installed(name) and not _installed(instead.get(name, name)):
            missing.append(name)
    twice = [name for name, other in instead.items() if _installed(name) and _installed(other)]
    if missing:
        yield Finding("packages", "fail", f"not installed: {', '.join(missing)}", "make setup")
    elif twice:
        both = ", ".join(f"{name} and {instead[name]}" for name in twice)
        mend = "uninstall both, then install one extra: '.[cpu]' or '.[gpu]'"
        yield Finding("packages", "fail", f"installed over one another: {both}", mend)
    else:
        yield Finding("packages", "ok", f"{DISTRIBUTION} {version(DISTRIBUTION)} and all it needs")


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _home(settings: Settings) -> Iterator[Finding]:
    home = settings.home.absolute()
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Finding(
            "home", "fail", f"{there} is no folder that can be written", "choose another folder with --home"
        )
        return
    yield Finding("home", "ok", f"{home}" if there == home else f"{home} (not there yet)")
    free = shutil.disk_usage(there).free
    enough = free >= LEAST_DISK_BYTES
    runs = shlex.quote(str(home / "runs"))
    mend = "" if enough else f"a run needs some GB: remove old runs from {runs}, or move --home"
    yield Finding("disk", "ok" if enough else "warn", f"{free / 1e9:.0f} GB free", mend)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    enough = memory >= LEAST_MEMORY_BYTES
    mend = "" if enough else "training on Complete Journey needs 8 GB; `reco run --data toy` works"
    yield Finding(
        "memory", "ok" if enough else "warn", f"{memory / 1e9:.0f} GB, {os.cpu_count()} cores", mend
    )


def _champion(settings: Settings) -> Iterator[Finding]:
    from serving.release.bundle import load_bundle

    try:
        champion = read_champion(settings.home)
    except NoChampion as error:
        found, _, mend = str(error).rpartition(": ")
        if (settings.home / POINTER).exists():
            yield Finding("champion", "fail", found, mend, "ChampionUnread")
        else:
            yield Finding("champion", "warn", found, "reco run")
        return
    try:
        bundle = load_bundle(champion.bundle(settings.home))
    except BundleInvalid as error:
        yield Finding("champion", "fail", str(error), _cure(settings.home, champion))
        return
    items = counted(len(bundle.statistics.item_ids), "item")
    found = f"version {champion.version}, bundle {champion.bundle_id}, {items}, trained until {champion.cut}"
    yield Finding("champion", "ok", found)


def _cure(home: Path, champion: Champion) -> str:
    """Return the command for a champion that cannot be loaded.

    The registry replaces damaged files. Files that are as their manifest says came from other code.
    """
    from serving.release.bundle import verify_files

    again = _train_again(home)
    try:
        bundle = champion.bundle(home)
        verify_files(bundle, read_manifest(bundle))
    except BundleInvalid:
        if (home / "mlflow.db").is_file():
            return f"reco promote {champion.version}"
        return again
    # The gate cannot measure this champion, and so would not refuse another shop's model.
    return f"{again} --param gate_params.over_champion=0"


def _train_again(home: Path) -> str:
    """Return the command for a new model of the same shop; without a champion any shop may come."""
    if not (home / POINTER).exists():
        return "reco run"
    run = shops_run(home)
    data = str(run.arguments.get("data") or "") if run else ""
    return f"reco run --data {shlex.quote(data) if data else 'DIR'}"


def _champion_of(home: Path) -> Champion | None:
    with suppress(NoChampion):
        return read_champion(home)
    return None


def _age(settings: Settings) -> Iterator[Finding]:
    champion = _champion_of(settings.home)
    if champion is None:
        return
    run = champions_run(settings.home)
    data = str(run.arguments.get("data", "")) if run else ""
    end = champion.cut
    with suppress(PublicationDamaged):  # its own finding
        end = published.until if (published := read_publication(settings.home)) else end
    days = (datetime.now(UTC) - datetime.fromisoformat(str(end))).days
    found = f"promoted {champion.promoted_at[:10]}, its data end {str(end)[:10]}, {counted(days, 'day')} ago"
    if data in DATA_NAMES:
        yield Finding("model age", "ok", f"{found}: {data} is demo data and never grows")
    elif days > OLD_DAYS:
        mend = _train_again(settings.home)
        yield Finding("model age", "warn", f"{found}; more than {OLD_DAYS} are old", mend)
    else:
        yield Finding("model age", "ok", found)


def _online_store(settings: Settings) -> Iterator[Finding]:
    from serving.errors import FeaturesUnavailable
    from serving.stores.online_features import open_store

    file, again = settings.home / "online_store.db", _train_again(settings.home)
    if not settings.store_url and not file.exists():
        run = champions_run(settings.home) if _champion_of(settings.home) else None
        if run is None or run.arguments.get("online_store") or not (settings.home / PUBLICATION).exists():
            yield Finding("online store", "warn", "not there yet", again)
            return
        kept = (run.artifacts("materialize-features") / "features").is_dir()
        again = f"reco run --resume {run.run_id} --only publish-features" if kept else again
        yield Finding("online store", "fail", f"{file} is gone: answers lack all features in it", again)
        return
    store = open_store(settings.online_store_url)
    try:
        store.read("doctor")
    except FeaturesUnavailable as error:
        yield Finding("online store", "fail", str(error), f"start it, or run `{again}` to write it again")
        return
    finally:
        store.close()
    try:
        held = read_publication(settings.home)
    except PublicationDamaged as error:
        yield Finding("online store", "warn", f"answers, but {error}", again)
        return
    if held is None:
        yield Finding("online store", "warn", "answers, but what it holds is not written down", again)
        return
    found = f"{counted(held.users, 'user')} as of {held.until}"
    champion = _champion_of(settings.home)
    if champion is None or held.cut == champion.cut:
        yield Finding("online store", "ok", found)
    else:
        yield Finding("online store", "warn", found, f"the champion was trained until {champion.cut}")


def _stream(settings: Settings) -> Iterator[Finding]:
    file = settings.home / "stream.json"
    if not file.is_file():
        return  # no stream was started here
    state = json.loads(file.read_bytes())
    silent_s = time.time() - state["updated_at"]
    lag = "an unknown number of messages" if state["lag"] is None else counted(state["lag"], "message")
    found = f"{counted(state['events'], 'event')}, {counted(state['dead_letters'], 'dead letter')}"
    found += f", waiting: {lag}"
    mend = "reco stream, or reco up; without it answers say stale_features"
    if not psutil.pid_exists(state["pid"]):
        yield Finding("stream", "warn", f"ended {silent_s:,.0f} s ago, after {found}", mend)
    elif silent_s > settings.stale_after_s:
        yield Finding("stream", "warn", f"silent for {silent_s:,.0f} s, after {found}", mend)
    elif state["broker_silent_s"] > BROKER_SILENT_S:
        found += f"; the broker has been silent for {state['broker_silent_s']:,.0f} s"
        yield Finding("stream", "warn", found, "start the broker, or correct RECO_KAFKA_BOOTSTRAP")
    elif state["store_failures"]:
        found += f"; the online store failed {counted(state['store_failures'], 'time')}"
        yield Finding("stream", "warn", found, "see the store's errors in the stream's log")
    else:
        yield Finding("stream", "ok", found)


def _facts(settings: Settings) -> Iterator[Finding]:
    from serving.errors import FactsUnavailable
    from serving.shop.fact_store import PAGE, open_fact_store

    if not settings.store_url and not Path(settings.fact_store_url.removeprefix("sqlite:///")).exists():
        return  # no fact was written here
    store = open_fact_store(settings.fact_store_url)
    try:
        facts, _ = store.changed_since(0)
    except FactsUnavailable as error:
        yield Finding("facts", "fail", str(error), "start it; until then prices and stock stay as they are")
        return
    finally:
        store.close()
    more = " or more" if len(facts) == PAGE else ""
    yield Finding(
        "facts", "ok", f"{counted(len(facts), 'fact')}{more}: prices, stocks, bans, promotions, coupons"
    )


def _registry(settings: Settings) -> Iterator[Finding]:
    """Read the alias with plain SQL: MLflow takes seconds to import, and would migrate the database."""
    database = settings.home / "mlflow.db"
    if not database.exists():
        yield Finding("registry", "warn", f"{database} is not there yet", _train_again(settings.home))
        return
    query = "SELECT name, version FROM registered_model_aliases WHERE alias = 'champion'"
    written = "SELECT name, key, value FROM registered_model_tags"
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            aliases = {str(name): str(version) for name, version in connection.execute(query)}
            tags = list(connection.execute(written))
    except sqlite3.Error as error:
        mend = f"make {shlex.quote(str(database))} readable for this user, or restore it from a backup"
        yield Finding("registry", "fail", f"{database} cannot be read as MLflow's ({error})", mend)
        return
    champion = _champion_of(settings.home)
    # No alias here at all: the champion came from another registry (--tracking-uri).
    alias = aliases.get(champion.model_name) if champion else None
    if champion and alias and alias != champion.version:
        own = {key: value for name, key, value in tags if name == champion.model_name}
        yield _disagreement(own, alias, champion)
        return
    yield Finding("registry", "ok", f"{database}")


def _disagreement(tags: dict[str, str], alias: str, champion: Champion) -> Finding:
    """Tell a promotion that was stopped, which may be completed, from an alias that was moved by hand."""
    from components.release.history import HistoryBroken, read_history

    found = f"its alias champion names version {alias}, champion.json version {champion.version}"
    try:
        history = read_history(tags, alias)
    except HistoryBroken as error:
        return Finding("registry", "fail", f"{found}; {error}", "reco history")
    if history and history[-1].version == alias:
        return Finding("registry", "fail", f"{found}: a promotion was stopped", f"reco promote {alias}")
    return Finding(
        "registry", "fail", f"{found}: the alias was moved by hand, past the gate", "reco rollback"
    )


def _listening(home: Path) -> Iterator[str]:
    """Yield the addresses of the endpoints that serve this home, on whatever port they were started."""
    serving = set()
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "serving.server" in words and any(Path(word).is_relative_to(home.absolute()) for word in words):
            serving.add(process.pid)
    for one in psutil.net_connections("tcp") if serving else ():
        if one.pid in serving and one.status == psutil.CONN_LISTEN:
            yield f"http://{host_port(one.laddr.ip, one.laddr.port)}"


def _endpoint(settings: Settings, urls: Sequence[str]) -> Iterator[Finding]:
    from pipelines.live.ports import answers

    faults = {url: answers(f"{url}/healthz") for url in urls}  # gRPC's port gives one, too
    alive = [url for url, fault in faults.items() if not fault]
    found = ", ".join(alive or faults.values()) or "`reco up` runs, but its endpoint does not"
    written = shlex.quote(str(settings.home / "up" / "endpoint.log"))
    mend = "" if alive else f"look into {written}, or reco serve"
    yield Finding("endpoint", "ok" if alive else "fail", found, mend)
    for url in alive:
        yield from _signals(f"http://{settings.metrics_address}" if settings.metrics_address else url)


def _ports(settings: Settings) -> Iterator[Finding]:
    urls = sorted(set(_listening(settings.home)))
    if urls or read_running(settings.home):
        yield from _endpoint(settings, urls)
        return
    for field, port in (("http_port", settings.http_port), ("grpc_port", settings.grpc_port)):
        taken = port != 0 and _is_taken(settings.host, port)
        mend = f"the endpoint if it runs already; else choose another with {variable(field)}" if taken else ""
        yield Finding(
            f"port {port}", "warn" if taken else "ok", "something listens" if taken else "free", mend
        )


def _is_taken(host: str, port: int) -> bool:
    for family, kind, _, _, address in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind) as probe:  # without IPv6 it listens nowhere
            probe.settimeout(0.5)
            if probe.connect_ex(address) == 0:
                return True
    return False


def _signals(url: str) -> Iterator[Finding]:
    """Yield each line of an alert that a running endpoint crosses within two seconds."""
    from pipelines.inspect.signals import watch

    try:
        for alert, figure in watch(f"{url}/metrics"):
            yield Finding("answers", "warn", f"{url}: {figure}", "see the runbook", alert)
    except OSError as error:
        yield Finding("metrics", "warn", f"{url}/metrics: {error}", "correct RECO_METRICS_ADDRESS")


def _runs(settings: Settings) -> Iterator[Finding]:
    run = next(list_runs(settings.home), None)
    if run is None:
        yield Finding("last run", "ok", "none yet")
    elif run.status in ("done", "running"):
        yield Finding("last run", "ok", f"{run.run_id}: {run.status}")
    else:
        failed = next((step for step in run.steps if step.error), None)
        why = f"failed at {failed.name}: {failed.error.splitlines()[0]}" if failed else "stopped"
        # The same step on the same inputs fails the same gate: what helps is to look at the comparison.
        refused = failed is not None and failed.error.startswith("GateFailed")
        mend = compare_again(run) if refused else f"reco run --resume {run.run_id}"
        yield Finding("last run", "warn", f"{run.run_id}: {why}", mend)


def _settings(settings: Settings) -> Iterator[Finding]:
    if unknown := unknown_variables():
        yield Finding("settings", "warn", f"name no setting: {', '.join(unknown)}", "correct or unset them")


def _rules(settings: Settings) -> Iterator[Finding]:
    file = settings.rules_path
    if not file.is_file():
        return
    from pipelines.inspect.preview_rules import check_rules

    checked = check_rules(file, settings.home)
    mend = f"reco rules check {shlex.quote(str(file))}"
    if checked.refused:
        yield Finding("rules", "fail", f"{file} is not taken", mend)
    elif checked.problems:
        yield Finding("rules", "warn", f"{file}: {counted(len(checked.problems), 'warning')}", mend)
    else:
        yield Finding("rules", "ok", f"{file}: {counted(len(checked.rules), 'rule')}")
