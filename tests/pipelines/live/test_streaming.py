"""Facts from the broker reach the store, or are refused with a reason; the command runs until a signal."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from feature_repo.facts import Fact
from feature_repo.stream.erasure import forget
from feature_repo.stream.fact_stream import FactStream
from feature_repo.stream.kafka import KafkaSettings, client_config
from feature_repo.stream.online_rows import OnlineRows
from pipelines.live import streaming
from pipelines.live.streaming import take_facts
from pipelines.live.up import reco
from serving.errors import FactsUnavailable
from serving.settings import Settings
from serving.shop.fact_store import open_fact_store

FACT = {
    "fact_id": "f1",
    "fact": "stock",
    "item_id": "milk",
    "value": 0,
    "at": "2026-03-02T09:14:00Z",
}


def test_each_message_is_a_fact_or_has_a_reason(tmp_path: Path) -> None:
    store = open_fact_store(f"sqlite:///{tmp_path / 'facts.db'}")
    good = json.dumps(FACT).encode()
    first, second, third = take_facts(store, [good, b"{}", b"no JSON"], tmp_path)
    assert first is None
    assert second
    assert third
    facts, _ = store.changed_since(0)
    assert [(fact.item_id, fact.value) for fact in facts] == [("milk", 0)]
    store.close()


def test_an_unwritable_store_is_retried_later(tmp_path: Path) -> None:
    class Away:
        def write(self, facts: list[Fact]) -> int:
            raise FactsUnavailable("away")

    with pytest.raises(ConnectionError, match="away"):
        take_facts(Away(), [json.dumps(FACT).encode()], tmp_path)  # type: ignore[arg-type]


def test_a_forgotten_shoppers_coupon_is_not_restored(tmp_path: Path) -> None:
    forget(tmp_path, "u1", 1_772_442_840_000_000)  # 2026-03-02T09:14Z
    store = open_fact_store(f"sqlite:///{tmp_path / 'facts.db'}")
    coupon = {**FACT, "fact": "coupon", "value": "MILK", "user_id": "u1"}
    new = {**coupon, "fact_id": "f2", "at": "2026-03-02T09:14:01Z"}
    other = {**coupon, "fact_id": "f3", "user_id": "u10"}
    told = [json.dumps(fact).encode() for fact in (FACT, coupon, new, other)]
    assert take_facts(store, told, tmp_path) == [None] * 4
    assert sorted(fact.fact_id for fact in store.changed_since(0)[0]) == ["f1", "f2", "f3"]
    store.close()


@pytest.mark.slow
def test_the_command_processes_events_and_facts_until_a_signal(broker: Any, tmp_path: Path) -> None:
    kafka = KafkaSettings(bootstrap=broker.bootstrap)
    event = {
        "event_id": "e1", "user_id": "ann", "basket_id": "b1", "item_id": "milk", "at": FACT["at"],
    }  # fmt: skip
    producer = Producer(client_config(kafka))
    producer.produce(kafka.events_topic, json.dumps(event), "ann")
    producer.produce(kafka.facts_topic, json.dumps(FACT), "milk")
    producer.produce(kafka.facts_topic, "{}", "milk")
    assert producer.flush(30) == 0
    command = reco("--home", str(tmp_path), "stream", "--output", "json")
    env = {**os.environ, "RECO_KAFKA_BOOTSTRAP": broker.bootstrap}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "ready"
        end, state = time.monotonic() + 60, {"events": 0, "facts": 0}
        while state["events"] + state["facts"] < 2 and time.monotonic() < end:
            time.sleep(0.2)
            state = json.loads((tmp_path / "stream.json").read_bytes())
        process.send_signal(signal.SIGTERM)
        answer, _ = process.communicate(timeout=60)
    counts = json.loads(answer)
    assert process.returncode == 0
    assert {name: counts[name] for name in ("events", "facts", "dead_letters")} == {
        "events": 1, "facts": 1, "dead_letters": 1,
    }  # fmt: skip
    assert len(list((tmp_path / "offline_store" / "events").glob("stream-*.parquet"))) == 1


@pytest.mark.slow
def test_facts_are_applied_during_a_rebuild_of_rows(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild, or a backlog of events, may take minutes: a sold-out item is gone meanwhile."""
    kafka, settings = KafkaSettings(bootstrap=broker.bootstrap), Settings(home=tmp_path)
    producer = Producer(client_config(kafka))
    producer.produce(kafka.facts_topic, json.dumps(FACT), "milk")
    assert producer.flush(30) == 0
    came = []

    class Slow(OnlineRows):
        def name(self) -> bytes | None:
            store, end = open_fact_store(settings.fact_store_url), time.monotonic() + 30
            while not ((facts := store.changed_since(0)[0]) and store.beats()):
                assert time.monotonic() < end
                time.sleep(0.1)
            came.extend(facts)
            store.close()
            os.kill(os.getpid(), signal.SIGTERM)
            return super().name()

    monkeypatch.setattr(streaming, "OnlineRows", Slow)
    counts = streaming.run_stream(settings, kafka, lambda: None)
    assert [fact.item_id for fact in came[:1]] == ["milk"]
    assert counts.facts == 1


@pytest.mark.slow
def test_a_failing_fact_consumer_ends_the_stream(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, stop: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(FactStream, "run", fail)
    kafka = KafkaSettings(bootstrap=broker.bootstrap)
    with pytest.raises(ValueError, match="broken"):
        streaming.run_stream(Settings(home=tmp_path), kafka, lambda: None)
