"""A step's report -> its page in Kubeflow: numbers for "compare runs", and tables to read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def show(report: dict[str, Any], numbers: Any, page: Any) -> dict[str, Any]:
    """Write a step's report into KFP's artifacts `Metrics` (numbers) and `Markdown` (page); return it."""
    rows = dict(flat(report))
    measured = {name: float(value) for name, value in rows.items() if is_number(value)}
    for name, value in measured.items():
        numbers.log_metric(name, value)
    Path(numbers.path).write_text(json.dumps(measured, indent=1), encoding="utf-8")
    Path(page.path).write_text(_markdown(rows), encoding="utf-8")
    return report


def flat(report: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a nested report with its path, joined by dots."""
    for name, value in report.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _markdown(rows: Mapping[str, Any]) -> str:
    curves = {name: value for name, value in rows.items() if is_curve(value)}
    text = _table(("", ""), [(name, value) for name, value in rows.items() if name not in curves])
    for name, points in curves.items():
        lines = [dict(flat(point)) for point in points]
        columns = list(dict.fromkeys(key for line in lines for key in line))
        text += f"\n## {name}\n\n" + _table(
            columns, [[point.get(key, "") for key in columns] for point in lines]
        )
    return text


def is_curve(value: Any) -> bool:
    """Return whether a value is a list of points, each a mapping."""
    return isinstance(value, list) and bool(value) and all(isinstance(point, Mapping) for point in value)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _table(head: Any, rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(value) for value in line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    text = (
        f"{value:.6g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    )
    return text.replace("|", "\\|").replace("\n", " ")
