"""The logged features equal those of the archive; otherwise the first feature that differs is named."""

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from feature_repo.aggregates import fold, no_events, pack
from feature_repo.schema import DENSE_NAMES
from feature_repo.stream.archive import EVENTS, read_archive, rows_of, streamed_name, write_segment
from monitoring.skew import describe, replay, replay_home
from serving.answer.recommender import Recommender
from serving.prediction_log import Record, read_log, records_to_table
from serving.release.bundle import load_bundle
from serving.schemas import Request
from serving.stores.online_features import MemoryStore, UserRow
from tests.feature_repo.stream.published_shop import write_note

REQUESTS = 1_000


@pytest.fixture(scope="module")
def served(toy_line: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which 1,000 requests were answered while events came in, late and out of order."""
    home = tmp_path_factory.mktemp("served")
    cut = datetime.fromisoformat((toy_line / "cut.txt").read_text())
    archive = read_archive(toy_line / "features" / EVENTS)
    late = pc.greater_equal(archive["at"], pa.scalar(cut))
    base, stream = archive.filter(pc.invert(late)), archive.filter(late)
    order = np.random.default_rng(0).permutation(len(stream))
    order = order[np.argsort(order // 300, kind="stable")]  # out of order within 300
    stream = stream.take(order)
    versions = pa.array(np.arange(len(stream), dtype=np.int64))
    stream = stream.set_column(stream.schema.get_field_index("version"), "version", versions)
    write_segment(home / "offline_store" / EVENTS, base, "base.parquet")
    half = len(stream) // 2
    for first, part in ((0, stream.slice(0, half)), (half, stream.slice(half))):
        name = streamed_name(0, first, first + len(part) - 1)
        write_segment(home / "offline_store" / EVENTS, part, name)

    store, records = MemoryStore(), list[Record]()
    recommender = Recommender(load_bundle(toy_line / "evaluated"), store, records)
    rows = dict(rows_of(base))
    for user, row in rows.items():
        store.write(user, UserRow(pack(row), float(row.at[-1])))
    for number in range(REQUESTS):
        event = stream.slice(number * 3, 3)  # three more events, then a request of one of these shoppers
        for user, more in rows_of(event):
            rows[user] = fold(rows.get(user, no_events()), more)
            store.write(user, UserRow(pack(rows[user]), float(rows[user].at[-1])))
        one = event.slice(0, 1).to_pylist()[0]
        asks: str | None = None if number % 50 == 0 else "stranger" if number % 50 == 1 else one["user_id"]
        asked = one["at"].timestamp() + (number % 7) * 1_000.25
        basket = (one["item_id"], f"item-{number % 80:03d}")
        recommender.recommend(Request(basket, asked, asks, one["store_id"], 5, f"r{number}"))
    hour_ago = time.time() - 3_600
    aged = [replace(record, answered_at=hour_ago + i / 1e3) for i, record in enumerate(records)]
    log = home / "prediction_log"
    log.mkdir()
    pq.write_table(records_to_table(aged, DENSE_NAMES), log / "segment.parquet")
    return home


def test_features_are_read_of_the_latest_answers_only(
    served: Path, toy_line: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[int]()

    def counted(*given: Any, **named: Any) -> pa.Table:
        found = read_log(*given, **named)
        read.append(len(found) * named.get("features", True))
        return found

    monkeypatch.setattr("monitoring.skew.read_log", counted)
    found = replay(served / "prediction_log", served / "offline_store", toy_line / "evaluated", 10)
    assert (found.compared, found.equal, sum(read)) == (10, 10, 10)


def test_a_thousand_answers_are_equal_bit_by_bit(served: Path, toy_line: Path) -> None:
    found = replay(served / "prediction_log", served / "offline_store", toy_line / "evaluated", REQUESTS)
    assert (found.compared, found.equal, found.first, found.skipped) == (REQUESTS, REQUESTS, None, {})
    assert found.values == REQUESTS * 5 * len(DENSE_NAMES)
    assert found.score_error <= 1e-6


def test_a_changed_archive_is_found_and_the_feature_named(
    served: Path, toy_line: Path, tmp_path: Path
) -> None:
    archive = read_archive(served / "offline_store" / EVENTS)
    price = archive.schema.get_field_index("price")
    dearer = archive.set_column(price, "price", pc.multiply(archive["price"], 1.01))
    write_segment(tmp_path / EVENTS, dearer, "base.parquet")
    found = replay(served / "prediction_log", tmp_path, toy_line / "evaluated", 100)
    assert found.first is not None
    assert found.first.feature == "user_spend_per_line"
    assert found.first.logged != found.first.recomputed
    assert "user_spend_per_line" in found.features
    assert "user_basket_count" not in found.features
    assert f"first difference: user_spend_per_line of item {found.first.item_id}" in describe(found)


@pytest.mark.parametrize("added", [0.25, -0.25])
def test_a_score_that_differs_is_shown_as_it_was_and_as_it_is(
    served: Path, toy_line: Path, tmp_path: Path, added: float
) -> None:
    table = pq.read_table(served / "prediction_log" / "segment.parquet").slice(0, 1)
    index, [[score, *others]] = table.schema.get_field_index("scores"), table["scores"].to_pylist()
    field = table.schema.field(index)
    table = table.set_column(index, field, pa.array([[score + added, *others]], field.type))
    pq.write_table(table, tmp_path / "segment.parquet")
    found = replay(tmp_path, served / "offline_store", toy_line / "evaluated", 10)
    assert found.first is not None
    assert found.first.feature == "score"
    assert (found.first.logged, found.first.recomputed) == pytest.approx((score + added, score), abs=1e-6)


def test_answers_that_cannot_be_compared_are_counted(served: Path, toy_line: Path, tmp_path: Path) -> None:
    table = pq.read_table(served / "prediction_log" / "segment.parquet").slice(0, 4)
    index = table.schema.get_field_index("bundle_id")
    bundles = table["bundle_id"].to_pylist()
    table = table.set_column(index, table.schema.field(index), [[*bundles[:2], "other", "other"]])
    pq.write_table(table, tmp_path / "segment.parquet")
    after_first = datetime.fromtimestamp(0, UTC) + timedelta(
        microseconds=table["answered_at"].cast(pa.int64())[1].as_py()
    )
    found = replay(tmp_path, served / "offline_store", toy_line / "evaluated", 10, after_first)
    assert (found.compared, found.equal) == (1, 1)
    assert found.skipped == {"of another bundle": 2, "from before the features were published": 1}


def test_an_empty_log_is_no_skew(served: Path, toy_line: Path, tmp_path: Path) -> None:
    found = replay(tmp_path, served / "offline_store", toy_line / "evaluated", 10)
    assert (found.compared, found.equal, found.first) == (0, 0, None)
    assert describe(found).startswith(
        "nothing to compare: what is written of the log holds no answer older than 10 s"
    )


def test_a_home_without_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="reco run"):
        replay_home(tmp_path, tmp_path / "bundle", 10)
    write_note(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"events holds no events to compute from: `reco run --data DIR`"
    ):
        replay_home(tmp_path, tmp_path / "bundle", 10)


def test_a_log_of_other_features_is_refused(served: Path, toy_line: Path, tmp_path: Path) -> None:
    empty = records_to_table([], ["one", "two"])
    record = pq.read_table(served / "prediction_log" / "segment.parquet").slice(0, 1)
    index = record.schema.get_field_index("features")
    field = record.schema.field(index)
    changed = record.set_column(index, field, pa.array([[1.0, 2.0]], field.type))
    pq.write_table(changed.replace_schema_metadata(empty.schema.metadata), tmp_path / "segment.parquet")
    with pytest.raises(ValueError, match="holds 2 features"):
        replay(tmp_path, served / "offline_store", toy_line / "evaluated", 10)
