"""Facts are written once; an invalid fact becomes a dead letter, and a store that is away is retried."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from feature_repo.stream.dead_letters import Counts, DeadLetters
from feature_repo.stream.fact_stream import FactSink, FactStream
from feature_repo.stream.kafka import KafkaSettings, client_config
from tests.chaos.procs import eventually

pytestmark = pytest.mark.slow
WAIT_S = 60.0
PARTITIONS = 4  # of the topic


class Notes:
    """A store's notes: of all partitions, unless `known` is given."""

    def __init__(self, known: dict[int, float] | None = None) -> None:
        self.known = dict.fromkeys(range(PARTITIONS), 0.0) if known is None else known

    def beats(self) -> dict[int, float]:
        return dict(self.known)

    def beat(self, partitions: list[int], at: float) -> None:
        self.known |= dict.fromkeys(partitions, at)

    def noted(self) -> set[int]:
        return {partition for partition, at in self.known.items() if at}


@contextmanager
def taking(
    settings: KafkaSettings, sink: FactSink, notes: Notes | None = None
) -> Iterator[tuple[Counts, FactStream]]:
    """Run the fact stream in a thread until the block ends."""
    counts, stop = Counts(), threading.Event()
    facts = FactStream(settings, sink, DeadLetters(settings, counts), notes or Notes())

    thread = threading.Thread(target=facts.run, args=(stop,))
    thread.start()
    try:
        yield counts, facts
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert not thread.is_alive()


def send(settings: KafkaSettings, *facts: str) -> None:
    from confluent_kafka import Producer

    producer = Producer(client_config(settings))
    for fact in facts:
        producer.produce(settings.facts_topic, fact, "milk")
    assert producer.flush(WAIT_S) == 0


def keeping(taken: list[bytes]) -> FactSink:
    """Return a store that keeps the messages; poison is no fact."""

    def sink(messages: list[bytes]) -> list[str | None]:
        taken.extend(messages)
        return ["no fact" if message == b"poison" else None for message in messages]

    return sink


def test_each_fact_is_written_once_and_an_invalid_one_becomes_a_dead_letter(broker: Any) -> None:
    settings, taken = KafkaSettings(bootstrap=broker.bootstrap), list[bytes]()

    send(settings, "one", "poison", "two")
    with taking(settings, keeping(taken)) as (counts, facts):
        eventually(lambda: counts.facts == 2, WAIT_S)
        eventually(lambda: counts.dead_letters == 1 and not facts._positions, WAIT_S)
    send(settings, "three")
    with taking(settings, keeping(taken)) as (counts, _):  # resumes at the committed position
        eventually(lambda: counts.facts == 1, WAIT_S)
    assert taken == [b"one", b"poison", b"two", b"three"]


def test_a_store_that_is_away_is_tried_until_it_is_back(broker: Any) -> None:
    settings, away, taken = KafkaSettings(bootstrap=broker.bootstrap), threading.Event(), list[bytes]()
    tried, notes = threading.Event(), Notes()

    def sink(messages: list[bytes]) -> list[str | None]:
        if away.is_set():
            tried.set()
            raise ConnectionError("away")
        taken.extend(messages)
        return [None] * len(messages)

    away.set()
    send(settings, "one")
    with taking(settings, sink):  # it ends although the store is away, and commits nothing
        assert tried.wait(WAIT_S)
    tried.clear()
    with taking(settings, sink, notes) as (counts, _):
        assert tried.wait(WAIT_S)
        send(settings, "two")
        assert len(notes.noted()) < PARTITIONS  # not of the one whose fact is not written
        away.clear()
        eventually(lambda: counts.facts == 2, WAIT_S)
        eventually(lambda: len(notes.noted()) == PARTITIONS, WAIT_S)
    assert taken == [b"one", b"two"]


def test_a_steady_flow_of_facts_is_complete(broker: Any) -> None:
    """The broker reports the end of a partition only where nothing comes for a moment."""
    settings, notes, over = KafkaSettings(bootstrap=broker.bootstrap), Notes(), threading.Event()

    def flow() -> None:
        while not over.wait(0.02):
            send(settings, "one")

    flowing = threading.Thread(target=flow)
    flowing.start()
    try:
        with taking(settings, lambda messages: [None] * len(messages), notes):
            eventually(lambda: len(notes.noted()) == PARTITIONS, WAIT_S)
            since = time.time()
            eventually(lambda: min(notes.known.values()) > since + 3, WAIT_S)
    finally:
        over.set()
        flowing.join()


def test_no_partition_is_noted_while_the_broker_is_away(broker: Any) -> None:
    """The consumer loses its partitions with its session: no note says that they are complete."""
    settings, notes = KafkaSettings(bootstrap=broker.bootstrap), Notes()

    def age() -> float:
        return time.time() - max(notes.known.values())

    with taking(settings, keeping([]), notes):
        eventually(lambda: len(notes.noted()) == PARTITIONS, WAIT_S)
        broker.stop()
        eventually(lambda: age() > 9, WAIT_S)
        broker.start()
        eventually(lambda: age() < 3, WAIT_S)


def test_an_emptied_store_gets_all_facts_again_and_no_dead_letter_twice(broker: Any) -> None:
    settings, taken, notes = KafkaSettings(bootstrap=broker.bootstrap), list[bytes](), Notes()

    send(settings, "one", "poison", "two")
    with taking(settings, keeping(taken), notes) as (counts, _):
        eventually(lambda: len(notes.noted()) == PARTITIONS, WAIT_S)
        taken.clear()
        notes.known.clear()
        eventually(lambda: len(notes.noted()) == PARTITIONS, WAIT_S)
        assert taken == [b"one", b"poison", b"two"]
        send(settings, "poison")
        eventually(lambda: counts.dead_letters == 2, WAIT_S)
        taken.clear()
        notes.known |= dict.fromkeys(range(PARTITIONS), 1.0)  # the store went back to a copy
        eventually(lambda: min(notes.known.values()) > 1, WAIT_S)
        assert taken == [b"one", b"poison", b"two", b"poison"]
        assert counts.dead_letters == 2
    notes.known.clear()  # while no stream runs
    taken.clear()
    with taking(settings, keeping(taken), notes) as (counts, _):
        eventually(lambda: len(notes.noted()) == PARTITIONS, WAIT_S)
        assert taken == [b"one", b"poison", b"two", b"poison"]
        assert counts.dead_letters == 0
