"""The figures of the load bench -> Markdown that begins with a manager's sentence, and one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from components.release.model_card import (
    DOLLARS_A_CORE_HOUR,
    WATTS_A_CORE,
    dollars_a_million,
    watt_hours,
)
from pipelines.bench.load.goals import MOST_DEGRADED, OURS, UNOPTIMISED
from pipelines.bench.report import MISSING, fixed, machine_line, percent, picture, short, table

_COMPARED = ("p50_ms", "cpu_ms", "capacity")
_COLOURS, _OTHERS = {OURS: "tab:blue", UNOPTIMISED: "tab:red"}, "#bbbbbb"


def load_table(result: Mapping[str, Any]) -> str:
    """Return the result of `bench_load` as Markdown."""
    parts = [
        [f"# Load report of bundle {result['bundle_id']}"],
        [_verdict(result)],
        _summary(result),
        goal_table(result["goals"]),
        [_preface(result)],
        ["The arms:", "", *(f"- {name}: {arm['what']}" for name, arm in result["arms"].items())],
        _stages(result),
        _under_load(result),
        _lengths(result["basket_length"]),
        _endurance(result.get("endurance")),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _verdict(result: Mapping[str, Any]) -> str:
    """Return a manager's sentence: ours beside the unoptimised stack."""
    ours = result["arms"][OURS]
    p50, cpu = short(ours["alone"]["p50_ms"]), short(ours["cpu_ms"])
    first = (
        f"An answer takes `{OURS}` {p50} ms (p50) and {cpu} ms of processor time; one process gives "
        f"{_range(ours['capacity'])} answers a second with 99 % within {result['goal_ms']:g} ms."
    )
    arm = result["arms"].get(UNOPTIMISED)
    if arm is None:
        return f"{first} `{UNOPTIMISED}` was not measured beside it."
    p50, cpu, rate = (difference(arm["ratio"].get(name)) for name in _COMPARED)
    return f"{first} `{UNOPTIMISED}` against that: p50 {p50}, processor time {cpu}, answers a second {rate}."


def difference(spread: Mapping[str, float] | None) -> str:
    """Return a ratio with its range over rounds; one that holds 1 is no difference."""
    if spread is None:
        return MISSING
    if spread["min"] == spread["max"]:
        return f"{spread['median']:.2f}x, measured once"
    text = f"{spread['median']:.2f}x [{spread['min']:.2f}, {spread['max']:.2f}]"
    return f"no difference ({text})" if spread["min"] <= 1 <= spread["max"] else text


def goal_table(goals: Iterable[Mapping[str, Any]], number: Callable[[float], str] = short) -> list[str]:
    """Return the table of goals with their figures, for the load report and for drills."""
    rows = []
    for goal in goals:
        measured = MISSING if goal["measured"] is None else number(goal["measured"]) + goal["unit"]
        if goal["measured"] is None and goal["reached"]:
            measured = "the other holds no rate"
        reached = {True: "yes", False: "no", None: "not measured"}[goal["reached"]]
        rows.append([goal["name"], goal["goal"], measured, reached])
    return table(["goal", "wanted", "measured", "reached"], rows)


def _preface(result: Mapping[str, Any]) -> str:
    effort = result["effort"]
    return (
        f"{machine_line(result)}, servers, Redis and client on the same ones; "
        f"Python {result['software']['python']}; "
        f"{result['measured_at']}. {result['requests']:,} different requests, "
        f"at most {result['candidates']} candidates ranked for each, "
        f"{result['online_store']['users']:,} shoppers' rows, no limit for one of them. "
        "Each arm runs beside ours alone; "
        f"{effort['rounds']} rounds of {effort['alone_s']:g} s and {effort['searches']} searches of the "
        "capacity, in turns. Medians and ranges over rounds, for ours over all pairs; ratios are those of a "
        "round. A ratio whose range holds 1 is called no difference: the noise of this machine is as large."
    )


def _summary(result: Mapping[str, Any]) -> list[str]:
    head = ["arm", "p50 ms", "p99 ms", f"answers/s, 99 % within {result['goal_ms']:g} ms"]
    head += ["CPU ms an answer", "memory MiB (RSS / PSS)"]
    rows = []
    for name, arm in result["arms"].items():
        alone, memory = arm["alone"], arm["memory_mb"]
        rows.append(
            [
                f"**{name}**" if name == OURS else name,
                short(alone["p50_ms"]),
                short(alone["p99_ms"]),
                _range(arm["capacity"]),
                fixed(arm["cpu_ms"]),
                f"{memory['rss']:.0f} / {memory['pss']:.0f}",
                *(difference(arm["ratio"].get(name)) if "ratio" in arm else "" for name in _COMPARED),
            ]
        )
    rows += [[name, f"skipped: {why}", *[""] * 7] for name, why in result["skipped"].items()]
    costs = [
        f"`{name}` ${dollars_a_million(arm['cpu_ms']):.3f} and {watt_hours(arm['cpu_ms'] * 1e3):.1f} Wh"
        for name, arm in result["arms"].items()
    ]
    return [
        *table([*head, "p50 against ours", "CPU", "answers/s"], rows),
        "",
        "p50 and p99: one request at a time, from the first byte sent to the last received. CPU: all "
        "processes of the server, without Redis and client. Goals of these requests stay open if more than "
        f"{MOST_DEGRADED:.0%} of our answers to them are degraded.",
        "",
        f"Processor time of a million answers, if a core costs ${DOLLARS_A_CORE_HOUR:g} an hour and takes "
        f"{WATTS_A_CORE:g} W (estimates): {'; '.join(costs)}.",
    ]


def _stages(result: Mapping[str, Any]) -> list[str]:
    arms = {name: arm["stages"] for name, arm in result["arms"].items() if arm["stages"]}
    rows = [
        [stage, percent(row["share"], 1), short(row["p50"]), short(row["p99"])]
        + [fixed(stages.get(stage, {}).get("mean"), 3) for stages in arms.values()]
        for stage, row in arms[OURS].items()
    ]
    head = ["stage", "share", "p50 ms", "p99 ms", *(f"mean ms, {name}" for name in arms)]
    lines = ["## Where the time goes", "", f"Share, p50 and p99 are those of {OURS}.", "", *table(head, rows)]
    if choosing := result["arms"][OURS]["choosing"]:
        lines += [
            "",
            f"Retrieval, ranking and re-ranking of an answer together: p50 {short(choosing['p50'])} ms, "
            f"p99 {short(choosing['p99'])} ms.",
        ]
    unexplained = "`unexplained` is network, client, JSON, checks and the server of each arm."
    return [*lines, "", f"Means add up to the client's: {unexplained}"]


def _under_load(result: Mapping[str, Any]) -> list[str]:
    head = ["arm", "half: answers/s", "p50 ms", "p99", "p99.9", "failed, refused, degraded"]
    head += ["3 x capacity: in full and in time, of the capacity", "degraded, in time", "refused", "failed"]
    rows = []
    for name, arm in result["arms"].items():
        if "half" not in arm:
            rows.append([name, "held no rate", *[""] * 8])
            continue
        half, over = arm["half"], arm["overload"]
        lost = half["failed"] + half["unanswered"]
        rows.append(
            [
                name,
                fixed(half["rate"], 1),
                *(short(half["ms"][p]) for p in ("p50", "p99", "p99_9")),
                f"{lost}, {half['refused']}, {half['degraded']} of {half['requests']}",
                percent(over["goodput_ratio"]),
                percent(over["degraded_ratio"]),
                f"{over['refused']} of {over['requests']}",
                str(over["failed"] + over["unanswered"]),
            ]
        )
    return [
        "## At half of each capacity, and at three times it",
        "",
        *table(head, rows),
        "",
        "Open loop: requests come at the times of a Poisson process, and a latency counts from when its "
        "request was due. At three times the capacity, answers within the goal are counted over the time in "
        "which they were due; those of a fallback stand beside, as no capacity counts them.",
    ]


def _lengths(figures: Mapping[str, Any]) -> list[str]:
    growth = figures["growth"]
    grown = " and ".join(f"{p} {growth[p]:.2f}x" for p in ("p50", "p99") if growth[p])
    rows = [[length, short(row["p50"]), short(row["p99"])] for length, row in figures["ms"].items()]
    return [
        "## Length of the basket (ours, one at a time)",
        "",
        *table(["items", "p50 ms", "p99 ms"], rows),
        "",
        f"From 1 item to {list(figures['ms'])[-1]}: {grown or 'too few samples to say'}.",
    ]


def _endurance(figures: Mapping[str, Any] | None) -> list[str]:
    if figures is None:
        return []
    start, *later = [mb for _, mb in figures["anonymous_mb"]]
    return [
        "## Endurance (ours)",
        "",
        f"{figures['requests']:,} requests without a pause, {figures['failed']} failed. Anonymous memory, "
        f"which leaves out mapped files, was {start:.0f} MiB at the start, and from {min(later):.0f} to "
        f"{max(later):.0f} MiB after it. From the median of the second quarter to that of the last it grew "
        f"by {figures['mb_grown']:.1f} MiB, {figures['mb_per_1000_requests']:.3f} MiB per 1,000 requests.",
    ]


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else short(rate)


def _range(capacity: Mapping[str, Any]) -> str:
    rates = capacity["rates"]
    spread = ", measured once" if len(rates) == 1 else f" [{_rate(min(rates))}, {_rate(max(rates))}]"
    return _rate(capacity["rate"]) + spread


def draw_load(result: Mapping[str, Any], file: Path) -> None:
    """Draw p99 over the rate, and each arm's answers a second with their range over the rounds."""
    arms = result["arms"]
    with picture(file, (11, 4.2), ncols=2) as (figure, [[left, right]]):
        for name, arm in arms.items():
            # No lines: rounds probe other rates, and a line between two rounds shows a change that was none.
            probes = [probe for probe in arm["capacity"]["probes"] if probe["p99_ms"] is not None]
            left.scatter(
                [probe["rate"] for probe in probes],
                [probe["p99_ms"] for probe in probes],
                s=14,
                color=_colour(name),
                zorder=2 + (name == OURS),
                label=name if name in _COLOURS else "_",  # one grey for all others
            )
        left.scatter([], [], s=14, color=_OTHERS, label="other arms")
        left.axhline(result["goal_ms"], color="grey", linewidth=0.8, linestyle=":")
        left.set(yscale="log", xlabel="requests a second, open loop; a point: one probe", ylabel="p99 ms")
        left.yaxis.set_major_formatter("{x:g}")
        order = sorted(arms, key=lambda name: arms[name]["capacity"]["rate"])
        for place, name in enumerate(order):
            capacity = arms[name]["capacity"]
            right.plot(
                [min(capacity["rates"]), max(capacity["rates"])],
                [place, place],
                color=_colour(name),
                linewidth=2,
            )
            right.plot(capacity["rate"], place, "o", color=_colour(name))
        right.set_yticks(range(len(order)), order)
        right.set_xlabel(f"answers a second, 99 % within {result['goal_ms']:g} ms; lines: all rounds")
        right.grid(alpha=0.3, axis="x")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)


def _colour(arm: str) -> str:
    return _COLOURS.get(arm, _OTHERS)
