"""A letter of any message arrives, or is counted as lost; it never stops the stream."""

from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import KafkaError, KafkaException

from feature_repo.stream.dead_letters import Counts, DeadLetters
from feature_repo.stream.kafka import KafkaSettings
from tests.chaos.letters import dead_letters


def poison(key: bytes, value: bytes = b"{not JSON") -> Any:
    """An invalid message of the broker."""
    place = {"topic": lambda: "checkout.events", "partition": lambda: 0, "offset": lambda: 7}
    return Mock(key=lambda: key, value=lambda: value, **place)


@pytest.mark.slow
@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_a_key_of_any_size_is_cut_as_the_value_is(broker: Any, byte: bytes) -> None:
    settings, counts = KafkaSettings(bootstrap=broker.bootstrap), Counts()
    letters = DeadLetters(settings, counts)
    letters.bury(poison(byte * 250_000, byte * 250_000), "no JSON")
    assert letters.flush(30)
    [(_, letter)] = dead_letters(settings)
    assert letter["key"] == (byte * 1_024).decode("utf-8", "backslashreplace")
    assert letter["bytes"] == 250_000
    assert counts == Counts(dead_letters=1)


def test_a_letter_waits_for_the_broker_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A letter that librdkafka drops after minutes would look delivered, and its message be committed."""
    import feature_repo.stream.dead_letters as module

    made = []
    monkeypatch.setattr(module, "Producer", lambda config, logger: made.append(config))
    DeadLetters(KafkaSettings(), Counts())
    assert made[0]["message.timeout.ms"] == 0


@pytest.mark.parametrize(
    "error", [BufferError("queue full"), KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))]
)
def test_a_letter_that_cannot_be_sent_is_logged_and_counted(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts()
    letters = DeadLetters(KafkaSettings(bootstrap="127.0.0.1:1"), counts)
    monkeypatch.setattr(letters, "_producer", Mock(produce=Mock(side_effect=error)))
    monkeypatch.setattr("feature_repo.stream.dead_letters.PATIENCE_S", 0.01)
    letters.bury(poison(b"ann"), "no JSON")
    assert counts == Counts(dead_letters=1, letters_lost=1)
    assert "checkout.events/0/7 is lost" in caplog.text


def test_a_letter_waits_for_room_among_those_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts()
    letters = DeadLetters(KafkaSettings(bootstrap="127.0.0.1:1"), counts)
    produce = Mock(side_effect=[BufferError("queue full"), BufferError("queue full"), None])
    monkeypatch.setattr(letters, "_producer", Mock(produce=produce))
    letters.bury(poison(b"ann"), "no JSON")
    assert produce.call_count == 3
    assert counts == Counts(dead_letters=1)


def test_an_undelivered_letter_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = Counts()
    letters = DeadLetters(KafkaSettings(bootstrap="127.0.0.1:1"), counts)
    letters.bury(poison(b"ann"), "no JSON")
    assert not letters.flush(0.1)
    letters._producer.purge()  # simulates a broker that refuses it
    assert letters.flush(10)
    assert counts == Counts(dead_letters=1, letters_lost=1)
    assert "checkout.events/0/7 is lost" in caplog.text
