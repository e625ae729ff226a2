"""The parts of an endpoint process: opened from settings, replaced one by one, closed in the end."""

import asyncio
import shutil
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from components.release.signing import sign
from serving.answer.recommender import Recommender, open_bundle
from serving.checkout.checkout import Checkout, rank_here
from serving.errors import BundleInvalid, FactsUnavailable, RulesUnread
from serving.prediction_log import PredictionLog
from serving.release.champion import Champion
from serving.release.signatures import SignatureInvalid
from serving.schemas import Request
from serving.settings import Settings
from serving.shop.watched_file import WatchedFile
from serving.stores.online_features import MemoryStore
from serving.wiring import Swap, Wiring, run, wire
from tests.serving.conftest import metric
from tests.serving.signed import write_keys


class StubDoor:
    """Is ready at once, answers no request, and swaps on the caller's thread."""

    def __init__(self, settings: Settings, http_socket: socket.socket) -> None:
        self.checkouts: list[Checkout] = []

    def start(self, checkout: Checkout, on_ready: Callable[[str, str], None], at_end: object) -> None:
        self.checkouts.append(checkout)
        asyncio.run(checkout.recommender.connect())
        on_ready("http://here", "there")

    def on_loop(self, act: Callable[[], None]) -> None:
        act()


def serve(
    wiring: Wiring, bundle: Path, tell: Callable[[dict[str, Any]], None] = lambda event: None
) -> tuple[Recommender, Checkout, Swap]:
    """Answer from a bundle; the swap finds other bundles beside it."""
    recommender = wiring.load(bundle, rest=lambda took_s: None)
    checkout = wiring.checkout(recommender)
    with socket.socket() as http_socket:
        door = StubDoor(wiring.settings, http_socket)
    return recommender, checkout, Swap(wiring, checkout, door, bundle.parent, tell)


def pointer(recommender: Recommender, bundle: str) -> Champion:
    return Champion(recommender.bundle.bundle_id, "1", "m", bundle, "", "")


def test_plain_reasons_tell_no_counts(toy_bundle: Path, toy_store: str, tmp_path: Path) -> None:
    said: dict[str, set[str]] = {}
    reasons: Literal["counts", "plain"]
    for reasons in ("counts", "plain"):
        wiring = wire(Settings(home=tmp_path, log=False, store_url=toy_store, reasons=reasons))
        with wiring.cleanup:
            recommender = wiring.load(toy_bundle, rest=lambda took_s: None)
            answer = recommender.recommend(Request((), 1_512_498_600.0, "u2", None, 10, "r"))
            recommender.facts.close()
        said[reasons] = {item.reason for item in answer.items if item.source == "history"}
    assert said["plain"] == {"bought before"}
    assert said["counts"]
    assert all(" before, last " in reason for reason in said["counts"])


def test_a_remote_ranker_takes_the_place_of_the_one_in_process(tmp_path: Path) -> None:
    wiring = wire(Settings(home=tmp_path, log=False, ranker_address="127.0.0.1:1"))
    with wiring.cleanup:
        assert wiring.rank != rank_here
        assert wiring.at_end is not None
    wiring = wire(Settings(home=tmp_path, log=False))
    with wiring.cleanup:
        assert wiring.rank is rank_here, "no queue between a request and its ranker"


def test_the_log_is_closed_before_a_collector_of_spans_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(PredictionLog, "close", lambda log: closed.append("log"))
    monkeypatch.setattr("serving.observe.tracing.Tracing.close", lambda tracing: closed.append("spans"))
    with wire(Settings(home=tmp_path, trace_url="http://127.0.0.1:1/v1/traces")).cleanup:
        pass
    assert closed == ["log", "spans"]


def test_run_uses_and_closes_the_given_parts(toy_bundle: Path, tmp_path: Path) -> None:
    opened: list[Path] = []
    doors: list[StubDoor] = []
    events: list[dict[str, Any]] = []
    closed: list[str] = []

    def open_counted(path: Path) -> Any:
        opened.append(path)
        return open_bundle(path)

    def door(settings: Settings, http_socket: socket.socket) -> StubDoor:
        doors.append(StubDoor(settings, http_socket))
        return doors[0]

    store = MemoryStore()
    wiring = Wiring(Settings(home=tmp_path), store, open_bundle=open_counted, door=door, observers=())
    wiring.cleanup.callback(closed.append, "store")
    began = time.time()
    with socket.socket() as http_socket:
        run(wiring, toy_bundle, None, http_socket, events.append)
    assert metric("reco_facts_read_timestamp_seconds") >= began, (
        "a store that never answers grows old from the start"
    )
    assert opened == [toy_bundle]
    assert closed == ["store"]
    [event] = events
    assert (event["event"], event["http"], event["online_store"]) == ("ready", "http://here", "ready")
    assert event["prediction_log"] == "off"
    [checkout] = doors[0].checkouts
    assert checkout.recommender.bundle.path == toy_bundle


def test_an_endpoint_does_not_start_with_a_rules_file_that_it_cannot_read(
    toy_bundle: Path, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path)
    settings.rules_path.write_text("ban: [")
    with (
        socket.socket() as http_socket,
        pytest.raises(RulesUnread, match=r"rules\.yaml: line \d.*reco rules check"),
    ):
        run(Wiring(settings, MemoryStore(), observers=()), toy_bundle, None, http_socket, lambda event: None)


def test_an_endpoint_does_not_start_while_its_rules_are_being_written(
    toy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, look = Settings(home=tmp_path), WatchedFile._look

    def write_first(watched: WatchedFile[Any]) -> Any:
        with settings.rules_path.open("a") as file:
            file.write("# one more line\n")
        return look(watched)

    monkeypatch.setattr(WatchedFile, "_look", write_first)
    monkeypatch.setattr("serving.shop.facts.POLL_S", 0.01)
    wiring = Wiring(settings, MemoryStore(), observers=(), door=StubDoor)
    with socket.socket() as http_socket, pytest.raises(RulesUnread, match="is being written"):
        run(wiring, toy_bundle, None, http_socket, lambda event: None)


def test_a_bundle_other_than_the_named_one_is_refused(toy_bundle: Path, tmp_path: Path) -> None:
    wiring = Wiring(Settings(home=tmp_path), MemoryStore(), observers=())
    recommender, checkout, swap = serve(wiring, toy_bundle)
    with pytest.raises(BundleInvalid, match="expected another: promote it again"):
        swap(Champion("another", "1", "m", toy_bundle.name, "", ""))
    assert checkout.recommender is recommender
    recommender.facts.close()


def test_an_endpoint_with_trusted_keys_takes_signed_bundles_alone(toy_bundle: Path, tmp_path: Path) -> None:
    key, public = write_keys(tmp_path, "ours")
    older, newer = (shutil.copytree(toy_bundle, tmp_path / name) for name in ("older", "newer"))
    wiring = Wiring(Settings(home=tmp_path, trusted_keys=public.parent), MemoryStore(), observers=())
    with pytest.raises(SignatureInvalid, match=r"bundle\.sig is missing"):
        wiring.load(newer, rest=lambda took_s: None)
    for day, bundle in enumerate((older, newer), 1):
        sign(bundle, key, at=datetime(2026, 11, day, tzinfo=UTC))
    recommender, checkout, swap = serve(wiring, newer)
    recommender.facts.close()
    with pytest.raises(SignatureInvalid, match="2026-11-01T00:00:00Z, before"):
        swap(pointer(recommender, "older"))
    assert checkout.recommender is recommender


def test_a_bundle_that_cannot_read_the_rules_again_does_not_take_over(
    toy_bundle: Path, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path)
    settings.rules_path.write_text("ban:\n  - {name: recall, items: ['1000000']}\n")
    recommender, checkout, swap = serve(Wiring(settings, MemoryStore(), observers=()), toy_bundle)
    settings.rules_path.write_text("ban: [")
    with pytest.raises(FactsUnavailable, match=r"rules\.yaml could not be read again: mend it$"):
        swap(pointer(recommender, toy_bundle.name))
    assert checkout.recommender is recommender
    recommender.facts.close()


def test_a_swap_is_reported_after_it_takes_effect(toy_bundle: Path, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    wiring = Wiring(Settings(home=tmp_path), MemoryStore(), observers=())
    recommender, checkout, swap = serve(wiring, toy_bundle, events.append)
    follow_up = swap(pointer(recommender, toy_bundle.name))
    assert checkout.recommender is not recommender
    assert not events
    follow_up()
    assert [event["event"] for event in events] == ["bundle"]
    checkout.recommender.facts.close()
