"""The schema of the model's inputs -> every Feast object: entities, views and the feature service."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import typeguard

# Feast decorates its classes with `typechecked`, which rewrites 261 functions when they are imported: more
# than half of the processor time of the import. mypy checks our calls.
_typechecked, typeguard.typechecked = typeguard.typechecked, lambda target: target  # type: ignore[assignment]
# It also imports PyTorch where that is installed, for tensors that nothing here asks for: half of the rest.
_hides_torch = "torch" not in sys.modules
if _hides_torch:
    sys.modules["torch"] = None  # type: ignore[assignment]  # an import of it fails, as where it is missing

try:
    from feast import Entity, FeatureService, FeatureView, Field, FileSource, Project, PushSource, ValueType
    from feast.types import Bytes, Float32, String
finally:
    typeguard.typechecked = _typechecked
    if _hides_torch:
        del sys.modules["torch"]

from feature_repo.schema import FRESH, ITEM, USER
from feature_repo.snapshots import HISTORY, ITEM_COLUMNS, ITEM_VIEW, USER_COLUMNS, USER_TTL_DAYS, USER_VIEW

OFFLINE_STORE = Path("../.reco/offline_store")  # relative to this folder, where `feast apply` runs
FOREVER = timedelta(0)
TYPES = {pa.string(): String, pa.binary(): Bytes, pa.float32(): Float32}
DESCRIPTIONS = {
    HISTORY: "The user's last events; feature_repo.aggregates.unpack reads it.",
    **{feature.__name__: (feature.__doc__ or "").splitlines()[0] for feature in (*USER, *ITEM, *FRESH)},
}

OWNER = "ml-team@shop.example"
TAGS = {"domain": "checkout"}
PERSONAL = {**TAGS, "personal_data": "yes"}  # a shopper is in it: `reco forget` clears it

project = Project(name="checkout", description="Recommendations at the checkout.", owner=OWNER, tags=TAGS)
user = Entity(
    name="user",
    join_keys=["user_id"],
    value_type=ValueType.STRING,
    description="Who buys; the id is a string as in the data.",
    owner=OWNER,
    tags=PERSONAL,
)
item = Entity(
    name="item",
    join_keys=["item_id"],
    value_type=ValueType.STRING,
    description="What is bought; the id is a string as in the data.",
    owner=OWNER,
    tags=TAGS,
)


def _view(
    name: str, entity: Entity, columns: pa.Schema, ttl: timedelta, description: str, offline_store: Path
) -> FeatureView:
    """Return a view: rows may be pushed to it, and its snapshots are a file."""
    snapshots = FileSource(
        name=f"{name}_snapshots",
        path=str(offline_store / name / "snapshots.parquet"),
        timestamp_field="event_timestamp",
        owner=OWNER,
        tags=TAGS,
    )
    source = PushSource(
        name=f"{name}_push",
        batch_source=snapshots,
        description="Rows of a job of your own: `store.push`.",
        owner=OWNER,
        tags=TAGS,
    )
    fields = [
        Field(name=column.name, dtype=TYPES[column.type], description=DESCRIPTIONS.get(column.name, ""))
        for column in columns
        if column.name != "event_timestamp"
    ]
    return FeatureView(
        name=name,
        entities=[entity],
        ttl=ttl,
        schema=fields,
        source=source,
        description=description,
        owner=OWNER,
        tags=entity.tags,
    )


def definitions(
    offline_store: Path,
) -> tuple[Project, Entity, Entity, FeatureView, FeatureView, FeatureService]:
    """Return every object of the repository, its views reading from `offline_store`.

    The row of a user at time t holds the events before t; that of an item counts the purchases before t.
    """
    of_user, of_item = "What a user did before the row's time.", "How an item sold before the row's time."
    views = (
        _view(USER_VIEW, user, USER_COLUMNS, timedelta(days=USER_TTL_DAYS), of_user, offline_store),
        _view(ITEM_VIEW, item, ITEM_COLUMNS, FOREVER, of_item, offline_store),
    )
    service = FeatureService(
        name="checkout",
        features=[*views],
        description="A user's history and an item's statistics, as of the basket's time.",
        owner=OWNER,
        tags=PERSONAL,
    )
    return project, user, item, *views, service


# `feast apply` registers the objects that are globals of this module.
*_, user_history, item_statistics, checkout = definitions(OFFLINE_STORE)
