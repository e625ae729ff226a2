"""Messages -> the broker, each confirmed: `send` hands one over, `flush` waits for all confirmations.

Each message arrives at least once. Messages of one key keep their order: after a failure all unconfirmed
messages are sent again in the same order. They are in memory only: after a crash the caller starts again from
its durable source.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from feature_repo.stream.kafka import KafkaSettings, client_config

MAX_MESSAGE_BYTES = 900_000  # a broker takes a million by default, headers included
MAX_PENDING_BYTES = 16 << 20
# Messages. The queue of librdkafka ends at 100,000: `send` would wait there for the broker.
MAX_PENDING = 50_000
# A second attempt cannot help with these errors; every other error can be mended at the broker.
_REFUSED = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD}
# A broker that lost its memory has lost our sequence numbers too, and librdkafka would retry without end.
# A producer without progress for this long is replaced.
STALL_S = 10.0
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # before a failed batch is sent again
Record = tuple[str, bytes, bytes]  # topic, key, value
_log = logging.getLogger(__name__)


class Delivery:
    """A producer that sends a message again until the broker confirms it; for one thread at a time.

    Attributes:
        refused: messages that the broker will never take (too large, invalid).
        pending_bytes: bytes of the messages that the broker has not confirmed.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.refused = self.pending_bytes = 0
        self._pending: dict[int, Record] = {}  # by number, the oldest first
        self._suspects: list[int] = []  # refused with a batch: sent again alone
        self._number = self._failures = 0
        self._failed: KafkaError | None = None
        self._progress_at = time.monotonic()
        self._logged: set[int] = set()  # codes of errors that were logged since the last confirmation
        self._config = {
            **client_config(settings),
            "enable.idempotence": True,  # acks=all; the client's own retries neither repeat nor reorder
            "message.timeout.ms": 0,  # a broker may be away for any time
            "batch.size": 1 << 17,  # so that a slow connection shows progress, too
            "partitioner": "murmur2_random",  # as in Java: a key has one partition for all producers
            "log_level": 0,  # librdkafka would write a line for each attempt to connect
            "error_cb": self._note_error,
        }
        self._producer = Producer(self._config)

    @property
    def is_full(self) -> bool:
        """Whether the caller should wait with `flush` before it sends more."""
        return self.pending_bytes > MAX_PENDING_BYTES or len(self._pending) > MAX_PENDING

    def send(self, topic: str, key: str | None, value: bytes) -> None:
        """Queue one message; it is sent in the background.

        Raises:
            ValueError: the message is too large for a broker.
        """
        # An empty key and a missing key differ for a partitioner, but no id of ours is empty.
        record = topic, (key or "").encode(), value
        if (size := _size(record)) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {size} bytes; expected at most {MAX_MESSAGE_BYTES}: send less at once"
            )
        if not self._pending:
            self._progress_at = time.monotonic()
        self._pending[self._number] = record
        self.pending_bytes += size
        self._produce(self._number)
        self._number += 1

    def flush(self, timeout_s: float) -> bool:
        """Wait until the broker has confirmed everything; False if the time was not enough."""
        end = time.monotonic() + timeout_s
        while self._pending:
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._producer.flush(min(left, 0.1))
            if self._failed or time.monotonic() - self._progress_at > STALL_S:
                self._send_again()
            elif self._suspects and len(self._suspects) == len(self._pending):
                self._send_suspects()
        return True

    def close(self) -> None:
        """Drop the messages that are not confirmed, and the connection."""
        self._producer.purge()
        self._producer.flush(1)

    def _produce(self, number: int, alone: bool = False) -> None:
        topic, key, value = self._pending[number]
        on_delivery = partial(self._note_delivery, self._producer, number, alone)
        while True:
            try:
                self._producer.produce(topic, value, key or None, on_delivery=on_delivery)
                self._producer.poll(0)
            except BufferError:  # the client's own queue is full
                self._producer.poll(0.1)
            except KafkaException as error:
                self._failed = error.args[0]
                return
            else:
                return

    def _note_delivery(
        self, producer: Producer, number: int, alone: bool, error: KafkaError | None, _: Message
    ) -> None:
        if producer is not self._producer or number not in self._pending:
            return  # a late report of a replaced producer
        if error is not None and error.code() in _REFUSED and not alone:
            self._suspects.append(number)  # a batch is refused as a whole
        elif error is not None and error.code() in _REFUSED:
            self.refused += 1
            _log.error("the broker refuses a message of %s for good: it is lost", self._confirm(number)[0])
        elif error is not None:
            self._failed = error
        else:
            self._confirm(number)
            if self._logged:
                _log.warning("the broker takes messages again")
                self._logged.clear()

    def _confirm(self, number: int) -> Record:
        record = self._pending.pop(number)
        self.pending_bytes -= _size(record)
        self._progress_at, self._failures = time.monotonic(), 0
        return record

    def _send_suspects(self) -> None:
        """Send each refused message alone: the good ones of the batch get through."""
        suspects, self._suspects = self._suspects, []
        for number in suspects:
            self._produce(number, alone=True)
            while number in self._pending and not self._failed:
                self._producer.flush(0.1)
                if time.monotonic() - self._progress_at > STALL_S:
                    return

    def _send_again(self) -> None:
        """Replace the producer, which is useless after a fatal error, and send all unconfirmed messages."""
        if self._failed:
            _log.warning("sending again, because: %s", self._failed.str())
        producer = self._producer
        self._producer = Producer(self._config)
        producer.purge()
        producer.flush(1)
        time.sleep(_PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)])
        self._failures += 1
        self._failed, self._suspects, self._progress_at = None, [], time.monotonic()
        for number in list(self._pending):
            self._produce(number)

    def _note_error(self, error: KafkaError) -> None:
        """Log each kind of error once, until the broker confirms a message."""
        if error.code() not in self._logged:
            _log.warning("messages wait for the broker: %s", error.str())
            self._logged.add(error.code())


def _size(record: Record) -> int:
    return sum(map(len, record))
