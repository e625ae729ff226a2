"""What drills found -> Markdown that begins with what passed, and a picture of each drill's latencies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.drills.catalogue import Drill
from pipelines.drills.outcome import CLIENT, RAW, Answer
from pipelines.tables import table

PHASES = ("before", "during", "after")
HEAD = "| drill | failed | late | degraded | p50 / p99 ms before | during | after | recovery s | passed |"
_COLUMNS = 4  # of the picture


def drill_table(result: Mapping[str, Any]) -> str:
    """Return the result of `run_drills` as Markdown."""
    lines = [f"# Drills on bundle {result['bundle_id']}", "", _verdict(result), "", _preface(result), ""]
    for name, why in result["broken_off"].items():
        lines += [f"`{name}` was broken off: {why}", ""]
    lines += [*drill_rows(result), ""]
    for name, drill in result["drills"].items():
        lines += [f"## {name}", "", f"Proves: {drill['proves']} ({drill['scenarios']}).", ""]
        lines += [*_goals(drill), "", *_faults(drill), ""]
        if drill["notes"]:
            lines += [f"Noted beside: `{json.dumps(drill['notes'])}`", ""]
    return "\n".join(lines)


def drill_rows(result: Mapping[str, Any]) -> list[str]:
    """Return the table that says of each drill what callers noticed."""
    rows = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for name, drill in result["drills"].items():
        whole, recovery = drill["all"][CLIENT], drill["recovery_s"]
        cells = [
            f"`{name}`",
            str(whole["failed"]),
            str(whole["late"]),
            f"{drill['during'][CLIENT]['degraded']:,} of {drill['during'][CLIENT]['requests']:,}",
            *(f"{_ms(drill[p][CLIENT]['p50_ms'])} / {_ms(drill[p][CLIENT]['p99_ms'])}" for p in PHASES),
            "never" if recovery is None else f"{recovery:.2f}",
            "yes" if drill["passed"] else "no",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _verdict(result: Mapping[str, Any]) -> str:
    drills = result["drills"]
    missed = [name for name, drill in drills.items() if not drill["passed"]]
    asked = sum(drill["all"][CLIENT]["requests"] for drill in drills.values())
    failed, late, unlabelled = (
        sum(drill["all"][CLIENT][name] for drill in drills.values())
        for name in ("failed", "late", "unlabelled")
    )
    others = f", not {', '.join(f'`{name}`' for name in missed)}" if missed else ""
    return (
        f"{len(drills) - len(missed)} of {len(drills)} drills reach every figure{others}; of {asked:,} calls "
        f"of the client {failed} failed, {late} came too late, and "
        f"{unlabelled} were less than they should be without saying so."
    )


def _preface(result: Mapping[str, Any]) -> str:
    effort, machine = result["effort"], result["machine"]
    return (
        f"{effort['client_rate']:g} requests a second through the project's client, whose deadline is "
        f"{result['deadline_ms']:g} ms, and {effort['raw_rate']:g} straight over HTTP, all the time, as an "
        f"open loop; each fault lasts {effort['during_s']:g} s or more. Endpoint, store, callers and proxy "
        f"share {machine['cores']} cores of {machine['cpu']}. Counts and times of this table "
        f"are the client's; commit {result['commit']}, {result['measured_at']}, load average "
        f"{result['load_average_before'][0]:.1f} before and {result['load_average_after'][0]:.1f} after."
    )


def _goals(drill: Mapping[str, Any]) -> list[str]:
    lines = ["| figure | wanted | measured | reached |", "|---|---|---|---|"]
    for goal in drill["goals"]:
        reached = {True: "yes", False: "no", None: "not measured"}[goal["reached"]]
        measured = "–" if goal["measured"] is None else f"{goal['measured']:.4g}{goal['unit']}"
        lines.append(f"| {goal['name']} | {goal['goal']} | {measured} | {reached} |")
    return lines


def _faults(drill: Mapping[str, Any]) -> list[str]:
    lines = [
        "| fault | s | who asks | requests | without an answer | degraded | why | p50 / p99 ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fault in drill["faults"]:
        for stream in (CLIENT, RAW):
            seen = fault["during"][stream]
            why = ", ".join(f"{reason} {count}" for reason, count in sorted(seen["reasons"].items())) or "–"
            times = f"{_ms(seen['p50_ms'])} / {_ms(seen['p99_ms'])}"
            counts = f"{seen['requests']} | {seen['failed']} | {seen['degraded']}"
            lines.append(
                f"| {fault['name']} | {fault['seconds']:.1f} | {stream} | {counts} | {why} | {times} |"
            )
    return lines


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def draw_drills(result: Mapping[str, Any], answers: Mapping[str, Sequence[Answer]], file: Path) -> None:
    """Draw each drill's latencies at the client over time; the faults' times are shaded.

    Args:
        result: of `run_drills`.
        answers: the client's, of each drill.
        file: the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(answers), _COLUMNS)
    rows = -(-len(answers) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 2.6 * rows), squeeze=False)
    for axes in grid.flat[len(answers) :]:
        axes.set_visible(False)
    for axes, (name, seen) in zip(grid.flat, answers.items(), strict=False):
        first = seen[0].due
        for begin, end in result["drills"][name]["marks_s"]:
            axes.axvspan(begin, end, color="tab:red", alpha=0.12, linewidth=0)
        kinds = {
            "whole": ("tab:blue", [a for a in seen if a.whole]),
            "degraded": (
                "tab:orange",
                [a for a in seen if a.status_ok and not a.whole and not a.from_client],
            ),
            "the client's own": ("tab:green", [a for a in seen if a.status_ok and a.from_client]),
            "failed": ("black", [a for a in seen if not a.status_ok]),
        }
        for kind, (colour, some) in kinds.items():
            times, waits = [a.due - first for a in some], [max(a.ms, 0.1) for a in some]
            axes.scatter(times, waits, s=4, color=colour, label=kind, linewidths=0)
        axes.axhline(result["deadline_ms"], color="grey", linewidth=0.8)
        axes.set(yscale="log", ylim=(0.5, 300.0), title=name)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("milliseconds at the client", fontsize=9)
    figure.supxlabel("seconds; shaded: the fault", fontsize=9)
    figure.tight_layout()
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, fontsize=8, loc="lower right", ncols=len(labels), markerscale=3, frameon=False
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def list_table(drills: Sequence[Drill]) -> str:
    """Return what each drill proves and which figures it asks, for a terminal."""
    parts = []
    for drill in drills:
        figures = table(["figure", "wanted"], [[goal.name, goal.wanted] for goal in drill.goals()])
        indented = "\n".join(f"    {line}" for line in figures.splitlines())
        faults = ", ".join(drill.breaks)
        parts.append(f"{drill.name}  ({drill.scenarios})\n  {drill.proves}\n  faults: {faults}\n{indented}")
    return "\n\n".join(parts)
