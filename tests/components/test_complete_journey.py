"""The real data set, counted."""

import pandas as pd
import pytest

from components.complete_journey import TIMEZONE, read_complete_journey

pytestmark = pytest.mark.slow


def test_what_is_in_it() -> None:
    data = read_complete_journey()
    events = data.events
    assert len(events) == 1_441_447
    assert events["basket_id"].nunique() == 140_897
    assert events["item_id"].nunique() == 67_823
    assert data.manifest["dropped"]["not a product (fuel, coupons, services, no metadata)"] == 23_917
    assert not events.duplicated(["basket_id", "item_id"]).any()
    assert (events["quantity"] > 0).all()
    assert (events["price"] >= 0).all()
    # Weeks begin on Monday in New York: nobody shops there on Christmas Day, in UTC somebody seems to.
    local = events["at"].dt.tz_convert(TIMEZONE)
    assert local.max() < pd.Timestamp("2018-01-01", tz=TIMEZONE)
    assert not (local.dt.normalize() == pd.Timestamp("2017-12-25", tz=TIMEZONE)).any()
    assert set(data.items["brand"]) == {"national", "private"}
    assert data.items["item_id"].is_unique
    assert set(events["item_id"]) <= set(data.items["item_id"])
    assert data.users is not None
    assert len(data.users) == 801
    promotions = data.promotions
    assert promotions is not None
    assert (promotions["valid_until"] > promotions["valid_from"]).all()
    assert promotions["valid_from"].max() == pd.Timestamp("2017-12-25T05:00:00Z")
    assert data.coupons is not None
    assert (data.coupons["valid_until"] > data.coupons["valid_from"]).all()
