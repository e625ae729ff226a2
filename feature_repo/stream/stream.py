"""Event stream (Kafka) -> rows of the online store, segments of the archive, dead letters.

A turn checks messages, folds each user's events into the user's row and writes the rows. Every few seconds
the events go to the archive, and only then is the group's position committed. A kill at any moment loses
nothing: uncommitted messages come again, and a row that holds an event already does not change.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import secrets
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import redis
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from feature_repo.aggregates import BATCH, UserEvents, fold, no_events
from feature_repo.atomic_files import write_file
from feature_repo.stream.archive import (
    EVENTS,
    archived_rows,
    last_events,
    merge_segments,
    read_archive,
    rows_of,
    streamed_name,
    streamed_users,
    write_segment,
)
from feature_repo.stream.dead_letters import Counts, DeadLetters, place_of
from feature_repo.stream.erasure import Forgotten, stamp
from feature_repo.stream.kafka import KafkaSettings, client_config, consumer_config
from feature_repo.stream.messages import Event, MessageInvalid, events_table, parse_event, parse_id
from feature_repo.stream.online_rows import OnlineRows, RowsDamaged
from feature_repo.stream.publication import FILE as PUBLICATION

log = logging.getLogger(__name__)

TURN_MESSAGES = 5_000
TURN_S = 0.05  # how long a turn waits for messages
ARCHIVE_S = 2.0  # how often the archive gets segments and the position is committed
ARCHIVE_EVENTS = 100_000  # or when this many wait
BEAT_S = 1.0
ASK_S = 1.0  # interval and timeout of the requests that check the broker
SILENT_S = 5.0  # the broker's silence after which the heartbeat stops
RETRY_S = 0.5
PROBE_S = 3.0  # how long the broker may take to show one message
LATE_S = 10.0  # timeout of a question at an assignment
LATEST_S = 60.0  # of all questions at one; the group waits five minutes for a member
OFFSET_BITS = 48  # of a version; the bits above count how often the topic was made again
REDIS_ERRORS = (redis.RedisError, redis.RedisClusterException)
STORE_ERRORS = (*REDIS_ERRORS, sqlite3.Error, OSError)


class Stream:
    """One consumer of the group: it owns some partitions and the rows of all users in them."""

    def __init__(self, home: Path, rows: OnlineRows, settings: KafkaSettings) -> None:
        """Prepare a consumer, which connects in `run`; `home` is the folder of all state."""
        self.counts = Counts()
        self.letters = DeadLetters(settings, self.counts)
        self._home, self._archive = home, home / "offline_store" / EVENTS
        self._rows, self._settings = rows, settings
        # Folded, but not archived: events and versions of each partition, and the positions behind them.
        self._waiting: defaultdict[int, list[tuple[Event, int]]] = defaultdict(list)
        self._positions: dict[int, int] = {}
        self._generation: dict[int, int] = {}
        self._began: dict[int, int] = {}  # where reading begins in each assigned partition
        self._published = self._publication()
        self._forgotten = Forgotten()
        self._forgotten_stamp: tuple[int, int] | None = None
        self._name: bytes | None = None  # the last seen name in the store's heartbeat
        self._unsure: set[str] = set()  # users whose last rows a failover of the store may have lost
        self._answered_at = time.monotonic()  # the caller has just created the topics
        self._partitions: set[int] = set()  # of the topic, as the broker last said
        self._archived_at = self._beat_at = time.monotonic()
        self._consumer = Consumer(consumer_config(settings, settings.group), logger=log)
        self._stop, self._late_until = threading.Event(), 0.0

    def run(self, stop: threading.Event, on_ready: Callable[[], None] | None = None) -> None:
        """Fold until `stop` is set, then archive and commit the folded events."""
        self._stop = stop
        asking = threading.Thread(target=self._ask_broker, args=(over := threading.Event(),), daemon=True)
        asking.start()
        try:
            self._run(on_ready)
        finally:
            over.set()
            asking.join()

    def _run(self, on_ready: Callable[[], None] | None) -> None:
        self._insist(self._beat)
        self._report()
        self._consumer.subscribe(
            [self._settings.events_topic], on_assign=self._assigned, on_revoke=self._revoked
        )
        if on_ready is not None:
            on_ready()
        try:
            while not self._stop.is_set():
                self._turn()
        except BaseException:
            try:
                self._settle()
            except OSError as error:  # the first error says more
                log.warning("the last events could not be archived and will be read again: %s", error)
            raise
        else:
            self._settle()
        finally:
            if self._consumer.assignment():
                self._consumer.close()
            # Without an assignment it is still joining the group. Some brokers never recover from a member
            # that leaves at this point; a silent member only expires with its session.

    def _turn(self) -> None:
        """Handle new messages, and archive and send the heartbeat when they are due."""
        if messages := self._consumer.consume(TURN_MESSAGES, TURN_S):
            self._take(messages)
        now = time.monotonic()
        waiting = sum(map(len, self._waiting.values()))
        if now - self._archived_at >= ARCHIVE_S or waiting >= ARCHIVE_EVENTS:
            self._settle()
        if now - self._beat_at >= BEAT_S:
            # Two processes in step would overwrite each other's times.
            self._beat_at = now - random.uniform(0, BEAT_S / 2)
            self._forget()
            self._insist(self._beat)
            self._report()

    # ------------------------------------------------------------------------------------------- messages

    def _take(self, messages: list[Message]) -> None:
        taken: list[tuple[int, Event, int]] = []  # partition, event, version
        positions: dict[int, int] = {}
        now = time.time()
        self._forget()
        for message in messages:
            if error := message.error():
                log.warning("the broker says: %s", error.str())
                continue
            _, partition, offset = place_of(message)
            positions[partition] = offset + 1
            try:
                event = parse_event(message.key(), message.value(), now)
            except MessageInvalid as error:
                self.letters.bury(message, str(error))
                continue
            user_id, at = event[2], event[5]
            if self._forgotten.covers(user_id, at):
                self.counts.forgotten += 1
                continue
            taken.append((partition, event, self._generation.get(partition, 0) << OFFSET_BITS | offset))
        if taken:
            self._insist(lambda: self._fold(taken))
        for partition, event, version in taken:
            self._waiting[partition].append((event, version))
            self.counts.events += 1
        # Only now: events that were not folded must come again.
        self._positions |= positions

    def _fold(self, taken: list[tuple[int, Event, int]]) -> None:
        """Fold events into their users' rows."""
        events, versions = [event for _, event, _ in taken], [version for _, _, version in taken]
        new = dict(rows_of(events_table(events, versions)))
        known = self._known(new)
        changed = {user: fold(known[user], more) for user, more in new.items()}
        self._put({user: row for user, row in changed.items() if row is not known[user]})

    def _known(self, users: Collection[str]) -> dict[str, UserEvents]:
        """Return users' rows; a row that is damaged or of an older format is rebuilt from the archive."""
        try:
            return self._rows.get(users)
        except RowsDamaged as error:
            log.warning("%s: they are rebuilt from the archive", error)
            self._settle()
            made = dict(rows_of(read_archive(self._archive, error.users)))
            rows = {user: made.get(user, no_events()) for user in error.users}
            self._rows.put({user: self._forgotten.cut(user, row) for user, row in rows.items()})
            return self._rows.get(users)

    def _put(self, rows: dict[str, UserEvents]) -> None:
        """Write rows without forgotten events, also of users who were forgotten while the rows were made."""
        self._forget()
        cut = {user: self._forgotten.cut(user, row) for user, row in rows.items()}
        self._rows.put({user: row for user, row in cut.items() if len(row)})

    def _kept(self, events: pa.Table) -> pa.Table:
        """Leave out forgotten events, also of users who were forgotten a moment ago."""
        self._forget()
        return self._forgotten.without(events)

    def _forget(self) -> None:
        """Load a changed list of forgotten users, and remove their rows from memory."""
        found = stamp(self._home)
        if found != self._forgotten_stamp:
            self._forgotten, self._forgotten_stamp = Forgotten.load(self._home), found
            self._rows.drop([user for user in self._rows.users() if self._forgotten.until(user) is not None])

    # ----------------------------------------------------------------------------------- archive and position

    def _settle(self) -> None:
        """Archive the folded events, flush the dead letters, then commit: this order survives any crash."""
        self._archived_at = time.monotonic()
        for partition in list(self._waiting):
            waiting, versions = map(list, zip(*self._waiting[partition], strict=True))
            events = self._kept(events_table(waiting, versions))
            if len(events):
                first, last = (end(events["version"].to_pylist()) for end in (min, max))
                write_segment(self._archive, events, streamed_name(partition, first, last))
            del self._waiting[partition]
            merge_segments(self._archive, partition, self._kept)
        self.letters.commit(self._consumer, self._settings.events_topic, self._positions)

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Resume at the group's position; read a new log of the broker from its beginning."""
        self._late_until = time.monotonic() + LATEST_S
        try:
            self._resume(consumer, partitions)
        except KafkaException:
            if not self._stop.is_set():
                raise

    def _resume(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        newest = last_events(self._archive, {one.partition for one in partitions})
        places = self._answer(lambda: consumer.committed(partitions, timeout=LATE_S))
        committed = {one.partition: one.offset for one in places}
        self._began = {}
        for place in partitions:
            # What was deleted by age does not wait, and without a message nothing else says so.
            oldest, _ = self._answer(partial(consumer.get_watermark_offsets, place, timeout=LATE_S))
            self._began[place.partition] = max(committed[place.partition], oldest)
            version, event_id = newest.get(place.partition, (BATCH, ""))
            if version < 0:
                continue
            generation, offset = version >> OFFSET_BITS, version & ((1 << OFFSET_BITS) - 1)
            self._report()  # the broker may show its message after PROBE_S only, and `reco up` looks at this
            if self._is_at(place, offset, event_id):
                if committed[place.partition] < 0:
                    place.offset = offset + 1  # the broker lost the group's position, not the messages
                    self._began[place.partition] = max(place.offset, oldest)
            else:
                generation += 1
                place.offset = OFFSET_BEGINNING  # the group's position belongs to the old log
                self._began[place.partition] = oldest
                log.warning(
                    "partition %d is read from its beginning: the broker lost the old log", place.partition
                )
            self._generation[place.partition] = generation
        consumer.assign(partitions)

    def _is_at(self, place: TopicPartition, offset: int, event_id: str) -> bool:
        """Return whether the broker's log is the one that had this event at this offset.

        The log's end does not show it: a broker may report it too low, and a new log may have grown past it.
        """
        # A broker's rights may name this group alone. Without a subscription the reader does not join it.
        reader = Consumer(consumer_config(self._settings, self._settings.group), logger=log)
        try:
            reader.assign([TopicPartition(place.topic, place.partition, offset)])
            message = reader.poll(PROBE_S)
            if message is None or message.error():
                # No message: the log is empty and new, or all of it was deleted by age.
                ends = self._answer(lambda: reader.get_watermark_offsets(place, timeout=LATE_S))
                return ends[1] > offset
            found = place_of(message)[2]
            if found != offset:
                return found > offset  # the message was deleted by age; a shorter log is a new one
            return parse_id(message.value()) == event_id
        finally:
            reader.close()

    def _answer(self, ask: Callable[[], Any]) -> Any:
        """Return the broker's answer; ask again while it is late, as after a change of the group."""
        while True:
            try:
                return ask()
            except KafkaException as error:
                if self._stop.is_set() or time.monotonic() > self._late_until:
                    raise
                log.warning("the broker did not answer (%s): asking again", error.args[0].str())
                self._stop.wait(RETRY_S)

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Settle, and drop all rows from memory: another consumer writes some of them from now on."""
        self._settle()
        self._rows.drop(self._rows.users())

    # ------------------------------------------------------------------------------------------- the rest

    def _rebuild(self, partitions: Collection[int] | None = None) -> None:
        """Merge the archive into the stored rows: of all users, or of users with events in some partitions.

        A row never shrinks: events that another consumer folded meanwhile stay.
        """
        self._settle()
        self._rows.reopen()
        self._merge(None if partitions is None else streamed_users(self._archive, partitions))

    def _merge(self, users: Collection[str] | None) -> None:
        made, count = archived_rows(self._archive, users), 0
        while rows := dict(islice(made, 500)):
            stored = self._known(rows)
            self._put({user: fold(row, stored[user]) for user, row in rows.items()})
            count += len(rows)
            self._report()  # it may take minutes, and `reco up` and `reco forget` look at this
        self.counts.rebuilt += 1
        log.info("%d rows written from the archive", count)

    def _publication(self) -> tuple[int, int] | None:
        """Return a stamp that changes when `publish_features` fills the stores."""
        return stamp(self._home, PUBLICATION)

    def _beat(self) -> None:
        """Write the heartbeat into the online store, for the endpoint; it stops while a backlog may wait."""
        name = self._look_after_rows()
        silent_s = time.monotonic() - self._answered_at
        lag = self._lag()
        # Without a partition, or just after an assignment, an unknown backlog may wait.
        is_fresh = silent_s < SILENT_S and lag is not None and lag <= TURN_MESSAGES
        if name is not None and (name != self._name or is_fresh):
            own = [one.partition for one in self._consumer.assignment()] if is_fresh else []
            until = time.time() - silent_s  # rows are complete up to this time
            self._rows.beat(until, name, own, self._partitions)
            self._name = name

    def _report(self) -> None:
        """Write the state for people. An error ends the stream: a full disk is no store that is away."""
        state = {
            "updated_at": time.time(),
            "pid": os.getpid(),
            "lag": self._lag(),
            "broker_silent_s": round(time.monotonic() - self._answered_at, 1),
            **vars(self.counts),
        }
        write_file(self._home / "stream.json", json.dumps(state))

    def _look_after_rows(self) -> bytes | None:
        """Restore rows that the store lost or another process overwrote; return the heartbeat's new name.

        None after a publication while no partition is assigned: the users of this consumer are not known yet.
        """
        publication = self._publication()
        published = publication != self._published
        if published:
            self._rows.reopen()  # the store may be another file now
        name = self._rows.name()
        own = [one.partition for one in self._consumer.assignment()]
        if name is None and published and not own:
            return None
        if name in (None, self._name) and (name is None) != published:
            # The store lost its rows, or a publication (which removes the heartbeat) went to another store.
            self._rebuild()
            if own and self._rows.name() != name:
                self._rebuild(own)  # another consumer wrote all users' rows at the same time
            name = None
        elif name != self._name and own:
            # Another process wrote all users' rows, without the events that wait in this consumer.
            self._rebuild(own)
        elif self._unsure:
            unsure = set(self._unsure)
            self._settle()
            self._merge(unsure)
            self._unsure -= unsure  # only now: the store may fail again meanwhile
        self._published = publication
        return name or secrets.token_hex(8).encode()

    def _ask_broker(self, over: threading.Event) -> None:
        """Record when the broker last answered, which the consumer does not report, and the partitions."""
        # log_level 0: the consumer logs the broker's errors already.
        broker = AdminClient({**client_config(self._settings), "log_level": "0"})
        name = self._settings.events_topic
        while not over.is_set():
            with contextlib.suppress(KafkaException):
                topic = broker.list_topics(name, timeout=ASK_S).topics.get(name)
                self._partitions = set(topic.partitions) if topic else set()
                self._answered_at = time.monotonic()
            over.wait(ASK_S)

    def _lag(self) -> int | None:
        """Return how many messages wait; None while the end of a partition is unknown."""
        try:
            assigned = self._consumer.assignment()
            ends = [self._consumer.get_watermark_offsets(one, cached=True)[1] for one in assigned]
            places = self._consumer.position(assigned)
        except KafkaException:
            return None
        if not assigned or min(ends) < 0:
            return None
        # Without a position no message of the partition was read; an end below the position is stale.
        began = [self._began.get(one.partition, 0) for one in places]
        at = [one.offset if one.offset >= 0 else first for one, first in zip(places, began, strict=True)]
        return sum(max(end - offset, 0) for end, offset in zip(ends, at, strict=True))

    def _insist(self, act: Callable[[], Any]) -> Any:
        """Retry an action on the store until it works: rows get stale meanwhile, but no event is lost.

        Nothing is consumed meanwhile. After minutes the group gives the partitions to another consumer, which
        writes their users' rows: so all rows are read again.
        """
        said, held = "", set[str]()
        while True:
            try:
                return act()
            except STORE_ERRORS as error:
                if getattr(error, "errno", None) == errno.ENOSPC:
                    raise  # the archive's or the registry's: a full disk is no store that is away
                # After a failover a replica answers, without the last rows, which are those in memory:
                # `_look_after_rows` merges them again. A single late answer is no failover.
                is_late = isinstance(error, redis.TimeoutError) and not said
                held.update(self._rows.users())
                if isinstance(error, REDIS_ERRORS) and not is_late:
                    self._unsure |= held
                self.counts.store_failures += 1
                if (why := type(error).__name__) != said:
                    said = why
                    log.warning(
                        "the online store cannot be used (%s): trying until it can; RECO_STORE_URL and "
                        "RECO_STORE_PASSWORD say where it is",
                        why,
                    )
                if self._stop.is_set():
                    raise ConnectionError(
                        f"stopped while the online store could not be used ({why}): events that were not "
                        "folded come again"
                    ) from error
                self._rows.drop(self._rows.users())
                # Before the next heartbeat comes a `consume`, which reports lost partitions.
                self._beat_at = self._archived_at = time.monotonic()
                self._stop.wait(RETRY_S)
