"""A bundle and the weeks after its cut -> gains and cost of re-ranking.

Four figures stand beside NDCG@10: the share of the catalogue that is ever shown, the share of new
manufacturers, how rare the shown items are, and how many types a list holds. Each has its weight, and each
weight its price. The weights are chosen on the four weeks before the cut, with tables fitted on the weeks
before those, and judged on the weeks after the cut. The ranker was trained on the weeks of the choice: its
scores are a little too sure there, so the choice is careful.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.data.fit_statistics import Purchases, purchases_of
from components.data.ingest_events import TEST_WINDOW
from components.evaluation.evaluate_bundle import as_known
from components.evaluation.metrics import DISCOUNT
from components.measurement import machine_state
from components.ranker.scoring import OnnxRanker
from feature_repo.events import read_dataset
from pipelines.bench.judged_lists import VALIDATION, JudgedLists, read_judged_lists
from pipelines.bench.report import change, machine_line, metric_title, table, write_report
from serving.release.bundle import Bundle, load_bundle
from serving.schemas import DEFAULT_K
from serving.stages.reranking import UNBOUNDED, of_new_manufacturers

log = logging.getLogger(__name__)

GOALS = {"coverage": 0.2, "new_manufacturers": 0.3}  # by how much they are to grow
MOST_LOST = 0.003  # of NDCG@10, at most
NOVELTIES = (0.2, 0.4, 0.8)
LOSSES = (0.0025, 0.005, 0.01, 0.02, UNBOUNDED)
SLOTS: tuple[tuple[int, ...], ...] = ((10,), (9, 10), (8, 9, 10), (6, 7, 8, 9, 10), tuple(range(1, 11)))
METRICS = (
    "ndcg_at_10",
    "recall_at_10",
    "new_recall_at_10",
    "coverage",
    "new_manufacturers",
    "novelty",
    "types",
)


Judgement = tuple[dict[str, float], np.ndarray]  # metrics, and NDCG@10 of each list


@dataclass(frozen=True)
class RerankWeights:
    """The weights of re-ranking, as a bundle holds them; these change nothing."""

    type_penalty: float = 1.0
    exposure: float = 0.0
    novelty: float = 0.0
    novel_slots: tuple[int, ...] = ()
    novel_loss: float = UNBOUNDED
    spares_new: bool = True


def bench_rerank(bundle: Path, dataset: Path, out_dir: Path) -> dict[str, Any]:
    """Measure and write `rerank.json` and `rerank.md`; return the content of the JSON.

    Raises:
        ValueError: no test basket lies before the cut, or after it.
    """
    before, data = machine_state(), read_dataset(dataset)
    loaded, purchases = load_bundle(bundle), purchases_of(data.events)
    cut, settings = pd.Timestamp(loaded.manifest["cut"]), loaded.settings
    start = cut - VALIDATION
    early = as_known(loaded, data.items, purchases.before(start), start)
    chosen_on, early_scores = scored_lists(early, purchases, start, VALIDATION)
    judged_on, scores = scored_lists(loaded, purchases, cut, TEST_WINDOW)
    served = RerankWeights(**{field.name: getattr(settings, field.name) for field in fields(RerankWeights)})
    log.info("choosing weights on %d baskets", len(chosen_on.tasks))
    points = {weights: judge(chosen_on, early_scores, weights) for weights in grid(settings.type_penalty)}
    chosen = choose(points)
    log.info("chosen: %s; judging on %d baskets", chosen, len(judged_on.tasks))
    off = judge(judged_on, scores, RerankWeights())
    figures = {
        "bundle_id": loaded.bundle_id,
        "chosen_on": len(chosen_on.tasks),
        "judged_on": len(judged_on.tasks),
        "items": len(loaded.statistics.item_ids),
        "items_of_new_manufacturers": int(of_new_manufacturers(loaded.statistics).sum()),
        "off": off[0],
        "served": compared(judged_on, scores, served, off),
        "chosen": compared(judged_on, scores, chosen, off),
        "frontier": [compared(judged_on, scores, weights, off) for weights in frontier(points)],
    }
    return write_report(out_dir, "rerank", figures, rerank_table, before)


def scored_lists(
    bundle: Bundle, purchases: Purchases, start: pd.Timestamp, window: pd.Timedelta
) -> tuple[JudgedLists, np.ndarray]:
    """Return the lists of the test baskets of some weeks, and the bundle's score of each candidate."""
    with tempfile.TemporaryDirectory() as scratch:
        lists = read_judged_lists(bundle, purchases, Path(scratch), start, window)
        scores = OnnxRanker(bundle.path / "ranker.onnx").scores(lists.examples)
    # A gigabyte that only the ranker reads.
    return replace(lists, examples=replace(lists.examples, dense=np.empty(0))), scores


def grid(type_penalty: float) -> list[RerankWeights]:
    """Return the combinations that are tried beside none at all."""
    novel = [(0.0, (), UNBOUNDED), *itertools.product(NOVELTIES, SLOTS, LOSSES)]
    tried = itertools.product((0.5, 1.0), novel)
    return [RerankWeights(), *(RerankWeights(type_penalty, exposure, *how) for exposure, how in tried)]


def judge(lists: JudgedLists, scores: np.ndarray, weights: RerankWeights) -> Judgement:
    """Return the metrics of lists of ten re-ranked with some weights, and NDCG@10 of each, (q,)."""
    statistics, settings = lists.bundle.statistics, replace(lists.bundle.settings, **asdict(weights))
    rows = np.full((len(lists.tasks), DEFAULT_K), -1)
    for number, found in enumerate(lists.shown(scores, settings, DEFAULT_K)):
        rows[number, : len(found)] = found
    hidden, types = lists.examples.label.astype(bool), lists.examples.categorical[:, 1]
    shown = rows >= 0
    codes = lists.codes[rows[shown]]
    wanted = np.array([len(task.hidden) for task in lists.tasks])
    wanted_new = np.array([int((~task.bought_before).sum()) for task in lists.tasks])
    hit, hit_new = hidden[rows] & shown, (hidden & ~lists.bought)[rows] & shown
    ideal = np.cumsum(DISCOUNT)[np.minimum(wanted, DEFAULT_K) - 1]
    ndcg = hit @ DISCOUNT / ideal
    share = np.maximum(statistics.basket_count, 1.0) / max(float(statistics.total_baskets), 1.0)
    kinds = np.where(shown, types[rows], -1)
    distinct = [len(set(kind[kind >= 0].tolist())) for kind in kinds]
    some_new = wanted_new > 0
    return {
        "ndcg_at_10": float(ndcg.mean()),
        "recall_at_10": float((hit.sum(1) / wanted).mean()),
        "new_recall_at_10": float((hit_new.sum(1)[some_new] / wanted_new[some_new]).mean())
        if some_new.any()
        else 0.0,
        "coverage": len(np.unique(codes)) / len(statistics.item_ids),
        "new_manufacturers": float(of_new_manufacturers(statistics)[codes].mean()),
        "novelty": float(-np.log2(share[codes]).mean()),
        "types": float(np.mean(distinct)),
    }, ndcg


def gains(found: dict[str, float], off: dict[str, float]) -> dict[str, float]:
    """Return the growth of each metric as a share of its old value; 0 where that was 0."""
    return {name: found[name] / off[name] - 1 if off[name] else 0.0 for name in METRICS}


def compared(
    lists: JudgedLists, scores: np.ndarray, weights: RerankWeights, off: Judgement
) -> dict[str, Any]:
    """Return weights, their metrics, their gains against none, and the interval of NDCG@10's change."""
    found, ndcg = judge(lists, scores, weights)
    ends = lists.bootstrap.ratio_interval(ndcg, off[1])
    return {
        "weights": asdict(weights),
        "metrics": found,
        "gains": gains(found, off[0]),
        "ndcg_interval": [None if end is None else end - 1 for end in ends],
    }


def choose(points: dict[RerankWeights, Judgement]) -> RerankWeights:
    """Return the cheapest weights that reach the goals, or come closest for what NDCG@10 may lose."""
    off = points[RerankWeights()][0]

    def worth(weights: RerankWeights) -> tuple[float, float]:
        gained = gains(points[weights][0], off)
        reached = sum(min(gained[name] / goal, 1.0) for name, goal in GOALS.items())
        return reached, gained["ndcg_at_10"]

    affordable = [
        one for one in points if points[one][0]["ndcg_at_10"] >= off["ndcg_at_10"] * (1 - MOST_LOST)
    ]
    return max(affordable, key=worth)


def frontier(points: dict[RerankWeights, Judgement]) -> list[RerankWeights]:
    """Return the weights that no others beat in both NDCG@10 and coverage, those with the most NDCG first."""
    ordered = sorted(points, key=lambda one: (-points[one][0]["ndcg_at_10"], -points[one][0]["coverage"]))
    best, kept = -1.0, []
    for weights in ordered:
        if points[weights][0]["coverage"] > best:
            best = points[weights][0]["coverage"]
            kept.append(weights)
    return kept


def rerank_table(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    chosen = results["chosen"]
    gained = chosen["gains"]
    low, high = map(change, chosen["ndcg_interval"])
    lines = [
        f"Chosen on {results['chosen_on']} baskets of the four weeks before the cut, with tables fitted on "
        f"the weeks before those and a ranker that was trained on these; judged on {results['judged_on']} "
        f"baskets of the weeks after the cut. {results['items']} items, "
        f"{results['items_of_new_manufacturers']} of new manufacturers; "
        f"{machine_line(results)}.",
        "",
        f"Chosen: {_named(chosen['weights'])}. "
        f"NDCG@10 {gained['ndcg_at_10']:+.2%} [{low}, {high}], "
        f"new items found {gained['new_recall_at_10']:+.1%}, "
        f"coverage {gained['coverage']:+.1%}, new manufacturers' share of places "
        f"{gained['new_manufacturers']:+.1%}, "
        f"novelty {gained['novelty']:+.1%}, types in a list {gained['types']:+.1%}.",
        "",
        *_metrics_table(
            [
                ("none", {"metrics": results["off"], "gains": {}}),
                ("as the bundle serves", results["served"]),
                ("**chosen**", chosen),
            ]
        ),
        "",
        "Combinations that no other beats in both NDCG@10 and coverage:",
        "",
        *_metrics_table([(_named(point["weights"]), point) for point in results["frontier"]]),
    ]
    return "\n".join(lines) + "\n"


def _named(weights: dict[str, Any]) -> str:
    """Return weights in words, those that do something."""
    spared = "" if weights["spares_new"] else ", new items too"
    said = [f"types {weights['type_penalty']:g}{spared}"] if weights["type_penalty"] != 1 else []
    said += [f"exposure {weights['exposure']:g}"] if weights["exposure"] else []
    if weights["novelty"]:
        slots = weights["novel_slots"]
        places = "every place" if len(slots) == DEFAULT_K else f"places {', '.join(map(str, slots))}"
        bound = "" if weights["novel_loss"] == UNBOUNDED else f", {weights['novel_loss']:g} lost at most"
        said.append(f"novelty {weights['novelty']:g} in {places}{bound}")
    return ", ".join(said) or "none"


def _metrics_table(points: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    rows = []
    for name, point in points:
        gained = point["gains"]
        cells = [
            f"{point['metrics'][metric]:.4f}" + (f" ({gained[metric]:+.1%})" if gained else "")
            for metric in METRICS
        ]
        rows.append([name, *cells])
    return table(["weights", *map(metric_title, METRICS)], rows)
