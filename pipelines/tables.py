"""Rows -> text tables, for terminals and for Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned table; numbers stand right."""
    cells = [[_text(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(head), *cells]) for i in range(len(head))]
    right = [all(isinstance(row[i], int | float) for row in rows) and bool(rows) for i in range(len(head))]
    lines = []
    for row in [list(head), *cells]:
        columns = zip(row, widths, right, strict=True)
        lines.append("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in columns).rstrip())
    return "\n".join(lines)


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *[[_text(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def quality_rows(evaluation: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Return the head and rows of the quality table: the served path, then each baseline and the ratio to it."""
    metrics = ("ndcg_at_10", "recall_at_20", "hit_ratio_at_10", "mrr")
    head = ["system", *metrics, "repeat_recall_at_20", "new_recall_at_20", "ndcg_ratio"]
    rows: list[list[Any]] = []
    for name, row in {"served": evaluation["served"], **evaluation.get("baselines", {})}.items():
        ratio = evaluation.get("ratios", {}).get(name, {}).get("ndcg_at_10", "")
        cells = [_with_interval(row, metric) for metric in metrics]
        rows.append(
            [name, *cells, row.get("repeat_recall_at_20", ""), row.get("new_recall_at_20", ""), ratio]
        )
    return head, rows


def size(count: int) -> str:
    """Return a number of bytes as people say it."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def moment(seconds: float) -> str:
    """Return a time as a short local-independent text."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _with_interval(row: Mapping[str, Any], metric: str) -> str:
    interval = row.get("interval", {}).get(metric)
    found = f"{row[metric]:.4f}" if metric in row else ""
    return f"{found} ({interval[0]:.4f}-{interval[1]:.4f})" if interval else found


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
