"""Shown items come back as impressions: each exactly once, even if a process ends in between."""

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from components.rollout.manifests import SHADOW
from feature_repo.stream.kafka import KafkaSettings, client_config
from feature_repo.stream.messages import parse_event
from pipelines.live import feedback
from pipelines.live.feedback import FeedbackCounts, impressions_of, send_impressions
from serving.prediction_log import STAMP, Record, records_to_table
from serving.schemas import Recommendation, Request, Response
from serving.settings import Settings
from tests.chaos.procs import eventually

AT = 1_709_283_600.25  # 2024-03-01T09:00:00.25Z


def answer(request_id: str, user: str | None, *items: str, store: str | None = None) -> Record:
    shown = tuple(Recommendation(item, 0.5, "personal", "for you") for item in items)
    asked = Request(("milk",), AT, user, store, request_id=request_id)
    return Record(asked, Response(request_id, shown, "bundle"), np.zeros((len(items), 1)), AT + 0.01)


def write(settings: Settings, name: str, *answers: Record) -> Path:
    settings.prediction_log_dir.mkdir(exist_ok=True)
    file = settings.prediction_log_dir / name
    pq.write_table(records_to_table(list(answers), ["f"]), file)
    return file


def messages(settings: KafkaSettings, expected: int) -> list[tuple[Any, ...]]:
    """All messages of the topic as events, by item; fails if there are not so many."""
    topic = settings.events_topic
    with Consumer({**client_config(settings), "group.id": "reader", "fetch.wait.max.ms": 50}) as reader:
        partitions = reader.list_topics(topic, timeout=60).topics[topic].partitions
        places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions]
        assert sum(reader.get_watermark_offsets(place)[1] for place in places) == expected
        reader.assign(places)  # a new group that subscribes waits for seconds
        found: list[Any] = []

        def is_complete() -> bool:
            found.extend(one for one in reader.consume(100, 0.1) if not one.error())
            return len(found) >= expected

        eventually(is_complete)
    return sorted((parse_event(one.key(), one.value(), AT) for one in found), key=lambda event: event[4])


def sent(settings: Settings, kafka: KafkaSettings) -> FeedbackCounts:
    return send_impressions(settings, kafka, threading.Event(), once=True)


def test_an_answer_is_an_impression_of_each_of_its_items() -> None:
    records = [answer("r1", "ann", "tea", "jam", store="7"), answer("r2", None, "tea"), answer("r3", "bob")]
    found = impressions_of(records_to_table(records, ["f"]))
    assert found.drop(columns=["event_id", "at"]).to_dict("records") == [
        {"basket_id": "r1", "user_id": "ann", "store_id": "7", "item_id": item, "event_type": "impression"}
        for item in ("tea", "jam")
    ]
    assert {at.timestamp() for at in found["at"]} == {AT}
    assert len(impressions_of(records_to_table([], ["f"]))) == 0


def test_impression_ids_are_distinct_and_stable() -> None:
    long = "x" * 128
    records = [
        answer(request, user, *items)
        for request, user, items in (
            ("r1", "ann", ("tea", "jam")),
            ("r2", "ann", ("tea",)),
            ("r1", "bob", ("tea",)),
            (long, long, (long,)),
        )
    ]
    first, again = (impressions_of(records_to_table(records, ["f"])) for _ in range(2))
    assert first["event_id"].nunique() == 5
    assert first["event_id"].str.len().max() <= 128
    assert first.equals(again)


class NoUnion(set[str]):
    """A long log has ten thousands of names: to join sets for each segment takes seconds."""

    def __or__(self, other: object) -> NoReturn:
        raise AssertionError("the sets were joined")


class StoppingDelivery:
    """A broker that takes everything, while the command is asked to stop."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def send(self, *message: object) -> None:
        self.stop.set()

    def flush(self, timeout_s: float) -> bool:
        return True


def test_a_stop_leaves_the_next_segments_and_known_ones_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, stop = Settings(home=tmp_path), threading.Event()
    monkeypatch.setattr(feedback, "_read_sent", lambda file: NoUnion({"1.parquet"}))
    for number in (1, 2, 3):
        write(settings, f"{number}.parquet", answer(f"r{number}", "ann", "tea"))
    delivery: Any = StoppingDelivery(stop)
    counts = feedback._send_segments(settings, "events", delivery, stop, once=True, keep_days=None)
    assert counts == FeedbackCounts(segments=1, answers=1, impressions=1)
    assert json.loads((tmp_path / "feedback.json").read_bytes()) == {"sent": ["1.parquet", "2.parquet"]}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"sent": null}', b'{"sent": [[1]]}', b"{}", b'{"sent": ["\xff"]}']
)
def test_a_damaged_progress_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "feedback.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"feedback.json is damaged, expected .*: remove it"):
        feedback._read_sent(tmp_path / "feedback.json")


@pytest.mark.slow
def test_each_segment_is_sent_once(broker: Any, tmp_path: Path) -> None:
    settings, kafka = Settings(home=tmp_path), KafkaSettings(bootstrap=broker.bootstrap)
    assert sent(settings, kafka) == FeedbackCounts(), "no log yet"
    write(settings, "1.parquet", answer("r1", "ann", "tea", "jam"), answer("r2", None, "tea"))
    assert sent(settings, kafka) == FeedbackCounts(segments=1, answers=2, impressions=2, anonymous=1)
    assert sent(settings, kafka) == FeedbackCounts()
    second = write(settings, "2.parquet", answer("r3", "bob", "oil"))
    assert sent(settings, kafka) == FeedbackCounts(segments=1, answers=1, impressions=1)
    found = messages(kafka, 3)
    assert [(event[1], event[2], event[3], event[4], event[5]) for event in found] == [
        ("impression", user, request, item, round(AT * 1e6))
        for user, request, item in (("ann", "r1", "jam"), ("bob", "r3", "oil"), ("ann", "r1", "tea"))
    ]
    second.unlink()
    write(settings, "3.parquet", answer("r4", "bob", "oil"))
    sent(settings, kafka)
    assert json.loads((tmp_path / "feedback.json").read_bytes()) == {"sent": ["1.parquet", "3.parquet"]}


@pytest.mark.slow
def test_an_unreadable_segment_does_not_stop_the_others(
    broker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, kafka = Settings(home=tmp_path), KafkaSettings(bootstrap=broker.bootstrap)
    write(settings, "1.parquet", answer("r1", "ann", "tea")).write_bytes(b"PAR1 and no more")
    flipped = write(settings, "2.parquet", *[answer(f"r{n}", "ann", "tea") for n in range(500)])
    damaged = bytearray(flipped.read_bytes())
    damaged[4:200] = bytes(196)  # the footer stays
    flipped.write_bytes(damaged)
    foreign = {name: ["text"] for name in ("request_id", "user_id", "store_id", "at", "item_ids")}
    pq.write_table(pa.table(foreign), settings.prediction_log_dir / "3.parquet")
    write(settings, "4.parquet", answer("r2", "ann", "tea"))
    assert sent(settings, kafka) == FeedbackCounts(segments=1, answers=1, impressions=1, unreadable=3)
    for number in (1, 2, 3):
        assert f"{number}.parquet is left out, it cannot be read" in caplog.text
    messages(kafka, 1)


@pytest.mark.slow
def test_an_unconfirmed_segment_is_not_recorded_as_sent(broker: Any, tmp_path: Path) -> None:
    settings, kafka = Settings(home=tmp_path), KafkaSettings(bootstrap=broker.bootstrap)
    stop, counts, noted = threading.Event(), list[FeedbackCounts](), tmp_path / "feedback.json"

    def until_noted(name: str) -> None:
        def is_noted() -> bool:
            assert sender.is_alive()
            return noted.is_file() and name in noted.read_text()

        eventually(is_noted)

    sender = threading.Thread(target=lambda: counts.append(send_impressions(settings, kafka, stop)))
    write(settings, "1.parquet", answer("r1", "ann", "tea"))
    sender.start()
    until_noted("1.parquet")
    broker.stop()
    write(settings, "2.parquet", answer("r2", "ann", "oil"))
    stop.wait(3)
    assert "2.parquet" not in noted.read_text()
    broker.start()
    until_noted("2.parquet")
    stop.set()
    sender.join(30)
    assert counts == [FeedbackCounts(segments=2, answers=2, impressions=2)]
    assert [event[4] for event in messages(kafka, 1)] == ["oil"], "the broker in memory forgot the first"


@pytest.mark.slow
def test_old_segments_are_deleted_once_they_were_sent(broker: Any, tmp_path: Path) -> None:
    settings, kafka = Settings(home=tmp_path), KafkaSettings(bootstrap=broker.bootstrap)
    old, new = "20240301T090000-a.parquet", f"{datetime.now(UTC):{STAMP}}-a.parquet"
    for name in (old, new, "of-another-tool.parquet"):
        write(settings, name, answer(name, "ann", "tea"))
    counts = send_impressions(settings, kafka, threading.Event(), once=True)
    assert (counts.segments, counts.deleted) == (3, 0), "without --keep-days all stay"
    folder = settings.prediction_log_dir
    (folder / "20240301T091500-b.parquet").write_bytes(b"damaged")
    (folder / SHADOW).mkdir()
    mirrored = write(settings, f"{SHADOW}/{old}", answer("r", "ann", "jam"))
    broken_now = folder / f"{datetime.now(UTC):{STAMP}}-b.parquet"
    broken_now.write_bytes(b"damaged")
    counts = send_impressions(settings, kafka, threading.Event(), once=True, keep_days=64)
    assert (counts.segments, counts.deleted, counts.unreadable) == (0, 3, 2)
    assert not mirrored.exists()
    assert {file.name for file in folder.glob("*.parquet")} == {
        new,
        "of-another-tool.parquet",
        broken_now.name,
    }
