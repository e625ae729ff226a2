"""The figures of a bench or drill -> its files: JSON, a Markdown page and pictures.

Every bench and drill uses this table writer, this report writer and these percentiles.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from components.measurement import machine_state, measured_on
from feature_repo.atomic_files import write_file

PERCENTILES = {"p50": 50, "p95": 95, "p99": 99, "p99_9": 99.9}
MISSING = "–"


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Return mean, maximum and each percentile, which is one of the values themselves.

    A percentile is None where there are too few values to distinguish it from the maximum; p50 always exists.
    """
    array = np.sort(np.asarray(values, float))
    if len(array) == 0:
        return {**dict.fromkeys(PERCENTILES), "mean": None, "max": None}
    last = len(array) - 1
    place = {name: math.ceil(last * percent / 100 - 1e-9) for name, percent in PERCENTILES.items()}
    resolved = {name: float(array[at]) if at < last else None for name, at in place.items()}
    median = float(array[place["p50"]])
    return {**resolved, "p50": median, "mean": float(array.mean()), "max": float(array[-1])}


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def fixed(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return a number with so many digits after the point, a dash for a missing one."""
    return MISSING if value is None else f"{value:,.{digits}f}{unit}"


def with_interval(row: Mapping[str, Any], metric: str, digits: int = 2) -> str:
    """Return a ratio with its interval, see `metrics.ratios`; a dash where one is None."""
    value, low, high = (fixed(number, digits) for number in (row[metric], *row[f"{metric}_interval"]))
    return f"{value} [{low}, {high}]"


def change(value: float | None) -> str:
    """Return a change as a signed percentage, a dash where it has no limit."""
    return MISSING if value is None else f"{value:+.2%}"


def short(value: float | None) -> str:
    """Return a number in about three digits: 2.31, 98.70, 1,234."""
    return fixed(value, 2 if value is None or value < 100 else 0)


def percent(ratio: float | None, digits: int = 0) -> str:
    """Return a ratio in per cent."""
    return MISSING if ratio is None else f"{ratio:.{digits}%}"


def machine_line(result: Mapping[str, Any]) -> str:
    """Return the commit and the machine of a measurement, and the bundle if it has one."""
    bundle = f"bundle {result['bundle_id']}, " if "bundle_id" in result else ""
    machine = result["machine"]
    return f"{bundle}commit {result['commit']}, {machine['cpu']}, {machine['cores']} cores{busy_line(result)}"


def busy_line(result: Mapping[str, Any]) -> str:
    """Return how busy the machine was; results of older versions lack these figures."""
    if "busy" not in result:
        return ""
    before, after = result["busy"]["before"], result["busy"]["after"]
    core_s = (after["at"] - before["at"]) * result["machine"]["cores"]
    stolen = (after["steal_s"] - before["steal_s"]) / core_s if core_s else 0.0
    first, last = (fixed(state["load_average"][0]) for state in (before, after))
    return f", load average {first} before and {last} after, {stolen:.1%} of the time stolen"


def write_report(
    folder: Path,
    name: str,
    figures: Mapping[str, Any],
    page: Callable[[dict[str, Any]], str],
    before: Mapping[str, Any],
) -> dict[str, Any]:
    """Write NAME.json and NAME.md; return the content of the JSON.

    Args:
        folder: of the files.
        name: of the report.
        figures: plain JSON types; time, machine, software and commit are added.
        page: writes the result as Markdown.
        before: `machine_state` when the measurement began.
    """
    result = {**measured_on(), "busy": {"before": before, "after": machine_state()}, **figures}
    if (measured := before.get("commit", result["commit"])) != result["commit"]:
        result["commit"] = measured.rstrip("+") + "+"  # changed meanwhile: no commit has these figures
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    write_file(folder / f"{name}.json", orjson.dumps(result, option=options))
    write_file(folder / f"{name}.md", page(result).encode())
    return result


def metric_title(name: str) -> str:
    """Return the name of a metric as people write it: recall_at_20 is Recall@20."""
    kind, _, places = name.partition("_at_")
    usual = {"ndcg": "NDCG", "recall": "Recall", "hit_ratio": "HitRate", "mrr": "MRR"}
    return usual.get(kind, kind.replace("_", " ")) + (places and f"@{places}")


@contextlib.contextmanager
def picture(file: Path, size: tuple[float, float], **subplots: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and an array of its axes, (rows, columns); write it as PNG after the block.

    The size is in inches; `subplots` are further arguments of `pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, squeeze=False, layout="constrained", **subplots)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    yield figure, axes
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    pyplot.close(figure)
    write_file(file, content.getvalue())
