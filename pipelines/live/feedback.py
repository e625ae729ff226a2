"""Prediction log -> the broker: each item that a shopper was shown becomes an impression.

So recommended items, bought or not, reach rows, archive and the next training like any other event.
Segments of the log are noted as sent once the broker has confirmed all of them; after a crash they are sent
again, and their impressions, which have the same ids then, count once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.home import locked, write_json
from components.rollout.manifests import SHADOW
from feature_repo.atomic_files import is_damage
from feature_repo.stream.delivery import Delivery
from feature_repo.stream.kafka import KafkaSettings, create_topics
from feature_repo.stream.replay_events import encode
from serving.prediction_log import RECORD_SCHEMA, is_older
from serving.settings import Settings

log = logging.getLogger(__name__)

FILE = "feedback.json"  # under the home: the segments that were sent
ANSWERS = 500  # sent at a time
POLL_S = 1.0
LONGEST_PAUSE_S = 60.0
NOTED_SEGMENTS = 100  # are sent before that is written down: of a long log the file is long, too
_COLUMNS = pa.schema(
    [RECORD_SCHEMA.field(name) for name in ("request_id", "user_id", "store_id", "at", "item_ids")]
)


@dataclass
class FeedbackCounts:
    """The parts of the log that were handled since the start."""

    segments: int = 0
    answers: int = 0
    impressions: int = 0
    anonymous: int = 0  # answers without a user
    unreadable: int = 0  # segments
    deleted: int = 0  # segments that were too old


def send_impressions(
    settings: Settings,
    kafka: KafkaSettings,
    stop: threading.Event,
    once: bool = False,
    keep_days: int | None = None,
) -> FeedbackCounts:
    """Send the impressions of a home's log, and of new answers, until `stop` is set.

    Args:
        settings: where home and log are.
        kafka: where the broker is.
        stop: when set, the segments not yet sent are left for the next time.
        once: send the log as it is now and return.
        keep_days: delete older segments that were sent, cannot be read, or are of mirrored requests; None
            keeps all.

    Raises:
        ConnectionError: the broker cannot be reached, or refuses.
        Conflict: another process sends the impressions of this home.
        ValueError: the list of sent segments is damaged.
    """
    create_topics(kafka)
    lock = locked(settings.home / "feedback.lock", "sending impressions")
    with lock, contextlib.closing(Delivery(kafka)) as delivery:
        return _send_segments(settings, kafka.events_topic, delivery, stop, once, keep_days)


def _send_segments(
    settings: Settings,
    topic: str,
    delivery: Delivery,
    stop: threading.Event,
    once: bool,
    keep_days: int | None,
) -> FeedbackCounts:
    position_file, counts = settings.home / FILE, FeedbackCounts()
    folder, sent, broken = settings.prediction_log_dir, _read_sent(position_file), set[str]()
    while not stop.is_set():
        began, noted = time.monotonic(), counts.segments
        segments = sorted(folder.glob("*.parquet"))
        listed_s = time.monotonic() - began  # a folder of many pods is slow to list
        try:
            for segment in segments:
                if stop.is_set():
                    return counts
                if segment.name in sent or segment.name in broken:
                    continue
                if (answers := _read(segment, broken)) is None:
                    continue
                if not _send(answers, topic, delivery, counts, stop):
                    return counts
                sent.add(segment.name)
                counts.segments += 1
                if counts.segments - noted >= NOTED_SEGMENTS:
                    noted = _note(position_file, sent, segments, counts)
        finally:
            counts.unreadable = len(broken)
            if counts.segments > noted:
                _note(position_file, sent, segments, counts)
        if keep_days is not None:
            done = [one for one in segments if one.name in sent or one.name in broken]
            counts.deleted += _delete_old([*done, *(folder / SHADOW).glob("*.parquet")], keep_days)
        if once:
            break
        stop.wait(min(max(POLL_S, 10 * listed_s), LONGEST_PAUSE_S))
    return counts


def _read(segment: Path, broken: set[str]) -> pa.Table | None:
    """Return a segment's answers; None if the disk does not give them now, or they are damaged."""
    try:
        return pq.read_table(segment, columns=_COLUMNS.names).cast(_COLUMNS)
    except (pa.ArrowException, ValueError, OSError) as error:
        if is_damage(error):
            log.warning("%s is left out, it cannot be read: %s", segment.name, error)
            broken.add(segment.name)
        else:
            log.warning("%s is read again later: %s", segment.name, error)
    return None


def _note(file: Path, sent: set[str], segments: Sequence[Path], counts: FeedbackCounts) -> int:
    """Write which of the present segments were sent; return how many were when it was written."""
    write_json(file, {"sent": sorted(sent & {segment.name for segment in segments})})
    return counts.segments


def _delete_old(segments: Sequence[Path], keep_days: int) -> int:
    """Delete the segments that are older than so many days; return their number."""
    since = datetime.now(UTC) - timedelta(days=keep_days)
    old = [segment for segment in segments if is_older(segment, since)]
    for segment in old:
        segment.unlink(missing_ok=True)
    return len(old)


def impressions_of(answers: pa.Table) -> pd.DataFrame:
    """Return the impressions of logged answers, with columns of EVENT_SCHEMA.

    An impression's basket is the request that it answers, its time the request's. The same item in two
    records of one request and user is one impression.
    """
    known = answers.filter(pc.is_valid(answers["user_id"]))
    shown = known["item_ids"].combine_chunks()
    one = known.select(["request_id", "user_id", "store_id", "at"]).take(pc.list_parent_indices(shown))
    frame: pd.DataFrame = one.rename_columns(["basket_id", "user_id", "store_id", "at"]).to_pandas()
    frame["item_id"] = pc.list_flatten(shown).to_numpy(zero_copy_only=False)
    frame["event_type"] = "impression"
    names = zip(frame["basket_id"], frame["user_id"], frame["item_id"], strict=True)
    frame["event_id"] = [
        f"shown-{hashlib.blake2b(repr(name).encode(), digest_size=16).hexdigest()}" for name in names
    ]
    return frame


def _read_sent(noted: Path) -> set[str]:
    if not noted.is_file():
        return set()
    try:
        return msgspec.json.decode(noted.read_bytes(), type=dict[str, set[str]])["sent"]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f'{noted} is damaged, expected {{"sent": [names of segments]}}: remove it, and all that the log '
            "holds is sent again and counts once"
        ) from error


def _send(
    answers: pa.Table, topic: str, delivery: Delivery, counts: FeedbackCounts, stop: threading.Event
) -> bool:
    """Send the impressions of one segment; False if stopped before the broker confirmed all of them."""
    for first in range(0, len(answers), ANSWERS):
        part = answers.slice(first, ANSWERS)
        impressions = impressions_of(part)
        for user, message in encode(impressions):
            delivery.send(topic, user, message)
        while not delivery.flush(POLL_S):
            if stop.is_set():
                return False
        counts.answers += len(part)
        counts.anonymous += part["user_id"].null_count
        counts.impressions += len(impressions)
    return True
