"""The pointer and the swaps that follow it; the endpoint that swaps under load."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from serving.errors import BundleInvalid
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.champion import Champion, read_champion, write_champion
from serving.release.manifest import read_manifest
from serving.release.updates import RETRY_S, Updates
from serving.settings import Settings
from serving.stages.retrieval import Quotas
from tests.chaos.callers import calling
from tests.chaos.procs import eventually, workers
from tests.serving.conftest import metric


def point(home: Path, bundle_id: str, path: str | None = None) -> None:
    """Point a home at a bundle, as a promotion does."""
    place = f"bundles/{bundle_id}" if path is None else path
    write_champion(home, Champion(bundle_id, "1", "reco", place, "2024-01-01", "2024-01-02"))


class Endpoint:
    """Accepts every bundle except broken ones, and records the accepted ones."""

    def __init__(self, home: Path) -> None:
        self.given: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.followed: list[str] = []
        self.trouble: Exception | None = None
        self.now = 0.0
        self.updates = Updates(home, "b1", self.take, lambda: self.now)

    def take(self, pointer: Champion) -> Callable[[], None]:
        self.given.append(pointer.bundle_id)
        if pointer.bundle_id in self.broken:
            raise self.broken[pointer.bundle_id]

        def follow_up() -> None:
            assert self.updates.serving == pointer.bundle_id, "it answers already"
            self.followed.append(pointer.bundle_id)
            if self.trouble is not None:
                raise self.trouble

        return follow_up


def test_a_promoted_bundle_is_loaded_once(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    for promoted, given in (("b1", []), ("b2", ["b2"]), ("b2", ["b2"]), ("b1", ["b2", "b1"])):
        point(tmp_path, promoted)
        endpoint.updates.look()
        assert endpoint.given == endpoint.followed == given
        assert endpoint.updates.serving == promoted
        assert metric("reco_champion_served") == 1
        assert metric("reco_champion_read_timestamp_seconds") > time.time() - 600


@pytest.mark.parametrize("error", [BundleInvalid("ranker.onnx is broken"), MemoryError()])
def test_a_broken_bundle_keeps_the_old_one_and_is_retried_later(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = Endpoint(tmp_path)
    endpoint.broken["b2"] = error
    point(tmp_path, "b2")
    for _ in range(3):
        endpoint.updates.look()
    assert (endpoint.given, endpoint.updates.serving) == (["b2"], "b1")
    assert len(caplog.records) == 1
    assert "b2 is refused, b1 goes on" in caplog.text
    assert metric("reco_champion_served") == 0
    endpoint.now += RETRY_S
    del endpoint.broken["b2"]
    endpoint.updates.look()
    assert (endpoint.given, endpoint.updates.serving) == (["b2", "b2"], "b2")


def test_an_error_after_the_swap_does_not_refuse_the_bundle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint, before = Endpoint(tmp_path), metric("reco_bundle_updates_total", outcome="refused")
    endpoint.trouble = BrokenPipeError("the parent is gone")
    point(tmp_path, "b2")
    for _ in range(3):
        endpoint.updates.look()
    assert (endpoint.given, endpoint.followed, endpoint.updates.serving) == (["b2"], ["b2"], "b2")
    assert metric("reco_bundle_updates_total", outcome="refused") == before
    assert "b2 answers, but not all that belongs to a swap was done" in caplog.text


def test_after_a_refusal_another_promotion_is_tried_at_once(tmp_path: Path) -> None:
    endpoint = Endpoint(tmp_path)
    endpoint.broken["b2"] = BundleInvalid("broken")
    for promoted in ("b2", "b1", "b2", "b3"):
        point(tmp_path, promoted)
        endpoint.updates.look()
    assert (endpoint.given, endpoint.updates.serving) == (["b2", "b2", "b3"], "b3")


def test_an_unreadable_pointer_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Endpoint(tmp_path)
    (tmp_path / "champion.json").write_text("{")
    for _ in range(3):
        endpoint.updates.look()
    assert (endpoint.given, endpoint.updates.serving, len(caplog.records)) == ([], "b1", 1)
    point(tmp_path, "b2")
    endpoint.updates.look()
    assert endpoint.updates.serving == "b2"


def test_polling_ends_with_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.release.updates.POLL_S", 0.001)
    endpoint = Endpoint(tmp_path)
    point(tmp_path, "b2")
    endpoint.updates.close()  # the thread may not have started
    endpoint = Endpoint(tmp_path)
    endpoint.updates.start()
    eventually(lambda: endpoint.updates.serving == "b2")
    endpoint.updates.close()
    point(tmp_path, "b3")
    assert endpoint.given == ["b2"]


# ------------------------------------------------------------------------------------ a real endpoint


@pytest.fixture
def home(tmp_path: Path, toy_bundle: Path) -> Path:
    """A home whose champion is the toy bundle."""
    bundle_id = read_manifest(toy_bundle)["bundle_id"]
    shutil.copytree(toy_bundle, tmp_path / "bundles" / bundle_id)
    point(tmp_path, bundle_id)
    return tmp_path


def add_bundle(home: Path, toy_bundle: Path, note: str) -> str:
    """Put another bundle under home, as a promotion does, and return its id; the pointer stays."""
    part = home / "bundles" / f".{note}"
    shutil.copytree(toy_bundle, part)
    manifest = json.loads((part / "manifest.json").read_bytes())
    given = dict(manifest["settings"])
    settings = RankingSettings(Quotas(**given.pop("quotas")), **given)
    bundle_id = seal_bundle(part, cut=manifest["cut"], settings=settings, made_from={"note": note})
    part.rename(home / "bundles" / bundle_id)
    return bundle_id


def mapped(pid: int, bundle_id: str) -> bool:
    """Whether a process still has files of a bundle in its memory."""
    return bundle_id in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
def test_a_promoted_bundle_takes_over_without_a_failed_request(
    home: Path, toy_bundle: Path, toy_store: str, start_endpoint: Callable[..., Any]
) -> None:
    old, new = read_champion(home).bundle_id, add_bundle(home, toy_bundle, "new")
    settings = Settings(home=home, store_url=toy_store, deadline_ms=60_000.0, log_segment_s=0.5)
    running = start_endpoint(None, settings)
    assert running.ready["bundle_id"] == old
    with calling(running.http) as seen:
        eventually(lambda: len(seen.answers) > 20)
        point(home, new)
        eventually(lambda: len(seen.callers(new)) == 4, 60)
        since = len(seen.answers)  # no caller waits for a request from before the swap any more
        eventually(lambda: len(seen.answers) > since + 20)
        assert seen.bundles(since) == {new}
        point(home, old)  # a rollback
        eventually(lambda: old in seen.bundles(since), 60)
    assert not seen.failures
    assert seen.bundles() == {old, new}
    turned = next(n for n, answer in enumerate(seen.answers) if answer["bundle_id"] == new)
    assert {answer["bundle_id"] for answer in seen.answers[:turned]} == {old}
    assert not any(answer["degraded"] for answer in seen.answers)
    eventually(lambda: not mapped(running.process.pid, new))  # the old bundle is freed
    swaps = [json.loads(line) for line in running.stderr if '"event": "bundle"' in line]
    assert [(swap["was"], swap["bundle_id"]) for swap in swaps] == [(old, new), (new, old)]
    metrics = httpx.get(f"{running.http}/metrics").text
    assert 'reco_bundle_updates_total{outcome="done"} 2.0' in metrics
    assert f'reco_bundle_info{{bundle_id="{new}"}} 0.0' in metrics
    assert f'reco_bundle_info{{bundle_id="{old}"}} 1.0' in metrics
    channel = grpc.insecure_channel(running.grpc)
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=120)
    assert next(watch) == b"\x08\x01", "serving"
    running.process.send_signal(signal.SIGTERM)
    assert list(watch) == [b"\x08\x02"], "the drain changed the status, and ended the watch"
    channel.close()
    assert running.process.wait(30) == 0


@pytest.mark.slow
def test_two_processes_refuse_a_corrupt_bundle_and_restart_with_the_good_one(
    home: Path, toy_bundle: Path, toy_store: str, start_endpoint: Callable[..., Any]
) -> None:
    old = read_champion(home).bundle_id
    bad, good = (add_bundle(home, toy_bundle, note) for note in ("bad", "good"))
    file = home / "bundles" / bad / "ranker.onnx"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    settings = Settings(home=home, store_url=toy_store, deadline_ms=60_000.0, log=False, processes=2)
    running = start_endpoint(None, settings)

    def refusals() -> float:
        text = httpx.get(f"{running.http}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if 'updates_total{outcome="refused"}' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    with calling(running.http) as seen:
        eventually(lambda: len(seen.answers) > 20)
        point(home, bad)
        eventually(lambda: refusals() >= 2, 60)
        assert httpx.get(f"{running.http}/healthz", timeout=30).status_code == 200
        assert seen.bundles() == {old}
        assert not seen.failures
    # A process that starts now does not load the champion.
    first, second = workers(running.process.pid)
    with calling(running.http) as seen:
        eventually(lambda: len(seen.answers) > 20, 60)
        os.kill(first, signal.SIGKILL)
        since = len(seen.answers)
        eventually(lambda: len(seen.answers) > since + 40, 60)
        eventually(lambda: len(workers(running.process.pid) - {first}) == 2, 60)
    assert len(seen.failures) <= 4, "the requests in flight there, one of each caller"
    assert any("SIGKILL" in line for line in running.stderr)
    os.kill(second, signal.SIGKILL)
    with calling(running.http, 1) as seen:
        eventually(lambda: len(seen.answers) > 0, 60)
        assert seen.bundles() == {old}
        eventually(lambda: refusals() >= 3, 60)  # counts of dead processes are still there
        point(home, good)
        eventually(lambda: good in seen.bundles(), 90)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0
