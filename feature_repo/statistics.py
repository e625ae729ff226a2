"""CONTRACT the tables fitted on a training window: item table, bought-together, popularity.

Rows are items of the catalogue; an item's row number is its *code*. All values of an item that do not depend
on one user or one basket come from here. So training, evaluation and serving look them up in the same arrays.
The arrays are memory-mapped `.npy` files, never pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from feature_repo.kernels.ids import codes_of, index_ids
from feature_repo.kernels.pairs import Catalogue, find

NO_ITEM = -1
SOLD_7D, SOLD_28D = 2, 4  # the columns of `fresh` with the baskets of 7 and of 28 days
NEW_ITEMS = "new_items.txt"  # holds their number; without the file it is 0


@dataclass(frozen=True)
class Statistics:
    """Arrays over the n items of the catalogue, all counted on events before the cut.

    Prices are in the shop's currency per unit, ages and intervals in days as of the cut.
    """

    item_ids: np.ndarray  # (n,) str, sorted, new items behind the others
    categorical: np.ndarray  # (n, 3) int32 codes of type, category, department; 0 is unknown
    is_private: np.ndarray  # (n,) float32, 1 for the shop's own brand
    price: np.ndarray  # (n,) float32 mean paid
    discount_ratio: np.ndarray  # (n,) float32 share of units sold at a discount
    purchases_4w: np.ndarray  # (n,) float32 baskets in the last 4 weeks
    purchases_13w: np.ndarray  # (n,) float32 baskets in the last 13 weeks
    basket_count: np.ndarray  # (n,) float32 baskets since the beginning
    buyer_count: np.ndarray  # (n,) float32 distinct users
    repeat_ratio: np.ndarray  # (n,) float32 share of buyers who bought on two occasions or more
    interval_days: np.ndarray  # (n,) float32 mean time between two purchases by one user
    age_days: np.ndarray  # (n,) float32 since the first sale
    neighbours: np.ndarray  # (n, K) int32 items most often bought together, NO_ITEM behind the last
    together_count: np.ndarray  # (n, K) float32 baskets that hold both
    type_lift: np.ndarray  # (T, T) float16 log of how much likelier a basket with type a also holds type b
    popular: np.ndarray  # (p,) int32 best sellers of the last 4 weeks, best first
    store_ids: np.ndarray  # (s,) str, sorted
    store_popular: np.ndarray  # (s, b) int32 best sellers of each store in the last 13 weeks
    total_baskets: np.ndarray  # () float64
    fresh: np.ndarray  # (n, features) float32, `schema.FRESH` as of the latest nightly count
    manufacturer: np.ndarray  # (n,) int32 codes of the manufacturer, 0 is unknown
    new_items: int = 0  # number of last rows that were added after the training: no model knows their ids

    @cached_property
    def code_of(self) -> dict[str, int]:
        """Item id -> code, for the pipeline; the endpoint does without: a million items take 120 MiB."""
        return {item: code for code, item in enumerate(self.item_ids.tolist())}

    @cached_property
    def level_sizes(self) -> np.ndarray:
        """How many codes each level has: type, category, department, (3,)."""
        sizes: np.ndarray = self.categorical.max(0, initial=0) + 1
        return sizes

    @cached_property
    def store_row(self) -> dict[str, int]:
        """Store id -> row of `store_popular`."""
        return {store: row for row, store in enumerate(self.store_ids.tolist())}

    def best_of_store(self, store_id: str | None) -> np.ndarray | None:
        """Return the best sellers of a store, best first, (b,) int32; None if the tables do not know it."""
        row = None if store_id is None else self.store_row.get(store_id)
        return None if row is None else self.store_popular[row]

    @cached_property
    def best_of_week(self) -> np.ndarray:
        """Best sellers of the last 7 days before the latest nightly count, best first, (w,) int64."""
        sold = self.fresh[:, SOLD_7D]
        order = np.argsort(-sold, kind="stable")[: len(self.popular)]
        return order[sold[order] > 0]

    @cached_property
    def link_weights(self) -> np.ndarray:
        """Factors of a link's count, (n, 6) float32: three factors of its source, three of its partner."""
        count = np.maximum(self.basket_count, 1).astype(np.float32)
        total = np.float32(self.total_baskets)
        rows = [count**-0.7, count**-0.5, 1 / count, count**-0.3, count**-0.5, total / count]
        return np.stack(rows, axis=1).astype(np.float32)

    @cached_property
    def log_price(self) -> np.ndarray:
        """The logarithm of each item's price plus a half, (n,) float64."""
        with np.errstate(invalid="ignore", divide="ignore"):  # an invalid price stays in its own row
            return np.log(self.price + np.float64(0.5))

    @cached_property
    def catalogue(self) -> Catalogue:
        """The arrays that candidates are compared by.

        (n, 3) type, category and department, 0 unknown; (3,) how many codes each of them has; (n,) price;
        (n,) `log_price`; (n,) 1 for the shop's own brand; (T, T) bits of `type_lift`; (n, K) `neighbours`;
        (n, K) `together_count`; (n, 6) `link_weights`.
        """
        return (
            self.categorical,
            self.level_sizes,
            self.price,
            self.log_price,
            self.is_private,
            self.type_lift.view(np.uint16),
            self.neighbours,
            self.together_count,
            self.link_weights,
        )

    def as_of(self, fresh: np.ndarray) -> Statistics:
        """Return the same statistics with the day-fresh features of another day, (n, features) float32."""
        for name, kind in vars(Statistics).items():
            if isinstance(kind, cached_property):
                getattr(self, name)  # so that both share the arrays derived from the others
        other = copy(self)
        del other.__dict__["best_of_week"]
        object.__setattr__(other, "fresh", fresh)
        return other

    def once(self, make: Callable[[Statistics], np.ndarray]) -> np.ndarray:
        """Return the result of a function of the statistics, which is called once and cached."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    @property
    def known_items(self) -> int:
        """The number of items that the models know; new items follow them."""
        return len(self.item_ids) - self.new_items

    def find(self, codes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Return the place of each wanted code among distinct codes, int64, -1 if it is missing."""
        return self.marked(find, codes, wanted)

    def marked(self, loop: Callable[..., Any], *arguments: object) -> Any:
        """Call a loop with one zero per item as its last argument; the loop must leave zeros behind.

        A mark per item shows in one step whether a code was seen, and where: no sort, no search. Threads may
        share the statistics: each call has an array of its own.
        """
        try:
            marks = self._idle_marks.pop()
        except IndexError:
            marks = np.zeros(len(self.item_ids), np.int32)
        found = loop(*arguments, marks)
        self._idle_marks.append(marks)  # not after an exception, which may leave marks set
        return found

    def codes_in(self, text: bytes, count: int) -> np.ndarray:
        """Return the codes of the ids in a text, one a line, int64; NO_ITEM for unknown ids.

        The result is empty if the number of ids in the text is not `count`.
        """
        if count > len(text) + 1:  # a damaged row may claim billions, and memory for them
            return np.empty(0, np.int64)
        return codes_of(np.frombuffer(text, np.uint8), count, self._index)

    @cached_property
    def _index(self) -> np.ndarray:
        ids = [item.encode() for item in self.item_ids.tolist()]
        text = np.frombuffer(b"".join(ids), np.uint8)
        ends = np.cumsum([len(item) for item in ids])
        slots = np.empty((1 << (2 * len(ids)).bit_length(), 2), np.int64)
        if (code := index_ids(text, ends, slots)) >= 0:
            raise ValueError(
                f"item {self.item_ids[code]!r} has the hash of another one: expected ids that differ"
            )
        return slots

    @cached_property
    def _made(self) -> dict[Callable[[Statistics], np.ndarray], np.ndarray]:
        return {}

    @cached_property
    def _idle_marks(self) -> list[np.ndarray]:
        return []

    def each_code(self, item_ids: Sequence[str]) -> np.ndarray:
        """Return the code of each id, int64; NO_ITEM for unknown ids. No id holds a line end, see `is_id`."""
        return self.codes_in("\n".join(item_ids).encode("utf-8", "surrogatepass"), len(item_ids))

    def codes(self, item_ids: Sequence[str]) -> np.ndarray:
        """Return the codes of those ids that the catalogue knows, in the order given, int64."""
        codes = self.each_code(item_ids)
        return codes[codes >= 0]


ARRAYS = tuple(f.name for f in fields(Statistics) if f.name != "new_items")


def write_statistics(path: Path, statistics: Statistics, vocabulary: dict[str, list[str]]) -> None:
    """Write the arrays as one `.npy` file each, and the names behind the categorical codes."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ARRAYS:
        np.save(path / f"{name}.npy", getattr(statistics, name), allow_pickle=False)
    if statistics.new_items:
        (path / NEW_ITEMS).write_text(str(statistics.new_items))
    (path / "vocabulary.json").write_text(json.dumps(vocabulary))


# What each array holds, and its axes: n items, 3 levels, k partners, t types, p best sellers of the chain, s
# stores, b best sellers of each. One letter is one length. All others are float32 over the items.
_LAYOUT = {
    "item_ids": ("U", "n"),
    "categorical": ("i4", "n3"),
    "manufacturer": ("i4", "n"),
    "fresh": ("f4", "nf"),
    "neighbours": ("i4", "nk"),
    "together_count": ("f4", "nk"),
    "type_lift": ("f2", "tt"),
    "popular": ("i4", "p"),
    "store_ids": ("U", "s"),
    "store_popular": ("i4", "sb"),
    "total_baskets": ("f8", ""),
}


def read_statistics(path: Path) -> Statistics:
    """Return the arrays that `write_statistics` wrote, memory-mapped.

    Raises:
        ValueError: an array is not of its type or shape, or holds codes out of range, which the compiled
            loops do not check.
    """
    loaded: dict[str, np.ndarray] = {}
    lengths = {"3": 3}
    for name in ARRAYS:
        # A plain view of the mapped pages: indexing the memmap class itself costs microseconds a time.
        array = np.asarray(np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False))
        kind, axes = _LAYOUT.get(name, ("f4", "n"))
        expected = [lengths.setdefault(*axis) for axis in zip(axes, array.shape, strict=False)]
        if list(array.shape) != expected or len(axes) != array.ndim or not _is(array.dtype, kind):
            raise ValueError(
                f"{path / name}.npy holds {array.dtype} of the shape {array.shape}, "
                f"expected {kind} of the axes {axes!r} with {lengths}"
            )
        loaded[name] = array
    n, t = lengths["n"], lengths["t"]
    for name, lowest, size in (
        ("neighbours", NO_ITEM, n),
        ("popular", 0, n),
        ("store_popular", 0, n),
        ("categorical", 0, np.iinfo(np.int32).max),
    ):
        _check_codes(path / f"{name}.npy", loaded[name], lowest, size)
    _check_codes(path / "categorical.npy", loaded["categorical"][:, 0], 0, t)
    file = path / NEW_ITEMS
    new = int(file.read_text()) if file.is_file() else 0
    if not 0 <= new <= n:
        raise ValueError(f"{file} says that {new} items are new, expected 0 to {n}")
    return Statistics(**loaded, new_items=new)


def _is(dtype: np.dtype, kind: str) -> bool:
    return dtype.kind == kind or dtype == np.dtype(kind)


def _check_codes(file: Path, codes: np.ndarray, lowest: int, size: int) -> None:
    if codes.size and (codes.min() < lowest or codes.max() >= size):
        raise ValueError(
            f"{file} holds codes from {codes.min()} to {codes.max()}, expected {lowest} to below {size}"
        )


def read_vocabulary(path: Path) -> dict[str, list[str]]:
    """Return the names behind the codes: of types, categories, departments and manufacturers."""
    vocabulary: dict[str, list[str]] = json.loads((path / "vocabulary.json").read_text())
    return vocabulary
