"""Rows -> text tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
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


def size(count: int) -> str:
    """Return a number of bytes as people say it."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def moment(seconds: float) -> str:
    """Return a time as a short local-independent text."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
