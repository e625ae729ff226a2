"""The process starts with a valid bundle or reports the reason, and stops without losing a request."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import httpx
import numpy as np
import pytest

from feature_repo.schema import DENSE_NAMES
from serving.errors import BundleInvalid
from serving.prediction_log import feature_names, feature_rows, read_log
from serving.server import end_with, main, serve
from serving.settings import SettingInvalid, Settings
from serving.wiring import Wiring
from tests.chaos.listening import listening
from tests.chaos.procs import eventually
from tests.serving.conftest import V1, Running, ask, connect, refused_start

AT = "2017-12-05T18:30:00Z"


def refuses(http: str) -> bool:
    """Whether nothing listens there."""
    try:
        connect(http).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.slow
def test_sigterm_finishes_a_request_in_flight_and_flushes_the_log(
    start_toy: Callable[..., Running], tmp_path: Path
) -> None:
    running = start_toy(log=True, body_timeout_ms=60_000.0, drain_s=0.0, grace_s=300.0)
    request = {"user_id": "u1", "basket": ["1000005"], "request_id": "in-flight"}
    body = json.dumps({"instances": [request]}).encode()
    with httpx.Client(base_url=running.http) as client, connect(running.http) as slow:
        head = f"POST {V1} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        slow.sendall(head + body[:10])  # which is read before the two that follow
        ask(client, {"user_id": "u1", "basket": ["1000005"], "request_id": "before", "at": AT})
        client.post(V1, content=b"{")
        running.process.send_signal(signal.SIGTERM)
        eventually(lambda: refuses(running.http))
        slow.sendall(body[10:])
        assert slow.recv(10_000).startswith(b"HTTP/1.1 200")
    assert running.process.wait(60) == 0

    files = [*(tmp_path / "prediction_log").iterdir()]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}, "other users read no shopper's row"
    log = read_log(tmp_path / "prediction_log")
    assert log["request_id"].to_pylist() == ["before", "in-flight"]
    assert log["user_id"].to_pylist() == ["u1", "u1"]
    assert feature_names(log) == list(DENSE_NAMES)
    assert np.isfinite(feature_rows(log)).all()
    running.reader.join(10)
    said = [json.loads(line) for line in running.stderr]  # no line for a client's mistake
    assert [line["event"] for line in said] == ["ready", "answered", "answered"]
    assert [line["request_id"] for line in said[1:]] == ["before", "in-flight"]
    assert {line["bundle_id"] for line in said} == {running.ready["bundle_id"]}
    assert '"u1"' not in "".join(running.stderr)


@pytest.mark.slow
def test_sigterm_finishes_a_grpc_call_and_drains(start_toy: Callable[..., Running]) -> None:
    from serving.proto.recommendations_pb2 import RecommendRequest
    from serving.proto.recommendations_pb2_grpc import RecommendationsStub

    asked = threading.Event()

    def hang(ranker: socket.socket) -> None:
        asked.set()
        while ranker.recv(4_096):
            pass

    with listening(hang) as (host, port):
        running = start_toy(drain_s=0.0, deadline_ms=10_000.0, ranker_address=f"{host}:{port}")
        with grpc.insecure_channel(running.grpc) as channel:
            request = RecommendRequest(basket=["1000005"], request_id="in-flight", k=3)
            call = RecommendationsStub(channel).Recommend.future(request, timeout=60)
            assert asked.wait(60)
            running.process.send_signal(signal.SIGTERM)
            eventually(lambda: refuses(f"http://{running.grpc}"))
            assert running.process.poll() is None
            assert not call.done()
            answer = call.result()
        assert (answer.request_id, len(answer.items)) == ("in-flight", 3)
        assert running.process.wait(60) == 0


@pytest.mark.slow
def test_readiness_ends_before_the_socket_closes(start_toy: Callable[..., Running], tmp_path: Path) -> None:
    running = start_toy(drain_s=4.0, grace_s=300.0, request_log=False)
    with httpx.Client(base_url=running.http) as client:
        assert client.get("/v2/health/ready").status_code == 200
        running.process.send_signal(signal.SIGTERM)
        eventually(lambda: client.get("/v2/health/ready").status_code == 503)
        assert client.get("/healthz").status_code == 503
        answer = client.post(V1, json={"instances": [{"basket": []}]})
        assert answer.json()["predictions"][0]["items"]
        assert answer.headers["connection"] == "close"  # the next request goes elsewhere
        assert client.post(V1, content=b"{").headers["connection"] == "close"
    assert running.process.wait(60) == 0
    assert not (tmp_path / "prediction_log").exists()


@pytest.mark.slow
def test_without_its_store_the_endpoint_serves_labelled_degraded_answers(
    toy_store: str, start_toy: Callable[..., Running], tmp_path: Path
) -> None:
    running = start_toy(store_url="")
    assert running.ready["online_store"] == "unavailable"
    assert len([line for line in running.stderr if "answers will lack the users' history" in line]) == 1
    with httpx.Client(base_url=running.http) as client:
        answers = [ask(client, {"user_id": "u1", "basket": ["1000005"], "at": AT}) for _ in range(20)]
        assert {answer["degraded_reason"] for answer in answers} == {"features_unavailable"}
        assert all(answer["degraded"] and answer["items"] for answer in answers)
        warnings = [line for line in running.stderr if '"event": "log"' in line]
        assert len(warnings) < 6  # one a second, not one per request
        assert 'degraded_reason="features_unavailable"' in client.get("/metrics").text
        part = tmp_path / "online_store.part"
        part.write_bytes(Path(toy_store.removeprefix("sqlite:///")).read_bytes())
        part.rename(tmp_path / "online_store.db")

        def healed() -> bool:  # as soon as the breaker's probe finds the store
            answers.append(ask(client, {"user_id": "u1", "basket": ["1000005"], "at": AT}))
            return not answers[-1]["degraded"]

        eventually(healed, 60)
        assert "history" in {item["source"] for item in answers[-1]["items"]}


@pytest.mark.slow
def test_a_wrong_setting_is_reported(toy_bundle: Path, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, http_port=0, grpc_port=0)
    misspelt = {"RECO_AUDIT": "1", "RECO_DEADLIN_MS": "5"}
    code, said = refused_start(toy_bundle, settings, RECO_DEADLINE_MS="soon", **misspelt)
    assert code == 2
    assert "RECO_DEADLINE_MS is 'soon'; expected a number" in said
    assert "no setting is named RECO_AUDIT or RECO_DEADLIN_MS, so" in said
    for host in ("no.such.host.invalid", "192.0.2.1"):  # the second is reserved for documentation, RFC 5737
        code, said = refused_start(toy_bundle, replace(settings, host=host))
        assert code == 2
        assert "RECO_HOST" in said


def test_the_cure_in_an_error_names_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `reco serve` prints it, which has become the endpoint by then."""
    program, home = tmp_path / "bin" / "reco", tmp_path / "my shop"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setattr("sys.executable", str(program.with_name("python")))
    monkeypatch.setattr("serving.server.log_to", lambda stream: None)
    monkeypatch.setattr("os.umask", lambda mode: mode)
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    monkeypatch.setenv("PATH", str(tmp_path))  # no environment is active
    assert main(["--home", str(home)]) == 2
    assert f"train one with `{program} --home '{home}' run`" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(program.parent))
    program.chmod(0o700)
    assert main(["--home", str(home)]) == 2
    assert f"train one with `reco --home '{home}' run`" in capfd.readouterr().err
    monkeypatch.setenv("RECO_HOME", str(home))  # as `reco serve` leaves it beside --bundle
    monkeypatch.setattr("serving.server.serve", Mock(side_effect=BundleInvalid("train with `reco run`")))
    assert main(["--bundle", str(tmp_path)]) == 1
    assert f"train with `reco --home '{home}' run`" in capfd.readouterr().err


def test_the_home_that_is_followed_has_the_rules_facts_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.server.serve", served := Mock())
    monkeypatch.setattr("serving.server.log_to", lambda stream: None)
    monkeypatch.setattr("os.umask", lambda mode: mode)
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    assert main(["--bundle", str(tmp_path), "--home", str(tmp_path / "shop")]) == 0
    _, settings, home, _ = served.call_args.args
    assert settings.home == home == tmp_path / "shop"
    main(["--bundle", str(tmp_path)])
    _, settings, home, _ = served.call_args.args
    assert (settings.home, home) == (Path(os.environ["RECO_HOME"]), None)


def test_ctrl_c_while_it_starts_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("serving.server.serve", interrupt)
    monkeypatch.setattr("serving.server.log_to", lambda stream: None)
    monkeypatch.setattr("os.umask", lambda mode: mode)
    monkeypatch.setenv("ARROW_DEFAULT_MEMORY_POOL", "system")
    assert main(["--bundle", str(tmp_path)]) == 130
    assert capfd.readouterr().err == ""


def test_after_its_imports_garbage_is_collected(tmp_path: Path) -> None:
    def wire(settings: Settings) -> Wiring:
        collected.append(gc.isenabled())
        raise BundleInvalid("enough")

    collected: list[bool] = []
    with pytest.raises(BundleInvalid):
        serve(tmp_path, Settings(home=tmp_path, http_port=0, grpc_port=0), wire=wire)
    assert collected == [True]


@pytest.mark.slow
def test_the_process_of_the_endpoint_lets_arrow_give_memory_back(tmp_path: Path) -> None:
    code = """
import sys
from serving.server import main
assert "pyarrow" not in sys.modules
assert main(["--home", sys.argv[1]]) == 2
import pyarrow
print(pyarrow.default_memory_pool().backend_name)
"""
    environment = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert out.stdout == "system\n", out.stderr


@pytest.mark.parametrize("given", [{"grpc_port": 9_123}, {"metrics_address": "0.0.0.0:9123"}])
def test_two_ports_that_are_one_are_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    settings = Settings(home=tmp_path, http_port=9_123, grpc_port=0)
    with pytest.raises(SettingInvalid, match="RECO_METRICS_ADDRESS two are port 9123; expected different"):
        serve(tmp_path, replace(settings, **given))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ranker_ca": "absent.pem"}, r"absent\.pem, which cannot be used \(No such file or directory\)"),
        ({"ranker_ca": "empty.pem"}, r"RECO_RANKER_CA is .*empty\.pem, which cannot be used \(it is empty\)"),
        ({"ranker_certificate": "some.pem"}, "one is set; expected both or neither"),
        ({"ranker_key": "some.pem"}, "of RECO_RANKER_CERTIFICATE and RECO_RANKER_KEY one is set"),
    ],
)
def test_files_that_no_call_of_a_ranker_can_use_are_refused(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    (tmp_path / "empty.pem").touch()
    (tmp_path / "some.pem").write_text("a certificate")
    settings = Settings(home=tmp_path, ranker_address="https://127.0.0.1:1")
    files = {name: tmp_path / file for name, file in files.items()}
    with pytest.raises(SettingInvalid, match=message):
        serve(tmp_path, replace(settings, **files))


def test_an_endpoint_that_others_reach_and_any_may_ask_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(settings: Settings) -> Any:
        raise SettingInvalid("enough")

    tokens = "0123456789abcdef"
    for host, known in (("127.0.0.1", ""), ("0.0.0.0", tokens), ("0.0.0.0", "")):
        assert "may ask about any shopper" not in caplog.text
        settings = Settings(home=tmp_path, host=host, http_port=0, grpc_port=0, caller_tokens=known)
        with pytest.raises(SettingInvalid, match="enough"):
            serve(tmp_path, settings, wire=stop)
    assert "any caller of 0.0.0.0 may ask about any shopper: set RECO_CALLER_TOKENS" in caplog.text


@pytest.mark.parametrize("said", [b"", b"a line that nobody reads"])
def test_a_child_ends_with_its_parent_despite_unread_messages(said: bytes) -> None:
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        ours, parent = socket.socketpair()
        with ours:
            ours.sendall(said)
            parent.close()
            end_with(ours)
        assert told.wait(5)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_an_item_banned_under_load_is_gone_within_two_seconds(endpoint: Any, client: httpx.Client) -> None:
    """Scenario: a change of the catalogue takes 30 % of the items away."""
    file, gone = endpoint.settings.rules_path, {str(1_000_000 + code) for code in range(0, 240, 3)}

    def shown() -> set[str]:
        answer = ask(client, {"user_id": "u2", "basket": [], "at": AT, "k": 100})
        return {item["item_id"] for item in answer["items"]}

    assert gone & shown()
    file.write_text(json.dumps({"ban": [{"name": "recall", "items": sorted(gone)}]}))
    written = time.monotonic()
    try:
        while time.monotonic() < written + 2:
            shown()
        late = [gone & shown() for _ in range(20)]
    finally:
        file.unlink()
        eventually(lambda: gone & shown())
    assert not any(late)
