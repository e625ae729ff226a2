"""Facts from the broker (prices, stock, coupons) -> the fact store, in a thread of their own.

A sold-out item must be gone within two seconds, even behind a backlog of events. Each message is written, or
becomes a dead letter with its reason, before the position is committed; a repeated fact changes nothing.

Readers cannot see that a store refuses writes. So the stream notes in it, once a second, until when it holds
all facts of each partition. A partition without a note is read again from its beginning: the store is new, or
was emptied.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from feature_repo.errors import RecoError
from feature_repo.stream.dead_letters import DeadLetters, place_of
from feature_repo.stream.kafka import KafkaSettings, consumer_config

log = logging.getLogger(__name__)

TURN_MESSAGES = 5_000
TURN_S = 0.05  # how long a turn waits for messages
RETRY_S = 0.5
BEAT_S = 1.0
# Messages -> for each the reason why it is invalid, or None.
FactSink = Callable[[list[bytes]], list[str | None]]


class Beats(Protocol):
    """The notes in the fact store; RecoError means that it is away."""

    def beats(self) -> dict[int, float]:
        """Return the partitions with a note, and its time."""

    def beat(self, partitions: list[int], at: float) -> None:
        """Note that the store holds all facts of these partitions."""


@dataclass
class _Place:
    """How far one partition was read."""

    ended: bool = False  # read to its end, and idle
    next: int = -1  # the position behind the last written fact
    end: int = -1  # of the partition, at the last beat
    is_again: bool = False  # the store had no note of it: it is read from its beginning
    again: int = 0  # up to this position it was read before
    noted: float = 0.0  # when this consumer noted it last


class FactStream:
    """The consumer of the facts topic; its group is the stream's with the suffix `-facts`."""

    def __init__(self, settings: KafkaSettings, sink: FactSink, letters: DeadLetters, beats: Beats) -> None:
        """Prepare a consumer, which connects in `run`.

        Args:
            settings: the address of the broker.
            sink: writes the messages; OSError means that the store is away.
            letters: get the invalid messages, and hold the counts.
            beats: the notes of complete partitions.
        """
        self._topic, self._sink, self._letters, self._beats = settings.facts_topic, sink, letters, beats
        self._waiting: list[Message] = []  # consumed, but not written: the store is away
        self._positions: dict[int, int] = {}  # written, but not committed
        self._places: defaultdict[int, _Place] = defaultdict(_Place)
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
            self._letters.commit(self._consumer, self._topic, self._positions)
            if self._consumer.assignment():
                self._consumer.close()
            # Else it is still joining: see `Stream.run`.

    def turn(self, stop: threading.Event) -> None:
        """Write and commit new messages; while the store is away, keep them and consume no more."""
        self._consume()
        if self._waiting:
            try:
                reasons = self._sink([message.value() or b"" for message in self._waiting])
            except OSError as error:
                log.warning("the fact store cannot be used, trying again: %s", error)
                self._consumer.pause(self._consumer.assignment())
                stop.wait(RETRY_S)
                return
            self._consumer.resume(self._consumer.assignment())
            self._settle(reasons)
        self._letters.commit(self._consumer, self._topic, self._positions)
        if (now := time.monotonic()) - self._beat_at >= BEAT_S:
            self._beat_at = now
            try:
                self._note()
            except (RecoError, KafkaException) as error:
                log.warning("the facts could not be noted as complete: %s", error)

    def _consume(self) -> None:
        """Take new messages, and note which partitions have no more."""
        for message in self._consumer.consume(TURN_MESSAGES, 0 if self._waiting else TURN_S):
            if (error := message.error()) is None:
                self._waiting.append(message)
                self._places[place_of(message)[1]].ended = False
            elif error.code() == KafkaError._PARTITION_EOF:
                self._places[place_of(message)[1]].ended = True
            else:
                log.warning("the broker says: %s", error.str())

    def _settle(self, reasons: Sequence[str | None]) -> None:
        """Count or bury the messages that the store has taken, each with its reason if it is no fact."""
        for message, reason in zip(self._waiting, reasons, strict=True):
            _, partition, offset = place_of(message)
            place = self._places[partition]
            is_new = offset >= place.again  # else it was counted or buried before
            if is_new and reason is None:
                self._letters.counts.facts += 1
            elif is_new and reason is not None:
                self._letters.bury(message, reason)
            self._positions[partition] = place.next = offset + 1
        self._waiting = []

    def _note(self) -> None:
        """Note which partitions are complete, and begin again with those that the store does not know."""
        known, complete = self._beats.beats(), []
        for one in self._consumer.assignment():
            end = self._consumer.get_watermark_offsets(one, cached=True)[1]
            place = self._places[one.partition]
            # The broker reports the end of an idle partition only; a busy one is written to its last end.
            before, place.end = place.end, end
            if not place.ended and not 0 <= before <= place.next:
                continue
            # A note that is older than our last one is of a store that went back to a copy.
            if known.get(one.partition, -1.0) >= place.noted or place.is_again:
                complete.append(one.partition)
                place.is_again, place.again = False, 0
                continue
            log.warning("partition %d of the facts is read again: the store has no note of it", one.partition)
            self._consumer.seek(TopicPartition(self._topic, one.partition, OFFSET_BEGINNING))
            read = end if place.next < 0 else place.next
            self._places[one.partition] = _Place(is_again=True, again=read)
        self._beats.beat(complete, now := time.time())
        for partition in complete:
            self._places[partition].noted = now

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """Forget how far a partition was read when this consumer had it before."""
        for one in partitions:
            self._places.pop(one.partition, None)
