"""Confirmed delivery: no message is lost while the broker is away, frozen or without memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError

from feature_repo.stream.delivery import MAX_MESSAGE_BYTES, MAX_PENDING_BYTES, Delivery
from feature_repo.stream.kafka import KafkaSettings, client_config

NOWHERE = KafkaSettings(bootstrap="127.0.0.1:1")  # no process listens on port 1
TOPIC = KafkaSettings().events_topic


@contextmanager
def opened(settings: KafkaSettings) -> Iterator[Delivery]:
    delivery = Delivery(settings)
    try:
        yield delivery
    finally:
        delivery.close()


def consumed(bootstrap: str, expected: int, timeout_s: float = 60) -> list[tuple[str, str]]:
    """Key and value of each message of the topic, in the order of each partition, until `expected` differ."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    config = client_config(KafkaSettings(bootstrap=bootstrap))
    consumer = Consumer({**config, "group.id": "test", "enable.auto.commit": False})
    consumer.assign([TopicPartition(TOPIC, partition, OFFSET_BEGINNING) for partition in range(4)])
    records: list[tuple[str, str]] = []
    end = time.monotonic() + timeout_s
    while len(set(records)) < expected and time.monotonic() < end:
        for message in consumer.consume(10_000, timeout=0.2):
            key, value = message.key(), message.value()
            assert message.error() is None
            assert key is not None
            assert value is not None
            records.append((key.decode(), value.decode()))
    consumer.close()
    return records


def test_without_a_broker_messages_stay_pending() -> None:
    with opened(NOWHERE) as delivery:
        assert delivery.flush(0)
        delivery.send(TOPIC, "käte", b"12345")
        assert delivery.pending_bytes == len(TOPIC) + len("käte".encode()) + 5
        assert not delivery.flush(0.3)
        assert (delivery.refused, delivery.is_full) == (0, False)


@pytest.mark.parametrize("value", [b"x" * 800_000, b"1"])
def test_beyond_its_bounds_a_delivery_is_full(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small messages fill it before the client's queue: `send` would wait there for room, silently."""
    monkeypatch.setattr("feature_repo.stream.delivery.MAX_PENDING", 25)
    with opened(NOWHERE) as delivery:
        for _ in range(26 if len(value) == 1 else MAX_PENDING_BYTES // len(value) + 1):
            assert not delivery.is_full
            delivery.send(TOPIC, "u", value)
        assert delivery.is_full


def test_a_message_too_large_for_a_broker_is_refused() -> None:
    with opened(NOWHERE) as delivery, pytest.raises(ValueError, match="expected at most 900000"):
        delivery.send(TOPIC, "u", b"x" * MAX_MESSAGE_BYTES)


def test_more_messages_than_the_client_queues_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka's own queue ends at 100,000 messages: `send` waits until there is room."""
    produce = Mock(side_effect=[BufferError("queue full"), BufferError("queue full"), None])
    with opened(NOWHERE) as delivery, monkeypatch.context() as patch:
        patch.setattr(delivery, "_producer", Mock(produce=produce))
        delivery.send(TOPIC, "u", b"1")
    assert produce.call_count == 3


class RefusingProducer:
    """Refuses each batch that holds `bad`, as a whole, as a broker does."""

    def __init__(self, _: object) -> None:
        self.sent: list[bytes] = []
        self._batch: list[tuple[bytes, Any]] = []

    def produce(self, topic: str, value: bytes, key: bytes | None, on_delivery: Any) -> None:
        self._batch.append((value, on_delivery))

    def poll(self, seconds: float) -> int:
        return 0

    def purge(self) -> None:
        pass

    def flush(self, seconds: float) -> int:
        batch, self._batch = self._batch, []
        is_bad = any(value == b"bad" for value, _ in batch)
        for value, on_delivery in batch:
            self.sent += [] if is_bad else [value]
            on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE) if is_bad else None, None)
        return 0


def test_of_a_refused_batch_the_bad_message_alone_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("feature_repo.stream.delivery.Producer", RefusingProducer)
    delivery = Delivery(NOWHERE)
    for value in (b"1", b"bad", b"2"):
        delivery.send(TOPIC, "u", value)
    assert delivery.flush(60)
    assert (delivery.refused, delivery.pending_bytes) == (1, 0)
    assert delivery._producer.sent == [b"1", b"2"]  # type: ignore[attr-defined]
    assert caplog.messages == [f"the broker refuses a message of {TOPIC} for good: it is lost"]


# --------------------------------------------------------------------------------------- with a broker


@pytest.mark.slow
def test_everything_arrives_once_and_in_order_when_nothing_fails(broker: Any) -> None:
    sent = [(f"user-{n % 7}", str(n)) for n in range(20_000)]
    with opened(KafkaSettings(bootstrap=broker.bootstrap)) as delivery:
        for key, value in sent:
            delivery.send(TOPIC, key, value.encode())
        assert delivery.flush(60)
        assert (delivery.refused, delivery.pending_bytes) == (0, 0)
    records = consumed(broker.bootstrap, 20_000)
    assert len(records) == 20_000
    for user in {key for key, _ in sent}:
        assert [v for k, v in records if k == user] == [v for k, v in sent if k == user]


@pytest.mark.slow
def test_a_broker_that_is_down_from_the_start_gets_all_messages_later(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.stop()
    with opened(KafkaSettings(bootstrap=broker.bootstrap)) as delivery:
        for number in range(5_000):
            delivery.send(TOPIC, f"user-{number % 7}", str(number).encode())
        assert not delivery.flush(1)
        broker.start()
        assert delivery.flush(60)
    assert {int(value) for _, value in consumed(broker.bootstrap, 5_000)} == set(range(5_000))
    lines = [record.message for record in caplog.records if record.name == "feature_repo.stream.delivery"]
    assert any("refused" in text and "messages wait for the broker" in text for text in lines)
    assert lines[-1] == "the broker takes messages again"
    assert len(lines) < 10


@pytest.mark.slow
def test_a_broker_that_lost_its_memory_gets_the_unconfirmed_messages(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It no longer knows our producer, its sequence numbers and, for a moment, the topic."""
    monkeypatch.setattr("feature_repo.stream.delivery.STALL_S", 2.0)
    with opened(KafkaSettings(bootstrap=broker.bootstrap)) as delivery:
        delivery.send(TOPIC, "u", b"before")
        assert delivery.flush(30)
        broker.stop()
        for number in range(5_000):
            delivery.send(TOPIC, "u", str(number).encode())
        broker.start()
        assert delivery.flush(60)
    values = [value for _, value in consumed(broker.bootstrap, 5_000)]
    assert list(dict.fromkeys(values)) == [str(number) for number in range(5_000)]
