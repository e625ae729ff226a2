"""Repeated, late and poisoned messages and kills: the rows are those of a batch over clean events."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pyarrow as pa
import pytest
import redis
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)

import feature_repo.stream.stream as stream_module
from feature_repo.events import EVENT_SCHEMA
from feature_repo.snapshots import HEARTBEAT, PARTITIONS, unpack_times, user_table
from feature_repo.stream.archive import (
    EVENTS,
    archived_rows,
    read_archive,
    rows_of,
    streamed_name,
    with_version,
    write_segment,
)
from feature_repo.stream.delivery import Delivery
from feature_repo.stream.kafka import KafkaSettings, consumer_config
from feature_repo.stream.online_rows import OnlineRows
from feature_repo.stream.replay_events import Disturbance, replay_events
from feature_repo.stream.stream import OFFSET_BITS, Stream
from feature_repo.toy_shop import toy_dataset
from tests.chaos.letters import dead_letters
from tests.chaos.procs import eventually
from tests.chaos.rows import patient_store
from tests.feature_repo.stream.stream_place import NOWHERE, WAIT_S, Place, same

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def events() -> pd.DataFrame:
    return toy_dataset().events.sort_values("at", kind="stable").iloc[:10_000].reset_index(drop=True)


def table_of(events: pd.DataFrame) -> pa.Table:
    """Events of a data set, as the archive holds them."""
    return with_version(pa.Table.from_pandas(events[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False))


def batch(events: pd.DataFrame) -> dict[str, bytes]:
    return {user: same(row) for user, row in rows_of(table_of(events))}


@pytest.fixture
def place(tmp_path: Path, valkey: tuple[str, Any]) -> Place:
    return Place(tmp_path, valkey[0], NOWHERE)


@pytest.fixture
def live(place: Place, broker: Any) -> Place:
    """A place with a broker."""
    return replace(place, settings=KafkaSettings(bootstrap=broker.bootstrap))


def test_a_hard_stream_gives_the_rows_of_the_clean_batch_and_a_letter_per_poison(
    live: Place, events: pd.DataFrame
) -> None:
    late = events.copy()  # a basket in a hundred arrives a day late
    order = late["at"] + pd.to_timedelta((pd.factorize(late["basket_id"])[0] % 100 == 0) * 24, unit="h")
    late = late.iloc[order.argsort(kind="stable")].reset_index(drop=True)
    with live.streaming() as stream:
        delivery = Delivery(live.settings)
        hard = Disturbance(duplicates=0.05, out_of_order=0.1, poison=0.01)
        sent = replay_events(late, live.settings.events_topic, delivery, 0, hard)
        assert delivery.flush(WAIT_S)
        delivery.close()
        eventually(lambda: stream.counts.events + stream.counts.dead_letters >= sent.messages, WAIT_S)
    assert stream.counts.events == len(events) + sent.duplicates
    wanted = batch(events)
    assert live.online(wanted) == wanted
    assert live.archived() == wanted
    letters = dead_letters(live.settings)
    assert len(letters) == len(dict(letters)) == sent.poison > 50
    assert all(letter["reason"] for _, letter in letters)


KILLED = """
import sys, threading
from pathlib import Path
from feature_repo.stream.kafka import KafkaSettings
from feature_repo.stream.online_rows import OnlineRows
from feature_repo.stream.stream import Stream
from components.data.feast_store import open_feature_store
home, url, bootstrap = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
stream = Stream(home, OnlineRows(lambda: open_feature_store(home, url)), KafkaSettings(bootstrap=bootstrap))
stream.run(threading.Event(), lambda: print("ready", flush=True))
"""


def test_a_stream_killed_at_random_ends_with_the_rows_of_the_batch(live: Place, events: pd.DataFrame) -> None:
    chance, store = random.Random(4), patient_store(live.url)
    for part in range(2):
        some = events.iloc[part * 3_000 : (part + 1) * 3_000]
        first = str(some["user_id"].iloc[0])
        before = store.read(first)
        command = [sys.executable, "-c", KILLED, str(live.home), live.url, live.settings.bootstrap]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                live.produce(some)
                # Joining the group takes seconds, with a dead member many; then it folds, archives, commits.
                eventually(lambda: store.read(first) != before, WAIT_S)  # noqa: B023 - called in this turn
                time.sleep(chance.uniform(0.0, 3.0))
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL
    store.close()
    live.produce(events.iloc[6_000:])
    wanted = batch(events)
    with live.streaming():
        eventually(lambda: live.archived() == wanted, WAIT_S)
    assert live.online(wanted) == wanted


def test_a_dead_store_is_retried_and_a_store_that_lost_its_rows_is_filled_again(
    live: Place, valkey: tuple[str, Any], events: pd.DataFrame
) -> None:
    server = valkey[1]
    few = events.iloc[:2_000]
    wanted = batch(few)
    write_segment(live.archive, table_of(few.iloc[:500]), "base.parquet")
    with live.streaming() as stream:
        eventually(lambda: stream.counts.rebuilt == 1, WAIT_S)
        assert live.online(["user-000"])["user-000"] == batch(few.iloc[:500])["user-000"]
        server.send_signal(signal.SIGSTOP)
        live.produce(few.iloc[500:])
        eventually(lambda: stream.counts.store_failures, WAIT_S)
        server.send_signal(signal.SIGCONT)
        eventually(lambda: stream.counts.events == 1_500, WAIT_S)
        assert live.online(wanted) == wanted
        rebuilt = stream.counts.rebuilt
        live.empty()
        eventually(lambda: stream.counts.rebuilt > rebuilt, WAIT_S)
        # Late answers may have caused that rebuild, and the next one follows.
        eventually(lambda: live.online(wanted) == wanted, WAIT_S)


def read_again(live: Place) -> int:
    """Let a stream have all partitions for a second; return how many events it read."""
    with live.streaming() as stream:
        eventually(lambda: len(stream._consumer.assignment()) == 4, WAIT_S)
        time.sleep(1.0)
        return stream.counts.events


def test_a_broker_that_lost_everything_starts_a_new_generation(
    live: Place, broker: Any, events: pd.DataFrame
) -> None:
    first, second = events.iloc[:1_000], events.iloc[1_000:1_200]
    for part, known in ((first, first), (second, events.iloc[:1_200])):
        live.produce(part)
        wanted = batch(known)
        with live.streaming():
            eventually(lambda wanted=wanted: live.archived() == wanted, WAIT_S)  # type: ignore[misc]
        assert read_again(live) == 0, "nothing is read twice while the log is the same"
        broker.stop()
        broker.start()
    versions = read_archive(live.archive)["version"].to_numpy() >> OFFSET_BITS
    assert set(versions.tolist()) == {0, 1}
    assert live.online(["user-000"])["user-000"] == wanted["user-000"]


def test_a_restored_archive_is_filled_when_the_group_goes_back_to_the_beginning(
    live: Place, events: pd.DataFrame, tmp_path: Path
) -> None:
    """As in the guide, which names the broker's own command; events that are there already count once."""
    backup, first, wanted = tmp_path / "backup", events.iloc[:600], batch(events.iloc[:1_000])
    for part, known in ((first, batch(first)), (events.iloc[600:1_000], wanted)):
        live.produce(part)
        with live.streaming():
            eventually(lambda known=known: live.archived() == known, WAIT_S)  # type: ignore[misc]
        if not backup.exists():
            shutil.copytree(live.archive, backup)
    shutil.rmtree(live.archive)
    shutil.copytree(backup, live.archive)
    assert read_again(live) == 0, "the group is already past what the backup lacks"
    group = Consumer(consumer_config(live.settings, live.settings.group))
    beginning = [TopicPartition(live.settings.events_topic, number, 0) for number in range(4)]
    group.commit(offsets=beginning, asynchronous=False)
    group.close()
    with live.streaming():
        eventually(lambda: live.archived() == wanted, WAIT_S)
    assert live.online(wanted) == wanted


def test_a_publication_keeps_streamed_events(live: Place, events: pd.DataFrame) -> None:
    """A publication fills the store with older rows; the stream detects it and restores its own."""
    few = events.iloc[:1_000]
    with live.streaming() as stream:
        live.produce(few)
        eventually(lambda: stream.counts.events == 1_000, WAIT_S)
        eventually(lambda: (live.state()["events"], live.state()["lag"]) == (1_000, 0), WAIT_S)
        report = live.state()
        assert report["pid"] == os.getpid()
        assert abs(report["updated_at"] - time.time()) < WAIT_S
        live.rows().put(dict(rows_of(table_of(few.iloc[:100]))))
        live.publish()
        eventually(lambda: stream.counts.rebuilt == 2, WAIT_S)
    assert live.online(["user-000"])["user-000"] == batch(few)["user-000"]


def test_two_consumers_share_the_users(live: Place, events: pd.DataFrame) -> None:
    with live.streaming() as one:
        eventually(lambda: len(one._consumer.assignment()) == 4, WAIT_S)
        with live.streaming() as other:
            eventually(
                lambda: len(other._consumer.assignment()) == len(one._consumer.assignment()) == 2, WAIT_S
            )
            live.produce(events.iloc[:4_000])
            eventually(lambda: one.counts.events + other.counts.events >= 4_000, WAIT_S)
            assert min(one.counts.events, other.counts.events) > 0
    wanted = batch(events.iloc[:4_000])
    assert live.online(wanted) == live.archived() == wanted


def test_a_state_that_cannot_be_written_ends_the_stream(live: Place) -> None:
    """A full disk is no store that is away: to try again would stop the folding, with a fresh heartbeat."""
    (live.home / "stream.json").mkdir()
    with pytest.raises(OSError, match=r"Is a directory.*stream\.json"), live.streaming() as stream:
        pass
    assert stream.counts.store_failures == 0


def test_a_stop_while_the_store_is_away_is_reported_once(
    broker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(tmp_path, "redis://127.0.0.1:1/0", KafkaSettings(bootstrap=broker.bootstrap))
    with (
        pytest.raises(ConnectionError, match="stopped while the online store could not be used"),
        place.streaming() as stream,
    ):
        eventually(lambda: stream.counts.store_failures > 3, WAIT_S)
    assert caplog.text.count("the online store cannot be used (ConnectionError)") == 1


def test_a_broker_that_answers_late_at_an_assignment_ends_no_stream(
    live: Place, events: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 2

    class Late(Consumer):  # a client of the broker in all but its first answers
        def committed(self, *arguments: Any, **options: Any) -> Any:
            nonlocal late
            late -= 1
            if late >= 0:
                raise KafkaException(
                    KafkaError(KafkaError._TIMED_OUT if late else KafkaError.NOT_COORDINATOR)
                )
            return super().committed(*arguments, **options)

    monkeypatch.setattr(stream_module, "Consumer", Late)
    live.produce(events.iloc[:100])
    with live.streaming() as stream:
        eventually(lambda: stream.counts.events >= 100, WAIT_S)
    assert late < 0
    assert live.archived() == batch(events.iloc[:100])


def test_a_stop_while_the_broker_is_late_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(tmp_path, None, NOWHERE)  # type: ignore[arg-type]

    class Late:
        def committed(self, *_: Any, **__: Any) -> Any:
            stream._stop.set()
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    partition = TopicPartition("checkout.events", 0)
    stream._assigned(Late(), [partition])  # type: ignore[arg-type]
    stream._stop = threading.Event()
    monkeypatch.setattr(stream._stop, "set", lambda: None)
    monkeypatch.setattr(stream_module, "LATEST_S", -1.0)
    with pytest.raises(KafkaException):
        stream._assigned(Late(), [partition])  # type: ignore[arg-type]


def test_a_group_that_outlived_its_topic_reads_the_new_one_from_its_start(
    tmp_path: Path, events: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it asks the broker it reports, so that `reco up` sees a stream that lives."""
    table = pa.Table.from_pandas(events.iloc[:10][EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False)
    table = table.append_column("version", pa.array(range(10)))
    write_segment(tmp_path / "offline_store" / EVENTS, table, streamed_name(0, 0, 9))
    stream = Stream(tmp_path, None, NOWHERE)  # type: ignore[arg-type]
    reported: list[bool] = []

    def is_at(*_: object) -> bool:  # the broker has another message there
        reported.append((tmp_path / "stream.json").is_file())
        return False

    monkeypatch.setattr(stream, "_is_at", is_at)
    assigned: list[TopicPartition] = []

    known = [TopicPartition("checkout.events", 0, 10)]
    ends = {"get_watermark_offsets": lambda *_, **__: (0, 0)}
    group = Mock(committed=lambda *_, **__: known, assign=assigned.extend, **ends)
    stream._assigned(group, [TopicPartition("checkout.events", 0)])
    assert assigned[0].offset == OFFSET_BEGINNING
    assert stream._began == {0: 0}
    assert stream._generation == {0: 1}
    assert reported == [True]


@pytest.mark.parametrize("committed", [OFFSET_INVALID, 10])
def test_messages_that_were_deleted_by_age_are_no_backlog(tmp_path: Path, committed: int) -> None:
    """A partition without messages gives a consumer no position."""
    stream = Stream(tmp_path, None, NOWHERE)  # type: ignore[arg-type]
    place = TopicPartition("checkout.events", 0)
    stream._consumer = Mock(
        assignment=lambda: [place],
        committed=lambda *_, **__: [TopicPartition("checkout.events", 0, committed)],
        get_watermark_offsets=lambda *_, **__: (10_000, 10_000),
        position=lambda places: places,
    )
    stream._assigned(stream._consumer, [place])
    assert stream._lag() == 0


def said(partition: int, offset: int, user: str) -> Any:
    """A message of the broker."""
    ids = {"event_id": f"{user}-{offset}", "user_id": user, "basket_id": f"b{offset}", "item_id": "milk"}
    value = json.dumps({**ids, "at": "2024-01-01T00:00:00Z"}).encode()
    message = Mock(error=lambda: None, key=user.encode, value=lambda: value, topic=lambda: "checkout.events")
    message.partition.return_value, message.offset.return_value = partition, offset
    return message


def say(stream: Stream, partition: int, offset: int, user: str = "ann") -> None:
    stream._take([said(partition, offset, user)])


def test_rows_that_another_consumer_writes_while_the_store_is_away_for_one_stay(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After minutes the group gives its partitions away: the rows in its memory are old."""
    one, put = place.alone(0), OnlineRows.put
    say(one, 0, 0)

    def away(*_: Any) -> None:
        monkeypatch.setattr(OnlineRows, "put", put)
        say(place.alone(0), 0, 1)
        raise ConnectionError("away")

    monkeypatch.setattr(OnlineRows, "put", away)
    say(one, 0, 2)
    assert place.lines("ann") == [3]


LATE = redis.TimeoutError("late")


@pytest.mark.parametrize(
    ("errors", "lines"),
    [
        ([redis.ConnectionError("broken")], 3),
        ([redis.ReadOnlyError("a replica")], 3),
        ([redis.RedisClusterException("no node")], 3),
        ([LATE, LATE], 3),
        ([LATE], 2),
    ],
)
def test_a_store_that_may_have_failed_over_gets_the_archived_rows_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, errors: list[Exception], lines: int
) -> None:
    """A replica that lags has the name of the store, but not the last rows."""
    stream, put = place.alone(0), OnlineRows.put
    stream._beat()
    say(stream, 0, 0)
    lagging = place.rows().get(["ann"])
    say(stream, 0, 1)
    stream._settle()
    place.rows().put(lagging)
    left = list(errors)

    def failing(*arguments: Any) -> None:
        if left:
            raise left.pop()
        put(*arguments)

    monkeypatch.setattr(OnlineRows, "put", failing)
    say(stream, 0, 2)
    with monkeypatch.context() as joining:  # after minutes the group has taken its partitions
        joining.setattr(stream._consumer, "assignment", list)
        stream._beat()
    stream._beat()
    assert place.lines("ann") == [lines], "a single late answer costs no rebuild"
    rebuilt = stream.counts.rebuilt
    stream._beat()
    assert stream.counts.rebuilt == rebuilt


def test_a_store_that_fails_again_during_the_merge_gets_all_rows(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, put = place.alone(0), OnlineRows.put
    users = [f"user-{number}" for number in range(501)]  # one more than are written at once
    stream._beat()
    for first in (0, 1_000):
        lagging = place.rows().get(users)
        stream._take([said(0, first + number, user) for number, user in enumerate(users)])
    stream._settle()
    place.rows().put(lagging)
    fails = iter([True, False, True])  # at an event, and at the first rows of the merge

    def failing(*arguments: Any) -> None:
        if next(fails, False):
            raise redis.ConnectionError("broken")
        put(*arguments)

    monkeypatch.setattr(OnlineRows, "put", failing)
    say(stream, 0, 2_000)
    stream._insist(stream._beat)
    assert next(fails, None) is None
    assert place.lines(*users) == [2] * 501


def test_partitions_are_given_away_while_the_store_is_away(place: Place) -> None:
    stream = place.alone(0)
    say(stream, 0, 0)
    stream._rows._open = Mock(side_effect=ConnectionError("away"))
    stream._revoked(stream._consumer, [])
    assert not stream._rows.users()


def test_a_store_that_lost_its_rows_gets_the_unarchived_rows_of_another_consumer(place: Place) -> None:
    one, other = place.alone(0), place.alone(1)
    one._beat()
    other._beat()
    say(other, 1, 0)
    other._settle()
    say(other, 1, 1)  # not archived yet
    place.empty()
    one._beat()  # it checks first, and writes all users' rows from the archive
    assert place.lines("ann") == [1]
    other._beat()  # it sees a heartbeat with an unknown name
    assert place.lines("ann") == [2]
    rebuilt = one.counts.rebuilt, other.counts.rebuilt
    one._beat()
    other._beat()
    assert (one.counts.rebuilt, other.counts.rebuilt) == rebuilt, "both know the store now"


def test_a_rebuild_keeps_events_that_another_consumer_writes_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = place.alone(0), place.alone(1)
    one._beat()
    other._beat()
    say(other, 1, 0)
    other._settle()

    def meanwhile(archive: Path, users: Any = None) -> Iterator[Any]:
        made = list(archived_rows(archive, users))
        monkeypatch.undo()
        say(other, 1, 1)
        other._settle()
        return iter(made)

    monkeypatch.setattr(stream_module, "archived_rows", meanwhile)
    place.publish()
    one._beat()
    assert one.counts.rebuilt == 2
    assert place.lines("ann") == [2]


def test_a_stream_reports_while_it_rebuilds(
    place: Place, monkeypatch: pytest.MonkeyPatch, row_of: Callable[..., Any]
) -> None:
    """Else `reco up` takes it for dead, and `reco forget` for stopped."""
    reported: list[bool] = []

    def many(*_: Any) -> Iterator[Any]:
        for number in range(501):  # one more than are written at once
            reported.append((place.home / "stream.json").is_file())
            yield f"user-{number}", row_of([(1.7e9, ["tea"], 1.0, 0.0)])

    monkeypatch.setattr(stream_module, "archived_rows", many)
    place.alone(0)._rebuild()
    assert reported == [False] * 500 + [True]


def test_after_a_publication_a_consumer_writes_the_rows_of_its_own_users_only(place: Place) -> None:
    one, other = place.alone(0), place.alone(1)
    for stream, user in ((one, "ann"), (other, "bob")):
        stream._beat()
        say(stream, int(user == "bob"), 0, user)
        stream._settle()
    place.empty()  # as a publication does: it leaves no heartbeat
    place.publish()
    one._beat()
    assert place.lines("ann", "bob") == [1, 0]
    other._beat()
    assert place.lines("ann", "bob") == [1, 1]


def test_a_publication_stays_open_until_a_consumer_has_partitions(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts again while features are published: first it has no partitions."""
    stream = place.alone(0)
    stream._beat()
    say(stream, 0, 0, "ann")
    stream._settle()
    place.empty()
    place.publish()
    with monkeypatch.context() as joining:
        joining.setattr(stream._consumer, "assignment", list)
        stream._beat()
        assert stream._rows.name() is None, "there is no heartbeat"
    stream._beat()
    assert place.lines("ann") == [1]
    assert stream._rows.name() is not None


@pytest.mark.parametrize("rebuild", [False, True])
def test_a_damaged_row_is_rebuilt_from_the_archive(
    place: Place, rebuild: bool, row_of: Callable[..., Any]
) -> None:
    stream = place.alone(0)
    stream._beat()
    for user in ("ann", "bob"):
        say(stream, 0, 0 if user == "ann" else 1, user)
    rows = place.rows()
    for user in ("ann", "bob", "eve"):  # eve has nothing in the archive
        frame = user_table([(user, row_of([(1.7e9, ["tea"], 1.0, 0.0)]))]).to_pandas()
        rows._write(frame.assign(history=b"\x01\x00" + b"\x00" * 30))  # of format 1
    stream._rows.reopen()
    if rebuild:
        stream._rebuild()
        assert place.lines("ann", "bob") == [1, 1]
    for offset, user in enumerate(("ann", "bob", "eve"), start=2):
        say(stream, 0, offset, user)
    assert place.lines("ann", "bob", "eve") == [2, 2, 1]


def test_an_archive_that_is_full_is_no_store_that_is_away(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = place.alone(0)
    say(stream, 0, 0)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(stream_module, "write_segment", Mock(side_effect=full))
    stream._stop.set()  # else a store that is away is tried for ever
    with pytest.raises(OSError, match="No space left"):
        stream._insist(stream._rebuild)
    assert stream.counts.store_failures == 0


def test_the_heartbeat_stops_while_a_backlog_waits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows lack what waits: they are not complete up to now."""
    stream = place.alone(0)
    stream._beat()
    complete: list[Any] = []
    monkeypatch.setattr(stream._rows, "beat", lambda *row: complete.append(row[2]))
    most = stream_module.TURN_MESSAGES
    for lag in (None, most, most + 1, 10 * most, 0):
        monkeypatch.setattr(stream, "_lag", lambda waits=lag: waits)
        stream._beat()
    assert complete == [[0], [0]], "no partition is complete while its end is unknown"


def test_the_heartbeat_stops_while_the_stream_has_no_partition(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have no right to the group, while the broker answers all other questions."""
    stream, beats = place.alone(0), list[Any]()
    beat = stream._rows.beat

    def noted(*row: Any) -> None:
        beats.append(row[2])
        beat(*row)

    monkeypatch.setattr(stream._rows, "beat", noted)
    with monkeypatch.context() as joining:
        joining.setattr(stream._consumer, "assignment", list)
        stream._beat()
        stream._beat()
        assert beats == [[]], "once, for the name of the new rows"
    stream._beat()
    assert beats == [[], [0]]


def test_the_heartbeat_leaves_out_partitions_that_the_topic_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = place.alone(0)
    stream._rows.beat(time.time() - 3_600, b"one", range(12))
    topics = {"checkout.events": Mock(partitions={0: Mock(), 1: Mock()})}
    broker = Mock(list_topics=lambda *_, **__: Mock(topics=topics))
    monkeypatch.setattr(stream_module, "AdminClient", lambda config: broker)
    stream._ask_broker(Mock(is_set=Mock(side_effect=[False, True])))
    stream._beat()
    store = patient_store(place.url)
    row = store.read(PARTITIONS)
    assert row is not None
    assert set(unpack_times(row.history) or ()) == {0, 1}
    store.close()


def test_the_heartbeat_stops_while_the_broker_is_away_and_resumes_when_it_is_back(
    live: Place, broker: Any
) -> None:
    store = patient_store(live.url)

    def age() -> float:
        beat = store.read(HEARTBEAT)
        return time.time() - (beat.written_at if beat else 0.0)

    with live.streaming() as stream:
        eventually(lambda: age() < 3, WAIT_S)
        broker.stop()
        eventually(lambda: age() > 9, WAIT_S)
        assert live.state()["broker_silent_s"] > 5
        assert time.time() - live.state()["updated_at"] < 5
        live.empty()  # the rows come back all the same, once
        eventually(lambda: stream.counts.rebuilt == 2, WAIT_S)
        eventually(lambda: store.read(HEARTBEAT), WAIT_S)
        assert age() > 5
        broker.start()
        eventually(lambda: age() < 3, WAIT_S)
        assert stream.counts.rebuilt == 2
    store.close()
