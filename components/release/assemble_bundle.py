"""Statistics, graphs, index and user rows -> a sealed release bundle with golden requests."""

from __future__ import annotations

import base64
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.data.examples import RankerExamples, read_ranker_examples
from components.hyper_parameters import BundleParams
from components.measurement import commit
from components.parameters import read_params
from components.ranker.ranker_artefact import CERTIFICATES, ENGINES, GRAPH, read_ranker
from components.ranker.scoring import OnnxRanker
from feature_repo.schema import DENSE_NAMES
from feature_repo.statistics import read_statistics
from serving.answer.recommender import answer_golden, verify_golden
from serving.release.bundle import INDEX_REPORT, RankingSettings, load_bundle, seal_bundle
from serving.release.golden import GoldenRequest, write_golden

log = logging.getLogger(__name__)

GOLDEN_USERS = 12
NEW_AMONG = 20  # new purchases are looked for among so many items, as `new_recall_at_20` does
NEW_GAINS = (1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)


def assemble_bundle(
    examples: Path,
    statistics: Path,
    graphs: Path,
    ranker: Path,
    index: Path,
    features: Path,
    bundle: Path,
    cut: str,
    data_hash: str,
    params: dict[str, Any],
) -> str:
    """Put the parts of one release together, record golden answers and seal it.

    Args:
        examples: what `build_examples` wrote; its held-out lists decide the gain of new items.
        statistics: what `fit_statistics` wrote.
        graphs: what `export_retriever` wrote.
        ranker: what `compile_ranker` wrote.
        index: what `build_index` wrote.
        features: what `materialize_features` wrote; rows of real users for the golden requests.
        bundle: the directory to write.
        cut: ISO 8601 time before which all training data lies.
        data_hash: hash of the data set all parts were made from.
        params: fields of `BundleParams`.

    Returns:
        The bundle id.

    Raises:
        BundleInvalid: the parts do not fit together.
    """
    given = read_params(BundleParams, params)
    held_out = read_ranker_examples(examples, "calibration")
    gain = choose_new_gain(held_out, OnnxRanker(ranker / GRAPH).scores(held_out))
    settings = replace(_settings(given, json.loads((index / INDEX_REPORT).read_bytes())), new_gain=gain)
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    shutil.copytree(statistics, bundle / "statistics")
    for source, name in (
        (graphs, "query_tower.onnx"),
        (graphs, "parity.json"),
        (ranker, GRAPH),
        (ranker, CERTIFICATES),
        (ranker, ENGINES),
        (index, "index.faiss"),
        (index, INDEX_REPORT),
    ):
        shutil.copyfile(source / name, bundle / name)
    trained_with = json.loads((graphs / "params.json").read_text())
    made = read_ranker(ranker).manifest
    made_from = {
        "ranker": {name: made[name] for name in ("id", "model", "variant", "engine", "size") if name in made},
        "cpu_seconds": made["cost"]["total_cpu_seconds"],
        "data_hash": data_hash,
        "commit": commit(),
        "params": {**trained_with, **made["params"], "bundle": asdict(given)},
    }
    requests = _golden_requests(bundle, features, cut)
    return seal_with_golden(bundle, requests, cut=cut, settings=settings, made_from=made_from)


def choose_new_gain(lists: RankerExamples, scores: np.ndarray) -> float:
    """Return the factor for the scores of items that are new to the shopper.

    It is 1 unless lists by score surely find fewer new items than lists by bought-together: a paired 95 %
    interval of the difference lies below 0. Then it is the least of NEW_GAINS that finds as many, or the
    last one.

    Args:
        lists: held out, with every candidate; those of strangers and without a new purchase do not count.
        scores: (rows,) probabilities.
    """
    bought = lists.dense[:, DENSE_NAMES.index("user_has_item")] > 0
    hidden = (lists.label > 0) & ~bought
    counted = [
        slice(first, last)
        for first, last in pairwise(lists.start.tolist())
        if bought[first:last].any() and hidden[first:last].any()
    ]

    def found(worth: np.ndarray) -> np.ndarray:
        """Return the share of each list's new purchases among its best NEW_AMONG."""
        best = [one.start + np.argsort(-worth[one], kind="stable")[:NEW_AMONG] for one in counted]
        return np.array(
            [hidden[rows].sum() / hidden[one].sum() for rows, one in zip(best, counted, strict=True)]
        )

    if len(counted) < 2:
        return 1.0
    together = found(lists.dense[:, DENSE_NAMES.index("together_sum")])
    differs = found(scores) - together
    if differs.mean() + 1.96 * differs.std(ddof=1) / np.sqrt(len(differs)) >= 0:
        return 1.0
    for gain in NEW_GAINS:
        share = found(scores * np.where(bought, 1.0, gain))
        if share.mean() >= together.mean():
            break
    log.info("new items: bought together finds %.3f, the ranker %.3f fewer", together.mean(), -differs.mean())
    log.info("their scores x %.2f: %.3f", gain, share.mean())
    return gain


def seal_with_golden(
    bundle: Path,
    requests: Sequence[GoldenRequest],
    *,
    cut: str,
    settings: RankingSettings,
    made_from: dict[str, Any],
) -> str:
    """Record a bundle's answers to its golden requests, seal it, and return its id.

    Raises:
        BundleInvalid: the parts do not fit together.
    """
    write_golden(bundle, [])
    seal_bundle(bundle, cut=cut, settings=settings, made_from=made_from)
    loaded = load_bundle(bundle)
    write_golden(bundle, [replace(golden, expected=answer_golden(loaded, golden)) for golden in requests])
    bundle_id = seal_bundle(bundle, cut=cut, settings=settings, made_from=made_from)
    asked = verify_golden(load_bundle(bundle))
    log.info("bundle %s, %d golden requests", bundle_id, asked)
    return bundle_id


def _settings(given: BundleParams, index: dict[str, Any]) -> RankingSettings:
    """Return the settings; a profile without a search of its own gets the one that the index was chosen with.

    `index` is the report of `build_index`.

    Raises:
        ValueError: a profile that cannot be read.
    """
    return RankingSettings(
        given.quotas,
        given.type_penalty,
        given.exposure,
        given.novelty,
        given.novel_slots,
        given.novel_loss,
        given.spares_new,
        index["search"],
        given.read_profiles(index["search"]),
    )


def _golden_requests(bundle: Path, features: Path, cut: str) -> list[GoldenRequest]:
    """Return requests with and without a user; baskets hold best sellers, rare and unknown items."""
    statistics = read_statistics(bundle / "statistics")
    rng = np.random.default_rng(0)
    rows = _latest_rows(features)
    chosen = rng.permutation(len(rows))[:GOLDEN_USERS]
    items = statistics.item_ids
    popular = items[statistics.popular]
    baskets = [
        rng.choice(popular, min(size, len(popular)), replace=False).tolist() for size in (1, 2, 3, 5, 8, 13)
    ]
    baskets += [rng.choice(items, min(4, len(items)), replace=False).tolist(), ["no such item"], []]
    stores = [None, *statistics.store_ids[:3].tolist()]
    golden: list[GoldenRequest] = []
    for number, basket in enumerate(baskets):
        users: list[tuple[str | None, bytes | None]] = [(None, None)]
        if rows:
            users.append(rows[int(chosen[number % len(chosen)])])
        for user_id, history in users:
            request_id = f"golden-{len(golden)}"
            request: dict[str, Any] = {"request_id": request_id, "basket": basket, "at": cut, "k": 10}
            if user_id is not None:
                request["user_id"] = user_id
            if (store := stores[number % len(stores)]) is not None:
                request["store_id"] = store
            encoded = None if history is None else base64.b64encode(history).decode()
            golden.append(GoldenRequest(request, encoded))
    return golden


def _latest_rows(features: Path) -> list[tuple[str, bytes]]:
    """Return user id and packed history of every user as of the newest snapshot."""
    table = pq.read_table(features / "user_history", columns=["user_id", "event_timestamp", "history"])
    if table.num_rows == 0:
        return []
    table = table.filter(pc.equal(table["event_timestamp"], pc.max(table["event_timestamp"])))
    return list(zip(table["user_id"].to_pylist(), table["history"].to_pylist(), strict=True))
