"""Statistics, graphs, index and user rows -> a sealed release bundle with golden requests."""

from __future__ import annotations

import base64
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from components.hyper_parameters import BundleParams
from components.measurement import commit
from components.parameters import overlay, read_params
from components.ranker.ranker_artefact import CERTIFICATES, ENGINES, GRAPH, read_ranker
from feature_repo.statistics import read_statistics
from serving.answer.recommender import answer_golden, verify_golden
from serving.release.bundle import INDEX_REPORT, RankingSettings, load_bundle, seal_bundle
from serving.release.golden import GoldenRequest, write_golden
from serving.schemas import DEFAULT_PROFILE
from serving.stages.profiles import read_profile
from serving.stages.retrieval import Quotas

log = logging.getLogger(__name__)

GOLDEN_USERS = 12


def assemble_bundle(
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
    settings = _settings(given, json.loads((index / INDEX_REPORT).read_bytes()))
    if bundle.exists():
        shutil.rmtree(bundle)
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
    """Return the settings; a profile has the default one's quotas where it names none.

    The default one looks at as much of the index as its own quota needs; others, whose filters leave items
    out, at as much as was measured for the deepest search.

    Args:
        given: the parameters.
        index: the report of `build_index`.

    Raises:
        ValueError: a profile that cannot be read.
    """
    quotas = Quotas(given.history, given.together, given.week, given.tower, given.store, given.candidates)
    profiles = {}
    for name, own in given.profiles.items():
        usual = {"quotas": asdict(quotas), "search": index["search"], "items": None}
        if name == DEFAULT_PROFILE or not isinstance(own, dict) or set(own) - set(usual):
            raise ValueError(
                f"profile {name!r} is {own!r}: expected a name other than {DEFAULT_PROFILE!r} and an object "
                "with quotas, search and items, or some of them"
            )
        try:
            profiles[name] = read_profile(overlay(usual, own))
        except (TypeError, KeyError) as error:
            raise ValueError(f"profile {name!r}: {error}") from error
    enough = index["quota"] if quotas.tower <= index["quota"]["k"] else index
    return RankingSettings(
        quotas,
        given.type_penalty,
        given.exposure,
        given.novelty,
        tuple(map(int, given.novel_slots)),  # numbers that came as JSON are floats
        float(given.novel_loss),
        given.spares_new,
        enough["search"],
        profiles,
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
