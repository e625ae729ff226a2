"""Two sizes -> seconds, memory and bytes of each step on a synthetic shop of that size.

The steps are those of the pipeline, from the events to a ranker in four bits, with parameters that keep the
number of examples small: tables have as many rows as the shop has items, however many purchases are read.
"""

from __future__ import annotations

import json
import logging
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import psutil
import torch

from components.compression.quantize_ranker import VARIANTS, quantize_ranker
from components.data.build_examples import build_examples
from components.data.fit_statistics import fit_statistics
from components.data.ingest_events import ingest_events
from components.measurement import machine_state
from components.models.dlrm import Dlrm
from components.models.ranker import Shape
from components.ranker.onnx_export import export_torch
from components.ranker.train_ranker import train_ranker
from components.retriever.build_index import build_index
from components.retriever.export_retriever import export_retriever
from components.retriever.train_retriever import train_retriever
from feature_repo.schema import DENSE_NAMES
from pipelines.bench.load.waiting import repeating
from pipelines.bench.report import fixed, machine_line, percent, table, write_report
from pipelines.bench.synthetic_shop import check_sizes, write_synthetic_shop
from serving.stages.onnx_runtime import ort

log = logging.getLogger(__name__)

CUT = "2024-09-30"  # a week before the end: the fortieth is there to be recommended for
TABLE_DIM = 64
EXAMPLE_USERS = 50_000  # give examples; the others count in every statistic
MOST_ITEMS = 8_000_000  # of TABLE_DIM x 4 bytes, with room for the rest of the graph
CANDIDATES, CALLS = 500, 200  # of a profile
LEVELS = (300, 60, 20)  # types, categories, departments
LOOKUP = "Gather"  # the operator of a row of a table
EVERY_S = 0.2  # between two looks at the memory


def bench_scale(items: int, users: int, out_dir: Path) -> dict[str, Any]:
    """Run the steps, each in a process of its own, and write `scale.json` and `.md`; return the JSON.

    Memory is the sum of the resident sets of a step's processes, five times a second. Pages that they share
    count once for each. A step that ends between two looks has at least its own peak.

    Args:
        items: size of the catalogue, a multiple of four, at most MOST_ITEMS.
        users: number of shoppers, at least half as many.
        out_dir: of the results.

    Raises:
        ValueError: the sizes do not fit together, or the graph would not fit into one file.
    """
    check_sizes(items, users)
    if items > MOST_ITEMS:
        raise ValueError(
            f"{items} items: a graph is one file of 2 GiB at most, which holds {MOST_ITEMS} rows"
        )
    before = machine_state()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        steps: list[dict[str, Any]] = []
        examples = {"windows": 1, "masks": 1, "user_ratio": min(1.0, EXAMPLE_USERS / users)}
        dataset, statistics, built = place / "dataset", place / "statistics", place / "examples"
        retriever, ranker, variants = place / "retriever", place / "ranker", place / "variants"

        def step(name: str, work: Callable[..., Any], *given: Any) -> Any:
            log.info("%s", name)
            others = psutil.Process().children(recursive=True)
            with _watched() as used, ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                try:
                    result, most = pool.submit(_with_memory, work, *given).result()
                except BaseException:
                    _end_children(others)  # the pool would wait for the end of the step, which may be an hour
                    raise
            used["gib"] = max(used["gib"], most)
            steps.append({"step": name, **used, "result": result})
            log.info("%s: %.0f s, %.1f GiB", name, used["seconds"], used["gib"])
            return result

        step("write_synthetic_shop", write_synthetic_shop, place / "shop", items, users)
        cut = step("ingest_events", ingest_events, str(place / "shop"), dataset, 0.0, CUT)
        step("fit_statistics", fit_statistics, dataset, statistics, cut)
        step("build_examples", build_examples, dataset, statistics, built, cut, examples)
        step("train_retriever", train_retriever, built, statistics, retriever, {"epochs": 1})
        step("export_retriever", export_retriever, retriever, built, place / "graphs")
        step("build_index", build_index, retriever, built, place / "index", {"queries": 20})
        params = {"dlrm": {"epochs": 1, "size": {"items": True, "dim": TABLE_DIM}}}
        step("train_ranker", train_ranker, built, statistics, ranker, "dlrm", params)
        # Rounding alone: tuning visits every row of the table at every step, some seconds each at 2 M rows.
        step("quantize_ranker", quantize_ranker, built, ranker, variants, {"tune_epochs": 0})
        figures = {
            "items": items,
            "users": users,
            "steps": steps,
            "variants": orjson.loads((variants / "table.json").read_bytes()),
            "lookups": [{"items": n, **_lookups(n)} for n in sorted({items // 100, items // 10, items})],
        }
    return write_report(out_dir, "scale", figures, scale_table, before)


def _with_memory(work: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    """Return the result of the work, and the GiB that this process had at most."""
    result = work(*given)
    return result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _end_children(others: Sequence[psutil.Process]) -> None:
    for process in set(psutil.Process().children(recursive=True)).difference(others):
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            process.terminate()


@contextmanager
def _watched() -> Iterator[dict[str, float]]:
    """Measure the block: its seconds, and the highest memory of the processes that it starts."""
    used = {"seconds": 0.0, "gib": 0.0}

    def look() -> None:
        total = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
                total += process.memory_info().rss
        used["gib"] = max(used["gib"], total / 2**30)

    began = time.perf_counter()
    with repeating(look, EVERY_S):
        yield used
        used["seconds"] = time.perf_counter() - began


def _lookups(items: int) -> dict[str, float]:
    """Return the time of a DLRM of so many items on one thread, and the share in look-ups.

    Weights are random, because they do not change the time. Items are random too, which is the worst case for
    the processor's caches.
    """
    torch.manual_seed(0)
    model = Dlrm(Shape(len(DENSE_NAMES), (items + 1, *LEVELS)), TABLE_DIM, items=True).eval()
    rng = np.random.default_rng(0)
    dense = rng.random((CANDIDATES, len(DENSE_NAMES)), np.float32)
    feeds = [
        {"dense": dense, "categorical": rng.integers(0, (items + 1, *LEVELS), (CANDIDATES, 1 + len(LEVELS)))}
        for _ in range(CALLS)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "ranker.onnx"
        inputs = {name: torch.from_numpy(values) for name, values in feeds[0].items()}
        export_torch(model, inputs, {name: {} for name in inputs}, "score", file)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(scratch) / "profile")
        session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        for feed in feeds:
            session.run(["score"], feed)
        events = json.loads(Path(session.end_profiling()).read_bytes())
    kernels = [event for event in events if event["name"].endswith("_kernel_time")]
    lookups_us = sum(event["dur"] for event in kernels if event["args"]["op_name"] == LOOKUP)
    whole_us = sum(event["dur"] for event in kernels)
    table_mb = items * TABLE_DIM * 4 / 1e6
    return {"table_mb": table_mb, "ms": whole_us / 1e3 / CALLS, "share": lookups_us / whole_us}


def scale_table(results: dict[str, Any]) -> str:
    """Return the measurements as Markdown."""
    whole = results["variants"]["fp16"]["parent_bytes"]
    steps = [[row["step"], fixed(row["seconds"], 0), fixed(row["gib"], 1)] for row in results["steps"]]
    head = ["tables", "dense layers", "MB", "smaller", "NDCG@10 kept", "AUC kept", "within tolerance"]
    lines = [
        f"{results['items']:,} items, {results['users']:,} users; {machine_line(results)}.",
        "",
        *table(["step", "seconds", "GiB at most"], steps),
        "",
        f"The ranker, a DLRM with an item table of d = {TABLE_DIM}: {whole / 1e6:.1f} MB in FP32. "
        "On the held-out lists:",
        "",
        *table(
            [*head, "p50 ms, 500", "of FP32's"],
            [_variant_row(name, row, whole) for name, row in results["variants"].items()],
        ),
        "",
        *lookup_lines(results),
    ]
    return "\n".join(lines) + "\n"


def lookup_lines(results: dict[str, Any]) -> list[str]:
    """Return the share of look-ups in the time of such a ranker, by the size of its table."""
    rows = [
        [f"{row['items']:,}", fixed(row["table_mb"], 1), fixed(row["ms"], 3), percent(row["share"], 1)]
        for row in results["lookups"]
    ]
    head = ["items of the table", "MB", "ms, 500 candidates", "in look-ups"]
    return ["Time in look-ups of tables, FP32, one thread, random items:", "", *table(head, rows)]


def _variant_row(name: str, row: dict[str, Any], whole: int) -> list[str]:
    p50, before = (row[key]["500"]["p50"] for key in ("latency_ms", "parent_latency_ms"))
    bits = VARIANTS[name].table_bits
    return [
        f"{'FP' if bits == 16 else 'INT'}{bits}",
        VARIANTS[name].dense,
        fixed(row["bytes"] / 1e6, 1),
        fixed(whole / row["bytes"], 2, "x"),
        *(fixed(row[metric]["ratio"], 4) for metric in ("ndcg_at_10", "auc")),
        ("; ".join(row["outside_tolerance"]) or "yes") + (", tuned" if row["tuned"] else ""),
        fixed(p50, 3),
        fixed(p50 / before),
    ]
