"""Dataset -> the files of Feast's offline store: every event, each user's and each item's row as of the cut.

Nobody is served from these files: `publish_features` brings them to the stores once their bundle is champion.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.home import write_json
from feature_repo.atomic_files import replaced
from feature_repo.events import EVENT_SCHEMA, read_dataset
from feature_repo.snapshots import ITEM_VIEW, USER_VIEW, item_table, user_table
from feature_repo.statistics import read_statistics
from feature_repo.stream.archive import BASE, EVENTS, read_archive, rows_of, write_segment

log = logging.getLogger(__name__)


def materialize_features(dataset: Path, statistics: Path, features: Path, cut: str) -> dict[str, int]:
    """Write the archive's base and both views as of `cut`.

    `features` gets `events/base.parquet`, `items.parquet`, `dataset.json` and one directory per view. The
    cut, in ISO 8601, is that of the statistics; only events strictly before it are in the views.

    Returns:
        How many events, and rows of users and of items, were written.

    Raises:
        ValueError: nothing happened before the cut.
    """
    at = pd.Timestamp(cut).timestamp()
    data = read_dataset(dataset)
    events = pa.Table.from_pandas(data.events, EVENT_SCHEMA, preserve_index=False)
    write_segment(features / EVENTS, events, BASE)
    # So that the offline store, with the events streamed later, is a data set to train on again.
    shutil.copyfile(dataset / "items.parquet", features / "items.parquet")
    write_json(features / "dataset.json", {"timezone": data.manifest["timezone"]})
    users = users_as_of(features / EVENTS, at)
    if not len(users):
        raise ValueError(f"no event before {cut}: move --train-until later or bring older events")
    items = item_table(read_statistics(statistics), at)
    write_view(features, USER_VIEW, users)
    write_view(features, ITEM_VIEW, items)
    log.info("offline store: %d events, %d users, %d items", len(events), len(users), len(items))
    return {"events": len(events), "users": len(users), "items": len(items)}


def users_as_of(archive: Path, at: float) -> pa.Table:
    """Return every user's row as of `at`, seconds since the epoch, from all segments of an archive."""
    events = read_archive(archive)
    past = pc.less(events["at"].cast(pa.int64()), round(at * 1e6))
    return user_table(rows_of(events.filter(past)), at)


def write_view(offline_store: Path, view: str, *tables: pa.Table) -> None:
    """Write the rows of a view in one step, in place of those that were there."""
    file = offline_store / view / "snapshots.parquet"
    with replaced(file) as part:
        pq.write_table(pa.concat_tables(tables), part, compression="zstd")
