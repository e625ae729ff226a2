"""A letter of any message arrives, or is counted as lost; it never stops the stream."""

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from feature_repo.stream.dead_letters import Counts, DeadLetters
from feature_repo.stream.kafka import KafkaSettings
from tests.chaos.letters import dead_letters


class Poison:
    """An invalid message of the broker."""

    def __init__(self, key: bytes, value: bytes = b"{not JSON") -> None:
        self.key, self.value = lambda: key, lambda: value

    def topic(self) -> str:
        return "checkout.events"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7


@pytest.mark.slow
@pytest.mark.parametrize("byte", [b"\x00", b"\xff"])
def test_a_key_of_any_size_is_cut_as_the_value_is(broker: Any, byte: bytes) -> None:
    settings, counts = KafkaSettings(bootstrap=broker.bootstrap), Counts()
    letters = DeadLetters(settings, counts)
    letters.bury(Poison(byte * 250_000, byte * 250_000), "no JSON")  # type: ignore[arg-type]
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


def test_a_letter_that_cannot_be_sent_is_logged_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = Counts()
    letters = DeadLetters(KafkaSettings(bootstrap="127.0.0.1:1"), counts)

    class Refusing:
        def produce(self, *_: Any, **__: Any) -> None:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))

        def poll(self, _: float) -> None:
            pass

    monkeypatch.setattr(letters, "_producer", Refusing())
    letters.bury(Poison(b"ann"), "no JSON")  # type: ignore[arg-type]
    assert counts == Counts(dead_letters=1, letters_lost=1)
    assert "checkout.events/0/7 is lost" in caplog.text


def test_a_letter_waits_for_room_among_those_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, sent = Counts(), list[Any]()
    letters = DeadLetters(KafkaSettings(bootstrap="127.0.0.1:1"), counts)

    class Busy:
        room = 0

        def produce(self, *letter: Any, **__: Any) -> None:
            if self.room < 3:
                raise BufferError("queue full")
            sent.append(letter)

        def poll(self, _: float) -> None:
            self.room += 1

    monkeypatch.setattr(letters, "_producer", Busy())
    letters.bury(Poison(b"ann"), "no JSON")  # type: ignore[arg-type]
    assert len(sent) == 1
    assert counts == Counts(dead_letters=1)


def test_an_undelivered_letter_is_logged_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = Counts()
    letters = DeadLetters(KafkaSettings(bootstrap="127.0.0.1:1"), counts)
    letters.bury(Poison(b"ann"), "no JSON")  # type: ignore[arg-type]
    assert not letters.flush(0.1)
    letters._producer.purge()  # simulates a broker that refuses it
    assert letters.flush(10)
    assert counts == Counts(dead_letters=1, letters_lost=1)
    assert "checkout.events/0/7 is lost" in caplog.text
