"""Facts from the broker (prices, stock, coupons) -> the fact store, in a thread of their own.

A sold-out item must be gone within two seconds, whatever backlog of events there is. Each message is written,
or buried with its reason, before the position is committed; a fact that comes twice changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from feature_repo.stream.dead_letters import DeadLetters, place_of
from feature_repo.stream.kafka import KafkaSettings, consumer_config

log = logging.getLogger(__name__)

TURN_MESSAGES = 5_000
TURN_S = 0.05  # how long a turn waits for messages
RETRY_S = 0.5
FactSink = Callable[[list[bytes]], list[str | None]]  # messages -> for each one why it is no fact, or None


class FactStream:
    """The consumer of the facts topic; its group is the stream's own with `-facts` behind it."""

    def __init__(self, settings: KafkaSettings, sink: FactSink, letters: DeadLetters) -> None:
        """Connect to nothing yet.

        Args:
            settings: where the broker is.
            sink: takes the messages; OSError says that it cannot now.
            letters: get what is no fact, and count.
        """
        self._topic, self._sink, self._letters = settings.facts_topic, sink, letters
        self._waiting: list[Message] = []  # brought, but not taken: the store is away
        self._positions: dict[int, int] = {}  # taken, but not committed
        self._consumer = Consumer(consumer_config(settings, f"{settings.group}-facts"), logger=log)

    def run(self, stop: threading.Event) -> None:
        """Take facts until told to stop."""
        self._consumer.subscribe([self._topic])
        try:
            while not stop.is_set():
                self.turn(stop)
        finally:
            self._commit()
            if self._consumer.assignment():
                self._consumer.close()
            # Else it is still joining: see `Stream.run`.

    def turn(self, stop: threading.Event) -> None:
        """Take what has come, and commit it; while the store is away, that waits, and nothing more comes."""
        for message in self._consumer.consume(TURN_MESSAGES, 0 if self._waiting else TURN_S):
            if (error := message.error()) is None:
                self._waiting.append(message)
            elif error.code() != KafkaError._PARTITION_EOF:
                log.warning("the broker says: %s", error.str())
        if self._waiting:
            try:
                reasons = self._sink([message.value() or b"" for message in self._waiting])
            except OSError as error:
                log.warning("the fact store cannot be used, trying again: %s", error)
                self._consumer.pause(self._consumer.assignment())
                stop.wait(RETRY_S)
                return
            self._consumer.resume(self._consumer.assignment())
            self._letters.counts.facts += reasons.count(None)
            for message, reason in zip(self._waiting, reasons, strict=True):
                if reason is not None:
                    self._letters.bury(message, reason)
                _, partition, offset = place_of(message)
                self._positions[partition] = offset + 1
            self._waiting = []
        self._commit()

    def _commit(self) -> None:
        """Commit what was taken, once the broker has answered for the letters too."""
        if self._positions and self._letters.flush(1):
            positions = [TopicPartition(self._topic, *place) for place in self._positions.items()]
            self._positions = {}
            try:
                self._consumer.commit(offsets=positions, asynchronous=False)
            except KafkaException as error:
                log.warning("the position of the facts could not be committed: %s", error.args[0].str())
