"""Two sizes -> the files of a large synthetic shop, on which a table of millions of rows is measured.

Every shopper comes three times in forty weeks and buys five items: one of two favourites, in turn, and two
pairs. Items come in fours (0 to 3, 4 to 7, ...). A pair is two of a four: one of its three ways to pair off,
of which one is three times as likely as each of the others, and then both of its pairs, one after the other.
The fours go round the whole catalogue in a shuffled order, so that every item is bought often enough to be
recommended, and no model can be sure which of three items goes with another.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WEEKS = 40
TRIPS = 3
PAIRS = 2  # in a basket
WAYS = np.array([[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]])  # to pair four items off
LIKELY = 0.6  # the way that a four's items mostly pair off
TYPES, CATEGORIES, DEPARTMENTS = 1_000, 200, 20
FIRST_S = 1_704_067_200  # Monday, 2024-01-01, UTC


def write_synthetic_shop(path: Path, items: int, users: int) -> int:
    """Write `events.parquet` and `items.parquet` into `path`; return the number of purchases.

    Args:
        path: the directory to write.
        items: size of the catalogue, a multiple of four of at most twice as many as there are users: then
            every item is bought five times or more in the first 35 weeks.
        users: number of shoppers.

    Raises:
        ValueError: the sizes do not fit together.
    """
    check_sizes(items, users)
    rng = np.random.default_rng(0)
    baskets = TRIPS * users
    order = np.arange(baskets)
    user = np.concatenate([rng.permutation(users) for _ in range(TRIPS)])
    favourite = rng.integers(items, size=(2, users))[order // users % 2, user]
    fours = items // 4
    visit, place = np.divmod(np.arange(PAIRS * baskets), fours)
    four = rng.permutation(fours)[place]
    mostly = rng.integers(3, size=fours)
    drawn = np.where(
        rng.random((visit[-1] // 2 + 1, fours)) < 1.5 * (1 - LIKELY),
        rng.integers(3, size=(visit[-1] // 2 + 1, fours)),  # of which a third is the likely way after all
        mostly,
    )
    pair = 4 * four[:, None] + WAYS[drawn[visit // 2, four], visit % 2]  # (PAIRS x baskets, 2)
    item = np.concatenate([favourite[:, None], pair.reshape(baskets, -1)], axis=1)  # (baskets, 1 + 2 PAIRS)
    second = ((order + rng.random(baskets)) * (WEEKS * 7 * 86_400 / baskets)).astype(np.int64)
    lines = item.shape[1]
    code = item.ravel().astype(np.int32)
    names = _names("item", items)
    path.mkdir(parents=True, exist_ok=True)
    events = pa.table(
        {
            "event_id": pa.array(np.arange(len(code))).cast(pa.string()),
            "user_id": _named(np.repeat(user, lines), _names("user", users)),
            "basket_id": _named(np.repeat(order, lines), _names("basket", baskets)),
            "item_id": _named(code, names),
            "at": pa.array((FIRST_S + np.repeat(second, lines)) * 1_000_000, pa.timestamp("us", tz="UTC")),
            "price": 1.0 + code % 7,
            "store_id": _named(np.repeat(user % 100, lines), _names("store", 100)),
        }
    )
    pq.write_table(events, path / "events.parquet")
    # The items of a four are of one type; the levels nest.
    kind = np.arange(items) // 4 % TYPES
    table = {"type": kind, "category": kind % CATEGORIES, "department": kind % DEPARTMENTS}
    columns = {level: _named(codes, _names(level, TYPES)) for level, codes in table.items()}
    pq.write_table(pa.table({"item_id": names, **columns}), path / "items.parquet")
    return len(code)


def check_sizes(items: int, users: int) -> None:
    """Raise ValueError when a shop of so many items and shoppers cannot be as described."""
    if items < 4 or items % 4 or items > 2 * users:
        raise ValueError(
            f"{items} items for {users} users: expected a multiple of four items, at most two for each user, "
            "so that every item is bought often enough to be recommended"
        )


def _names(kind: str, count: int) -> pa.Array:
    width = len(str(count - 1))
    return pa.array(np.char.mod(f"{kind}-%0{width}d", np.arange(count)))


def _named(codes: np.ndarray, names: pa.Array) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), names)
