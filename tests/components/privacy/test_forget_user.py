"""After `reco forget` the user is in no file or store of a home, except where the report says so."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from components.data.feast_store import open_feature_store, quiet_feast
from components.data.ingest_events import ingest_events
from components.home import UPDATE_LOCK, Conflict, Running, announced, locked
from components.privacy.forget_user import DONE, IN_USE, REMAINS, UNREACHABLE, Report, forget_user
from components.release.publish_features import publish_features
from feature_repo.events import read_dataset
from feature_repo.facts import Fact
from feature_repo.stream.archive import EVENTS, last_events, read_archive, streamed_name, write_segment
from feature_repo.stream.erasure import FILE, Forgotten
from feature_repo.stream.kafka import KafkaSettings
from feature_repo.stream.messages import events_table, parse_event
from feature_repo.stream.online_rows import OnlineRows
from pipelines.bench.load.waiting import wait_for
from serving.prediction_log import PredictionLog, Record, read_log
from serving.release.champion import Champion, write_champion
from serving.release.manifest import read_manifest
from serving.schemas import Request, Response
from serving.settings import Settings
from serving.shop.fact_store import open_fact_store
from tests.chaos.procs import eventually
from tests.feature_repo.stream.stream_place import Place

USER, LONGER = "user-000", "user-0007"  # of which the first is the beginning
NOW = 1.75e9  # the user's last event in these homes; everything lies before the test's own clock
RUN = Path("runs/20260301-100000/artifacts")


@pytest.fixture(autouse=True)
def nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No endpoint is at work in most of these homes: nothing to wait for."""
    monkeypatch.setattr("components.privacy.forget_user.QUEUE_S", 0.01)
    monkeypatch.setattr("components.privacy.erased_stores.POLL_S", 0.01)


def settings_of(home: Path, **given: Any) -> Settings:
    return replace(Settings(home=home, log_segment_s=0.2), **given)


def streamed(user: str, number: int, at: float = NOW) -> Any:
    """An event as the stream takes it from the broker."""
    said = {
        "event_id": f"s{number}-{user}",
        "user_id": user,
        "basket_id": f"b{number}-{user}",
        "item_id": "item-001",
        "at": pd.Timestamp(at, unit="s", tz="UTC").isoformat(),
    }
    return parse_event(user.encode(), json.dumps(said).encode(), time.time())


def logged(folder: Path, *records: tuple[str, float]) -> None:
    log = PredictionLog(folder, ("count",), segment_records=4, poll_s=0.01)
    for number, (user, at) in enumerate(records):
        request = Request(("item-001",), at, user, None, 10, f"r{number}")
        log.append(Record(request, Response(f"r{number}", (), "b"), np.empty((0, 1)), at))
    log.close()


@pytest.fixture
def home(toy_line: Path, tmp_path: Path) -> Path:
    """A home as a champion, an endpoint, a stream and a till without a broker leave it."""
    home = tmp_path / "home"
    shutil.copytree(toy_line / "home", home)
    for step, name in (("ingest-events", "dataset"), ("materialize-features", "features")):
        shutil.copytree(toy_line / name, home / RUN / step / name)
    shutil.copytree(toy_line / "evaluated", home / "bundles" / "b1")
    bundle_id = read_manifest(home / "bundles" / "b1")["bundle_id"]
    write_champion(home, Champion(bundle_id, "1", "recommender", "bundles/b1", "2024-06-10", "2024-07-20"))
    archive = home / "offline_store" / EVENTS
    for first in (0, 3):
        events = [streamed(user, first + n) for n, user in enumerate((LONGER, "user-001", USER))]
        name = streamed_name(1, first, first + 2)
        write_segment(archive, events_table(events, [first, first + 1, first + 2]), name)
    logged(
        home / "prediction_log", *[(user, NOW + n) for n in range(3) for user in (USER, LONGER, "user-001")]
    )
    store = open_fact_store(settings_of(home).fact_store_url)
    coupons = [Fact(user, "coupon", "item-001", "TEA", NOW, None, user) for user in (USER, LONGER)]
    store.write([replace(coupon, fact_id=str(n)) for n, coupon in enumerate(coupons)])
    store.close()
    (home / RUN / "ingest-events" / "dataset.quarantine").mkdir()
    quarantine = home / RUN / "ingest-events" / "dataset.quarantine" / "quarantine.jsonl"
    quarantine.write_text("".join(json.dumps({"row": 1, "user_id": user}) + "\n" for user in (USER, LONGER)))
    return home


def may_hold_text(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(may_hold_text(kind.field(number).type) for number in range(kind.num_fields))
    return not pa.types.is_primitive(kind)  # numbers and times


def found(home: Path, user: str) -> set[str]:
    """Every file that names a user: as bytes, or in the cells of a table."""
    exact = re.compile(re.escape(user.encode()) + rb"(?![0-9])")
    files = set()
    for file in (one for one in home.rglob("*") if one.is_file()):
        texts = [file.read_bytes()]
        if file.suffix == ".parquet":
            with suppress(pa.ArrowInvalid):  # a damaged one
                table = pq.ParquetFile(file).read()
                columns = [column for column in table.columns if may_hold_text(column.type)]
                cells = [each if pa.types.is_nested(each.type) else each.unique() for each in columns]
                texts += [json.dumps([each.to_pylist() for each in cells], default=str).encode()]
        if any(exact.search(text) for text in texts):
            files.add(str(file.relative_to(home)))
    return files


def places(report: Report) -> dict[str, tuple[int, str]]:
    return {place.place: (place.removed, place.state) for place in report.places}


def others(home: Path) -> dict[str, int]:
    """Return the rows of all other users."""
    events = read_archive(home / "offline_store" / EVENTS)["user_id"].to_pylist()
    log = read_log(home / "prediction_log")["user_id"].to_pylist()
    data = read_dataset(home / RUN / "ingest-events" / "dataset").events["user_id"].tolist()
    store = open_fact_store(settings_of(home).fact_store_url)
    coupons = [str(fact.user_id) for fact in store.changed_since(0)[0]]
    store.close()
    return {
        name: sum(user != USER for user in users)
        for name, users in {"events": events, "log": log, "data": data, "coupons": coupons}.items()
    }


def test_nothing_is_left_except_the_places_in_the_report(home: Path) -> None:
    logged(home / "prediction_log" / "shadow", (USER, NOW))  # a mirrored request
    before = others(home)
    everywhere = found(home, USER)
    assert len(everywhere) > 10
    counted = forget_user(settings_of(home), USER, dry_run=True)
    assert found(home, USER) == everywhere
    assert not (home / FILE).exists()
    report = forget_user(settings_of(home), USER)
    assert found(home, USER) == {"bundles/b1/reference_log.parquet"}
    assert others(home) == before
    assert LONGER in str(read_archive(home / "offline_store" / EVENTS)["user_id"].to_pylist())
    told = places(report)
    assert told["archive"] == (390 + 2, DONE)
    assert told["prediction log"] == (3 + 1, DONE)
    assert told["fact store"] == (1, DONE)
    assert told["offline store"] == (2, DONE)
    assert told["runs and data sets"] == (390 + 390 + 1 + 1, DONE)  # events twice, a snapshot, a refused row
    assert told["online store"][0] > 10
    assert told["bundles"] == (0, REMAINS)
    [bundle] = [place for place in report.places if place.place == "bundles"]
    assert "the champion is one: it remains until the next promotion" in bundle.note
    assert report.exit_code == 0
    removed = {place: count for place, (count, _) in told.items()}
    assert {place: count for place, (count, _) in places(counted).items()} == removed
    assert USER not in json.dumps(report.to_dict())


def test_a_second_run_and_an_unknown_user_find_nothing(home: Path) -> None:
    forget_user(settings_of(home), USER)
    for user in (USER, "nobody"):
        report = forget_user(settings_of(home), user)
        assert {place.removed for place in report.places} == {0}
        assert report.exit_code == 0


def test_a_longer_id_is_another_user(home: Path) -> None:
    before = found(home, USER)
    forget_user(settings_of(home), LONGER)
    assert found(home, USER) == before
    assert not found(home, LONGER)


def test_the_next_run_and_the_next_publication_do_not_see_the_user(
    home: Path, toy_line: Path, tmp_path: Path
) -> None:
    forget_user(settings_of(home), USER)
    cut = ingest_events("toy", tmp_path / "dataset", home=str(home))
    data = read_dataset(tmp_path / "dataset")
    assert data.manifest["dropped"]["of forgotten users"] == 390
    assert data.manifest["users"] == 59
    # Of a run that had read its events before.
    publish_features(toy_line / "features", cut, {"bundle_id": "b2"}, str(home))
    assert found(home, USER) == {"bundles/b1/reference_log.parquet"}
    assert found(home, "user-001")


def test_events_after_the_moment_count(home: Path) -> None:
    forget_user(settings_of(home), USER)
    later = time.time() + 60
    archive = home / "offline_store" / EVENTS
    write_segment(archive, events_table([streamed(USER, 9, later)], [9]), streamed_name(1, 9, 9))
    logged(home / "prediction_log", (USER, later))
    assert Forgotten.load(home).without(read_archive(archive, [USER])).num_rows == 1
    assert USER in read_log(home / "prediction_log")["user_id"].to_pylist()


def test_a_till_whose_clock_is_ahead(home: Path) -> None:
    """The latest event that is known lies in the future: it goes, and does not count when it comes again."""
    ahead = float(round(time.time()) + 3_600)
    archive = home / "offline_store" / EVENTS
    write_segment(archive, events_table([streamed(USER, 9, ahead)], [9]), streamed_name(1, 9, 9))
    forget_user(settings_of(home), USER)
    assert len(read_archive(archive, [USER])) == 0
    assert Forgotten.load(home).covers(USER, round(ahead * 1e6))


def test_a_coupon_whose_clock_is_ahead_goes_too(home: Path) -> None:
    ahead = float(round(time.time()) + 3_600)
    store = open_fact_store(settings_of(home).fact_store_url)
    store.write([Fact("2", "coupon", "item-002", "TEA", ahead, None, USER)])
    # Beside a Redis that is away, the file under home counts, too.
    report = forget_user(settings_of(home, store_url="redis://127.0.0.1:1/0"), USER)
    assert places(report)["fact store's file"] == (2, DONE)
    assert store.of_user(USER) == {}
    store.close()
    assert Forgotten.load(home).covers(USER, round(ahead * 1e6))


def test_bundles_that_a_release_published_are_named_among_what_remains(home: Path) -> None:
    """Object Lock keeps them, with golden requests and reference answers, and no rule deletes them later."""
    [place] = [one for one in forget_user(settings_of(home), USER).places if "bucket of bundles" in one.place]
    assert (place.state, "published bundles" in place.what) == (REMAINS, True)


def test_the_copies_of_the_champion_are_the_champion(home: Path) -> None:
    """Its run's artifacts stay while it is champion, and its registered copy is not to be deleted."""
    for copy in (home / RUN / "evaluate-bundle" / "evaluated", home / "mlartifacts" / "1"):
        shutil.copytree(home / "bundles" / "b1", copy)
    [place] = [place for place in forget_user(settings_of(home), USER).places if place.place == "bundles"]
    assert "in 3 sealed bundles" in place.note
    assert place.note.endswith("; the champion is one: it remains until the next promotion")


def test_a_damaged_bundle_is_named_and_a_refresh_that_runs_is_waited_for(home: Path) -> None:
    """A flipped byte is an OSError without a number; the refresh read the list of users before."""
    log = home / "bundles" / "b1" / "reference_log.parquet"
    content = bytearray(log.read_bytes())
    content[-40] ^= 0xFF
    log.write_bytes(content)
    with locked(home / UPDATE_LOCK, "refreshing the champion"):
        report = forget_user(settings_of(home), USER)
    notes = {place.place: place.note for place in report.places}
    assert "bundles/b1" in notes["damaged files"]
    assert notes["runs and data sets"].endswith("try again: its bundle may hold the user")
    assert report.exit_code == 4
    assert forget_user(settings_of(home), USER).exit_code == 0


def test_a_folder_that_is_no_home_is_refused_and_stays_as_it_was(home: Path, tmp_path: Path) -> None:
    for folder, holds in ((tmp_path, "home"), (tmp_path / "empty", "nothing")):
        folder.mkdir(exist_ok=True)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match=rf"is no home of reco \(found .*{holds}\): point --home at one"):
            forget_user(settings_of(folder), USER)
        assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "stream.json").write_text("{}")  # a stream just began, with its rows in Redis
    assert forget_user(settings_of(tmp_path), USER).exit_code == 0


def test_an_unreachable_store_is_reported_and_the_rest_is_done(home: Path) -> None:
    report = forget_user(settings_of(home, store_url="redis://127.0.0.1:1/0"), USER)
    told = places(report)
    assert (told["online store"], told["fact store"]) == ((0, UNREACHABLE), (0, UNREACHABLE))
    assert told["archive"] == (392, DONE)
    assert report.exit_code == 3
    assert forget_user(settings_of(home), USER).exit_code == 0  # it is back


def test_the_store_of_a_stopped_reco_up_is_unreachable(home: Path) -> None:
    """Its append-only file brings the row back when it starts again."""
    (home / "store").mkdir()
    report = forget_user(settings_of(home), USER)
    assert places(report)["store of `reco up`"] == (0, UNREACHABLE)
    assert report.exit_code == 3
    assert places(report)["archive"] == (392, DONE)
    assert any(re.search("start `.*reco .* up` and repeat", place.note) for place in report.places)
    with locked(home / "up.lock", "running `reco up`"), announced(home, Running("memory:", "", True)):
        assert forget_user(settings_of(home, store_url="memory:"), USER).exit_code == 0
        assert forget_user(settings_of(home), USER).exit_code == 3, "another store was asked"


def test_the_files_under_home_are_erased_when_another_store_is_named(home: Path) -> None:
    report = forget_user(settings_of(home, store_url="memory:"), USER)
    told = places(report)
    assert told["online store's file"][0] > 1
    assert told["fact store"] == (1, DONE)
    assert "fact store's file" not in told, "beside `memory:` it is the fact store"
    assert found(home, USER) == {"bundles/b1/reference_log.parquet"}


def test_a_file_in_use_is_reported_and_the_rest_is_done(home: Path) -> None:
    with locked(home / "run.lock", "running a pipeline"):
        report = forget_user(settings_of(home), USER)
    told = places(report)
    assert told["runs and data sets"] == (0, IN_USE)
    assert told["archive"] == (392, DONE)
    assert report.exit_code == 4
    assert places(forget_user(settings_of(home), USER))["runs and data sets"][0] > 390


def test_a_damaged_file_is_named_and_the_rest_is_done(home: Path) -> None:
    damaged = home / "offline_store" / "old" / "copy.parquet"
    damaged.parent.mkdir()
    damaged.write_bytes(b"half a file")
    half = home / "extended"
    half.mkdir()
    (half / "golden.jsonl").write_text('{"request": {"user_')
    segment = home / "offline_store" / EVENTS / streamed_name(2, 0, 5)
    segment.write_bytes(b"half a segment")
    (home / "stream.json").write_text("{")
    report = forget_user(settings_of(home), USER)
    [place] = [place for place in report.places if place.place == "damaged files"]
    assert place.state == REMAINS
    named = {"offline_store/old/copy.parquet", "extended", str(segment.relative_to(home))}
    assert named <= set(place.note.rpartition(": ")[2].split(", "))
    assert places(report)["runs and data sets"][0] > 390
    assert places(report)["archive"] == (392, DONE)
    assert Forgotten.load(home).until(USER) is not None


@pytest.mark.parametrize("damaged", ["manifest.json", "items.parquet", "events.parquet"])
@pytest.mark.parametrize("is_cut", [True, False], ids=["cut short", "missing"])
def test_a_damaged_data_set_loses_its_rows_file_by_file(home: Path, damaged: str, is_cut: bool) -> None:
    """Its refused rows too; a table that cannot be read is named, and the rest is done."""
    folder = home / RUN / "ingest-events" / "dataset"
    refused = [{"row": n, "user_id": user} for n, user in enumerate((USER, LONGER))]
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in refused))
    file = folder / damaged
    content = file.read_bytes()
    file.unlink()
    if is_cut:
        file.write_bytes(content[: len(content) // 2])
    report = forget_user(settings_of(home), USER)
    assert found(folder, USER) <= {damaged}
    assert found(folder, LONGER) == {"quarantine.jsonl"}
    names = [place.note for place in report.places if place.place == "damaged files"]
    unreadable = is_cut and file.suffix == ".parquet"
    assert [str(file.relative_to(home)) in name for name in names] == [True] * unreadable


def test_a_flipped_byte_and_a_refused_row_that_was_cut_off_hold_nothing_up(home: Path) -> None:
    """A column that is damaged inside is an OSError to pyarrow, but no fault of the file system."""
    folder = home / RUN / "ingest-events" / "dataset"
    copies = home / "offline_store" / "old"
    copies.mkdir()
    content = bytearray((folder / "events.parquet").read_bytes())
    for number, byte in enumerate(range(200, len(content) // 2, len(content) // 40)):
        damaged = content.copy()
        damaged[byte] ^= 0xFF
        (copies / f"{number}.parquet").write_bytes(damaged)
    renamed = (folder / "events.parquet").read_bytes().replace(b"user_id", b"\xf3ser_id")  # no UTF-8
    (copies / "renamed.parquet").write_bytes(renamed)
    refused = f'{{"row": 1, "user_id": "{LONGER}"}}\n{{"user_id": "{USER}", "te'
    (folder / "quarantine.jsonl").write_bytes(refused.encode() + b"\xc3")  # the first half of a character
    report = forget_user(settings_of(home), USER)
    [place] = [place for place in report.places if place.place == "damaged files"]
    assert "offline_store/old/renamed.parquet" in place.note
    assert found(folder, USER) == set()
    assert LONGER in (folder / "quarantine.jsonl").read_text()


def test_an_answer_of_tomorrow_comes_back_no_more_and_one_of_far_ahead_forgets_no_user_for_ever(
    home: Path,
) -> None:
    """The checkout asked with its clock ahead: the answer becomes an impression of tomorrow."""
    now, day_s = time.time(), 86_400
    logged(home / "prediction_log", (USER, now + day_s / 2))
    forget_user(settings_of(home), USER)
    assert Forgotten.load(home).covers(USER, int((now + day_s / 2) * 1e6))
    logged(home / "prediction_log", (USER, now + 9e9))
    forget_user(settings_of(home), USER)
    assert not Forgotten.load(home).covers(USER, int((now + 2 * day_s) * 1e6))


def test_one_at_a_time(home: Path) -> None:
    with locked(home / "forget.lock", "forgetting a user"), pytest.raises(Conflict):
        forget_user(settings_of(home), USER)


@pytest.mark.parametrize("user", ["", "a\nb", "x" * 129])
def test_invalid_user_ids_are_refused(home: Path, user: str) -> None:
    with pytest.raises(ValueError, match="printable characters") as refused:
        forget_user(settings_of(home), user)
    assert not user or user not in str(refused.value)
    assert not (home / FILE).exists()


@pytest.mark.parametrize("inner", ["", "shadow"])
def test_an_open_segment_of_the_log_is_waited_for(home: Path, inner: str) -> None:
    shutil.rmtree(home / "prediction_log")
    log = PredictionLog(home / "prediction_log" / inner, ("count",), segment_s=4.0, poll_s=0.01)
    request = Request(("item-001",), NOW, USER, None, 10, "r")
    log.append(Record(request, Response("r", (), "b"), np.empty((0, 1)), NOW))
    said: list[str] = []
    report = forget_user(settings_of(home, log_segment_s=4.0), USER, say=said.append)
    log.close()
    assert places(report)["prediction log"] == (1, DONE)
    assert len(said) == 1
    assert found(home, USER) == {"bundles/b1/reference_log.parquet"}


# ------------------------------------------------------------------------------------- with processes

FORGET = """
import sys
from pathlib import Path
from components.privacy.forget_user import forget_user
from serving.settings import Settings
forget_user(Settings(home=Path(sys.argv[1]), log_segment_s=0.2), sys.stdin.read())
"""


def test_a_data_set_that_a_watch_writes_is_waited_for(home: Path) -> None:
    folder = home / "datasets" / "shop"
    shutil.copytree(home / RUN / "ingest-events" / "dataset", folder)
    shutil.rmtree(home / "prediction_log")  # else it is waited for first
    forgetting = threading.Thread(target=forget_user, args=(settings_of(home), USER))
    with FileLock(home / "datasets" / "shop.lock"):  # of `dataset_of`
        forgetting.start()
        eventually((home / FILE).exists)
        forgetting.join(3)
        assert forgetting.is_alive()
        assert USER in set(read_dataset(folder).events["user_id"])
    forgetting.join(60)
    assert USER not in set(read_dataset(folder).events["user_id"])


@pytest.mark.slow
def test_killed_at_any_moment_and_done_again_it_ends_the_same(home: Path) -> None:
    """What was done stays done, nothing is damaged, and the tombstone was there first."""
    before, lock = others(home), home / "forget.lock"
    stops = 0
    for delay_s in (0.0, 0.05, 0.15, 0.4, 0.9):
        with subprocess.Popen([sys.executable, "-c", FORGET, str(home)], stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(USER.encode())
            process.stdin.close()
            wait_for(lambda: lock.exists() and lock.stat().st_size > 0, "the start")
            time.sleep(delay_s)
            process.send_signal(signal.SIGKILL)
            stops += process.wait() == -signal.SIGKILL
        assert Forgotten.load(home).until(USER) is not None or found(home, USER)
        assert others(home) == before
        lock.write_text("")
    assert stops > 2
    assert forget_user(settings_of(home), USER).exit_code == 0
    for file in home.rglob(".*.part"):  # they go once no process can be writing them
        os.utime(file, (time.time() - 3_600,) * 2)
    forget_user(settings_of(home), USER)
    assert found(home, USER) == {"bundles/b1/reference_log.parquet"}
    assert others(home) == before


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("valkey")[0]) if request.param == "redis" else ""


@pytest.mark.slow
def test_a_running_stream_brings_nothing_back_and_takes_new_events(
    broker: Any, url: str, tmp_path: Path, toy_line: Path
) -> None:
    home = tmp_path / "streamed"
    place = Place(home, url, KafkaSettings(bootstrap=broker.bootstrap))
    events = read_dataset(toy_line / "dataset").events
    chosen = events[events["user_id"].isin([USER, "user-001"])].reset_index(drop=True)
    own = int((chosen["user_id"] == USER).sum())
    with quiet_feast(), place.streaming() as stream:
        place.produce(chosen)
        wait_for(lambda: stream.counts.events == len(chosen), "the events")
        settings = settings_of(home, store_url=url)
        while_busy = producing(place, chosen)  # again, while the user is being forgotten
        report = forget_user(settings, USER)
        while_busy()
        assert places(report)["online store"][0] > 10
        assert report.exit_code == 0
        wait_for(lambda: stream.counts.events + stream.counts.forgotten == 2 * len(chosen), "the repetition")
        place.produce(chosen)
        wait_for(lambda: stream.counts.events + stream.counts.forgotten == 3 * len(chosen), "the next one")
        assert own <= stream.counts.forgotten <= 2 * own
        new = (
            chosen[chosen["user_id"] == USER]
            .iloc[:1]
            .assign(event_id="new", basket_id="new", at=pd.Timestamp.now("UTC").as_unit("us"))
        )
        place.produce(new)
        archive = home / "offline_store" / EVENTS
        wait_for(lambda: read_archive(archive, [USER])["event_id"].to_pylist() == ["new"], "the new event")
        rows = OnlineRows(lambda: open_feature_store(home, url)).get([USER, "user-001"])
        assert len(rows[USER]) == 1
        assert len(rows["user-001"]) == len(chosen) - own
        assert set(read_archive(archive)["user_id"].to_pylist()) == {USER, "user-001"}


def producing(place: Place, events: pd.DataFrame) -> Callable[[], None]:
    thread = threading.Thread(target=place.produce, args=(events,))
    thread.start()
    return thread.join


@pytest.mark.slow
@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_stream_that_starts_again_goes_on_behind_a_forgotten_event(
    broker: Any, url: str, tmp_path: Path, toy_line: Path
) -> None:
    """The partition's last event was the user's: it is gone, and the log is still known as the same."""
    home = tmp_path / "streamed"
    place = Place(home, url, KafkaSettings(bootstrap=broker.bootstrap))
    archive = home / "offline_store" / EVENTS
    events = read_dataset(toy_line / "dataset").events
    # librdkafka's own partitioner: the checksum of the key.
    neighbour = next(
        user
        for user in events["user_id"].unique()
        if user != USER and (crc32(user.encode()) - crc32(USER.encode())) % 4 == 0
    )
    one, other = (events[events["user_id"] == user] for user in (neighbour, USER))
    both = pd.concat([one, other], ignore_index=True)
    with quiet_feast(), place.streaming() as first:
        place.produce(both)
        wait_for(lambda: len(read_archive(archive)) == len(both), "the archive")
        assert first.counts.events == len(both)
    assert len(last_events(archive, range(4))) == 1
    forget_user(settings_of(home), USER)
    assert [version for version, _ in last_events(archive, range(4)).values()] == [len(one) - 1]
    with quiet_feast(), place.streaming() as second:
        place.produce(both)
        wait_for(lambda: second.counts.forgotten == len(other), "the events again")
        assert {*second._generation.values()} == {0}  # the log is the one that it was
    assert read_archive(archive)["user_id"].to_pylist() == [neighbour] * len(one)
