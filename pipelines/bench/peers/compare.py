"""A run's bundle and published methods -> one table on the same test baskets: `peers.json` and `peers.md`."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.data.fit_statistics import purchases_of
from components.evaluation.evaluate_bundle import as_known, tasks_after
from components.evaluation.metrics import METRICS, Bootstrap, Tally, ratios, summary
from components.evaluation.protocol import Task
from components.measurement import machine_state
from components.ranker.scoring import OnnxRanker
from components.ranker.train_ranker import train_ranker
from feature_repo.events import read_dataset
from feature_repo.statistics import Statistics
from pipelines.bench.compression import TrainingLine
from pipelines.bench.funnel import sample
from pipelines.bench.judged_lists import VALIDATION, read_judged_lists
from pipelines.bench.peers.rankers import (
    EASE_ITEMS,
    PEERS,
    Peer,
    PeerRequest,
    Score,
    Seen,
    fit_personal,
    read_asked,
    read_seen,
)
from pipelines.bench.report import fixed, machine_line, metric_title, table, with_interval, write_report
from serving.release.bundle import load_bundle

log = logging.getLogger(__name__)

VALIDATION_TASKS = 1_500
OWN_WEIGHTS = (0.25, 0.5, 1.0, 2.0)  # of the own purchases, in a mix with them
COLUMNS = (*METRICS, "repeat_recall_at_20", "new_recall_at_20", "coverage_at_10")


@dataclass(frozen=True)
class TunedPeer:
    """A peer with one choice of parameters; `own` is the weight of the own purchases, 0: the peer alone."""

    peer: Peer
    params: Mapping[str, Any]
    own: float = 0.0


def bench_peers(line: TrainingLine, out_dir: Path, peers: Mapping[str, Peer] | None = None) -> dict[str, Any]:
    """Fit, tune and judge every peer beside the path of the run's bundle; write the two files.

    Parameters are chosen by NDCG@10 on the four weeks before the cut, with a fit on what lies before those.
    Then each peer is fitted until the cut and asked once on the test weeks, over the whole catalogue.
    Without `peers`, all of them.
    """
    before, bundle, data = machine_state(), load_bundle(line.bundle), read_dataset(line.dataset)
    purchases, statistics = purchases_of(data.events), bundle.statistics
    cut = pd.Timestamp(bundle.manifest["cut"])
    start = cut - VALIDATION
    known, early = purchases.before(cut), purchases.before(start)
    validation = sample(tasks_after(known, statistics, start, VALIDATION).hidden, VALIDATION_TASKS)
    chosen: dict[str, TunedPeer] = {}
    tried: list[dict[str, Any]] = []
    earlier = as_known(bundle, data.items, early, start).statistics
    seen = read_seen(early, statistics)
    for name, peer in (PEERS if peers is None else peers).items():
        chosen |= _choose(name, peer, seen, validation, earlier, tried)
    tasks = tasks_after(purchases, statistics, cut).hidden
    boot = Bootstrap([task.user_id for task in tasks])
    tallies: dict[str, Tally] = {}
    fit_s: dict[str, float] = {}
    seen = read_seen(known, statistics)
    for name, arm in chosen.items():
        began = time.monotonic()
        score = arm.peer.fit(seen, **arm.params)
        if arm.own:
            score = partial(_mixed, score, fit_personal(seen, 120.0), arm.own)
        fit_s[name] = time.monotonic() - began
        tallies[name] = _judge(score, tasks, statistics)
        log.info("%s: %s", name, summary(tallies[name], boot, seen.items)["ndcg_at_10"])
    with tempfile.TemporaryDirectory() as scratch:
        lists = read_judged_lists(bundle, purchases, Path(scratch), cut)
        began = time.monotonic()
        place = Path(scratch) / "lambdarank"
        train_ranker(line.examples, line.statistics, place, "gradient_boosting", line.ranker_params)
        fit_s["LightGBM, our features"] = time.monotonic() - began
        trees = OnnxRanker(place / "ranker.onnx").scores(lists.examples)
        tallies["LightGBM, our features"] = lists.judge(trees)
        served = lists.judge(OnnxRanker(bundle.path / "ranker.onnx").scores(lists.examples))
    rows = {name: summary(tally, boot, seen.items) for name, tally in tallies.items()}
    library = {name: arm.peer.library for name, arm in chosen.items()}
    for name, row in rows.items():
        row |= {"library": library.get(name, "LightGBM"), "fit_s": fit_s[name]}
        row |= {"params": dict(chosen[name].params) | {"own": chosen[name].own} if name in chosen else {}}
    results = {
        "bundle_id": bundle.bundle_id,
        "baskets": len(tasks),
        "items": seen.items,
        "served": summary(served, boot, seen.items),
        "peers": rows,
        "served_against": {name: ratios(served, tally, boot) for name, tally in tallies.items()},
        "tried": tried,
    }
    return write_report(out_dir, "peers", results, peers_table, before)


def _choose(
    name: str,
    peer: Peer,
    seen: Seen,
    tasks: Sequence[Task],
    statistics: Statistics,
    tried: list[dict[str, Any]],
) -> dict[str, TunedPeer]:
    """Return the best arm of a peer alone, and of its mix with the own purchases if it has one.

    The statistics are as of before the tasks: their best sellers break ties.
    """
    best: dict[str, tuple[float, TunedPeer]] = {}
    own = fit_personal(seen, 120.0)
    for params in peer.grid:
        alone = peer.fit(seen, **params)
        for weight in (0.0, *(OWN_WEIGHTS if peer.with_own else ())):
            score = partial(_mixed, alone, own, weight) if weight else alone
            label = f"{name} + own purchases" if weight else name
            found = float(_judge(score, tasks, statistics).values("ndcg_at_10").mean())
            tried.append({"peer": label, **params, "own": weight, "ndcg_at_10": round(found, 5)})
            log.info("%s %s, own %g: %.4f on validation", name, dict(params), weight, found)
            if found > best.get(label, (-1.0,))[0]:
                best[label] = found, TunedPeer(peer, params, weight)
    return {label: arm for label, (_, arm) in best.items()}


def _mixed(alone: Score, own: Score, weight: float, asked: PeerRequest) -> np.ndarray:
    """Return the sum of two scores, each divided by its maximum; the own one by its logarithm."""
    left, right = alone(asked), np.log1p(own(asked))
    return left / max(left.max(), 1e-12) + weight * right / max(right.max(), 1e-12)


def _judge(score: Score, tasks: Sequence[Task], statistics: Statistics) -> Tally:
    tally = Tally()
    popular = statistics.purchases_4w / max(float(statistics.purchases_4w.max()), 1.0)
    for task in tasks:
        asked = read_asked(task, statistics)
        scores = score(asked)
        scores = scores + 1e-9 * max(float(np.abs(scores).max()), 1e-9) * popular  # breaks ties
        scores[asked.visible] = -np.inf
        tally.add_best(scores, task.hidden, task.bought_before)
    return tally


def peers_table(results: dict[str, Any]) -> str:
    """Return the comparison as Markdown, best first."""
    rows = {"**served**": results["served"], **results["peers"]}
    cells = []
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["ndcg_at_10"]):
        against = results["served_against"].get(name)
        cells.append(
            [
                name,
                row.get("library", "this project"),
                *(fixed(row[column], 4) for column in COLUMNS),
                with_interval(against, "ndcg_at_10") if against else "",
                fixed(row["fit_s"], 0) if "fit_s" in row else "",
            ]
        )
    head = ["method", "library", *map(metric_title, COLUMNS), "served is x times", "fit s"]
    lines = [
        f"{results['baskets']} test baskets, {results['items']} items ranked; {machine_line(results)}.",
        "",
        *table(head, cells),
        "",
        "The ratio is that of NDCG@10, with a 95 % interval over shoppers, paired. `peers.json` holds the "
        f"{len(results['tried'])} choices of parameters that were tried on the weeks before.",
        "",
        "All methods are given the basket and the shopper's own purchases until the request. Alone, EASE, "
        "item-kNN and ALS on baskets read only the basket; BPR reads only what the shopper bought before "
        "the cut. Served and LightGBM also have "
        "counts of all purchases until the night before, as a nightly refresh gives them. The others are "
        f"fitted on what lies before the cut. EASE sees the {EASE_ITEMS:,} most bought items.",
    ]
    return "\n".join(lines) + "\n"
