"""The home of a stream with a real store, and the stream that works on it in a thread."""

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import redis
from confluent_kafka import Producer, TopicPartition

from components.data.feast_store import open_feature_store
from feature_repo.aggregates import UserEvents, pack
from feature_repo.stream.archive import (
    EVENTS,
    read_archive,
    rows_of,
)
from feature_repo.stream.kafka import KafkaSettings, client_config
from feature_repo.stream.online_rows import OnlineRows
from feature_repo.stream.replay_events import encode
from feature_repo.stream.stream import Stream

NOWHERE = KafkaSettings(bootstrap="127.0.0.1:1")
WAIT_S = 180.0  # longer than a busy machine needs


def same(row: UserEvents) -> bytes:
    """The row without its version: a batch does not know the message of an event."""
    return pack(replace(row, version=0))


@contextmanager
def streaming(home: Path, url: str, settings: KafkaSettings) -> Iterator[Stream]:
    """Run a stream in a thread until the block ends."""
    stream = Stream(home, OnlineRows(lambda: open_feature_store(home, url)), settings)
    stop, failed = threading.Event(), list[Exception]()

    def work() -> None:
        try:
            stream.run(stop)
        except Exception as error:  # noqa: BLE001 - of another thread: reported below
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield stream
    finally:
        stop.set()
        thread.join(WAIT_S)
        if failed:
            raise failed[0]  # also when the block waited in vain: this is why
    assert not thread.is_alive()


def produce(settings: KafkaSettings, events: pd.DataFrame) -> None:
    producer = Producer(client_config(settings))
    for user, value in encode(events):
        producer.produce(settings.events_topic, value, user)
    assert producer.flush(WAIT_S) == 0


@dataclass(frozen=True)
class Place:
    """The home of a stream, its real store, and its broker if it has one."""

    home: Path
    url: str
    settings: KafkaSettings

    @property
    def archive(self) -> Path:
        return self.home / "offline_store" / EVENTS

    def rows(self) -> OnlineRows:
        return OnlineRows(lambda: open_feature_store(self.home, self.url))

    def online(self, users: Iterable[str]) -> dict[str, bytes]:
        return {user: same(row) for user, row in self.rows().get(list(users)).items()}

    def archived(self) -> dict[str, bytes]:
        return {user: same(row) for user, row in rows_of(read_archive(self.archive))}

    def state(self) -> dict[str, Any]:
        """Return the report of a stream."""
        return dict(json.loads((self.home / "stream.json").read_bytes()))

    def empty(self) -> None:
        """Let the store lose everything."""
        redis.Redis.from_url(self.url).flushall()

    def publish(self) -> None:
        """Note a publication of features, which a stream sees at its next look."""
        (self.home / "online_store.json").write_text("{}")

    def streaming(self) -> AbstractContextManager[Stream]:
        return streaming(self.home, self.url, self.settings)

    def produce(self, events: pd.DataFrame) -> None:
        produce(self.settings, events)

    def alone(self, partition: int) -> Stream:
        """A stream whose group has one partition and no broker; its turns are called by the test."""
        stream = Stream(self.home, self.rows(), NOWHERE)
        stream._consumer = Mock(
            assignment=lambda: [TopicPartition("checkout.events", partition)],
            get_watermark_offsets=lambda *_, **__: (0, 0),
            position=lambda places: places,
        )
        return stream

    def lines(self, *users: str) -> list[int]:
        """Return how many events each user's row holds."""
        found = self.rows().get(list(users))
        return [len(found[user]) for user in users]
