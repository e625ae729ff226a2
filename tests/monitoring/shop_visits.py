"""Visits to a checkout whose shoppers take a shown item with a known chance -> a log and its purchases.

The truth is known: `TAKES` is the chance, by rung, that a shopper takes the one shown item worth 3.00. What
else is in a basket has nothing to do with it.
"""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from feature_repo.events import EVENT_SCHEMA
from feature_repo.stream.archive import EVENTS, write_segment
from serving.prediction_log import RECORD_SCHEMA
from serving.settings import Settings

START = pd.Timestamp("2024-01-01", tz="UTC")
TAKES = {"full": 0.30, "popular": 0.12}
PRICE = 3.0


def shop_visits(
    visits: int,
    weeks: float = 4.0,
    degraded: float = 0.5,
    seed: int = 0,
    takes: dict[str, float] | None = None,
    since: float = 0.0,
) -> tuple[pa.Table, pd.DataFrame]:
    """Return answers and purchases of visits, one answer each; a share of them is at the rung `popular`.

    From `since` weeks on, `takes` is the chance of taking the shown item by rung, in place of TAKES.
    """
    rng = np.random.default_rng(seed)
    week = np.sort(rng.uniform(0, weeks, visits))
    at = START + pd.to_timedelta((week * 7 * 86_400).astype(int), unit="s")
    rung = np.where(rng.random(visits) < degraded, "popular", "full")
    chance = np.array([TAKES[name] for name in rung])
    if takes:
        chance = np.where(week >= since, [takes[name] for name in rung], chance)
    taken = rng.random(visits) < chance
    users = np.array([f"user-{n}" for n in range(visits)], object)
    times = pa.array(at.tz_localize(None).as_unit("us").to_numpy(), RECORD_SCHEMA.field("at").type)
    log = {field.name: pa.nulls(visits, field.type) for field in RECORD_SCHEMA}
    log |= {
        "user_id": pa.array(users),
        "at": times,
        "answered_at": times,
        "rung": pa.array(rung),
        "bundle_id": pa.array(np.full(visits, "bundle")),
        "store_id": pa.array(np.array([f"store-{n % 3}" for n in range(visits)])),
        "profile": pa.array(np.full(visits, "default")),
        "item_ids": pa.array([["shown", "other"]] * visits, pa.list_(pa.string())),
        "scores": pa.array([[TAKES["full"], 0.1]] * visits, pa.list_(pa.float32())),
        "stage_ms": pa.array(
            [[("ranking", 2.0), ("features", 1.0), ("total", 3.0)]] * visits,
            RECORD_SCHEMA.field("stage_ms").type,
        ),
    }
    paid = at + pd.Timedelta(minutes=2)
    basket = np.array([f"basket-{n}" for n in range(visits)], object)
    bread = pd.DataFrame({"user_id": users, "basket_id": basket, "item_id": "bread", "at": paid})
    bread["price"] = rng.uniform(1, 20, visits).round(2)
    extra = pd.DataFrame(
        {"user_id": users, "basket_id": basket, "item_id": "shown", "at": paid, "price": PRICE}
    )
    return pa.table(log, schema=RECORD_SCHEMA), pd.concat([bread, extra[taken]]).assign(quantity=1)


def write_visits(settings: Settings, visits: int, weeks: float = 4.0, **given: Any) -> pd.DataFrame:
    """Write the log and the archive of a shop whose truth is known; return the purchases."""
    answers, purchases = shop_visits(visits, weeks, **given)
    settings.prediction_log_dir.mkdir(parents=True)
    pq.write_table(answers, settings.prediction_log_dir / "1-000000.parquet")
    lines = purchases.assign(event_type="purchase", discount=0.0, store_id="store-0")
    lines["event_id"] = [f"event-{n}" for n in range(len(lines))]
    events = pa.Table.from_pandas(lines, preserve_index=False).select(EVENT_SCHEMA.names).cast(EVENT_SCHEMA)
    write_segment(settings.home / "offline_store" / EVENTS, events, "base.parquet")
    return purchases
