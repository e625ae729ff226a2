"""Facts from the broker (prices, stock, coupons) -> the fact store, in a thread of their own.

A sold-out item must be gone within two seconds, even behind a backlog of events. Each message is written, or
becomes a dead letter with its reason, before the position is committed; a repeated fact changes nothing.

Readers cannot see that a store refuses writes. So the stream notes in it, once a second, until when it holds
all facts of each partition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from feature_repo.stream.dead_letters import DeadLetters, place_of
from feature_repo.stream.kafka import KafkaSettings, consumer_config

log = logging.getLogger(__name__)

TURN_MESSAGES = 5_000
TURN_S = 0.05  # how long a turn waits for messages
RETRY_S = 0.5
BEAT_S = 1.0
# Messages -> for each the reason why it is invalid, or None.
FactSink = Callable[[list[bytes]], list[str | None]]


class FactStream:
    """The consumer of the facts topic; its group is the stream's with the suffix `-facts`."""

    def __init__(
        self,
        settings: KafkaSettings,
        sink: FactSink,
        letters: DeadLetters,
        beat: Callable[[list[int]], None],
    ) -> None:
        """Prepare a consumer, which connects in `run`.

        Args:
            settings: the address of the broker.
            sink: writes the messages; OSError means that the store is away.
            letters: get the invalid messages, and hold the counts.
            beat: notes that the store holds all facts of these partitions now.
        """
        self._topic, self._sink, self._letters, self._beat = settings.facts_topic, sink, letters, beat
        self._waiting: list[Message] = []  # consumed, but not written: the store is away
        self._positions: dict[int, int] = {}  # written, but not committed
        self._ended: set[int] = set()  # partitions that were read to their end
        self._beat_at = 0.0
        config = consumer_config(settings, f"{settings.group}-facts") | {"enable.partition.eof": True}
        self._consumer = Consumer(config, logger=log)

    def run(self, stop: threading.Event) -> None:
        """Write facts until `stop` is set."""
        self._consumer.subscribe([self._topic], on_assign=self._assigned)
        try:
            while not stop.is_set():
                self.turn(stop)
        finally:
            self._commit()
            if self._consumer.assignment():
                self._consumer.close()
            # Else it is still joining: see `Stream.run`.

    def turn(self, stop: threading.Event) -> None:
        """Write and commit new messages; while the store is away, keep them and consume no more."""
        for message in self._consumer.consume(TURN_MESSAGES, 0 if self._waiting else TURN_S):
            if (error := message.error()) is None:
                self._waiting.append(message)
                self._ended.discard(place_of(message)[1])
            elif error.code() == KafkaError._PARTITION_EOF:
                self._ended.add(place_of(message)[1])
            else:
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
        if (now := time.monotonic()) - self._beat_at >= BEAT_S:
            self._beat_at = now
            own = {one.partition for one in self._consumer.assignment()}
            self._beat(sorted(self._ended & own))

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """Forget how far a partition was read when this consumer had it before."""
        self._ended.difference_update(one.partition for one in partitions)

    def _commit(self) -> None:
        """Commit the written messages, once the broker has confirmed or refused their dead letters."""
        if self._positions and self._letters.flush(1):
            positions = [TopicPartition(self._topic, *place) for place in self._positions.items()]
            self._positions = {}
            try:
                self._consumer.commit(offsets=positions, asynchronous=False)
            except KafkaException as error:
                log.warning("the position of the facts could not be committed: %s", error.args[0].str())
