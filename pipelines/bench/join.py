"""Every basket of a data set -> its shopper's features just before: our join beside Feast's own.

Ours walks each user's events once and gives all of them before the basket, which any feature can be computed
from. Feast is given values computed beforehand (`schema.USER`), one row after each basket, and finds the
latest one before. Each runs in a process of its own, so that its memory can be measured.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

STEP = pd.Timedelta(microseconds=1)  # after its basket a row is known


def bench_join(events: pd.DataFrame, folder: Path) -> dict[str, Any]:
    """Return rows, seconds, memory and the largest difference of the two joins.

    Args:
        events: of a data set.
        folder: for the files in between.
    """
    source, ours, feast = (folder / f"join-{name}.parquet" for name in ("events", "ours", "feast"))
    events[events["event_type"] == "purchase"].to_parquet(source)
    results = {}
    for name, act, arguments in (
        ("ours", join_ours, (source, ours)),
        ("feast", join_feast, (ours, folder, feast)),
    ):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            results[name] = pool.submit(act, *arguments).result()
    mine, theirs = pd.read_parquet(ours), pd.read_parquet(feast)
    keys = ["user_id", "event_timestamp"]
    both = mine.merge(theirs, on=keys, suffixes=("", "_feast"))
    names = [name for name in mine.columns if name.startswith("known_")]
    # Feast's rows were computed just after the basket before; only what does not age is the same at ours.
    differs = int((both[names].to_numpy() != both[[f"{name}_feast" for name in names]].to_numpy()).sum())
    return {"rows": len(mine), "compared": len(both), "differences": differs, **results}


def join_ours(source: Path, target: Path) -> dict[str, float]:
    """Join; then write user, time and features of each basket. Return seconds of both, and mebibytes."""
    from components.data.build_examples import replay
    from components.data.fit_statistics import purchases_of
    from feature_repo.queries import User
    from feature_repo.schema import USER, user_values

    before = _peak_mib()
    purchases = purchases_of(pd.read_parquet(source))
    began = time.perf_counter()
    lines = sum(len(basket.history) for basket in replay(purchases))
    joined = time.perf_counter() - began
    peak = _peak_mib() - before
    rows = [(b.user, b.at, User(b.history, b.at)) for b in replay(purchases)]
    began = time.perf_counter()
    values = [user_values(user) for *_, user in rows]
    took = time.perf_counter() - began
    features = pd.DataFrame(np.array(values, np.float32), columns=[f.__name__ for f in USER])
    features.insert(0, "known_baskets", np.array([u.totals.baskets for *_, u in rows], np.float32))
    times = pd.to_datetime(np.array([at for _, at, _ in rows]), unit="s", utc=True)
    features.insert(0, "event_timestamp", times)
    features.insert(0, "user_id", purchases.user_ids[[user for user, *_ in rows]])
    features.drop_duplicates(["user_id", "event_timestamp"]).to_parquet(target)
    return {
        "seconds": round(joined, 3),
        "mib": peak,
        "features_seconds": round(took, 2),
        "lines_per_basket": round(lines / max(len(rows), 1), 1),
    }


def join_feast(ours: Path, folder: Path, target: Path) -> dict[str, float]:
    """Let Feast join the latest row before each basket; return seconds and mebibytes."""
    from datetime import timedelta

    from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
    from feast.types import Float32

    from components.data.feast_store import quiet_feast

    start = _peak_mib()
    asked = pd.read_parquet(ours)
    names = [name for name in asked.columns if name not in ("user_id", "event_timestamp")]
    # The row that is known after each basket is the one of the shopper's next basket, but for its age.
    rows = asked.sort_values(["user_id", "event_timestamp"])
    after = rows.assign(**rows.groupby("user_id")[names].shift(-1)).dropna()
    after["event_timestamp"] += STEP
    after.to_parquet(folder / "join-rows.parquet")
    user = Entity(name="user", join_keys=["user_id"], value_type=ValueType.STRING)
    view = FeatureView(
        name="user_rows",
        entities=[user],
        ttl=timedelta(0),
        schema=[Field(name=name, dtype=Float32) for name in names],
        source=FileSource(
            name="rows", path=str(folder / "join-rows.parquet"), timestamp_field="event_timestamp"
        ),
    )
    with quiet_feast():
        store = FeatureStore(
            config=RepoConfig(
                project="join",
                provider="local",
                registry=str(folder / "join-registry.db"),
                offline_store={"type": "duckdb"},
                online_store={"type": "sqlite", "path": str(folder / "join-online.db")},
                entity_key_serialization_version=3,
            )
        )
        store.apply([user, view])
        entities = asked[["user_id", "event_timestamp"]]
        began = time.perf_counter()
        found = store.get_historical_features(entities, [f"user_rows:{name}" for name in names]).to_df()
        took = time.perf_counter() - began
        found.dropna().to_parquet(target)
    return {"seconds": round(took, 3), "mib": _peak_mib() - start}


def _peak_mib() -> int:
    """Return the most memory that this program held; `getrusage` would count the one that started it, too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024
