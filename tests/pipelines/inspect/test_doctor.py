"""A home in each state that a user may leave it in -> the findings of `reco doctor`."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from components.home import Running, announced, command, locked
from components.release.history import Promotion
from feature_repo.facts import parse_fact
from pipelines.inspect.doctor import RUNBOOKS, Finding, examine
from pipelines.run.runs import new_run
from serving.release.champion import Champion, read_champion, write_champion
from serving.release.manifest import read_manifest
from serving.settings import Settings, variable
from serving.shop.fact_store import open_fact_store
from tests.feature_repo.stream.published_shop import write_note
from tests.pipelines.conftest import promote_run


def look(home: Path, **settings: object) -> dict[str, Finding]:
    """The findings about a home, without those about this machine's packages."""
    findings = examine(replace(Settings(http_port=0, grpc_port=0), home=home, **settings))  # type: ignore[arg-type]
    return {found.name: found for found in findings if found.name != "packages"}


def test_a_package_of_the_stream_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> str:
        if name == "confluent-kafka":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("pipelines.inspect.doctor.version", without)
    [found] = [found for found in examine(Settings(home=tmp_path)) if found.name == "packages"]
    assert (found.status, found.found) == ("fail", "not installed: confluent-kafka")
    assert found.mend == "make setup"


@pytest.fixture
def home(tmp_path: Path, toy_line: Path) -> Path:
    """A home as a finished run leaves it, with MLflow's one table that is looked at."""
    home = tmp_path / "home"
    shutil.copytree(toy_line / "home", home)
    manifest = read_manifest(toy_line / "evaluated")
    bundle_id = manifest["bundle_id"]
    shutil.copytree(toy_line / "evaluated", home / "bundles" / bundle_id)
    cut = (toy_line / "cut.txt").read_text()
    promote_run(home, "toy", bundle_id)  # the pointer below has the cut of the toy line
    write_champion(home, Champion(bundle_id, "3", "reco", f"bundles/{bundle_id}", cut, cut))
    with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        database.execute("CREATE TABLE registered_model_aliases (alias TEXT, version INTEGER, name TEXT)")
        database.execute("INSERT INTO registered_model_aliases VALUES ('champion', 3, 'reco')")
        database.execute("CREATE TABLE registered_model_tags (key TEXT, value TEXT, name TEXT)")
    return home


@pytest.mark.slow
def test_a_finished_run_needs_no_repair(home: Path) -> None:
    for finding in look(home).values():
        assert (finding.status, finding.mend) == ("ok", ""), finding


def test_every_runbook_that_is_named_exists() -> None:
    pages = Path(__file__).parents[3] / "docs" / "runbooks"
    assert all((pages / f"{name}.md").is_file() for name in RUNBOOKS.values())


def test_an_empty_home_has_missing_parts_and_no_broken_one(tmp_path: Path) -> None:
    found = look(tmp_path / "new")
    for name in ("champion", "online store", "registry"):
        assert (found[name].status, found[name].mend) == ("warn", command(tmp_path / "new", "run"))
    assert "fail" not in {finding.status for finding in found.values()}
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["broken", "{}", '{"bundle_id": "b1", "path": "/a: b"}'])
def test_a_damaged_champion_s_remedy_is_whole(tmp_path: Path, content: str) -> None:
    (tmp_path / "champion.json").write_text(content)
    found = look(tmp_path)["champion"]
    assert found.status == "fail"
    assert found.found.startswith(f"{tmp_path / 'champion.json'} ")
    assert found.mend in (f"write it again with `{command(tmp_path, 'promote champion')}`", "promote again")


@pytest.mark.slow
def test_a_flipped_byte_in_the_champion_is_found(home: Path) -> None:
    ranker = read_champion(home).bundle(home) / "ranker.onnx"
    ranker.write_bytes(b"X" + ranker.read_bytes()[1:])
    found = look(home)["champion"]
    assert found.status == "fail"
    assert "ranker.onnx has SHA-256" in found.found
    assert found.mend == command(home, "promote 3"), "the registry has the file"
    (home / "mlflow.db").unlink()
    assert look(home)["champion"].mend == command(home, "run --data toy"), "the shop stays the same"


@pytest.mark.slow
def test_a_bundle_of_another_feature_schema_is_trained_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.release.bundle.schema_hash", lambda: "0000")
    found = look(home)["champion"]
    assert "was built for feature schema" in found.found
    again = command(home, "run --data toy --param gate_params.over_champion=0")
    assert found.mend == again, "the registry holds the same files, and the shop stays the same"
    assert found.found.endswith("train again with the command that `reco doctor` gives")


@pytest.mark.parametrize(
    ("data", "days", "status", "says"),
    [
        ("/data/shop", 29, "ok", "29 days ago"),
        ("/data/shop", 31, "warn", "31 days ago; more than 30 are old"),
        ("toy", 3_000, "ok", "3,000 days ago: toy is demo data"),
    ],
)
def test_the_age_of_the_champion_s_data_is_told(
    tmp_path: Path, data: str, days: int, status: str, says: str
) -> None:
    end = (datetime.now(UTC) - timedelta(days=days, hours=1)).isoformat()
    write_note(tmp_path, until=end)
    promote_run(tmp_path, data)
    found = look(tmp_path)["model age"]
    assert (found.status, bool(found.mend)) == (status, status == "warn")
    assert found.found.startswith("promoted 2024-01-02, its data end ")
    assert says in found.found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("promoted", "cause", "mend"),
    [
        ("3", "a promotion was stopped", "promote 3"),
        ("2", "the alias was moved by hand, past the gate", "rollback"),
        (None, "the alias was moved by hand, past the gate", "rollback"),
        ("", "line 1 of the history cannot be read", "history"),
    ],
)
def test_a_pointer_that_differs_from_the_alias_is_found(
    home: Path, promoted: str | None, cause: str, mend: str
) -> None:
    write_champion(home, replace(read_champion(home), version="2"))
    if promoted is not None:
        line = json.dumps(asdict(Promotion(1, "promote", promoted, "b", "", ""))) if promoted else "torn"
        with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
            database.execute(
                "INSERT INTO registered_model_tags VALUES ('promotion.000001', ?, 'reco')", [line]
            )
    found = look(home)["registry"]
    assert (found.status, found.mend) == ("fail", command(home, mend))
    assert found.found.startswith("its alias champion names version 3, champion.json version 2")
    assert cause in found.found


@pytest.mark.slow
def test_an_online_store_of_another_run_is_found(home: Path) -> None:
    write_note(home, cut="2024-05-01T00:00:00Z", until="2024-05-01T00:00:00Z")
    found = look(home)["online store"]
    assert (found.status, found.found) == ("warn", "3 users as of 2024-05-01T00:00:00Z")
    assert "the champion was trained until" in found.mend


@pytest.mark.parametrize(
    ("kept", "mend"),
    [(True, "run --resume {run_id} --only publish-features"), (False, "run --data /my/shop")],
)
def test_a_lost_online_store_is_no_new_one(tmp_path: Path, kept: bool, mend: str) -> None:
    write_note(tmp_path, cut="2024-01-01T00:00:00Z", until="2024-01-01T00:00:00Z")
    run = promote_run(tmp_path, "/my/shop")
    if kept:
        (run.artifacts("materialize-features") / "features").mkdir(parents=True)
    found = look(tmp_path)["online store"]
    assert (found.status, found.mend) == ("fail", command(tmp_path, mend.format(run_id=run.run_id)))
    assert found.found.startswith(f"{tmp_path / 'online_store.db'} is gone")
    (tmp_path / "online_store.json").unlink()
    for name in ("online store", "registry"):  # `reco run` alone would train another shop
        assert look(tmp_path)[name].mend == command(tmp_path, "run --data /my/shop")


@pytest.mark.slow
@pytest.mark.parametrize("content", ["", "[]"])
def test_a_damaged_note_of_the_online_store_is_named(home: Path, content: str) -> None:
    (home / "online_store.json").write_text(content)
    found = look(home)
    assert found["online store"].status == "warn"
    assert found["online store"].found.startswith(f"answers, but {home / 'online_store.json'} does not say")
    assert found["online store"].mend == command(home, "run --data toy")
    assert found["model age"].status == "ok", "it is as old as its cut"


@pytest.mark.parametrize(
    ("changed", "status", "says"),
    [
        ({}, "ok", "1,234 events, 5 dead letters, waiting: 6 messages"),
        ({"lag": None}, "ok", ", waiting: an unknown number of messages"),
        ({"updated_at": 1_700_000_000}, "warn", "silent for "),
        ({"pid": 2**22 + 1}, "warn", "ended 0 s ago, after 1,234 events"),
        ({"store_failures": 7}, "warn", "the online store failed 7 times"),
        ({"broker_silent_s": 60.0}, "warn", "the broker has been silent for 60 s"),
    ],
)
def test_the_state_of_the_stream_is_reported(
    tmp_path: Path, changed: dict[str, object], status: str, says: str
) -> None:
    assert "stream" not in look(tmp_path)
    state = {"updated_at": time.time(), "events": 1_234, "dead_letters": 5, "lag": 6}
    state |= {"store_failures": 0, "broker_silent_s": 0.4, "pid": os.getpid()}
    (tmp_path / "stream.json").write_text(json.dumps(state | changed))
    found = look(tmp_path)["stream"]
    assert found.status == status
    assert says in found.found
    assert bool(found.mend) == (status == "warn")


def test_the_facts_in_force_are_reported(tmp_path: Path) -> None:
    assert "facts" not in look(tmp_path)
    store = open_fact_store(Settings(home=tmp_path).fact_store_url)
    line = {"fact_id": "f", "fact": "stock", "item_id": "tea", "value": 0, "at": "2024-06-12T10:00:00Z"}
    store.write([parse_fact(json.dumps(line).encode())])
    store.close()
    assert look(tmp_path)["facts"].found.startswith("1 fact: prices")
    (tmp_path / "facts.db").write_bytes(b"no database, but as long as one" * 100)
    assert look(tmp_path)["facts"].status == "fail"


def test_an_invalid_database_is_reported(tmp_path: Path) -> None:
    for file in ("mlflow.db", "online_store.db"):
        (tmp_path / file).write_text("hello" * 100)
    found = look(tmp_path)
    assert found["registry"].status == found["online store"].status == "fail"


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        ("ValueError: no rows\nmore", "run --resume {run_id}"),
        (
            "GateFailed: ndcg_at_10 is 0.1, needed 0.2",
            "promote --dry-run --model-name shop",
        ),
    ],
)
def test_a_failed_run_comes_with_the_command_that_helps(tmp_path: Path, error: str, mend: str) -> None:
    run = new_run(tmp_path, "training", {"model_name": "shop"}, ["ingest-events", "fit-statistics"])
    run.step("ingest-events").status, run.step("fit-statistics").status = "done", "failed"
    run.step("fit-statistics").error = error
    run.save()
    found = look(tmp_path)["last run"]
    assert found.found.endswith(f"failed at fit-statistics: {error.splitlines()[0]}")
    assert found.mend == command(tmp_path, mend.format(run_id=run.run_id))


def test_a_cure_for_a_home_with_spaces_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.inspect.doctor.LEAST_DISK_BYTES", 1 << 80)
    home = tmp_path / "my reco data x"
    home.mkdir()
    for name in ("mlflow.db", "rules.yaml"):
        (home / name).write_text("no such file: [")
    found = look(home)
    assert found["registry"].mend.startswith(f"make '{home}/mlflow.db' readable")
    assert found["rules"].mend == command(home, f"rules check '{home}/rules.yaml'")
    assert f"remove old runs from '{home}/runs'," in found["disk"].mend
    monkeypatch.setattr("pipelines.inspect.doctor._listening", lambda home: ["http://127.0.0.1:1"])
    assert look(home)["endpoint"].mend.startswith(f"look into '{home}/up/endpoint.log', or ")


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_port_in_use_is_reported(tmp_path: Path, family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as taken:
        try:
            taken.bind((host, 0))
        except OSError:
            if family == socket.AF_INET:
                raise
            pytest.skip("no IPv6 on this machine")
        taken.listen()
        port = taken.getsockname()[1]
        found = look(tmp_path, http_port=port, host=host)[f"port {port}"]
    assert found.status == "warn"
    assert variable("http_port") in found.mend


def test_an_endpoint_at_an_ipv6_address_has_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "-m", "serving.server", "--home", str(tmp_path)]
    process = SimpleNamespace(pid=7, info={"cmdline": words})
    monkeypatch.setattr(psutil, "process_iter", lambda names: [process])
    listening = [
        SimpleNamespace(pid=7, status=psutil.CONN_LISTEN, laddr=SimpleNamespace(ip=ip, port=1))
        for ip in ("::1", "127.0.0.1")
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: listening)
    found = look(tmp_path)["endpoint"].found
    assert found.startswith("http://127.0.0.1:1/healthz: ")
    assert ", http://[::1]:1/healthz: " in found
    away = look(tmp_path, store_url="redis://[::1]:1/0")["online store"]
    assert (away.status, "[::1]:1" in away.found) == ("fail", True)


def test_a_misspelt_setting_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECO_DEADLINE", "50")
    assert "RECO_DEADLINE" in look(tmp_path)["settings"].found


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [("ban: [", "fail", "is not taken"), ("ban:\n  - {name: a, items: [x]}\n", "ok", "1 rule")],
)
def test_the_rules_are_reported_as_read(tmp_path: Path, text: str, status: str, says: str) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    found = look(tmp_path)["rules"]
    assert (found.status, bool(found.mend)) == (status, status != "ok")
    assert says in found.found


ENDPOINT = """
import http.server, socket, threading
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path in ("/healthz", "/metrics") else 404)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b"# TYPE reco_rules_broken gauge\\nreco_rules_broken 1.0\\n")
def grpc(listener):
    while True:
        listener.accept()[0].sendall(b"\\0\\0\\x1e\\x04 no HTTP/1.1\\r\\n")
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=grpc, args=[listener], daemon=True).start()
server = http.server.HTTPServer(("127.0.0.1", 0), Health)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.mark.slow
def test_the_endpoint_of_a_home_is_found_at_any_port(tmp_path: Path) -> None:
    assert "endpoint" not in look(tmp_path)
    command = [sys.executable, "-c", ENDPOINT, "serving.server", "--home", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as endpoint:
        assert endpoint.stdout is not None
        port = int(endpoint.stdout.readline())
        found = look(tmp_path)
        other = look(tmp_path / "other")
        endpoint.kill()
    assert (found["endpoint"].status, found["endpoint"].found) == ("ok", f"http://127.0.0.1:{port}")
    assert (found["answers"].status, found["answers"].runbook) == ("warn", "RulesBroken")
    assert not [name for name in found if name.startswith("port ")]
    assert "endpoint" not in other


def test_a_reco_up_without_its_endpoint_is_reported(tmp_path: Path) -> None:
    running = Running("memory:", "127.0.0.1:1", False)
    with locked(tmp_path / "up.lock", "running `reco up`"), announced(tmp_path, running):
        found = look(tmp_path)["endpoint"]
    assert (found.status, found.runbook) == ("fail", "CheckoutGone")


def test_a_home_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        found = look(home)["home"]
        assert found.status == "fail"
        assert found.found == f"{tmp_path / 'file'} is no folder that can be written"
