"""The offline store's Parquet files -> every Feast object: entities, views and the feature service."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from feast import Entity, FeatureService, FeatureView, Field, FileSource, Project, ValueType
from feast.types import Bytes, Float32, Int64, String, UnixTimestamp

OFFLINE_STORE = Path("../.reco/offline_store")  # seen from this folder, where `feast apply` runs
FOREVER = timedelta(0)  # a user who comes back after a year still has a history

project = Project(name="checkout", description="Recommendations at the checkout.")
user = Entity(
    name="user",
    join_keys=["user_id"],
    value_type=ValueType.STRING,
    description="Who buys; the id is a string as in the data.",
)
item = Entity(
    name="item",
    join_keys=["item_id"],
    value_type=ValueType.STRING,
    description="What is bought; the id is a string as in the data.",
)


def user_history_view(offline_store: Path) -> FeatureView:
    """Return the view of what each user bought; its row at time t holds the purchases before t."""
    return FeatureView(
        name="user_history",
        entities=[user],
        ttl=FOREVER,
        schema=[
            Field(name="user_id", dtype=String),
            Field(
                name="history",
                dtype=Bytes,
                description="Each item's counts and times; feature_repo.aggregates.unpack reads it.",
            ),
            Field(name="basket_count", dtype=Int64, description="Baskets bought."),
            Field(name="item_count", dtype=Int64, description="Distinct items kept in the history."),
            Field(name="last_basket_at", dtype=UnixTimestamp, description="When the last basket was bought."),
            Field(name="basket_size", dtype=Float32, description="Mean distinct items per basket."),
            Field(name="basket_spend", dtype=Float32, description="Mean paid per basket, in currency."),
            Field(name="discount_ratio", dtype=Float32, description="Share of the full price taken off."),
        ],
        source=_source("user_history", offline_store),
        description="What a user bought before the row's time.",
    )


def item_statistics_view(offline_store: Path) -> FeatureView:
    """Return the view of how each item sells; its row at time t counts the purchases before t."""
    return FeatureView(
        name="item_statistics",
        entities=[item],
        ttl=FOREVER,
        schema=[
            Field(name="item_id", dtype=String),
            Field(name="purchases_4w", dtype=Int64, description="Baskets with it in the last 4 weeks."),
            Field(name="purchases_13w", dtype=Int64, description="Baskets with it in the last 13 weeks."),
            Field(name="price", dtype=Float32, description="Mean paid per unit, in currency."),
            Field(name="discount_ratio", dtype=Float32, description="Share of units sold at a discount."),
            Field(name="buyer_count", dtype=Int64, description="Distinct users who bought it."),
            Field(name="repeat_ratio", dtype=Float32, description="Share of buyers who bought it again."),
        ],
        source=_source("item_statistics", offline_store),
        description="How an item sold before the row's time.",
    )


def _source(view: str, offline_store: Path) -> FileSource:
    return FileSource(
        name=f"{view}_snapshots",
        path=str(offline_store / view / "snapshots.parquet"),
        timestamp_field="event_timestamp",
    )


def checkout_service(*views: FeatureView) -> FeatureService:
    """Return what the recommender knows about a user and an item when a basket is scanned."""
    return FeatureService(
        name="checkout",
        features=[*views],
        description="A user's history and an item's statistics, as of the basket's time.",
    )


def definitions(offline_store: Path) -> list[Project | Entity | FeatureView | FeatureService]:
    """Return every object of the repository, its views reading from `offline_store`."""
    views = user_history_view(offline_store), item_statistics_view(offline_store)
    return [project, user, item, *views, checkout_service(*views)]


# Feast takes the objects of the module itself: these are the ones that `feast apply` registers.
user_history = user_history_view(OFFLINE_STORE)
item_statistics = item_statistics_view(OFFLINE_STORE)
checkout = checkout_service(user_history, item_statistics)
