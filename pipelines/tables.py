"""Rows -> text tables for a terminal; colours and the terminal's width only where stdout is one."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

STYLES = {
    "NO": "red",
    "failed": "red",
    "error": "red",
    "drifted": "red",
    "warning": "yellow",
    "warn": "yellow",
}
SHORT = 40  # characters of a cell that is no more than a hint
UNLIMITED = 100_000  # columns of a file or a pipe: no cell is wrapped there


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned table; numbers are aligned right, and a terminal gets long cells wrapped."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(head):
        is_number = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        grid.add_column(Text(name), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(text, STYLES.get(text, "")) for text in map(_text, row)))
    width = shutil.get_terminal_size().columns if terminal else UNLIMITED
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal)
    with console.capture() as capture:
        console.print(grid)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def counted(count: int, noun: str) -> str:
    """Return "1 line" or "1,234 lines"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shortened(text: str) -> str:
    """Return a text of SHORT characters at most, an ellipsis for the rest; a file or a pipe gets it whole."""
    return text if len(text) <= SHORT or not sys.stdout.isatty() else f"{text[: SHORT - 1]}…"


def size(count: int) -> str:
    """Return a number of bytes in MB or kB."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"


def moment(seconds: float) -> str:
    """Return a time in UTC, to the minute."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
