"""What the load bench measured -> Markdown that begins with what a manager reads, and one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

OURS, NULL = "ours", "null"
_COLOURS = {OURS: "tab:blue", NULL: "black", "fastapi": "tab:green", "unoptimised": "tab:red"}
_NEXT_COLOURS = ("tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "tab:gray")


def load_table(result: Mapping[str, Any]) -> str:
    """Return the result of `bench_load` as Markdown."""
    lines = [
        f"# Load report of bundle {result['bundle_id']}",
        "",
        *_preface(result),
        "",
        *_summary(result),
        "",
        *_compared(result),
        "",
        *_stages(result),
        "",
        *_under_load(result),
        "",
        *_lengths(result["basket_length"]),
        "",
        *_payloads(result["payloads"]),
        "",
        *_endurance(result.get("endurance")),
        *_knees(result),
    ]
    return "\n".join(lines) + "\n"


def _preface(result: Mapping[str, Any]) -> list[str]:
    machine, effort = result["machine"], result["effort"]
    before, after = result["load_average_before"][0], result["load_average_after"][0]
    return [
        f"{machine['cpu']}, {machine['cores']} cores, servers, Redis and client on the same ones; "
        f"load average {before:.2f} before, {after:.2f} after; Python {result['software']['python']}; commit "
        f"{result['commit']}; {result['measured_at']}. {result['distinct_requests']} different requests, "
        f"{result['online_store']['users']:,} shoppers' rows; {effort['rounds']} rounds of "
        f"{effort['alone_s']:g} s an arm, the arms taking turns. Medians over rounds."
    ]


def _summary(result: Mapping[str, Any]) -> list[str]:
    goal = result["goal_ms"]
    lines = [
        f"| arm | p50 ms | p99 ms | capacity, answers/s at p99 <= {goal:g} ms | CPU ms an answer "
        "| $ a million | Wh a million | memory MB (RSS / PSS) | against ours: p50, CPU, capacity |",
        "|" + "---|" * 9,
    ]
    for name, arm in result["arms"].items():
        alone, memory = arm["alone"], arm["memory_mb"]
        cells = [
            f"**{name}**" if name == OURS else name,
            _ms(alone["p50_ms"]),
            _ms(alone["p99_ms"]),
            f"{arm['capacity']['rate']:,.0f}"
            if arm["capacity"]["rate"] >= 10
            else _ms(arm["capacity"]["rate"]),
            f"{arm['cpu_ms']:.2f}",
            f"{arm['dollars_a_million']:.3f}",
            f"{arm['wh_a_million']:.1f}",
            f"{memory['rss']:.0f} / {memory['pss']:.0f}",
            _against(arm.get("ratio")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {name} | skipped: {why} |" + " |" * 7 for name, why in result["skipped"].items()]
    constants = result["constants"]
    return [
        *lines,
        "",
        "p50 and p99: one request at a time, from the first byte sent to the last received. CPU: all "
        "processes of the server, without Redis and client. $ = CPU ms x 1000 s / 3600 x "
        f"${constants['dollars_a_core_hour']:g} a core-hour; Wh = CPU ms x 1000 s / 3600 x "
        f"{constants['watts_a_core']:g} W a core: estimates with stated constants.",
    ]


def _against(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return ""
    named = [ratio.get("p50_ms"), ratio.get("cpu_ms")]
    cells = [f"{one['median']:.2f}x [{one['min']:.2f}, {one['max']:.2f}]" if one else "–" for one in named]
    capacity = f"{ratio['capacity']:.2f}x" if ratio["capacity"] is not None else "–"
    return ", ".join([*cells, capacity])


def _compared(result: Mapping[str, Any]) -> list[str]:
    lines = ["What each arm is:", ""]
    return lines + [f"- {name}: {arm['what']}" for name, arm in result["arms"].items()]


def _stages(result: Mapping[str, Any]) -> list[str]:
    lines = []
    floor = result["floor"]
    for name, arm in result["arms"].items():
        stages = arm["stages"]
        if stages is None:
            continue
        shown = f"## Where the time goes: {name}"
        lines += [shown, "", "| stage | mean ms | share | p50 | p99 |", "|" + "---|" * 5]
        lines += [
            f"| {stage} | {row['mean']:.3f} | {row['share']:.1%} | {_ms(row['p50'])} | {_ms(row['p99'])} |"
            for stage, row in stages.items()
        ]
        lines.append("")
    if floor:
        lines.append(
            f"Means add up to the client's. Of `unexplained`, a bare HTTP answer of the null server takes "
            f"{floor['mean_ms']:.3f} ms (network, client, uvicorn); the rest is JSON, checks and KServe."
        )
    return lines


def _under_load(result: Mapping[str, Any]) -> list[str]:
    lines = [
        "## At half of each capacity, and at three times it",
        "",
        "| arm | half: answers/s | p50 ms | p99 | p99.9 | CPU ms | failed, refused, degraded "
        "| 3 x capacity: in time, of the capacity | refused | degraded |",
        "|" + "---|" * 10,
    ]
    for name, arm in result["arms"].items():
        if "half" not in arm:
            lines.append(f"| {name} | held no rate |" + " |" * 8)
            continue
        half, over = arm["half"], arm["overload"]
        cells = [
            name,
            f"{half['rate']:,.1f}",
            *(_ms(half["ms"][p]) for p in ("p50", "p99", "p99_9")),
            f"{half['cpu_ms']:.2f}",
            f"{half['failed'] + half['unanswered']}, {half['refused']}, {half['degraded']} "
            f"of {half['requests']}",
            f"{over['goodput_ratio']:.0%}",
            f"{over['refused']} of {over['requests']}",
            str(over["degraded"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "Open loop: requests come at the times of a Poisson process, and a latency counts from when its "
        "request was due. The tail of `null` is that of machine and client at the same processor time: set "
        "no goal below it.",
    ]


def _lengths(found: Mapping[str, Any]) -> list[str]:
    growth = found["growth"]
    last = list(found["ms"])[-1]
    told = " and ".join(f"{p} {growth[p]:.2f}x" for p in ("p50", "p99") if growth[p])
    return [
        "## Length of the basket (ours, one at a time)",
        "",
        "| items | p50 ms | p99 ms |",
        "|---|---|---|",
        *(f"| {length} | {_ms(row['p50'])} | {_ms(row['p99'])} |" for length, row in found["ms"].items()),
        "",
        f"From 1 item to {last}: {told or 'too few samples to say'}.",
    ]


def _payloads(found: Mapping[str, Any]) -> list[str]:
    first = next(iter(found.values()))
    rows = []
    for name, row in found.items():
        answer, p50 = row["answer_bytes"], row["ms"]["p50"]
        slower = f"{p50 / first['ms']['p50']:.2f}x" if p50 and first["ms"]["p50"] else "–"
        size = f"{answer:,.0f}" if answer else "–"
        rows.append(
            f"| {name} | {row['request_bytes']:,.0f} | {size} | {_ms(p50)} | {_ms(row['ms']['p99'])} "
            f"| {slower} | {row['failed']} |"
        )
    return [
        "## The same question in each protocol (ours, one at a time, in turns)",
        "",
        "| protocol | request bytes | answer bytes | p50 ms | p99 ms | p50 of the first | failed |",
        "|" + "---|" * 7,
        *rows,
        "",
        "Bytes are those of bodies and messages, without HTTP's heads. The gRPC client is Python's.",
    ]


def _endurance(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    return [
        "## Endurance (ours)",
        "",
        f"{found['requests']:,} requests without a pause, {found['failed']} failed. After the first quarter "
        f"memory grew by {found['mb_after_warm_up']:.1f} MB, {found['mb_per_1000_requests']:.3f} MB a "
        f"thousand requests; {found['rss_mb'][0][1]:.0f} MB at the start, {found['rss_mb'][-1][1]:.0f} at "
        "the end.",
        "",
    ]


def _knees(result: Mapping[str, Any]) -> list[str]:
    lines = ["## On the way to each knee", "", "| arm | answers/s: p99 ms |", "|---|---|"]
    for name, arm in result["arms"].items():
        told = ", ".join(f"{rate:,.4g}: {p99:.1f}" for rate, p99 in _curve(arm))
        lines.append(f"| {name} | {told} |")
    idle = sum(arm["idle_cpu_ratio"] for arm in result["arms"].values())
    return [*lines, "", f"While nobody was asked, all servers together used {idle:.1%} of a core."]


def _curve(arm: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return rate and p99 of each rate that was asked, the median where it was asked more than once."""
    asked: dict[float, list[float]] = {}
    for probe in arm["capacity"]["probes"]:
        if probe["p99_ms"] is not None:
            asked.setdefault(probe["rate"], []).append(probe["p99_ms"])
    return [(rate, float(np.median(asked[rate]))) for rate in sorted(asked)]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def draw_load(result: Mapping[str, Any], out_dir: Path) -> None:
    """Draw `load.png`: p99 over the rate for each arm, and where the time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5), width_ratios=(3, 2))
    colours = iter(_NEXT_COLOURS * 3)
    for name, arm in result["arms"].items():
        if curve := _curve(arm):
            rates, p99 = zip(*curve, strict=True)
            style = ":" if name == NULL else "-"
            colour = _COLOURS.get(name) or next(colours)
            left.plot(rates, p99, style, marker="o", markersize=3, color=colour, label=name)
    left.axhline(result["goal_ms"], color="grey", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="requests a second, open loop", ylabel="p99, milliseconds")
    left.legend(fontsize=8)
    _draw_stages(right, {name: arm["stages"] for name, arm in result["arms"].items() if arm["stages"]})
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    out_dir.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_dir / "load.png", dpi=120)
    pyplot.close(figure)


def _draw_stages(axes: Any, stages: Mapping[str, Mapping[str, Any]]) -> None:
    names = list(stages)
    left = np.zeros(len(names))
    kinds: Iterable[str] = dict.fromkeys(
        stage for rows in stages.values() for stage in rows if stage != "client"
    )
    for kind in sorted(kinds, key=lambda stage: stage == "unexplained"):
        means = np.array([stages[name].get(kind, {"mean": 0.0})["mean"] for name in names])
        colour = "lightgrey" if kind == "unexplained" else None
        axes.barh(names, np.maximum(means, 0), left=left, label=kind, color=colour)
        left += np.maximum(means, 0)
    axes.invert_yaxis()
    axes.set(xlabel="mean milliseconds, one request at a time")
    axes.legend(fontsize=8)
