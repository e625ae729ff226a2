"""A bundle, its retriever, new items and removed ones -> a bundle that knows of them, without any training.

The models, the main index and everything that was counted stay as they are; `refresh_counts` updates the
counts of the last days. A new item gets a row in the item table: its names and price, the usual interval
between two purchases, and zeros where nothing was counted yet. Its vector is the item tower's content: its
type, category and department. The item's own embedding is left out, and its bias is the mean of its type's:
both take purchases to learn.
"""

from __future__ import annotations

import logging
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch

from components.data.examples import ContractViolation
from components.data.fit_statistics import NAMES, Purchases, fresh_by_day
from components.models.two_tower import QueryTower, TwoTower
from components.release.assemble_bundle import seal_with_golden
from components.retriever.train_retriever import load_retriever
from feature_repo.atomic_files import is_damage
from feature_repo.ids import is_id
from feature_repo.schema import BASKET_LENGTH, HISTORY_LENGTH, LEVELS
from feature_repo.statistics import (
    ARRAYS,
    NO_ITEM,
    Statistics,
    read_vocabulary,
    write_statistics,
)
from feature_repo.stream.erasure import Forgotten
from serving.release.bundle import NEW_VECTORS, REMOVED_ITEMS, Bundle, load_bundle
from serving.release.golden import GoldenRequest, read_golden
from serving.stages.retrieval import Quotas

log = logging.getLogger(__name__)

ALIKE = 0.01  # two processors differ by less in a vector, two trainings by more
_LARGEST = float(np.finfo(np.float32).max)
_OF_ITEMS = ("price", "is_private")  # optional columns of a new item, beside its names
# The tables without a row for each item: new items do not change them.
_NOT_OF_ITEMS = ("type_lift", "popular", "store_ids", "store_popular", "total_baskets")
# Pandas unpacks a .zip, .tar, .gz or .xz by itself: the errors of a broken one, beside Python's usual ones.
_OF_ARCHIVES = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)


def extend_index(
    bundle: Path,
    retriever: Path,
    extended: Path,
    new: pd.DataFrame,
    removed: Sequence[str],
    counted: Purchases | None = None,
    until: pd.Timestamp | None = None,
    forgotten: Forgotten | None = None,
) -> str:
    """Write a bundle with new items and without removed ones, and return its id.

    Args:
        bundle: the bundle to start from; it may be an extended one.
        retriever: the checkpoint that it was made from.
        extended: the directory to write.
        new: one row for each new item: `item_id`, and as far as they are known `type`, `category`,
            `department`, `manufacturer`, `price` and `is_private` (1 for the shop's own brand).
        removed: ids of items that are not sold any more.
        counted: purchases for the day-fresh features; None: these stay as they are.
        until: the end of the last day that counts.
        forgotten: shoppers whose golden requests and reference answers the new bundle must not hold.

    Raises:
        ValueError: a new item has no id, comes twice or is known already; a removed one is not known.
        ContractViolation: the retriever is of another bundle.
    """
    loaded = load_bundle(bundle)
    before = loaded.statistics
    _check(new, removed, loaded)
    model = load_retriever(retriever)
    known = before.known_items
    if not (
        np.array_equal(model.categorical[1:], before.categorical[:known]) and _is_tower_of(model, loaded)
    ):
        raise ContractViolation(
            f"{retriever} was trained on other items than bundle {loaded.bundle_id} holds, or is of another "
            "training: pass the checkpoint of the run that made the bundle"
        )
    if extended.exists():
        shutil.rmtree(extended)
    shutil.copytree(bundle, extended)
    vocabulary = read_vocabulary(bundle / "statistics")
    _warn_of_unknown(new, vocabulary)
    after = _with_rows(before, new, vocabulary)
    if counted is not None and until is not None:
        types, end = np.asarray(after.categorical[:, 0]), until.timestamp()
        after = replace(after, fresh=fresh_by_day(counted, after.item_ids, types, end, 1)[0])
    shutil.rmtree(extended / "statistics")
    write_statistics(extended / "statistics", after, vocabulary)
    vectors = cold_vectors(model, np.asarray(after.categorical[known:], np.int64))
    if after.new_items:
        np.save(extended / NEW_VECTORS, vectors, allow_pickle=False)
    settings = loaded.settings
    if len(new) and counted is None and not settings.quotas.tower:
        # An item that was never sold has no partners and no counts: only the towers find it.
        settings = replace(
            settings, quotas=replace(settings.quotas, tower=Quotas().of(settings.quotas.total).tower)
        )
    gone = np.union1d(loaded.removed, after.codes(list(removed)))
    if len(gone):
        np.save(extended / REMOVED_ITEMS, gone, allow_pickle=False)
    bundle_id = seal_with_golden(
        extended,
        _without(forgotten or Forgotten(), extended),
        cut=loaded.manifest["cut"],
        settings=settings,
        made_from={**loaded.manifest["made_from"], "parent": loaded.bundle_id},
    )
    log.info("bundle %s: %d new items, %d removed", bundle_id, after.new_items, len(gone))
    return bundle_id


def _is_tower_of(model: TwoTower, bundle: Bundle) -> bool:
    """Say whether a bundle's query tower is the model's: it gives some baskets the same vectors."""
    baskets = np.resize(np.arange(1, len(model.categorical)), (64, BASKET_LENGTH))
    history = np.zeros((len(baskets), HISTORY_LENGTH))
    inputs = {
        "history": history.astype(np.int64),
        "history_weight": history.astype(np.float32),
        "basket": baskets,
    }
    served = bundle.query_tower.run(["vector"], inputs)[0]
    with torch.no_grad():
        own = QueryTower(model)(*map(torch.from_numpy, inputs.values())).numpy()
    return own.shape == served.shape and np.allclose(own, served, atol=ALIKE)


def _without(forgotten: Forgotten, bundle: Path) -> list[GoldenRequest]:
    """Take forgotten shoppers out of a bundle's reference answers; return the other golden requests."""
    log_file = bundle / "reference_log.parquet"
    if len(forgotten) and log_file.is_file():
        answers = pq.read_table(log_file)
        left = forgotten.without(answers, "answered_at")
        if len(left) < len(answers):
            pq.write_table(left, log_file)
    asked = ((golden, golden.request.get("user_id")) for golden in read_golden(bundle))
    return [golden for golden, user in asked if user is None or forgotten.until(user) is None]


def read_new_items(file: Path) -> pd.DataFrame:
    """Return the rows of a CSV file with a header; ids and names stay text.

    Raises:
        ValueError: it is no such file.
    """
    try:
        names = {name: str for name in ("item_id", *NAMES)}
        empty = {name: [""] for name in _OF_ITEMS}
        items = pd.read_csv(file, dtype=names, keep_default_na=False, na_values=empty)
    except (ValueError, OSError, EOFError, RuntimeError, ImportError, *_OF_ARCHIVES) as error:
        if not is_damage(error):
            raise
        said = str(error).partition("\n")[0]
        raise ValueError(
            f"{file} is no CSV file of items ({said}): expected a header with item_id"
        ) from error
    if not isinstance(items.index, pd.RangeIndex):  # pandas took the first column for names of rows
        raise ValueError(
            f"the lines of {file} have more fields than its header: take away the comma at their end"
        )
    return items


def cold_vectors(model: TwoTower, categorical: np.ndarray) -> np.ndarray:
    """Return vectors of items without any purchase, (m, dim + 1) float32.

    Args:
        model: the trained towers.
        categorical: (m, 3) int64 codes of type, category and department; 0 is unknown.
    """
    with torch.no_grad():
        rows = torch.from_numpy(categorical)
        content = sum(
            (table(codes) for table, codes in zip(model.levels, rows.unbind(1), strict=True)),
            torch.zeros(len(rows), model.item.embedding_dim),
        )
        vectors = torch.cat([content + model.item_mlp(content), torch.zeros(len(rows), 1)], dim=1).numpy()
        bias, known = model.bias.weight[1:, 0].numpy(), model.categorical[1:].numpy()
    for row, codes in enumerate(categorical):
        alike = (known[:, level] == code for level, code in enumerate(codes) if code)
        mask = next((found for found in alike if found.any()), np.ones(len(known), bool))
        vectors[row, -1] = bias[mask].mean()
    return np.ascontiguousarray(vectors, np.float32)


def codes_of(names: Iterable[str], vocabulary: Sequence[str]) -> list[int]:
    """Return the code of each name, 0 where it is unknown; the exact spelling comes before any other case.

    Commands print names in lower case, so an item may come with one of these.
    """
    code = {name.casefold(): number for number, name in enumerate(vocabulary)}
    code |= {name: number for number, name in enumerate(vocabulary)}
    return [code.get(name, code.get(name.casefold(), 0)) for name in names]


def _warn_of_unknown(new: pd.DataFrame, vocabulary: dict[str, list[str]]) -> None:
    """Log the given names that the bundle does not know: its models and rules see the items without them."""
    unknown = []
    for level in LEVELS:
        names = new[level].unique().tolist() if level in new else []
        codes = codes_of(names, vocabulary[level])
        unknown += [f"{level} {name}" for name, code in zip(names, codes, strict=True) if name and not code]
    if unknown:
        some = ", ".join(unknown[:3]) + (", …" if len(unknown) > 3 else "")
        log.warning("new items lose %d names that the bundle does not know: %s", len(unknown), some)


def _check(new: pd.DataFrame, removed: Sequence[str], bundle: Bundle) -> None:
    statistics = bundle.statistics
    may = ("item_id", *NAMES, *_OF_ITEMS)
    if "item_id" not in new or set(new) - set(may):
        found = ", ".join(map(str, new)) or "no column"
        raise ValueError(
            f"new items come with {found}: expected item_id, and of {', '.join(may[1:])} what is known"
        )
    for item in new["item_id"].tolist():
        if not isinstance(item, str) or not is_id(item):
            raise ValueError(f"{item!r} is no item id: expected a short printable text")
        if item in statistics.code_of:
            found = "is no new one: the bundle knows it already"
            if statistics.code_of[item] in bundle.removed:
                found = "was removed from this bundle: the next training, or a rollback, brings it back"
            raise ValueError(f"item {item} {found}")
    if new["item_id"].duplicated().any():
        raise ValueError(f"item {new.loc[new['item_id'].duplicated(), 'item_id'].iloc[0]} comes twice")
    expect = {"price": "a number from 0, or nothing", "is_private": "1 for an own brand, else 0"}
    for name, expected in expect.items():
        if name in new:
            number = pd.to_numeric(new[name], errors="coerce")
            in_range = number.isin((0, 1)) if name == "is_private" else number.between(0, _LARGEST)
            if not (valid := in_range | new[name].isna()).all():
                item, value = new.loc[~valid, ["item_id", name]].iloc[0]
                raise ValueError(f"item {item} has {name} {value}: expected {expected}")
    if unknown := [item for item in removed if item not in statistics.code_of]:
        raise ValueError(f"item {unknown[0]} cannot be removed: the bundle does not know it")


def _with_rows(before: Statistics, new: pd.DataFrame, vocabulary: dict[str, list[str]]) -> Statistics:
    """Return the tables with a row for each new item; manufacturers not yet known join the vocabulary."""
    count = len(new)
    if not count:
        return before
    usual = np.median(before.interval_days[: before.known_items])  # no training has seen a 0
    rows = {
        "item_ids": new["item_id"].to_numpy(str),
        "neighbours": np.array([NO_ITEM]),
        "interval_days": np.array([usual], np.float32),
    }
    names = {name: new[name].tolist() if name in new else [""] * count for name in NAMES}
    known = {maker.casefold() for maker in vocabulary["manufacturer"]}
    vocabulary["manufacturer"] += dict.fromkeys(m for m in names["manufacturer"] if m.casefold() not in known)
    codes = {name: np.array(codes_of(names[name], vocabulary[name])) for name in NAMES}
    rows["categorical"] = np.stack([codes[level] for level in LEVELS], axis=1)
    rows["manufacturer"] = codes["manufacturer"]
    for name in _OF_ITEMS:
        values = pd.to_numeric(new[name]).fillna(0.0) if name in new else np.zeros(count)
        rows[name] = np.asarray(values, np.float32)
    longer = {}
    for name in ARRAYS:
        old = np.asarray(getattr(before, name))
        if name not in _NOT_OF_ITEMS:
            own = np.broadcast_to(rows.get(name, np.zeros(1)).astype(old.dtype.type), (count, *old.shape[1:]))
            longer[name] = np.concatenate([old, own])
    return replace(before, **longer, new_items=before.new_items + count)
