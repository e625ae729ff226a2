"""The outbox: nothing is lost while the broker is away, until the bound; then it is counted."""

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from feature_repo.stream.kafka import KafkaSettings, client_config
from feature_repo.stream.outbox import MAX_MESSAGE_BYTES, Outbox, OutboxInUse, read_segment, remove_messages

NOWHERE = KafkaSettings(bootstrap="127.0.0.1:1")  # nobody listens on port 1
TOPIC = KafkaSettings().events_topic


@contextmanager
def opened(directory: Path, settings: KafkaSettings, **given: Any) -> Iterator[Outbox]:
    outbox = Outbox(directory, settings, **given)
    try:
        yield outbox
    finally:
        outbox.close()


def spooled(directory: Path) -> list[tuple[str, bytes, bytes]]:
    return [record for segment in sorted(directory.glob("*.spool")) for record in read_segment(segment)]


def consumed(bootstrap: str, expected: int, timeout_s: float = 60) -> list[tuple[str, str]]:
    """Key and value of each message of the topic, in the order of each partition, until `expected` differ."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    config = client_config(KafkaSettings(bootstrap=bootstrap))
    consumer = Consumer({**config, "group.id": "test", "enable.auto.commit": False})
    consumer.assign([TopicPartition(TOPIC, partition, OFFSET_BEGINNING) for partition in range(4)])
    found: list[tuple[str, str]] = []
    end = time.monotonic() + timeout_s
    while len(set(found)) < expected and time.monotonic() < end:
        for message in consumer.consume(10_000, timeout=0.2):
            key, value = message.key(), message.value()
            assert message.error() is None
            assert key is not None
            assert value is not None
            found.append((key.decode(), value.decode()))
    consumer.close()
    return found


# ------------------------------------------------------------------------------------ without a broker


def test_what_is_sent_lies_on_the_disk_at_once(tmp_path: Path) -> None:
    with opened(tmp_path, NOWHERE) as outbox:
        assert outbox.send(TOPIC, "käte", b'{"a": 1}')
        assert outbox.send("other", None, b"")
        assert spooled(tmp_path) == [(TOPIC, "käte".encode(), b'{"a": 1}'), ("other", b"", b"")]
        assert outbox.pending_bytes == sum(f.stat().st_size for f in tmp_path.glob("*.spool"))
        assert not outbox.flush(0.01)


def test_messages_can_be_taken_out_of_an_outbox_that_nobody_sends_from(tmp_path: Path) -> None:
    with opened(tmp_path, NOWHERE) as outbox:
        for user in ("u1", "u10", "u1"):
            outbox.send(TOPIC, user, b"{}")
        with pytest.raises(OutboxInUse):
            remove_messages(tmp_path, lambda record: True)
    before = spooled(tmp_path)
    assert remove_messages(tmp_path, lambda record: record[1] == b"u1", dry_run=True) == 2
    assert spooled(tmp_path) == before
    assert remove_messages(tmp_path, lambda record: record[1] == b"u1") == 2
    assert remove_messages(tmp_path, lambda record: record[1] == b"u1") == 0
    assert spooled(tmp_path) == [(TOPIC, b"u10", b"{}")]
    with opened(tmp_path, NOWHERE) as outbox:  # what is left is sent as before
        assert outbox.pending_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.spool")) > 0


def test_beyond_the_bound_messages_are_dropped_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    value = b"x" * 1_000
    with opened(tmp_path, NOWHERE, max_bytes=50_000) as outbox, caplog.at_level(logging.ERROR):
        taken = [outbox.send(TOPIC, "u", value) for _ in range(100)]
        size = len(spooled(tmp_path)[0][0]) + 1 + len(value) + 14  # 14 bytes head a record
        assert sum(taken) == 50_000 // size
        assert taken == sorted(taken, reverse=True)
        assert outbox.dropped == 100 - sum(taken)
        assert outbox.pending_bytes <= 50_000
        assert sum("dropped and counted" in r.message for r in caplog.records) == 1
    assert len(spooled(tmp_path)) == sum(taken)


def test_a_message_that_no_broker_takes_is_refused_here(tmp_path: Path) -> None:
    with opened(tmp_path, NOWHERE) as outbox, pytest.raises(ValueError, match="expected at most 900000"):
        outbox.send(TOPIC, "u", b"x" * MAX_MESSAGE_BYTES)


def test_a_closed_outbox_takes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, NOWHERE) as outbox:
        pass
    with pytest.raises(ValueError, match="closed"):
        outbox.send(TOPIC, "u", b"x")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_for_a_sender_that_died_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(segment: Path) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("feature_repo.stream.outbox.read_segment", unreadable)
    with opened(tmp_path, NOWHERE) as outbox:
        outbox.send(TOPIC, "u", b"x")
        outbox._sender.join(10)
        with pytest.raises(RuntimeError, match="nobody sends"):
            outbox.flush(60)


def test_two_processes_never_share_a_directory(tmp_path: Path) -> None:
    with opened(tmp_path, NOWHERE), pytest.raises(OutboxInUse, match="another process"):
        Outbox(tmp_path, NOWHERE)
    Outbox(tmp_path, NOWHERE).close()


def test_a_torn_record_ends_its_segment_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, NOWHERE) as outbox:
        for number in range(3):
            outbox.send(TOPIC, "u", b"%d" % number)
    segments = sorted(tmp_path.glob("*.spool"))  # the sender may have taken the first one meanwhile
    whole = b"".join(segment.read_bytes() for segment in segments)
    segment = segments[0]
    for torn in (whole[:-1], whole[:-8], whole[:-1] + b"x"):
        segment.write_bytes(torn)
        assert [value for _, _, value in read_segment(segment)] == [b"0", b"1"]
    assert sum("is damaged at byte" in r.message for r in caplog.records) == 3


def test_memory_and_segments_stay_bounded(tmp_path: Path) -> None:
    with opened(tmp_path, NOWHERE) as outbox:
        for number in range(3_000):
            assert outbox.send(TOPIC, "u", b"%d " % number + b"x" * 1_000)
    sizes = [f.stat().st_size for f in sorted(tmp_path.glob("*.spool"))]
    assert len(sizes) >= 3
    assert max(sizes) < 1.01 * 2**20
    assert [int(value.split()[0]) for _, _, value in spooled(tmp_path)] == list(range(3_000))


# --------------------------------------------------------------------------------------- with a broker


@pytest.mark.slow
def test_everything_arrives_once_and_in_order_when_nothing_fails(tmp_path: Path, broker: Any) -> None:
    sent = [(f"user-{n % 7}", str(n)) for n in range(20_000)]
    with opened(tmp_path, KafkaSettings(bootstrap=broker.bootstrap)) as outbox:
        for key, value in sent:
            assert outbox.send(TOPIC, key, value.encode())
        assert outbox.flush(60)
        assert (outbox.delivered, outbox.dropped, outbox.refused) == (20_000, 0, 0)
    found = consumed(broker.bootstrap, 20_000)
    for user in {key for key, _ in sent}:
        assert [v for k, v in found if k == user] == [v for k, v in sent if k == user]
    assert not list(tmp_path.glob("*.spool"))


@pytest.mark.slow
def test_a_broker_that_is_down_from_the_start_gets_all_when_it_comes(
    tmp_path: Path, broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    broker.stop()
    with opened(tmp_path, KafkaSettings(bootstrap=broker.bootstrap)) as outbox:
        for number in range(5_000):
            assert outbox.send(TOPIC, f"user-{number % 7}", str(number).encode())
        assert not outbox.flush(1)
        broker.start()
        assert outbox.flush(60)
        assert outbox.dropped == 0
    assert {int(value) for _, value in consumed(broker.bootstrap, 5_000)} == set(range(5_000))
    said = [record.message for record in caplog.records if record.name == "feature_repo.stream.outbox"]
    assert any("refused" in text and "messages wait in" in text for text in said)
    assert said[-1] == "the broker takes messages again"
    assert len(said) < 10


@pytest.mark.slow
def test_a_broker_that_is_frozen_in_the_middle_loses_nothing(tmp_path: Path, broker: Any) -> None:
    import signal

    with opened(tmp_path, KafkaSettings(bootstrap=broker.bootstrap)) as outbox:
        thaw = threading.Timer(2, broker.process.send_signal, [signal.SIGCONT])
        for number in range(30_000):
            assert outbox.send(TOPIC, f"user-{number % 7}", str(number).encode())
            if number == 10_000:
                broker.process.send_signal(signal.SIGSTOP)
                thaw.start()
        assert outbox.flush(90)
    found = consumed(broker.bootstrap, 30_000)
    assert {int(value) for _, value in found} == set(range(30_000))


@pytest.mark.slow
def test_a_broker_that_lost_its_memory_gets_what_it_had_not_confirmed(
    tmp_path: Path, broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows neither our producer nor its sequence numbers any more, for a moment not even the topic."""
    monkeypatch.setattr("feature_repo.stream.outbox.STALL_S", 2.0)
    with opened(tmp_path, KafkaSettings(bootstrap=broker.bootstrap)) as outbox:
        outbox.send(TOPIC, "u", b"before")
        assert outbox.flush(30)
        broker.stop()
        for number in range(5_000):
            assert outbox.send(TOPIC, "u", str(number).encode())
        broker.start()
        assert outbox.flush(60)
    values = [value for _, value in consumed(broker.bootstrap, 5_000)]
    assert list(dict.fromkeys(values)) == [str(number) for number in range(5_000)]


CHILD = """
import sys
from pathlib import Path
from feature_repo.stream.kafka import KafkaSettings
from feature_repo.stream.outbox import Outbox
outbox = Outbox(Path(sys.argv[1]), KafkaSettings(bootstrap=sys.argv[2]))
number = int(sys.argv[3])
while True:
    assert outbox.send("checkout.events", "u%d" % (number % 7), str(number).encode())
    sys.stdout.write("%d\\n" % number)
    number += 1
    if number % 500 == 0:
        sys.stdout.flush()
"""


@pytest.mark.slow
def test_a_sender_that_is_killed_loses_nothing_that_it_had_taken(tmp_path: Path, broker: Any) -> None:
    taken: set[int] = set()
    for begin in (0, 1_000_000, 2_000_000):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), broker.bootstrap, str(begin)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(8_000)]
        child.kill()  # in full run: sending, spooling, deleting segments
        lines += child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        taken |= {int(line) for line in lines if line.endswith(b"\n")}
    assert len(taken) >= 24_000
    with opened(tmp_path, KafkaSettings(bootstrap=broker.bootstrap)) as outbox:
        assert outbox.flush(60)
    # Up to 500 of each child were taken but not yet told; those may come too.
    found = {int(value) for _, value in consumed(broker.bootstrap, len(taken) + 1_500, timeout_s=5)}
    assert taken <= found
