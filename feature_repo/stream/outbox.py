"""Messages -> the disk -> the broker: `send` returns at once, whether there is a broker or not.

Messages wait in segment files, `<sequence>.spool`. A thread takes the oldest segment, has the broker confirm
every message in it, and deletes it; meanwhile new messages go to the next one. So a busy outbox sends large
batches and an idle one small, memory holds one segment, and what a killed process leaves behind is segments
that the next one sends again. Each message arrives at least once; messages of one key keep their order, but
a batch that failed is repeated from its start. Against a power cut, the last seconds are as safe as the file
system makes them: there is no fsync per message.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from feature_repo.errors import CONFLICT, RecoError
from feature_repo.stream.kafka import KafkaSettings, client_config

MAX_BYTES = 64 << 20
SEGMENT_BYTES = 1 << 20  # a larger batch is not sent faster
MAX_MESSAGE_BYTES = 900_000  # brokers take a million if not told otherwise, headers included
_HEADER = struct.Struct(">IHII")  # crc32 of what follows, then the lengths of topic, key and value
# Sending these again cannot help; everything else can be mended at the broker and is tried until it is.
_REFUSED = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG, KafkaError.INVALID_RECORD}
# librdkafka itself would offer a batch for ever to a broker that lost its memory and with it our sequence
# numbers; a producer that gets nowhere for this long is replaced.
STALL_S = 10.0
_PAUSE_S = (0.1, 0.2, 0.5, 1.0, 2.0)  # before a batch that failed is sent again
Record = tuple[str, bytes, bytes]  # topic, key, value
_log = logging.getLogger(__name__)


class OutboxInUse(RecoError, RuntimeError):
    """Another process sends from the same directory."""

    exit_code = CONFLICT


class Outbox:
    """A bounded queue on disk in front of the broker; any thread may send.

    Attributes:
        delivered: messages that the broker confirmed.
        dropped: messages that were not taken because the directory was full, or the disk.
        refused: messages that the broker will never take (too large, invalid).
    """

    def __init__(self, directory: Path, settings: KafkaSettings, max_bytes: int = MAX_BYTES) -> None:
        """Open the directory, find what an earlier process left, and begin to send it.

        Raises:
            OutboxInUse: another process holds the directory.
        """
        self.delivered = self.dropped = self.refused = 0
        self._directory, self._max_bytes = directory, max_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._lock_file = (directory / "lock").open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock_file.close()
            raise OutboxInUse(f"{directory} is the outbox of another process: end that one first") from error
        left = sorted(directory.glob("*.spool"))
        self._sizes = {file: file.stat().st_size for file in left}  # segment -> bytes, oldest first
        self._sequence = int(left[-1].stem) + 1 if left else 0
        self._open: tuple[Path, int] | None = None  # the segment that is written, and its descriptor
        self._bytes = sum(self._sizes.values())
        self._full = self._closing = False
        self._told: set[int] = set()  # errors of the client that were logged since a batch got through
        self._changed = threading.Condition()
        self._config = {
            **client_config(settings),
            "enable.idempotence": True,  # acks=all, and the client's own retries neither repeat nor reorder
            "message.timeout.ms": 0,  # a broker may be away for as long as it likes
            "batch.size": 1 << 17,  # so that a slow line shows progress too
            "partitioner": "murmur2_random",  # Java's: whoever produces, a key has one partition
            "log_level": 0,  # librdkafka would write a line for each attempt to connect
            "error_cb": self._note_error,
        }
        self._sender = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._sender.start()

    @property
    def pending_bytes(self) -> int:
        """Bytes on disk whose messages are not all confirmed."""
        return self._bytes

    def send(self, topic: str, key: str | None, value: bytes) -> bool:
        """Take one message and return at once; False if it had to be dropped.

        Raises:
            ValueError: the message is too large for a broker, or the outbox is closed.
            RuntimeError: the sending thread ended, because a segment could not be read or removed.
        """
        # An empty key and none are different things to a partitioner, but no id of ours is empty.
        record = _encoded(topic, (key or "").encode(), value)
        if (size := len(record) - _HEADER.size) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {size} bytes; expected at most {MAX_MESSAGE_BYTES}: send less at once"
            )
        with self._changed:
            if self._closing:
                raise ValueError("the outbox is closed: nothing can be sent any more")
            self._check_sender()
            if self._bytes + len(record) > self._max_bytes:
                return self._drop(f"holds {self._max_bytes} bytes that the broker has not confirmed")
            try:
                self._append(record)
            except OSError as error:
                return self._drop(f"cannot be written ({error.strerror})")
            if self._full:
                _log.warning("%s takes messages again; %d were dropped so far", self._directory, self.dropped)
                self._full = False
            self._changed.notify()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until the broker has confirmed everything; False if the time was not enough.

        Raises:
            RuntimeError: as `send` does; it would wait in vain.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._sizes or not self._sender.is_alive(), timeout_s)
            if self._sizes:
                self._check_sender()
            return not self._sizes

    def close(self) -> None:
        """Stop sending; what is not confirmed stays on disk for the next process."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._sender.join()
        self._roll()
        self._lock_file.close()

    def _check_sender(self) -> None:
        if not self._sender.is_alive():
            raise RuntimeError(f"nobody sends what is in {self._directory}: the log says why; start anew")

    def _drop(self, why: str) -> bool:
        self.dropped += 1
        if not self._full:
            _log.error("%s %s: messages are dropped and counted from now on", self._directory, why)
        self._full = True
        return False

    def _append(self, record: bytes) -> None:
        if self._open is None:
            file = self._directory / f"{self._sequence:020d}.spool"
            self._open = file, os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
            self._sequence += 1
            self._sizes[file] = 0
        file, descriptor = self._open
        # One write: when `send` has returned, the record survives this process.
        if os.write(descriptor, record) < len(record):
            os.ftruncate(descriptor, self._sizes[file])
            raise OSError(28, "no space left for the whole message")
        self._sizes[file] += len(record)
        self._bytes += len(record)
        if self._sizes[file] >= SEGMENT_BYTES:
            self._roll()

    def _roll(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    # ------------------------------------------------------------------------------------ the sender

    def _send_all(self) -> None:
        failures = 0
        producer = Producer(self._config)
        while (segment := self._next()) is not None:
            if self._deliver(producer, segment):
                failures = 0
                if self._told:
                    _log.warning("the broker takes messages again")
                    self._told.clear()
                segment.unlink()
                with self._changed:
                    self._bytes -= self._sizes.pop(segment)
                    self._changed.notify_all()
            else:
                # After a fatal error, or without progress, a producer is of no more use.
                producer.purge()
                producer.flush(1)
                producer = Producer(self._config)
                self._wait(_PAUSE_S[min(failures, len(_PAUSE_S) - 1)])
                failures += 1
        producer.purge()
        producer.flush(1)

    def _note_error(self, error: KafkaError) -> None:
        """Say what the client complains of: once, until a batch gets through."""
        if error.code() not in self._told:
            _log.warning("messages wait in %s: %s", self._directory, error.str())
            self._told.add(error.code())

    def _next(self) -> Path | None:
        """Wait for the oldest segment and close it to writers; None when the outbox is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._sizes or self._closing)
            if self._closing:
                return None
            oldest = next(iter(self._sizes))
            if self._open and self._open[0] == oldest:
                self._roll()
            return oldest

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)

    def _deliver(self, producer: Producer, segment: Path) -> bool:
        """Send one segment; True when the broker has confirmed, or refused for good, every message of it."""
        messages = list(read_segment(segment))
        refused = self._produce(producer, messages)
        if refused is None:
            return False
        # A batch is refused as a whole: alone, the messages that are not to blame get through.
        for message in refused:
            alone = self._produce(producer, [message])
            if alone is None:
                return False
            if alone:
                self.refused += 1
                _log.error("the broker refuses a message of %s for good: it is lost", message[0])
            else:
                self.delivered += 1
        self.delivered += len(messages) - len(refused)
        return True

    def _produce(self, producer: Producer, messages: list[Record]) -> list[Record] | None:
        """Send and wait for the broker's answers; return what it refused, None if it has to be sent again."""
        refused: list[Record] = []
        failed: list[KafkaError] = []

        def note(record: Record, error: KafkaError | None, _: Message) -> None:
            if error is not None and error.code() in _REFUSED:
                refused.append(record)
            elif error is not None:
                failed.append(error)

        try:
            for record in messages:
                topic, key, value = record
                producer.produce(topic, value, key or None, on_delivery=partial(note, record))
            left, since = len(messages), time.monotonic()
            while (waiting := producer.flush(0.1)) and not failed:
                if self._closing:
                    return None
                if waiting < left:
                    left, since = waiting, time.monotonic()
                elif time.monotonic() - since > STALL_S:
                    _log.info("no answer from the broker for %g s: sending again", STALL_S)
                    return None
        except KafkaException as error:
            failed.append(error.args[0])
        if failed:
            _log.warning("sending again, because: %s", failed[0].str())
            return None
        return refused


def remove_messages(directory: Path, unwanted: Callable[[Record], bool], dry_run: bool = False) -> int:
    """Take messages out of an outbox that nobody sends from; return how many there were.

    Raises:
        OutboxInUse: a process sends from it.
    """
    removed = 0
    with (directory / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutboxInUse(f"{directory} is the outbox of another process") from error
        for segment in sorted(directory.glob("*.spool")):
            messages = list(read_segment(segment))
            kept = [record for record in messages if not unwanted(record)]
            removed += len(messages) - len(kept)
            if len(kept) < len(messages) and not dry_run:
                part = segment.with_suffix(".part")
                part.write_bytes(b"".join(_encoded(*record) for record in kept))
                part.replace(segment)
    return removed


def _encoded(topic: str, key: bytes, value: bytes) -> bytes:
    name = topic.encode()
    body = _HEADER.pack(0, len(name), len(key), len(value))[4:] + name + key + value
    return zlib.crc32(body).to_bytes(4, "big") + body


def read_segment(segment: Path) -> Iterator[Record]:
    """Yield topic, key and value of each message; what follows a damaged record is lost, and said."""
    raw, begin = segment.read_bytes(), 0
    while begin < len(raw):
        end = body = begin + _HEADER.size
        if body <= len(raw):
            crc, topic, key, value = _HEADER.unpack_from(raw, begin)
            end = body + topic + key + value
        if end > len(raw) or zlib.crc32(raw[begin + 4 : end]) != crc:
            _log.error("%s is damaged at byte %d of %d: the rest is lost", segment, begin, len(raw))
            return
        yield raw[body : body + topic].decode(), raw[body + topic : end - value], raw[end - value : end]
        begin = end
