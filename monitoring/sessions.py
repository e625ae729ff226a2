"""Logged answers and the purchases that followed -> one row for each visit to the checkout.

A session is a run of answers to one shopper, without a payment and without a pause of more than ANSWERED_S.
Its basket is the next one that the shopper pays for, at most ANSWERED_S after the last answer. A shown item
is accepted if that basket holds it. That proves no effect: the shopper may have bought the item anyway.

Labels arrive late. A session is complete once its attribution window is over in the purchases that are known;
figures are made from complete sessions only.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

ANSWERED_S = 1_800  # the attribution window: as long as a checkout may neither ask nor pay
AHEAD_US = 86_400_000_000  # a day: a test request of the year 9999 must not count as the newest question
FIELDS = ["user_id", "bundle_id", "rung", "store_id", "profile"]


def asked_at(answers: pa.Table) -> pd.Series:
    """Return the time of each question: when it was answered, if its own is missing or impossible.

    Impossible is one before 1970, as a till with an unset clock sends it, or one more than AHEAD_US after the
    answer.
    """
    at, answered = answers["at"], answers["answered_at"]
    us = at.cast(pa.int64())
    is_wrong = pc.or_(pc.less(us, 0), pc.greater(pc.subtract(us, answered.cast(pa.int64())), AHEAD_US))
    return pc.if_else(pc.fill_null(is_wrong, True), answered, at).to_pandas()


def make_sessions(
    answers: pa.Table, purchases: pd.DataFrame, until: pd.Timestamp, cost: pd.Series | None = None
) -> pd.DataFrame:
    """Return the sessions of known shoppers, in order of shopper and time.

    Args:
        answers: records of the prediction log; those without a shopper are left out.
        purchases: columns user_id, basket_id, item_id, at, quantity and price (paid per unit, NaN where
            unknown), with the history that separates repeat purchases from new ones.
        until: the time up to which all purchases are known.
        cost: of one unit of each item, by item id; None if no cost is known.

    Returns:
        Of each session: `at` of its first answer; `bundle_id`, `rung`, `store_id` and `profile` of its last.
        `answers`, and `wait_ms`, the mean time of one. `complete`, `paid` and `basket_value`. The numbers of
        distinct items `shown` and `accepted`; `accepted_value`; `accepted_margin`, NaN without cost.
        `accepted_new` counts the items that the shopper never bought before. Of the last list, if a model
        made it: `hits` of its items, and `expected` by its scores; `gain` (DCG) and the largest possible one.
    """
    asked = answers.select(FIELDS).to_pandas().assign(at=asked_at(answers))
    known = np.flatnonzero(asked["user_id"].notna())
    users = pd.Index(pd.unique(pd.concat([asked["user_id"].iloc[known], purchases["user_id"]])))
    ends = [end for at in (asked["at"], purchases["at"]) for end in (at.min(), at.max())]
    times = pd.Series([until] if pd.isna(ends).all() else ends).dropna()
    key = _keys(users, asked["user_id"].iloc[known], asked["at"].iloc[known], times)
    order = known[np.argsort(key, kind="stable")]
    key = np.sort(key, kind="stable")

    lines = purchases.reset_index(drop=True)
    lines["key"] = _keys(users, lines["user_id"], lines["at"], times)
    lines["value"] = (lines["price"] * lines["quantity"]).fillna(0.0)
    baskets = lines.groupby("basket_id", sort=False).agg(key=("key", "min"), value=("value", "sum"))
    baskets = baskets.sort_values("key")
    following = np.searchsorted(baskets["key"].to_numpy(), key)
    # The pause to the answer before; another shopper's answer is always further away.
    begins = np.ones(len(key), bool)
    begins[1:] = (np.diff(key) > ANSWERED_S * 1_000) | (np.diff(following) > 0)
    session = np.cumsum(begins) - 1
    last = np.flatnonzero(np.append(begins[1:], True)) if len(key) else np.empty(0, np.int64)
    rows = asked.iloc[order[last]].reset_index(drop=True)
    rows["at"] = asked["at"].to_numpy()[order[begins]]
    rows["answers"] = np.bincount(session, minlength=len(rows))
    wait = _waits(answers)[order]
    rows["wait_ms"] = np.bincount(session, wait, len(rows)) / rows["answers"]
    ended = asked["at"].iloc[order[last]]
    rows["complete"] = (ended + pd.Timedelta(seconds=ANSWERED_S) <= until).to_numpy()

    paid_at = np.append(baskets["key"].to_numpy(), np.iinfo(np.int64).max)
    rows["paid"] = paid_at[following[last]] - key[last] <= ANSWERED_S * 1_000
    basket = np.where(rows["paid"], following[last], -1)
    rows["basket_value"] = np.append(baskets["value"].to_numpy(), np.nan)[basket]
    rows = rows.join(_accepted(answers, order, session, basket, lines, baskets.index, cost))
    return rows.join(_judged(answers.take(pa.array(order[last])), basket, lines, baskets.index))


def _keys(users: pd.Index, user: pd.Series, at: pd.Series, times: pd.Series) -> np.ndarray:
    """Return one growing number for each shopper and time, in ms; `times` holds the first and the last."""
    start = times.min()
    span = int((times.max() - start).total_seconds() * 1_000) + ANSWERED_S * 1_000 + 1
    ms = (at - start).dt.total_seconds().to_numpy() * 1_000
    return np.asarray(users.get_indexer(user).astype(np.int64) * span + ms.astype(np.int64))


def _waits(answers: pa.Table) -> np.ndarray:
    """Return the milliseconds of each answer: its `total`, which for a fallback begins with the request."""
    total = pc.map_lookup(answers["stage_ms"].combine_chunks(), "total", "first")
    return np.asarray(pc.fill_null(total, 0.0), np.float64)


def _accepted(
    answers: pa.Table,
    order: np.ndarray,
    session: np.ndarray,
    basket: np.ndarray,
    lines: pd.DataFrame,
    basket_ids: pd.Index,
    cost: pd.Series | None,
) -> pd.DataFrame:
    """Return what each session showed, and how much of it its basket holds."""
    lists = answers["item_ids"].take(pa.array(order))
    shown = pd.DataFrame(
        {
            "session": np.repeat(session, pc.list_value_length(lists).fill_null(0).to_numpy()),
            "item_id": pc.list_flatten(lists).to_pandas().to_numpy(),
        }
    ).drop_duplicates()
    lines = lines.assign(basket=basket_ids.get_indexer(lines["basket_id"]))
    first = lines.groupby(["user_id", "item_id"], sort=False)["key"].transform("min")
    lines["new"] = (first == lines["key"]).astype(float)
    each_cost = np.nan if cost is None else lines["item_id"].map(cost)
    lines["margin"] = lines["value"] - each_cost * lines["quantity"]
    groups = lines.groupby(["basket", "item_id"], sort=False)
    bought = groups[["value", "margin"]].sum(min_count=1).assign(new=groups["new"].max())
    taken = shown.assign(basket=basket[shown["session"]]).merge(
        bought, left_on=["basket", "item_id"], right_index=True
    )
    sums = taken.groupby("session").agg(
        accepted=("item_id", "size"),
        accepted_value=("value", "sum"),
        accepted_new=("new", "sum"),
        accepted_margin=("margin", "sum"),
    )
    figures = sums.reindex(np.arange(len(basket)), fill_value=0.0)
    if cost is None:
        figures["accepted_margin"] = np.nan
    figures["shown"] = np.bincount(shown["session"], minlength=len(basket))
    return figures


def _judged(answers: pa.Table, basket: np.ndarray, lines: pd.DataFrame, basket_ids: pd.Index) -> pd.DataFrame:
    """Return how well each list fits its basket; zeros without a basket, or where no model ranked."""
    scored = pc.and_(pc.equal(answers["rung"], "full"), pc.is_valid(answers["scores"])).fill_null(False)
    judged = (basket >= 0) & scored.to_numpy()
    size = np.where(judged, pc.list_value_length(answers["item_ids"]).fill_null(0).to_numpy(), 0)
    answers = answers.filter(pa.array(judged))
    shown = pd.DataFrame({"item_id": pc.list_flatten(answers["item_ids"]).to_pandas()})
    session = np.repeat(np.arange(len(basket)), size)
    place = np.arange(len(session)) - np.repeat(np.cumsum(size) - size, size)
    bought = pd.MultiIndex.from_arrays(
        [basket_ids.get_indexer(lines["basket_id"]), lines["item_id"]]
    ).unique()
    hit = pd.MultiIndex.from_arrays([basket[session], shown["item_id"]]).isin(bought)
    worth = 1 / np.log2(np.arange(size.max(initial=0)) + 2)
    sums = {
        "hits": hit,
        "expected": pc.list_flatten(answers["scores"]).to_numpy(),
        "gain": hit * worth[place],
    }
    figures = pd.DataFrame({name: np.bincount(session, each, len(basket)) for name, each in sums.items()})
    held = np.zeros(len(basket), np.int64)
    held[judged] = pc.list_value_length(answers["basket"]).fill_null(0).to_numpy()
    paid = np.append(np.bincount(bought.get_level_values(0), minlength=len(basket_ids)), 0)[basket]
    left = np.where(judged, np.minimum(size, np.maximum(paid - held, figures["hits"])), 0).astype(np.int64)
    return figures.assign(best_gain=np.append(0, worth.cumsum())[left])
