"""The prediction log or the events of two windows -> tables of the watched columns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import faiss
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from feature_repo.events import Dataset, lines_bought
from feature_repo.schema import LEVELS
from feature_repo.statistics import read_statistics, read_vocabulary
from monitoring.sessions import ANSWERED_S, asked_at
from serving.errors import BundleInvalid
from serving.prediction_log import feature_names, feature_rows
from serving.release.manifest import read_manifest
from serving.stages.item_index import read_faiss

REFERENCE_EVENTS, REFERENCE_LOG = "reference_events.parquet", "reference_log.parquet"  # files of a bundle
DAY = timedelta(days=1)
WEEK = timedelta(days=7)  # the window that a check looks at
HOURS = np.array([f"{hour:02d}" for hour in range(24)], object)
LENGTHS = (1, 2, 3, 5, 9, 17)  # where the groups of basket lengths begin
RARE_LENGTH = 0.02  # the lengths of baskets or lists of a smaller share of either window's requests are rare
REGIONS = 16  # of the space of item vectors
BASKETS = 200_000  # whose vectors are in memory at once
LEAST_UNITS = 200  # baskets or requests on each side; with fewer, chance alone looks like drift
# The baskets in a shopper's history: 0 for a guest, a request without a user, and a row that was not read. No
# training changes their share, and an evaluation, which has a row for each request, may have none of them.
HISTORY = "user_basket_count"


@dataclass(frozen=True)
class Window:
    """A time span, `since` included, `until` excluded; None is open."""

    since: datetime | None = None
    until: datetime | None = None

    @classmethod
    def parse(cls, since: str, until: str, timezone: str = "UTC") -> Window:
        """Read ISO 8601 times; a time without an offset is local, a date is its midnight, "" is open.

        Raises:
            ValueError: a text is not a time, or the window ends before it begins.
        """
        window = cls(_time(since, timezone), _time(until, timezone))
        if window.since and window.until and window.since >= window.until:
            raise ValueError(f"the window ends ({until}) before it begins ({since}): move one of them")
        return window

    def holds(self, at: pd.Series) -> np.ndarray:
        """Return which of the times lie in the window."""
        inside = np.ones(len(at), bool)
        if self.since is not None:
            inside &= (at >= self.since).to_numpy()
        if self.until is not None:
            inside &= (at < self.until).to_numpy()
        return inside

    def to_dict(self) -> dict[str, str | None]:
        """Return both ends as ISO 8601 text."""
        ends = {"since": self.since, "until": self.until}
        return {name: None if at is None else at.isoformat() for name, at in ends.items()}


@dataclass(frozen=True)
class TablePair:
    """The same columns in both windows; rows that name the same `unit` are not independent."""

    current: pd.DataFrame
    reference: pd.DataFrame
    unit: str = ""  # the column that names the basket or request of a row; "" when each row is its own
    week: str = ""  # the column that numbers the weeks, counted back from the last day; "" without one

    def only(self, columns: Sequence[str]) -> TablePair:
        """Return the table with only those of these columns that it has."""
        kept = {*columns, self.unit, self.week}
        frames = (self.current, self.reference)
        current, reference = (frame[[name for name in frame if name in kept]] for frame in frames)
        return TablePair(current, reference, self.unit, self.week)


@dataclass(frozen=True)
class Embeddings:
    """A bundle's item vectors, and the regions into which baskets fall among them: for drift of embeddings.

    The vector of a basket is the mean of its items' vectors, which the item tower made. K-means over the
    baskets of the reference gives the regions. A basket without an item of the bundle is in none.
    """

    item_ids: pd.Index
    index: Any  # Faiss's; its row numbers are those of `item_ids`
    centres: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))  # of the regions

    @classmethod
    def of(cls, bundle: Path) -> Embeddings:
        """Take the index of a bundle; there are no regions yet.

        Raises:
            BundleInvalid: a file is damaged.
        """
        with _damage_named(bundle):
            item_ids = read_statistics(bundle / "statistics").item_ids
            return cls.of_index(read_faiss(bundle / "index.faiss"), item_ids)

    @classmethod
    def of_index(cls, index: Any, item_ids: Sequence[str] | np.ndarray) -> Embeddings:
        """Take an index; items beyond its rows are unknown."""
        if isinstance(index, faiss.IndexIVF):
            index.make_direct_map()
        return cls(pd.Index(item_ids[: index.ntotal]), index)

    def with_regions(self, items: pd.Series, unit: pd.Series) -> Embeddings:
        """Return the same with the regions of the reference's baskets, see `regions_of`."""
        row, units = pd.factorize(unit)
        sampled = row % max(1, -(-len(units) // BASKETS)) == 0
        vectors, _ = self.means(items[sampled], unit[sampled])
        if len(vectors) < REGIONS:
            return self
        kmeans: Any = faiss.Kmeans(self.index.d, REGIONS, seed=0, min_points_per_centroid=1)
        kmeans.train(vectors)
        return replace(self, centres=kmeans.centroids)

    def regions_of(self, items: pd.Series, unit: pd.Series) -> pd.Series:
        """Return the names of regions by basket, where it has one; `unit` is the basket of each item."""
        if not len(self.centres):
            return pd.Series(dtype=object)
        row, units = pd.factorize(unit)
        regions = []
        for first in range(0, len(units), BASKETS):  # the vectors of all baskets may not fit into memory
            part = (row >= first) & (row < first + BASKETS)
            vectors, baskets = self.means(items[part], unit[part])
            far = (self.centres**2).sum(1) - 2 * vectors @ self.centres.T
            regions.append(pd.Series([f"region {n}" for n in far.argmin(1)], baskets, dtype=object))
        return pd.concat(regions) if regions else pd.Series(dtype=object)

    def means(self, items: pd.Series, unit: pd.Series) -> tuple[np.ndarray, pd.Index]:
        """Return the vector of each basket that has one, and the baskets; see `regions_of`."""
        code = self.item_ids.get_indexer(pd.Index(items))
        row, units = pd.factorize(unit[code >= 0])
        distinct, place = np.unique(code[code >= 0], return_inverse=True)
        vectors = self.index.reconstruct_batch(distinct)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        sums = np.zeros((len(units), self.index.d), np.float32)
        np.add.at(sums, row, vectors[place])
        return sums / np.bincount(row, minlength=len(units))[:, None].astype(np.float32), pd.Index(units)


def known_until(at: pd.Series) -> pd.Timestamp:
    """Return the newest of the times that is not in the future; the newest where all are.

    One till's clock may be a day ahead. The purchases of all others are not known up to its time.
    """
    past = at[at <= pd.Timestamp.now("UTC")]
    return (past if len(past) else at).max()


def purchases(data: Dataset, window: Window) -> pd.DataFrame:
    """Return the purchases of a window with each item's category and department."""
    return lines_bought(data, window.holds(data.events["at"]))


@dataclass(frozen=True)
class EventFrames:
    """The purchases of one window, by line and by basket."""

    lines: pd.DataFrame
    baskets: pd.DataFrame

    @classmethod
    def of(cls, events: pd.DataFrame, timezone: str, embeddings: Embeddings | None = None) -> EventFrames:
        """Convert purchases to the watched columns; hours and days are local.

        With embeddings each basket has its region.
        """
        lines = events[["basket_id", "category", "department"]].assign(item_price=events["price"])
        baskets = _baskets(events, timezone)
        if embeddings is not None:
            region = embeddings.regions_of(events["item_id"], events["basket_id"])
            baskets["basket_region"] = baskets["basket_id"].map(region).astype(object)
        baskets["week"] = _weeks(baskets["date"])
        week = baskets.set_index("basket_id")["week"].reindex(lines["basket_id"]).to_numpy()
        return cls(lines.assign(week=week), baskets)


def event_tables(current: EventFrames, reference: EventFrames) -> list[TablePair]:
    """Return the watched columns of purchases: by line, and by basket."""
    baskets = [frames.baskets.drop(columns="date") for frames in (current, reference)]
    return [
        TablePair(current.lines, reference.lines, "basket_id", "week"),
        TablePair(baskets[0], baskets[1], "basket_id", "week"),
    ]


def log_tables(
    current: pa.Table, reference: pa.Table, category_of: Mapping[str, str], embeddings: Embeddings
) -> list[TablePair]:
    """Return the watched columns of the log: of each returned item, of each basket item, of each request."""
    # A till may repeat its last question, and the cached answer has no features.
    ranked = _at_equal_lengths(*_checkouts(_ranked(current), _ranked(reference)))
    current, reference = _at_equal_lengths(*_checkouts(current, reference))
    # A till that asks for three items has no later places, where scores are lower; an evaluation has ten.
    most = min((_usual_k(side) for side in ranked if len(side)), default=0)
    answers = _alike(*(_answers(side, most) for side in ranked))
    return [
        TablePair(*answers, "request"),
        TablePair(_basket_items(current, category_of), _basket_items(reference, category_of), "request"),
        TablePair(_requests(current, embeddings), _requests(reference, embeddings), week="week"),
    ]


def _checkouts(*sides: pa.Table) -> list[pa.Table]:
    """Return the last answer of each checkout, without guests where enough shoppers are known.

    A till may ask after each scan. Such questions are not independent of each other, and the first items of a
    large basket are no small basket. Nothing joins the questions of a guest: each stands for itself.
    """
    ends = []
    for side in sides:
        asked = pd.DataFrame({"user": side["user_id"].to_pandas(), "at": asked_at(side)})
        asked = asked.sort_values(["user", "at"], kind="stable")
        following = asked.shift(-1)
        goes_on = (following["at"] - asked["at"]).dt.total_seconds() <= ANSWERED_S
        goes_on &= following["user"] == asked["user"]
        ends.append(side.filter(pa.array(~goes_on.sort_index().to_numpy())))
    known = [side.filter(pc.is_valid(side["user_id"])) for side in ends]
    return known if min(map(len, known)) >= LEAST_UNITS else ends


def _at_equal_lengths(current: pa.Table, reference: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the records of both with the basket lengths that both have, in the shares of the window.

    A till may not ask after the last scan, an evaluation asks about whole baskets. How long a basket is when
    the till asks is no behaviour of shoppers, and many features follow from it.
    """
    sides = (current, reference)
    group = [np.digitize(pc.list_value_length(side["basket"]).to_numpy(), LENGTHS) for side in sides]
    count = [np.bincount(each, minlength=len(LENGTHS) + 1) for each in group]
    common = np.logical_and(*(each >= max(1, RARE_LENGTH * each.sum()) for each in count))
    scale = (count[1][common] / count[0][common]).min(initial=np.inf)
    rng = np.random.default_rng(0)
    kept = [
        rng.permutation(np.flatnonzero(group[1] == n))[: int(scale * count[0][n])]
        for n in np.flatnonzero(common)
    ]
    return current.filter(pa.array(common[group[0]])), reference.take(
        np.sort(np.concatenate([[], *kept])).astype(int)
    )


def _time(text: str, timezone: str) -> datetime | None:
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"'{text}' is no time: write it as 2017-11-20 or 2017-11-20T05:00:00Z") from error
    return at if at.tzinfo else at.replace(tzinfo=ZoneInfo(timezone))


def _baskets(events: pd.DataFrame, timezone: str) -> pd.DataFrame:
    lines = events.assign(value=events["price"] * events["quantity"], discounted=events["discount"] > 0)
    baskets = lines.groupby("basket_id", sort=False, as_index=False).agg(
        basket_size=("value", "size"),
        basket_value=("value", "sum"),
        discounted_line_ratio=("discounted", "mean"),
        store_id=("store_id", "first"),
        at=("at", "first"),
    )
    local = pd.to_datetime(baskets.pop("at"), utc=True).dt.tz_convert(timezone)
    return baskets.assign(
        hour=HOURS[local.dt.hour.to_numpy()], date=local.dt.tz_localize(None).dt.normalize()
    )


def _ranked(records: pa.Table) -> pa.Table:
    """Return the records whose items have features: fallbacks and cached lists have none."""
    items = pc.list_value_length(records["item_ids"]).to_numpy()
    values = pc.list_value_length(records["features"]).to_numpy()
    return records.filter(pa.array((items > 0) & (values == items * len(feature_names(records)))))


def _usual_k(records: pa.Table) -> int:
    """Return the smallest number of wanted items that is not rare."""
    return int(np.quantile(records["k"].to_numpy(), RARE_LENGTH, method="inverted_cdf"))


def _answers(records: pa.Table, most: int) -> pd.DataFrame:
    """Return the first `most` items of each list."""
    names, items = feature_names(records), pc.list_value_length(records["item_ids"]).to_numpy()
    place = np.arange(items.sum()) - np.repeat(np.cumsum(items) - items, items)
    frame = pd.DataFrame(feature_rows(records), columns=names) if names else pd.DataFrame()
    return frame.assign(
        score=pc.list_flatten(records["scores"]).to_numpy(),
        source=pc.list_flatten(records["sources"]).to_pandas(),
        request=np.repeat(np.arange(len(records)), items),
    )[place < most]


def _alike(current: pd.DataFrame, reference: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the answers to shoppers with a history; in a shop of guests, the others."""
    if HISTORY not in current or HISTORY not in reference:
        return current, reference
    known = current[current[HISTORY] > 0], reference[reference[HISTORY] > 0]
    if min(side["request"].nunique() for side in known) >= LEAST_UNITS:
        return known
    return current[current[HISTORY] == 0], reference[reference[HISTORY] == 0]


def _basket_items(records: pa.Table, category_of: Mapping[str, str]) -> pd.DataFrame:
    items, request = basket_lines(records)
    # An unknown item has no category: the share without a value shows how many there are.
    return pd.DataFrame({"basket_category": items.map(category_of), "request": request})


def basket_lines(records: pa.Table) -> tuple[pd.Series, pd.Series]:
    """Return the items of all baskets, and the number of each one's request."""
    lengths = pc.list_value_length(records["basket"]).to_numpy().astype(np.int64)
    request = pd.Series(np.repeat(np.arange(len(records)), lengths))
    return pc.list_flatten(records["basket"]).to_pandas(), request


def _requests(records: pa.Table, embeddings: Embeddings) -> pd.DataFrame:
    frame = records.select(["rung", "store_id"]).to_pandas()
    region = embeddings.regions_of(*basket_lines(records)).reindex(frame.index).astype(object)
    return frame.assign(basket_region=region, week=_weeks(records["answered_at"].to_pandas()))


def _weeks(at: pd.Series) -> np.ndarray:
    """Return how many whole weeks before the last moment each one lies."""
    return np.asarray((at.max() - at).dt.days // 7) if len(at) else np.empty(0, np.int64)


def bundle_categories(bundle: Path) -> dict[str, str]:
    """Return the category of each item that a bundle's catalogue holds.

    Raises:
        BundleInvalid: a file is damaged.
    """
    with _damage_named(bundle):
        statistics = read_statistics(bundle / "statistics")
        names = read_vocabulary(bundle / "statistics")["category"]
    codes = statistics.categorical[:, LEVELS.index("category")]
    return {
        item: names[code] for item, code in zip(statistics.item_ids.tolist(), codes.tolist(), strict=True)
    }


@contextlib.contextmanager
def _damage_named(bundle: Path) -> Iterator[None]:
    """Name the bundle in the errors that Faiss and NumPy raise for a cut file."""
    try:
        yield
    except (RuntimeError, EOFError, ValueError) as error:
        raise BundleInvalid(f"bundle {bundle} can't be read ({error}): fetch the bundle again") from error


def bundle_reference(bundle: Path, name: str) -> pa.Table:
    """Return a reference that a bundle holds: REFERENCE_EVENTS or REFERENCE_LOG.

    Raises:
        FileNotFoundError: the bundle was not evaluated.
    """
    manifest = read_manifest(bundle)
    if name not in manifest["files"]:
        raise FileNotFoundError(
            f"bundle {manifest['bundle_id']} holds no {name}: evaluate it first, or name a reference window"
        )
    return pq.read_table(bundle / name)
