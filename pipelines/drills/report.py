"""The outcomes of drills -> Markdown that begins with the verdict, and a picture of the latencies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from monitoring.alerting import read_slo
from pipelines.bench.load.report import goal_table
from pipelines.bench.report import MISSING, busy_line, fixed, picture, table
from pipelines.drills.catalogue import Drill
from pipelines.drills.goals import PAGE_S, RESOLVED_S
from pipelines.drills.outcome import CLIENT, RAW, Answer
from pipelines.live.monitors import Monitors
from pipelines.tables import table as text_table

PHASES = ("before", "during", "after")
HEAD = (
    *("drill", "failed", "late", "degraded", "p50 / p99 ms before", "during", "after"),
    *("recovery s", "passed"),
)
_COLUMNS = 4  # of the picture
# Of the panels, by their names in Grafana; a share is written with its per cent sign.
_UNITS = {"s": "seconds", "reqps": "a second", "percentunit": "", "short": ""}


def drill_table(result: Mapping[str, Any]) -> str:
    """Return the result of `run_drills` as Markdown."""
    lines = [f"# Drills on bundle {result['bundle_id']}", "", _verdict(result), "", _preface(result), ""]
    lines += [*_broken_off(result), *drill_rows(result), ""]
    for name, drill in result["drills"].items():
        lines += [f"## {name}", "", f"Proves: {drill['proves']}.", ""]
        lines += [*goal_table(drill["goals"], "{:.4g}".format), "", *_faults(drill), ""]
        if drill["notes"]:
            lines += [f"Noted beside: `{json.dumps(drill['notes'])}`", ""]
    return "\n".join(lines)


def _broken_off(result: Mapping[str, Any]) -> list[str]:
    return [f"`{name}` was broken off: {why}\n" for name, why in result["broken_off"].items()]


def drill_rows(result: Mapping[str, Any]) -> list[str]:
    """Return the table with the effects of each drill on callers."""
    rows = []
    for name, drill in result["drills"].items():
        whole, during, recovery_s = drill["all"][CLIENT], drill["during"][CLIENT], drill["recovery_s"]
        rows.append(
            [
                f"`{name}`",
                whole["failed"],
                whole["late"],
                f"{during['degraded']:,} of {during['requests']:,}",
                *(_two(drill[phase][CLIENT]) for phase in PHASES),
                "never" if recovery_s is None else f"{recovery_s:.2f}",
                "yes" if drill["passed"] else "no",
            ]
        )
    return table(HEAD, rows)


def page_rows(drills: Mapping[str, Any]) -> list[str]:
    """Return the table of pages, a row for each fault."""
    rows = [
        [
            f"`{name}`",
            page["fault"],
            page["expected"] or "none",
            fixed(page["paged_s"], 0) if page["expected"] else MISSING,
            fixed(page["resolved_s"], 0) if page["expected"] else MISSING,
            ", ".join(page["wrong"]) or "none",
            ", ".join(page["tickets"]) or "none",
        ]
        for name, drill in drills.items()
        for page in drill["pages"]
    ]
    head = ["drill", "fault", "must page", "s to the page", "s to resolved", "wrong pages", "tickets"]
    return table(head, rows)


def alerts_table(result: Mapping[str, Any]) -> str:
    """Return the pages of drills with alerts as Markdown."""
    effort = result["effort"]
    missed = {name: missed_figures(drill) for name, drill in result["drills"].items()}
    lines = [
        f"# Alerts of drills on bundle {result['bundle_id']}",
        "",
        alerts_verdict(result["drills"]),
        "",
        *([result["note"], ""] if "note" in result else []),  # of a result that was put together by hand
        f"Each fault lasts {effort['during_s']:g} s or more, and Prometheus watched {effort['history_s']:g} "
        f"s before the first. All processes share {_machine(result)}.",
        "",
        *_broken_off(result),
        *page_rows(result["drills"]),
        "",
        "All figures that the drills missed beside Prometheus and Alertmanager:",
        "",
        *([f"- `{name}`: {figures}" for name, figures in missed.items() if figures] or ["- none"]),
        "",
    ]
    return "\n".join(lines)


def missed_figures(outcome: Mapping[str, Any]) -> str:
    """Return the missed figures of a drill, in a line; empty: none."""
    missed = [goal for goal in outcome["goals"] if not goal["reached"]]
    figures = [MISSING if goal["measured"] is None else f"{goal['measured']:.4g}" for goal in missed]
    told = zip(missed, figures, strict=True)
    return "; ".join(f"{goal['name']} {figure} (wanted {goal['goal']})" for goal, figure in told)


def alerts_verdict(drills: Mapping[str, Any]) -> str:
    """Return how many pages came, in time and rightly."""
    pages = [page for drill in drills.values() for page in drill["pages"]]
    due = [page for page in pages if page["expected"]]
    came = [page for page in due if page["paged_s"] is not None]
    soon = sum(page["paged_s"] <= PAGE_S for page in came)
    over = sum(page["resolved_s"] is not None and page["resolved_s"] <= RESOLVED_S for page in due)
    wrong = sum(len(page["wrong"]) for page in pages)
    return (
        f"{len(pages)} faults, {len(due)} of which must page: {len(came)} right pages came, {soon} of them "
        f"within {PAGE_S:g} s. {over} ended within {RESOLVED_S:g} s of the repair. Wrong pages: {wrong}."
    )


def _verdict(result: Mapping[str, Any]) -> str:
    drills = result["drills"]
    missed = [*(name for name, drill in drills.items() if not drill["passed"]), *result["broken_off"]]
    count = len(drills) + len(result["broken_off"])
    calls = [drill["all"][CLIENT] for drill in drills.values()]
    counts = (sum(call[name] for call in calls) for name in ("requests", "failed", "late", "unlabelled"))
    requests, failed, late, unlabelled = counts
    others = f", not {', '.join(f'`{name}`' for name in missed)}" if missed else ""
    return (
        f"{count - len(missed)} of {count} drills reach every figure{others}; of {requests:,} "
        f"calls of the client {failed} failed, {late} came too late, and "
        f"{unlabelled} were less than they should be without saying so."
    )


def _preface(result: Mapping[str, Any]) -> str:
    effort = result["effort"]
    return (
        f"{effort['client_rate']:g} requests a second through the project's client, whose deadline is "
        f"{result['deadline_ms']:g} ms, and {effort['raw_rate']:g} straight over HTTP, all the time, as an "
        f"open loop; each fault lasts {effort['during_s']:g} s or more. Counts and times of this table are "
        f"the client's. Endpoint, store, callers and proxy share {_machine(result)}."
    )


def _machine(result: Mapping[str, Any]) -> str:
    """Return where and when a result was measured."""
    machine = result["machine"]
    return (
        f"{machine['cores']} cores of {machine['cpu']}. Commit {result['commit']}, {result['measured_at']}"
        f"{busy_line(result)}"
    )


def _faults(drill: Mapping[str, Any]) -> list[str]:
    rows = []
    for fault in drill["faults"]:
        for stream in (CLIENT, RAW):
            tally = fault["during"][stream]
            why = ", ".join(f"{reason} {count}" for reason, count in sorted(tally["reasons"].items()))
            counts = [tally[name] for name in ("requests", "failed", "degraded")]
            rows.append(
                [fault["name"], fixed(fault["seconds"], 1), stream, *counts, why or MISSING, _two(tally)]
            )
    head = ["fault", "s", "stream", "requests", "without an answer", "degraded", "why", "p50 / p99 ms"]
    return table(head, rows)


def _two(tally: Mapping[str, Any]) -> str:
    return f"{fixed(tally['p50_ms'], 1)} / {fixed(tally['p99_ms'], 1)}"


def draw_drills(result: Mapping[str, Any], answers: Mapping[str, Sequence[Answer]], file: Path) -> None:
    """Draw each drill's latencies at the client over time, as PNG; the faults' times are shaded."""
    columns = min(len(answers), _COLUMNS)
    rows = -(-len(answers) // columns)
    with picture(file, (4.2 * columns, 2.6 * rows), nrows=rows, ncols=columns) as (figure, grid):
        for axes, (name, seen) in zip(_used(grid, len(answers)), answers.items(), strict=True):
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
            axes.yaxis.set_major_formatter("{x:g}")
            axes.title.set_fontsize(10)
            axes.grid(alpha=0.3)
        figure.supylabel("milliseconds at the client", fontsize=9)
        figure.supxlabel("seconds; shaded: the fault", fontsize=9)
        handles, labels = grid[0][0].get_legend_handles_labels()
        place = {"loc": "outside upper center", "ncols": len(labels), "frameon": False}
        figure.legend(handles, labels, fontsize=8, markerscale=3, **place)


def _used(grid: Any, count: int) -> Any:
    """Return the first axes of a grid; the others are left out."""
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return grid.flat[:count]


def draw_dashboards(monitors: Monitors, out_dir: Path) -> None:
    """Draw the queries of each dashboard over the time that Prometheus has watched, a picture a page."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for board in read_slo()["dashboards"]:
        panels = [(panel, monitors.series(panel["expr"])) for panel in board["panels"]]
        drawn, columns = [(panel, series) for panel, series in panels if series], 2
        rows = max(-(-len(drawn) // columns), 1)
        file = out_dir / f"dashboard-{board['name']}.png"
        with picture(file, (11.0, 2.6 * rows), nrows=rows, ncols=columns) as (figure, grid):
            for axes, (panel, series) in zip(_used(grid, len(drawn)), drawn, strict=True):
                for labels, values in series.items():
                    axes.plot(*zip(*values, strict=True), label=labels[:30], linewidth=1)
                if any(series):
                    axes.legend(fontsize=6, frameon=False)
                axes.set_title(panel["title"], fontsize=9)
                axes.set_ylabel(_UNITS[panel["unit"]], fontsize=8)
                if panel["unit"] == "percentunit":
                    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
                if min(value for values in series.values() for _, value in values) >= 0:
                    axes.set_ylim(bottom=0)
                axes.grid(alpha=0.3)
            empty = ", ".join(panel["title"] for panel, series in panels if not series)
            figure.suptitle(board["title"], fontsize=11)
            figure.supxlabel("seconds since Prometheus began" + (empty and f"\nNo data: {empty}"), fontsize=8)


def list_table(drills: Sequence[Drill]) -> str:
    """Return what each drill proves, and of a single one its faults and figures, for a terminal."""
    if len(drills) > 1:
        return text_table(["drill", "proves"], [[drill.name, drill.proves] for drill in drills])
    (drill,) = drills
    figures = text_table(["figure", "wanted"], [[goal.name, goal.wanted] for goal in drill.goals()])
    return f"{drill.name}: {drill.proves}\nfaults: {', '.join(drill.breaks)}\n\n{figures}"


def release_table(result: Mapping[str, Any]) -> str:
    """Return the result of `drill_release` as Markdown."""
    rows = []
    for name, case in result["cases"].items():
        times = [fixed(case[key], 1) for key in ("detect_s", "abort_s")]
        counts = [case["requests"], case["failed_at_client"], case["hurt"], f"{case['touched']:.1f} %"]
        end = [f"{case['ended']}", f"{case['largest_weight']} %", "yes" if case["passed"] else "no"]
        rows.append([f"`{name}`", *times, *counts, *end])
    head = ["case", "s to detect", "s to abort", "requests", "failed at the client", "hurt", "touched"]
    broken_off: Mapping[str, str] = result["broken_off"]
    missed = [*(name for name, case in result["cases"].items() if not case["passed"]), *broken_off]
    count = len(rows) + len(broken_off)
    verdict = f"{count - len(missed)} of {count} cases reach every figure"
    lines = [
        f"# Releases of bundle {result['bundle_id']}",
        "",
        f"{verdict}{', not ' + ', '.join(missed) if missed else ''}.",
        "",
        f"{result['rate']:g} requests a second through the gateway, half of them by the project's client. "
        "Time to detect counts from the first mirrored request, of `-live` cases from the first shopper's "
        "answer. Hurt are requests that failed, or got less than the full path from the canary: a busy "
        "machine or a new process hurts some of a good one, too, and the gate compares them with the stable "
        f"slot's. Two endpoints, gateway, store and load share {_machine(result)}.",
        "",
        *_broken_off(result),
        *table([*head, "end", "largest weight", "passed"], rows),
        "",
    ]
    for name, case in result["cases"].items():
        lines += [f"## {name}", "", f"Proves: {case['proves']}.", ""]
        if case["reason"]:
            lines += [f"End: {case['ended']}, {case['reason']}.", ""]
        lines += [*goal_table(case["goals"], "{:.4g}".format), ""]
    return "\n".join(lines)


def draw_release(result: Mapping[str, Any], file: Path) -> None:
    """Draw the weight over time of each canary that got some, from its first mirrored request on."""
    with picture(file, (8.4, 3.2)) as (figure, grid):
        axes = grid[0][0]
        for name, case in result["cases"].items():
            began = next((at for at, state, _ in case["steps"] if state == "shadow"), None)
            if began is None or not case["largest_weight"]:  # its line would lie on the axis
                continue
            steps = [(at - began, weight) for at, state, weight in case["steps"] if at >= began]
            axes.step([at for at, _ in steps], [weight for _, weight in steps], where="post", label=name)
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_yticks([0, 1, 5, 25, 50, 100], ["0", "1", "5", "25", "50", "100"])
        axes.set_xlabel("seconds since the first mirrored request")
        axes.set_ylabel("weight of the canary, %")
        axes.grid(alpha=0.3)
        if axes.lines:
            figure.legend(loc="outside right center", frameon=False, fontsize=8)
