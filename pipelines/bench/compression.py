"""A run's rankers, from the teachers to the served file -> quality against bytes and milliseconds.

Every ranker re-ranks the very candidates that the bundle retrieves for the test baskets, through the same
re-ranking as the endpoint, so that only the ranker differs. Latencies are measured in one run, the rankers
taking turns, one thread each.
"""

from __future__ import annotations

import contextlib
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
import pandas as pd

from components.compression.compile_ranker import TORCH, EngineMissing, open_torch
from components.compression.quantize_ranker import VARIANTS, quantize_dense, tune
from components.compression.table_quantization import quantize_tables
from components.data.examples import RankerExamples, read_ranker_examples
from components.data.fit_statistics import purchases_of
from components.evaluation.metrics import Tally, auc, ratios, summary
from components.hyper_parameters import RANKERS, SIZES, QuantizeParams
from components.measurement import machine_state
from components.ranker.distill_ranker import Ensemble, train_student
from components.ranker.ranker_artefact import GRAPH, RankerArtefact, read_ranker
from components.ranker.scoring import Call, Feed, Latency, OnnxRanker, measure_calls
from components.ranker.train_ranker import train_ranker
from feature_repo.events import read_dataset
from pipelines.bench.judged_lists import JudgedLists, read_judged_lists
from pipelines.bench.report import fixed, machine_line, picture, table, with_interval, write_report
from serving.release.bundle import Bundle, load_bundle

TUNED = ("int8_weights", "int4_weights")  # variants that are measured after tuning, too

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingLine:
    """The parts that one run of the training pipeline left behind."""

    examples: Path
    statistics: Path
    teachers: Sequence[Path]
    student: Path
    pruned: Path
    variants: Path
    compiled: Path
    bundle: Path
    dataset: Path
    ranker_params: dict[str, Any]  # of the run, for its rankers


def bench_compression(line: TrainingLine, out_dir: Path) -> dict[str, Any]:
    """Measure and write `compression.json`, `.md` and a picture; return the content of the JSON.

    Rankers that did not teach are trained here, and so is the student without teachers: some minutes each.
    """
    with tempfile.TemporaryDirectory() as scratch:
        return _bench(line, out_dir, Path(scratch))


def _bench(line: TrainingLine, out_dir: Path, scratch: Path) -> dict[str, Any]:
    before = machine_state()
    # An incomplete part is refused before a quarter of an hour of work.
    student, *_ = [read_ranker(path) for path in (line.student, line.pruned, line.compiled)]
    bundle = load_bundle(line.bundle)
    purchases, cut = purchases_of(read_dataset(line.dataset).events), pd.Timestamp(bundle.manifest["cut"])
    lists = read_judged_lists(bundle, purchases, scratch, cut)
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
    for variant in TUNED:
        arms[f"pruned, {variant}, tuned"] = _tuned(line, variant, scratch / f"{variant}-tuned")
    arms["served"] = line.compiled
    results = _judge(line, bundle, lists, arms, teachers)
    results = write_report(out_dir, "compression", results, compression_table, before)
    draw_compression(results, out_dir / "compression-bytes.png")
    return results


def _tuned(line: TrainingLine, name: str, place: Path) -> Path:
    """Write a variant of the pruned ranker after quantisation-aware training, needed or not."""
    variant, artefact = VARIANTS[name], read_ranker(line.pruned)
    train, held_out = (read_ranker_examples(line.examples, part) for part in ("train", "calibration"))
    graph = tune(artefact, variant, place / "float", train, held_out, QuantizeParams())
    model = quantize_dense(onnx.load(graph), variant.dense, graph, train)
    onnx.save(quantize_tables(model, variant.table_bits), place / GRAPH)
    return place


def _judge(
    line: TrainingLine,
    bundle: Bundle,
    lists: JudgedLists,
    arms: Mapping[str, Path],
    teachers: list[RankerArtefact],
) -> dict[str, Any]:
    held_out = read_ranker_examples(line.examples, "calibration")
    items = len(bundle.statistics.item_ids)
    rows: dict[str, dict[str, Any]] = {}
    tallies: dict[str, Tally] = {}
    ensemble = Ensemble.of(teachers, held_out)
    rankers = {name: OnnxRanker(path / GRAPH) for name, path in arms.items()}
    for name, ranker in rankers.items():
        log.info("%s: scoring %d candidates", name, len(lists.examples.label))
        tallies[name], rows[name] = _row(lists, ranker.scores(lists.examples), items)
    calls: list[Call] = [ranker.run for ranker in rankers.values()]
    feeds: list[Feed] = [ranker.feed for ranker in rankers.values()]
    sizes = {name: (arms[name] / GRAPH).stat().st_size for name in arms}
    whole = f"teacher {ensemble.teachers[0].manifest['model']}"
    if len(ensemble.teachers) > 1:  # one alone is the ensemble
        whole = "ensemble"
        tallies[whole], rows[whole] = _row(lists, ensemble.scores(lists.examples), items)
        asked = [rankers[f"teacher {teacher.manifest['model']}"] for teacher in ensemble.teachers]
        calls.append(partial(_run_all, asked))
        feeds.append(partial(_feed_all, asked))
        sizes[whole] = sum(teacher.graph.stat().st_size for teacher in ensemble.teachers)
    for name, latency in zip(rows, measure_calls(calls, feeds, held_out), strict=True):
        rows[name] |= {"bytes": sizes[name], "latency_ms": latency}
    return {
        "bundle_id": bundle.bundle_id,
        "baskets": len(lists.tasks),
        "teachers": len(ensemble.teachers),
        "rankers": rows,
        "against_ensemble": {
            name: ratios(tally, tallies[whole], lists.bootstrap) for name, tally in tallies.items()
        },
        "pruning": json.loads((line.pruned / "table.json").read_bytes()),
        "engines": _engines(line, held_out),
    }


def _row(lists: JudgedLists, scores: np.ndarray, items: int) -> tuple[Tally, dict[str, Any]]:
    tally = lists.judge(scores)
    row = summary(tally, lists.bootstrap, items)
    start, label = lists.examples.start, np.asarray(lists.examples.label, bool)
    pairs = [(scores[a:b], label[a:b]) for a, b in itertools.pairwise(start)]
    row["gauc"] = float(np.mean([auc(s, y) for s, y in pairs if 0 < y.sum() < len(y)]))
    return tally, row


def _engines(line: TrainingLine, held_out: RankerExamples) -> dict[str, dict[str, Latency]]:
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
            with contextlib.suppress(EngineMissing):  # without a C++ compiler
                calls[engine] = open_torch(artefact, engine, held_out)
        feeds = [graphs["fp32"].feed] * len(calls)
        measured = measure_calls(list(calls.values()), feeds, held_out)
        found[name] = dict(zip(calls, measured, strict=True))
    return found


def _run_all(teachers: Sequence[OnnxRanker], feeds: Sequence[dict[str, np.ndarray]]) -> Any:
    return [teacher.run(feed) for teacher, feed in zip(teachers, feeds, strict=True)]


def _feed_all(teachers: Sequence[OnnxRanker], *given: Any) -> list[dict[str, np.ndarray]]:
    return [teacher.feed(*given) for teacher in teachers]


def compression_table(results: Mapping[str, Any]) -> str:
    """Return the measurements as Markdown."""
    lines = [
        f"{results['baskets']} test baskets, {results['teachers']} teachers; {machine_line(results)}, "
        "one thread a ranker, all in one run and taking turns.",
        "",
        *_leaderboard(results),
        "",
        "Pruning, on the held-out lists, tuned again after each cut:",
        "",
        *table(
            ["hidden units cut", "NDCG@10 of the student's", "kB", "p50 ms, 500", "within tolerance"],
            [_pruned(float(ratio), row) for ratio, row in results["pruning"].items()],
        ),
        "",
        "Engines, one thread each, p50 / p99 in milliseconds:",
        "",
        *_engine_table(results["engines"]),
    ]
    return "\n".join(lines) + "\n"


def whole_ensemble(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of all teachers together: the only teacher's where there is one."""
    rows: Mapping[str, dict[str, Any]] = results["rankers"]
    return rows.get("ensemble") or next(row for name, row in rows.items() if name.startswith("teacher "))


def _leaderboard(results: Mapping[str, Any]) -> list[str]:
    whole = whole_ensemble(results)
    head = ["ranker", "NDCG@10", "Recall@20", "repeat", "new", "GAUC", "of the ensemble's NDCG@10", "kB"]
    head += ["smaller", "p50 ms, 500", "p99", "faster"]
    rows = []
    for name, row in sorted(results["rankers"].items(), key=lambda pair: -pair[1]["ndcg_at_10"]):
        at = row["latency_ms"]["500"]
        rows.append(
            [
                name,
                *(fixed(row[metric], 4) for metric in ("ndcg_at_10", "recall_at_20")),
                *(fixed(row[metric], 3) for metric in ("repeat_recall_at_20", "new_recall_at_20")),
                fixed(row["gauc"], 4),
                with_interval(results["against_ensemble"][name], "ndcg_at_10", 4),
                fixed(row["bytes"] / 1e3, 0),
                fixed(whole["bytes"] / row["bytes"], 1, "x"),
                *(fixed(at[percentile], 3) for percentile in ("p50", "p99")),
                fixed(whole["latency_ms"]["500"]["p50"] / at["p50"], 1, "x"),
            ]
        )
    return table(head, rows)


def _pruned(ratio: float, row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table; a student that training ruined has a reason and no figures."""
    figures = ["", "", ""]
    if "ndcg_at_10" in row:
        p50 = row["latency_ms"]["500"]["p50"]
        figures = [fixed(row["ndcg_at_10"]["ratio"], 4), fixed(row["bytes"] / 1e3, 0), fixed(p50, 3)]
    return [f"{ratio:.0%}", *figures, "; ".join(row["outside_tolerance"]) or "yes"]


def _engine_table(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for ranker, latencies in engines.items():
        eager = latencies["torch_eager"]["500"]["p50"]
        for engine, latency in latencies.items():
            sizes = (latency[str(size)] for size in SIZES)
            name = engine if engine in TORCH else f"ONNX Runtime, {engine}"
            cells = [f"{at['p50']:.3f} / {at['p99']:.3f}" for at in sizes]
            rows.append([ranker, name, *cells, fixed(eager / latency["500"]["p50"], 2, "x")])
    return table(["ranker", "engine", *(f"{size} candidates" for size in SIZES), "faster than eager"], rows)


def draw_compression(results: Mapping[str, Any], file: Path) -> None:
    """Draw quality against bytes, a point for each ranker."""
    points = {name: (row["bytes"] / 1e3, row["ndcg_at_10"]) for name, row in results["rankers"].items()}
    with picture(file, (9, 5.5)) as (figure, [[axes]]):
        for kind, colour in _COLOURS.items():
            if some := [point for ranker, point in points.items() if _kind(ranker) == kind]:
                axes.scatter(*zip(*some, strict=True), color=colour, s=36, zorder=3, label=kind)
        axes.set_xscale("log")
        axes.margins(x=0.12)
        axes.set(xlabel="kilobytes of the graph", ylabel="NDCG@10 on the test weeks")
        axes.grid(alpha=0.3)
        legend = {"frameon": False, "fontsize": 8, "loc": "lower left", "ncols": len(_COLOURS)}
        axes.legend(bbox_to_anchor=(0, 1), **legend)
        figure.draw_without_rendering()  # settles where the names go
        _label(axes, points)


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
