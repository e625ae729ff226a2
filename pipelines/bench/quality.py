"""A bundle and a data set -> the quality tables people look at: JSON, Markdown and a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import orjson

from components.evaluation.evaluate_bundle import evaluate
from components.evaluation.metrics import METRICS
from feature_repo.events import read_dataset
from serving.measurement import measured_on, write_result
from serving.release.bundle import load_bundle

COLUMNS = (*METRICS, "repeat_recall_at_20", "new_recall_at_20", "coverage_at_10")


def bench_quality(bundle: Path, dataset: Path, out_dir: Path) -> dict[str, Any]:
    """Evaluate a bundle on the weeks after its cut and write `quality.json`, `.md` and `.png`.

    Returns:
        What the JSON file holds.
    """
    loaded = load_bundle(bundle)
    results, _ = evaluate(loaded, read_dataset(dataset))
    results = {"bundle_id": loaded.bundle_id, **measured_on(), **results}
    write_result(out_dir / "quality.json", orjson.dumps(results, option=orjson.OPT_INDENT_2))
    write_result(out_dir / "quality.md", quality_table(results).encode())
    draw_quality(results, out_dir / "quality.png")
    return results


def quality_table(results: dict[str, Any]) -> str:
    """Return the evaluation as Markdown."""
    window = results["test_window"]
    systems = {
        "**served**": results["served"],
        "served, history frozen at the cut": results["served_frozen_history"],
        **results["baselines"],
    }
    cold = {name.replace("_", " "): row for name, row in results["cold"].items() if isinstance(row, dict)}
    rows = [
        f"{results['baskets']} test baskets of {results['users']} users, {window['from'][:10]} to "
        f"{window['until'][:10]}, {results['catalogue_items']} items ranked, "
        f"{results['out_of_catalogue_ratio']:.1%} of lines outside the catalogue; "
        f"bundle {results['bundle_id']}, commit {results['commit']}, {results['machine']['cpu']}, "
        f"{results['machine']['cores']} cores.",
        "",
        *_table("system", COLUMNS, systems),
        "",
        "95 % intervals (bootstrap over users) of the served path: "
        + ", ".join(
            f"{name} {low:.3f}-{high:.3f}" for name, (low, high) in results["served"]["interval"].items()
        )
        + ".",
        "",
        "| served against | NDCG@10 ratio | Recall@20 ratio |",
        "|---|---|---|",
        *(
            f"| {name} | {_ratio(row, 'ndcg_at_10')} | {_ratio(row, 'recall_at_20')} |"
            for name, row in results["ratios"].items()
        ),
        "",
        "Recall@500 of each candidate source alone, and of the candidates as served:",
        "",
        *_table("source", ("recall", "repeat", "new"), results["candidates"]),
        "",
        f"Users the tables have never seen ({results['cold'].get('users', 0)}):",
        "",
        *_table("history given", COLUMNS, cold),
        "",
        *_table("segment", ("baskets", *METRICS), results["segments"]),
        "",
        "| calibration over all candidates | |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {value} |" for name, value in results["calibration"].items()),
    ]
    return "\n".join(rows) + "\n"


def _ratio(row: dict[str, Any], metric: str) -> str:
    low, high = row[f"{metric}_interval"]
    return f"{row[metric]:.2f} [{low:.2f}, {high:.2f}]"


def _table(title: str, columns: tuple[str, ...], rows: dict[str, dict[str, Any]]) -> list[str]:
    head = [title, *(column.replace("_", " ") for column in columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in rows.items():
        cells = [f"{row[c]:.4f}" if isinstance(row[c], float) else str(row[c]) for c in columns]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return lines


def draw_quality(results: dict[str, Any], file: Path) -> None:
    """Draw NDCG@10 of the served path and the baselines, with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    systems = {"served": results["served"], **results["baselines"]}
    order = sorted(systems, key=lambda name: systems[name]["ndcg_at_10"])
    values = [systems[name]["ndcg_at_10"] for name in order]
    low, high = zip(*(systems[name]["interval"]["ndcg_at_10"] for name in order), strict=True)
    errors = [
        [v - a for v, a in zip(values, low, strict=True)],
        [b - v for v, b in zip(values, high, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(7, 0.45 * len(order) + 1.2))
    colours = ["#1f77b4" if name == "served" else "#b0b7bf" for name in order]
    axes.barh([name.replace("_", " ") for name in order], values, xerr=errors, color=colours, ecolor="#555")
    axes.set_xlabel("NDCG@10, whole catalogue ranked (95 % interval over users)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=140)
    pyplot.close(figure)
    write_result(file, picture.getvalue())
