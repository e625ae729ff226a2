"""Invalid messages -> the dead-letter topic, each with the reason, and the counts of all messages.

A letter never stops the stream: a letter that the broker refuses for good is logged and counted as lost.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import orjson
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from feature_repo.stream.kafka import KafkaSettings, client_config

log = logging.getLogger(__name__)

PATIENCE_S = 30.0  # how long a letter is retried
KEY_BYTES, VALUE_BYTES = 1_024, 65_536  # the longest parts of a message in a letter


@dataclass
class Counts:
    """The outcomes of the messages since the start."""

    events: int = 0
    facts: int = 0
    dead_letters: int = 0
    letters_lost: int = 0  # dead letters that the broker did not take
    forgotten: int = 0  # events of users who asked to be forgotten since
    store_failures: int = 0
    rebuilt: int = 0


class DeadLetters:
    """Sends letters; both threads of the stream may do so at once."""

    def __init__(self, settings: KafkaSettings, counts: Counts) -> None:
        """Prepare a producer, which connects later; `counts` gets the number of letters."""
        self.counts = counts
        self._topic = settings.dead_letter_topic
        self._lock = threading.Lock()
        self._producer = Producer(
            {
                **client_config(settings),
                "enable.idempotence": True,
                "linger.ms": 5,
                "message.timeout.ms": 0,  # an expired letter would be committed as if delivered
            },
            logger=log,
        )

    def bury(self, message: Message, reason: str) -> None:
        """Send an invalid message; the letter's key says where it came from."""
        topic, partition, offset = place_of(message)
        value = message.value() or b""
        letter = {
            "reason": reason,
            "topic": topic,
            "partition": partition,
            "offset": offset,
            "key": (message.key() or b"")[:KEY_BYTES].decode("utf-8", "backslashreplace"),
            "bytes": len(value),
            "value": value[:VALUE_BYTES].decode("utf-8", "backslashreplace"),
        }
        key = f"{topic}/{partition}/{offset}"
        with self._lock:
            self.counts.dead_letters += 1
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._producer.produce(self._topic, orjson.dumps(letter), key, on_delivery=self._delivered)
                break
            except BufferError as error:  # too many are in flight
                if time.monotonic() > end:
                    self._lose(key, str(error))
                    break
                self._producer.poll(0.1)  # handles delivery reports, which makes room
            except KafkaException as error:
                self._lose(key, str(error))
                break
        self._producer.poll(0)

    def flush(self, timeout_s: float) -> bool:
        """Return whether the broker has confirmed or refused every letter."""
        return self._producer.flush(timeout_s) == 0

    def commit(self, consumer: Consumer, topic: str, positions: dict[int, int]) -> None:
        """Commit a consumer's positions and clear them, once the broker has confirmed or refused all letters.

        While the broker is away it cannot commit either: the next call tries again.
        """
        if positions and self.flush(1):
            places = [TopicPartition(topic, *place) for place in positions.items()]
            positions.clear()
            try:
                consumer.commit(offsets=places, asynchronous=False)
            except KafkaException as error:  # at worst some messages are read again
                log.warning("the position in %s could not be committed: %s", topic, error.args[0].str())

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._lose((message.key() or b"").decode(), error.str())

    def _lose(self, key: str, reason: str) -> None:
        with self._lock:
            self.counts.letters_lost += 1
        log.error("the dead letter for %s is lost: %s", key, reason)


def place_of(message: Message) -> tuple[str, int, int]:
    """Return topic, partition and offset of a message that came from the broker."""
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return topic, partition, offset
