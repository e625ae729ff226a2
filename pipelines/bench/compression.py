"""A run's rankers, from the teachers to the served file -> quality against bytes and milliseconds.

Every ranker re-ranks the very candidates that the bundle retrieves for the test baskets, through the same
re-ranking as the endpoint, so that only the ranker differs. Latencies are measured in one run, the rankers
taking turns, one thread each.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import orjson

from components.compression.compile_ranker import TORCH, EngineMissing, open_torch
from components.compression.table_quantization import table_names
from components.data.examples import RankerExamples, read_ranker_examples
from components.evaluation.metrics import Tally, auc, ratios, summary
from components.ranker.distill_ranker import Ensemble, train_student
from components.ranker.ranker_artefact import GRAPH, RankerArtefact, read_ranker
from components.ranker.scoring import SIZES, Call, Feed, Latency, OnnxRanker, measure_calls
from components.ranker.train_ranker import RANKERS, train_ranker
from components.release.model_card import DOLLARS_A_CORE_HOUR, WATTS_A_CORE, dollars_a_million, watt_hours
from feature_repo.events import read_dataset
from feature_repo.statistics import read_statistics
from pipelines.bench.budget_tables import (
    Option,
    budget_tables,
    read_table,
    table_bytes,
    uniform_options,
    uniform_table,
)
from pipelines.bench.judged_lists import TestLists, read_test_lists
from serving.measurement import measured_on, write_result
from serving.release.bundle import Bundle, load_bundle

log = logging.getLogger(__name__)

TABLE_DIM = 64  # of the item table that precisions are compared on
BUDGETS = (8, 16, 32)  # a table is given this part of its FP32 bytes


@dataclass(frozen=True)
class Line:
    """What one run of the training pipeline left behind."""

    examples: Path
    statistics: Path
    teachers: Sequence[Path]
    student: Path
    pruned: Path
    variants: Path
    compiled: Path
    bundle: Path
    dataset: Path
    ranker_params: dict[str, Any]  # what the run was asked to train its rankers by


def bench_compression(line: Line, out_dir: Path) -> dict[str, Any]:
    """Measure and write `compression.json`, `.md` and two pictures; return what the JSON holds.

    Rankers that did not teach are trained here, and so are the student without teachers and a DLRM with a
    64-dimensional item table for the comparison of precisions: some minutes each.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _bench(line, out_dir, Path(scratch))


def _bench(line: Line, out_dir: Path, scratch: Path) -> dict[str, Any]:
    # What is not whole is refused before a quarter of an hour of work.
    student, _, compiled = (read_ranker(path) for path in (line.student, line.pruned, line.compiled))
    bundle = load_bundle(line.bundle)
    lists = read_test_lists(bundle, read_dataset(line.dataset), scratch)
    teachers = [read_ranker(path) for path in line.teachers]
    taught = {teacher.manifest["model"] for teacher in teachers}
    arms: dict[str, Path] = {f"teacher {t.manifest['model']}": t.path for t in teachers}
    for model in sorted(set(RANKERS) - taught):
        train_ranker(line.examples, line.statistics, scratch / model, model, line.ranker_params)
        arms[f"ranker {model}"] = scratch / model
    arms["student"] = line.student
    arms["student without teachers"] = scratch / "alone"
    settings = {**student.manifest["params"]["student"], "soft_weight": 0.0}
    train_student(line.examples, line.statistics, line.teachers, scratch / "alone", settings)
    arms["pruned"] = line.pruned
    arms |= {f"pruned, {place.name}": place for place in sorted(line.variants.iterdir()) if place.is_dir()}
    arms["served"] = line.compiled
    results = _judge(line, bundle, lists, arms, teachers, scratch)
    results["certificates"] = compiled.certificates
    write_result(out_dir / "compression.json", orjson.dumps(results, option=orjson.OPT_INDENT_2))
    write_result(out_dir / "compression.md", compression_table(results).encode())
    draw_compression(results, out_dir)
    return results


def _judge(
    line: Line,
    bundle: Bundle,
    lists: TestLists,
    arms: Mapping[str, Path],
    teachers: list[RankerArtefact],
    scratch: Path,
) -> dict[str, Any]:
    held_out = read_ranker_examples(line.examples, "calibration")
    items = len(bundle.statistics.item_ids)
    rows: dict[str, dict[str, Any]] = {}
    tallies: dict[str, Tally] = {}
    ensemble = Ensemble.of(teachers, held_out)
    tallies["ensemble"], rows["ensemble"] = _row(lists, ensemble.scores(lists.examples), items)
    rankers = {name: OnnxRanker(path / GRAPH) for name, path in arms.items()}
    for name, ranker in rankers.items():
        log.info("%s: scoring %d candidates", name, len(lists.examples.label))
        tallies[name], rows[name] = _row(lists, ranker.scores(lists.examples), items)
    asked = [rankers[f"teacher {teacher.manifest['model']}"] for teacher in ensemble.teachers]
    calls: list[Call] = [
        *(ranker.run for ranker in rankers.values()),
        partial(_run_all, asked),
    ]
    feeds: list[Feed] = [*(ranker.feed for ranker in rankers.values()), partial(_feed_all, asked)]
    sizes = {name: (arms[name] / GRAPH).stat().st_size for name in arms}
    sizes["ensemble"] = sum(teacher.graph.stat().st_size for teacher in ensemble.teachers)
    for name, latency in zip([*rankers, "ensemble"], measure_calls(calls, feeds, held_out), strict=True):
        rows[name] |= {"bytes": sizes[name], "latency_ms": latency}
    for row in rows.values():
        each = row["latency_ms"]["500"]["p50"]
        row |= {"wh_a_million": watt_hours(each * 1e3), "dollars_a_million": dollars_a_million(each)}
    return {
        "bundle_id": bundle.bundle_id,
        **measured_on(),
        "baskets": len(lists.tasks),
        "teachers": len(ensemble.teachers),
        "rankers": rows,
        "against_ensemble": {
            name: ratios(tally, tallies["ensemble"], lists.bootstrap) for name, tally in tallies.items()
        },
        "against_student": {
            name: ratios(tally, tallies["student"], lists.bootstrap) for name, tally in tallies.items()
        },
        "tables": _tables(line, lists, scratch),
        "pruning": json.loads((line.pruned / "table.json").read_bytes()),
        "engines": _engines(line, held_out),
    }


def _row(lists: TestLists, scores: np.ndarray, items: int) -> tuple[Tally, dict[str, Any]]:
    tally = lists.judge(scores)
    row = summary(tally, lists.bootstrap, items)
    start, label = lists.examples.start, np.asarray(lists.examples.label, bool)
    pairs = [(scores[a:b], label[a:b]) for a, b in itertools.pairwise(start)]
    row["gauc"] = float(np.mean([auc(s, y) for s, y in pairs if 0 < y.sum() < len(y)]))
    return tally, row


def _tables(line: Line, lists: TestLists, scratch: Path) -> dict[str, dict[str, Any]]:
    """Return a DLRM's embedding tables in each precision: measured bytes, and what of the quality is left."""
    place = scratch / "tables"
    params = {"dlrm": {"epochs": 1, "size": {"items": True, "dim": TABLE_DIM}}}
    train_ranker(line.examples, line.statistics, place, "dlrm", params)
    whole = onnx.load(place / GRAPH)
    table = table_names(whole)[0]  # of the items: categorical inputs are looked up in their order
    size = 4 * read_table(whole, table).numel()
    frequency = np.r_[0, np.asarray(read_statistics(line.statistics).basket_count)]
    graphs = {"FP32": whole} | {
        f"{'FP' if bits == 16 else 'INT'}{bits}": uniform_table(
            whole, table, frequency, Option(TABLE_DIM, bits)
        )
        for bits in (16, 8, 4)
    }
    held_out = read_ranker_examples(line.examples, "calibration")
    for part in BUDGETS:
        graphs[f"1/{part}, budgeted"], _ = budget_tables(whole, table, frequency, size // part, held_out)
        for option in uniform_options(len(frequency), TABLE_DIM, size // part):
            graphs[f"1/{part}, uniform {option.dim} x {option.bits} bits"] = uniform_table(
                whole, table, frequency, option
            )
    rows: dict[str, dict[str, Any]] = {}
    tallies: dict[str, Tally] = {}
    for name, graph in graphs.items():
        file = scratch / "table.onnx"
        onnx.save(graph, file)
        tallies[name], rows[name] = _row(lists, OnnxRanker(file).scores(lists.examples), len(frequency) - 1)
        stored = table_bytes(graph, table) or size  # as it is, the table is none of that module's parts
        rows[name] |= {
            "table_bytes": stored,
            "ratio": size / stored,
            "kept": ratios(tallies[name], tallies["FP32"], lists.bootstrap),
            "gauc_kept": rows[name]["gauc"] / rows["FP32"]["gauc"],
        }
    return rows


def _engines(line: Line, held_out: RankerExamples) -> dict[str, dict[str, Latency]]:
    """Return ONNX Runtime against PyTorch, one thread each: the student, the pruned, each variant."""
    found: dict[str, dict[str, Latency]] = {}
    variants = {place.name: place for place in sorted(line.variants.iterdir()) if place.is_dir()}
    for name, path in {"student": line.student, "pruned": line.pruned}.items():
        artefact = read_ranker(path)
        graphs = {"fp32": OnnxRanker(artefact.graph)}
        if name == "pruned":
            graphs |= {variant: OnnxRanker(place / GRAPH) for variant, place in variants.items()}
        calls: dict[str, Call] = {variant: ranker.run for variant, ranker in graphs.items()}
        for engine in TORCH:
            with contextlib.suppress(EngineMissing):  # compile_ranker's table says why
                calls[engine] = open_torch(artefact, engine, held_out)
        feeds = [graphs["fp32"].feed] * len(calls)
        measured = measure_calls(list(calls.values()), feeds, held_out)
        found[name] = dict(zip(calls, measured, strict=True))
    return found


def _run_all(teachers: Sequence[OnnxRanker], feeds: Sequence[dict[str, np.ndarray]]) -> Any:
    return [teacher.run(feed) for teacher, feed in zip(teachers, feeds, strict=True)]


def _feed_all(teachers: Sequence[OnnxRanker], *given: Any) -> list[dict[str, np.ndarray]]:
    return [teacher.feed(*given) for teacher in teachers]


def _pruned(ratio: float, row: dict[str, Any]) -> str:
    """Return a line of the table; of a student that training ruined there is only that to tell."""
    found = ["", "", ""]
    if "ndcg_at_10" in row:
        found = [
            f"{row['ndcg_at_10']['ratio']:.4f}",
            f"{row['bytes'] / 1e3:.0f}",
            f"{row['latency_ms']['500']['p50']:.3f}",
        ]
    within = "; ".join(row["outside_tolerance"]) or "yes"
    return f"| {ratio:.0%} | {' | '.join(found)} | {within} |"


def compression_table(results: Mapping[str, Any]) -> str:
    """Return the measurements as Markdown."""
    rows, best = results["rankers"], results["rankers"]["ensemble"]
    lines = [
        f"{results['baskets']} test baskets, {results['teachers']} teachers; "
        f"bundle {results['bundle_id']}, commit {results['commit']}, "
        f"{results['machine']['cpu']}, one thread a ranker, all in one run and taking turns.",
        "",
        "| ranker | NDCG@10 | Recall@20 | repeat | new | GAUC | of the ensemble's NDCG@10 | kB | smaller "
        "| p50 ms, 500 | p99 | faster | Wh a million | $ a million |",
        "|" + "---|" * 14,
    ]
    for name, row in sorted(rows.items(), key=lambda pair: -pair[1]["ndcg_at_10"]):
        at = row["latency_ms"]["500"]
        lines.append(
            f"| {name} | {row['ndcg_at_10']:.4f} | {row['recall_at_20']:.4f} "
            f"| {row['repeat_recall_at_20']:.3f} | {row['new_recall_at_20']:.3f} | {row['gauc']:.4f} "
            f"| {share(results['against_ensemble'][name], 'ndcg_at_10')} | {row['bytes'] / 1e3:.0f} "
            f"| {best['bytes'] / row['bytes']:.1f}x | {at['p50']:.3f} | {at['p99']:.3f} "
            f"| {best['latency_ms']['500']['p50'] / at['p50']:.1f}x "
            f"| {row['wh_a_million']:.2f} | {row['dollars_a_million']:.3f} |"
        )
    lines += [
        "",
        f"Wh and $ are estimates for ranking 500 candidates: p50 x {WATTS_A_CORE:g} W a core, and x "
        f"${DOLLARS_A_CORE_HOUR:g} a core-hour.",
        "",
        f"Item table of a DLRM, d = {TABLE_DIM}:",
        "",
        "| table | kB | smaller | NDCG@10 | of FP32's | Recall@20 of FP32's | GAUC of FP32's |",
        "|" + "---|" * 7,
        *(
            f"| {name} | {row['table_bytes'] / 1e3:.0f} | {row['ratio']:.2f}x | {row['ndcg_at_10']:.4f} "
            f"| {share(row['kept'], 'ndcg_at_10')} | {share(row['kept'], 'recall_at_20')} "
            f"| {row['gauc_kept']:.2%} |"
            for name, row in results["tables"].items()
        ),
        "",
        "Pruning, on the held-out lists, tuned again after each cut:",
        "",
        "| hidden units cut | NDCG@10 of the student's | kB | p50 ms, 500 | within tolerance |",
        "|" + "---|" * 5,
        *(_pruned(float(ratio), row) for ratio, row in results["pruning"].items()),
        "",
        "Engines, one thread each, p50 / p99 in milliseconds:",
        "",
        "| ranker | engine | "
        + " | ".join(f"{size} candidates" for size in SIZES)
        + " | faster than eager |",
        "|" + "---|" * (len(SIZES) + 3),
    ]
    for ranker, engines in results["engines"].items():
        eager = engines["torch_eager"]["500"]["p50"]
        for engine, latency in engines.items():
            cells = " | ".join(f"{latency[str(s)]['p50']:.3f} / {latency[str(s)]['p99']:.3f}" for s in SIZES)
            shown = engine if engine in TORCH else f"ONNX Runtime, {engine}"
            lines.append(f"| {ranker} | {shown} | {cells} | {eager / latency['500']['p50']:.2f}x |")
    return "\n".join(lines) + "\n"


def share(row: Mapping[str, Any], metric: str) -> str:
    """Return a ratio with its interval, as a table shows it."""
    low, high = row[f"{metric}_interval"]
    return f"{row[metric]:.4f} [{low:.4f}, {high:.4f}]"


def draw_compression(results: Mapping[str, Any], out_dir: Path) -> None:
    """Draw quality against bytes and quality against p99 at 500 candidates, a point for each ranker."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes_of = {
        "bytes": ("kilobytes of the graph", lambda row: row["bytes"] / 1e3),
        "p99": (
            "p99 in milliseconds, 500 candidates, one thread",
            lambda row: row["latency_ms"]["500"]["p99"],
        ),
    }
    for name, (label, value) in axes_of.items():
        figure, axes = pyplot.subplots(figsize=(9, 5.5))
        for kind, colour in _COLOURS.items():
            rows = [row for ranker, row in results["rankers"].items() if _kind(ranker) == kind]
            points = [value(row) for row in rows], [row["ndcg_at_10"] for row in rows]
            axes.scatter(*points, color=colour, s=36, zorder=3, label=kind)
        axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.set(xlabel=label, ylabel="NDCG@10 on the test weeks")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(_COLOURS))
        figure.tight_layout()
        _label(axes, {ranker: (value(row), row["ndcg_at_10"]) for ranker, row in results["rankers"].items()})
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=140)
        pyplot.close(figure)
        write_result(out_dir / f"compression-{name}.png", picture.getvalue())


_COLOURS = {"ensemble": "#333333", "single ranker": "#b07aa1", "student": "#1f77b4", "compressed": "#2ca02c"}


def _label(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each ranker's name beside its point, as near as the names that stand there already allow."""
    renderer = axes.figure.canvas.get_renderer()
    taken: list[Any] = []
    for ranker, point in sorted(points.items(), key=lambda pair: -pair[1][1]):
        name = ranker.removeprefix("teacher ").removeprefix("ranker ").removeprefix("pruned, ")
        for lower in range(len(points)):
            place = {"xytext": (14 if lower else 6, 4 - 9 * lower), "textcoords": "offset points"}
            text = axes.annotate(name, point, fontsize=7, **place)
            box = text.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        taken.append(box)
        if lower:  # a line from the name to its point
            axes.annotate("", point, arrowprops={"arrowstyle": "-", "color": "#999999", "lw": 0.5}, **place)


def _kind(ranker: str) -> str:
    if ranker == "ensemble":
        return "ensemble"
    if ranker.startswith(("teacher", "ranker")):
        return "single ranker"
    return "student" if ranker.startswith("student") else "compressed"
