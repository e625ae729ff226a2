"""A bundle and a data set -> the quality tables people look at: JSON, Markdown and a picture."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from components.data.fit_statistics import Purchases, purchases_of
from components.evaluation.evaluate_bundle import evaluate, serve, tasks_after
from components.evaluation.metrics import METRICS, Bootstrap, summary
from components.evaluation.nightly import Nightly
from components.evaluation.protocol import Task
from components.measurement import machine_state
from feature_repo.events import read_dataset
from pipelines.bench.funnel import (
    compare_sources,
    compare_with_whole_catalogue,
    evaluate_new_items,
    find_ceiling,
    map_hidden_items,
    sample,
)
from pipelines.bench.load.goals import Goal, part_of
from pipelines.bench.load.report import goal_table
from pipelines.bench.report import (
    fixed,
    machine_line,
    metric_title,
    picture,
    table,
    with_interval,
    write_report,
)
from serving.release.bundle import Bundle, load_bundle

_SHOWN = ("ndcg_at_10", "recall_at_20", "new_recall_at_20")
GOALS = (
    Goal("NDCG@10", ">=", 0.188, "", part_of("served", "ndcg_at_10")),
    Goal("Recall@20", ">=", 0.320, "", part_of("served", "recall_at_20")),
    Goal("Recall@20 of items new to the shopper", ">=", 0.077, "", part_of("served", "new_recall_at_20")),
    Goal("strangers' Recall@20", ">=", 0.175, "", part_of("cold", "no_history", "recall_at_20")),
)
SOURCE_TASKS = 1_500  # test baskets on which each source is measured
BASELINES = {
    "popularity": "best sellers of four weeks",
    "store_popularity": "best sellers of the store",
    "personal": "what this shopper buys, decayed",
    "together": "bought together with the basket",
    "blend": "untrained blend of own purchases and bought together",
    "two_tower": "two-tower and Faiss alone",
}
COLUMNS = (*METRICS, "repeat_recall_at_20", "new_recall_at_20", "coverage_at_10")


def bench_quality(
    bundle: Path, dataset: Path, retriever: Path, out_dir: Path, ceiling: bool = False
) -> dict[str, Any]:
    """Evaluate a bundle after its cut and write `quality.json`, `.md` and `.png`; return the JSON.

    Args:
        bundle: of the evaluated model.
        dataset: the weeks after the bundle's cut are in it.
        retriever: the checkpoint that the bundle was made from, to add new items to it.
        out_dir: of the results.
        ceiling: measure also how good the list could be, with the truth among the candidates.
    """
    before, loaded, data = machine_state(), load_bundle(bundle), read_dataset(dataset)
    results, _ = evaluate(loaded, data)
    purchases = purchases_of(data.events)
    every = tasks_after(purchases, loaded.statistics, pd.Timestamp(loaded.manifest["cut"])).hidden
    tasks, more = sample(every), sample(every, SOURCE_TASKS)
    with tempfile.TemporaryDirectory() as scratch:
        new_items = evaluate_new_items(loaded, retriever, data, Path(scratch) / "extended")
    figures = {
        "bundle_id": loaded.bundle_id,
        "goals": judge_quality(results),
        **results,
        "served_frozen_history": _with_frozen_history(loaded, every, purchases),
        "two_stages": compare_with_whole_catalogue(loaded, tasks, purchases),
        "sources": compare_sources(loaded, more, purchases),
        "hidden_items_map": map_hidden_items(loaded, more, purchases),
        "new_items": new_items,
    }
    if ceiling:
        figures["ceiling"] = find_ceiling(loaded, more, purchases)
    results = write_report(out_dir, "quality", figures, quality_table, before)
    draw_quality(results, out_dir / "quality.png")
    return results


def _with_frozen_history(bundle: Bundle, tasks: list[Task], purchases: Purchases) -> dict[str, Any]:
    """Return the metrics of the served path with histories and counts as at the cut."""
    cut_s = pd.Timestamp(bundle.manifest["cut"]).timestamp()
    # The bundle's own counts may be later: a champion is refreshed each night.
    then = replace(bundle, statistics=Nightly(bundle, purchases).statistics[0])
    tally, _ = serve(then, [replace(task, history=task.history.before(cut_s)) for task in tasks])
    return summary(tally, Bootstrap([task.user_id for task in tasks]), len(bundle.statistics.item_ids))


def judge_quality(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals of quality with their figures; one that was not measured is open."""
    return [goal.judge(results) for goal in GOALS]


def quality_table(results: dict[str, Any]) -> str:
    """Return the evaluation as Markdown."""
    window = results["test_window"]
    systems = {
        "**served**": results["served"],
        "served, history frozen at the cut": results["served_frozen_history"],
        **{BASELINES[name]: row for name, row in results["baselines"].items()},
    }
    cold = {name.replace("_", " "): row for name, row in results["cold"].items() if isinstance(row, dict)}
    intervals = results["served"]["interval"].items()
    ratios = [
        [BASELINES[name], with_interval(row, "ndcg_at_10"), with_interval(row, "recall_at_20")]
        for name, row in results["ratios"].items()
    ]
    calibration = [[name.replace("_", " "), value] for name, value in results["calibration"].items()]
    lines = [
        f"{results['baskets']} test baskets of {results['users']} users, {window['from'][:10]} to "
        f"{window['until'][:10]}, {results['catalogue_items']} items ranked, "
        f"{results['out_of_catalogue_ratio']:.1%} of lines outside the catalogue; {machine_line(results)}.",
        "",
        *goal_table(results["goals"], partial(fixed, digits=5)),
        "",
        *_metrics_table("system", COLUMNS, systems),
        "",
        "95 % intervals (bootstrap over users) of the served path: "
        + ", ".join(f"{metric_title(name)} {low:.3f}-{high:.3f}" for name, (low, high) in intervals)
        + ".",
        "",
        *table(["served against", "NDCG@10 ratio", "Recall@20 ratio"], ratios),
        "",
        "Recall@500 of each candidate source alone, and of the candidates as served:",
        "",
        *_metrics_table("source", ("recall", "repeat", "new"), results["candidates"]),
        "",
        f"Users that the tables have never seen ({results['cold'].get('users', 0)}):",
        "",
        *_metrics_table("history given", COLUMNS, cold),
        "",
        *_metrics_table("segment", ("baskets", *METRICS), results["segments"]),
        "",
        *table(["calibration over all candidates", ""], calibration),
        "",
        *_sources(results["sources"], results["hidden_items_map"]),
        "",
        *_ceiling(results.get("ceiling", {})),
        "",
        *_two_stages(results["two_stages"]),
        "",
        *_new_items(results["new_items"]),
    ]
    return "\n".join(lines) + "\n"


def _sources(rows: list[dict[str, Any]], shares: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    cells = [
        [row["requests"], row["source"], row["quota"], *(with_interval(row, name, 3) for name in _SHOWN)]
        for row in rows
    ]
    lines = [
        "Without the candidates that one source found first, against the path as served (same baskets); no "
        "other source takes their places. A tower that is not asked is asked for the candidates of its row.",
        "",
        *table(
            ["requests", "source", "candidates", "NDCG@10 ratio", "Recall@20 ratio", "of new items"], cells
        ),
    ]
    return lines + _map(shares)


def _map(shares: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    lines = []
    for title, found in shares.items():
        kinds = list(next(iter(found.values())))
        body = [[name, *(f"{row[kind]:.1%}" for kind in kinds)] for name, row in found.items()]
        lines += ["", "Share of the hidden items:", "", *table([title, *kinds], body)]
    return lines


def _ceiling(systems: dict[str, dict[str, Any]]) -> list[str]:
    if not systems:
        return []
    heads = ("NDCG@10", "Recall@20", "of new items")
    cells = [
        [name, *(fixed(row[metric], 4) for metric in _SHOWN)]
        + [with_interval(row["ratios"], metric, 3) for metric in _SHOWN]
        for name, row in systems.items()
    ]
    return [
        "How good the list could be; ratios are to the ranker's plain order:",
        "",
        *table(["list", *heads, *(f"{head}, ratio" for head in heads)], cells),
        "",
    ]


def _two_stages(found: dict[str, Any]) -> list[str]:
    slower, low, high = found["times_slower"]
    rows = [
        [
            label,
            *(fixed(found[name][metric], 4) for metric in ("recall_at_20", "ndcg_at_10")),
            fixed(found["ms"][name]),
        ]
        for label, name in (
            ("candidates, then the ranker", "funnel"),
            ("the ranker alone", "whole_catalogue"),
        )
    ]
    kept = {name: with_interval(found["kept"], name) for name in ("recall_at_20", "ndcg_at_10")}
    return [
        f"Two stages against the same ranker over all {found['items']:,} items, on "
        f"{found['baskets']} baskets:",
        "",
        *table(["way", "Recall@20", "NDCG@10", "median ms"], rows),
        "",
        f"Kept by two stages: Recall@20 {kept['recall_at_20']}, NDCG@10 {kept['ndcg_at_10']}. The ranker "
        f"alone takes {slower:.1f} x the time (5 % to 95 % of baskets: {low:.1f} to {high:.1f}).",
        "",
        "AUC over the served candidates of these baskets, of all together and inside each basket:",
        "",
        *table(
            ["scores of", "AUC", "in a basket"],
            [
                [BASELINES.get(name, name), fixed(row["auc"], 4), fixed(row["gauc"], 4)]
                for name, row in found["auc"].items()
            ],
        ),
    ]


def _new_items(found: dict[str, Any]) -> list[str]:
    recalls = (fixed(found[name], 4) for name in ("recall_at_500", "recall_at_20"))
    return [
        "Items that the catalogue lacks, sold fewer than five times before the cut, added with `reco extend` "
        "and not trained on:",
        "",
        *table(
            ["new items", "baskets", "lines", "found among the candidates", "found in the list of 20"],
            [[found["items"], found["baskets"], found["lines"], *recalls]],
        ),
    ]


def _metrics_table(title: str, columns: tuple[str, ...], rows: dict[str, dict[str, Any]]) -> list[str]:
    head = [title, *map(metric_title, columns)]
    cells = ([row[c] for c in columns] for row in rows.values())
    texts = ([fixed(v, 4) if isinstance(v, float) else v for v in values] for values in cells)
    return table(head, [[name, *values] for name, values in zip(rows, texts, strict=True)])


def draw_quality(results: dict[str, Any], file: Path) -> None:
    """Draw NDCG@10 of the served path and the baselines, with intervals."""
    systems = {"served": results["served"], **results["baselines"]}
    order = sorted(systems, key=lambda name: systems[name]["ndcg_at_10"])
    values = [systems[name]["ndcg_at_10"] for name in order]
    low, high = zip(*(systems[name]["interval"]["ndcg_at_10"] for name in order), strict=True)
    errors = [
        [v - a for v, a in zip(values, low, strict=True)],
        [b - v for v, b in zip(values, high, strict=True)],
    ]
    colours = ["#1f77b4" if name == "served" else "#b0b7bf" for name in order]
    names = [BASELINES.get(name, name) for name in order]
    with picture(file, (9, 0.45 * len(order) + 1.2)) as (_, [[axes]]):
        axes.barh(names, values, xerr=errors, color=colours, ecolor="#555")
        axes.set_xlabel("NDCG@10 (95 % interval over users)")
