"""What the load bench measured -> Markdown that begins with what a manager reads, and one picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

OURS, NULL = "ours", "null"
TUTORIALS = ("unoptimised", "unoptimised-user-row")
# Where an arm is says nothing of how fast it is.
_PLACES = {"RECO_HOME", "RECO_HOST", "RECO_HTTP_PORT", "RECO_GRPC_PORT", "RECO_STORE_URL"}
_COLOURS = {OURS: "tab:blue", NULL: "black", "fastapi": "tab:green", "unoptimised": "tab:red"}
CUT = 4.0  # times as long as ours: there a bar is cut, so that ours can be read beside it
_NEXT_COLOURS = ("tab:orange", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan", "tab:gray")


def load_table(result: Mapping[str, Any]) -> str:
    """Return the result of `bench_load` as Markdown."""
    lines = [
        f"# Load report of bundle {result['bundle_id']}",
        "",
        _verdict(result),
        "",
        *_summary(result),
        "",
        *_goals(result),
        "",
        *_preface(result),
        "",
        *_compared(result),
        "",
        *_stages(result),
        "",
        *_start(result),
        "",
        *_under_load(result),
        "",
        *_rounds(result),
        "",
        *_lengths(result["basket_length"]),
        "",
        *_payloads(result["payloads"]),
        "",
        *_priority(result.get("priority"), result["goal_ms"]),
        *_swap(result.get("swap")),
        *_canary(result.get("canary")),
        *_endurance(result.get("endurance")),
        *_knees(result),
    ]
    return "\n".join(lines) + "\n"


def _verdict(result: Mapping[str, Any]) -> str:
    """Return what a manager reads: ours beside the tutorials' stack, in one sentence."""
    ours, within = result["arms"][OURS], f"p99 <= {result['goal_ms']:g} ms"
    others = [name for name in TUTORIALS if name in result["arms"]]
    fast = f"An answer takes `{OURS}` {_ms(ours['alone']['p50_ms'])} ms (p50)"
    many = f"at {within} one process gives {_rate(ours['capacity']['rate'])} answers a second"
    if not others:
        return f"{fast}, and {many}; the tutorials' stack was not measured beside it."
    p50s, capacities = [], []
    for name in others:
        arm = result["arms"][name]
        theirs, rate = arm["alone"]["p50_ms"], arm["capacity"]["rate"]
        times = _times(arm["ratio"]["p50_ms"]["median"]) if "p50_ms" in arm["ratio"] else "–"
        p50s.append(f"where `{name}` takes {times} x as long ({_ms(theirs)} ms)")
        over = _times(ours["capacity"]["rate"] / rate) if rate else ""
        none = f"where `{name}` holds no rate"
        capacities.append(f"{over} x as many as `{name}` ({_rate(rate)})" if rate else none)
    return f"{fast}, {' and '.join(p50s)}; {many}, {' and '.join(capacities)}."


def _goals(result: Mapping[str, Any]) -> list[str]:
    lines = ["| goal | wanted | measured | reached |", "|---|---|---|---|"]
    for goal in result["goals"]:
        reached = {True: "yes", False: "no", None: "not measured"}[goal["reached"]]
        measured = "–" if goal["measured"] is None else _ms(goal["measured"]) + goal["unit"]
        if goal["measured"] is None and goal["reached"]:
            measured = "the other holds no rate"
        lines.append(f"| {goal['name']} | {goal['goal']} | {measured} | {reached} |")
    return lines


def _preface(result: Mapping[str, Any]) -> list[str]:
    machine, effort = result["machine"], result["effort"]
    asked = f"{result['requests']:,} different requests"
    if (mixed := result["mixed"]) is not None:
        asked = (
            f"{result['requests']:,} questions of growing baskets after the cut in their order, "
            f"{mixed['anonymous']:.0%} of the shoppers anonymous, {mixed['again']:.0%} asked again"
        )
    before, after = result["load_average_before"][0], result["load_average_after"][0]
    return [
        f"{machine['cpu']}, {machine['cores']} cores, servers, Redis and client on the same ones; "
        f"load average {before:.2f} before, {after:.2f} after; Python {result['software']['python']}; commit "
        f"{result['commit']}; {result['measured_at']}. {asked}, "
        f"at most {result['candidates']} candidates ranked for each, "
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
            _rate(arm["capacity"]["rate"]),
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
    for name, arm in result["arms"].items():
        own = [f"{key}={value}" for key, value in arm["settings"].items() if key not in _PLACES]
        lines.append(f"- {name}: {arm['what']}" + (f" ({', '.join(own)})" if own else ""))
    return lines


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
        if name == OURS and (choosing := arm["choosing"]):
            lines += [
                f"Retrieval, ranking and re-ranking of an answer together: p50 {_ms(choosing['p50'])} ms, "
                f"p99 {_ms(choosing['p99'])} ms.",
                "",
            ]
    if floor:
        lines.append(
            f"Means add up to the client's. Of `unexplained`, a bare HTTP answer of the null server takes "
            f"{floor['mean_ms']:.3f} ms (network, client, uvicorn); the rest is JSON, checks and KServe."
        )
    return lines


def _start(result: Mapping[str, Any]) -> list[str]:
    lines = [
        "## From start to the first answer",
        "",
        "| arm | ready after s | first answer ms | warm p50 ms | warm p99 ms |",
        "|" + "---|" * 5,
    ]
    for name, arm in result["arms"].items():
        first = _ms(arm["first_ms"]) + (" (degraded)" if arm["first_degraded"] else "")
        alone = arm["alone"]
        cells = [name, f"{arm['ready_s']:.1f}", first, _ms(alone["p50_ms"]), _ms(alone["p99_ms"])]
        lines.append("| " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "Ready: from the start of the process to its ready line. The first answer is that to one request "
        "before which nobody asked anything; to connect is part of it. Warm: one at a time, as above.",
    ]


def _under_load(result: Mapping[str, Any]) -> list[str]:
    lines = [
        "## At half of each capacity, and at three times it",
        "",
        "| arm | half: answers/s | p50 ms | p99 | p99.9 | CPU ms | failed, refused, degraded "
        "| 3 x capacity: in full and in time, of the capacity | degraded, in time | refused | failed |",
        "|" + "---|" * 11,
    ]
    for name, arm in result["arms"].items():
        if "half" not in arm:
            lines.append(f"| {name} | held no rate |" + " |" * 9)
            continue
        half, over = arm["half"], arm["overload"]
        cells = [
            name,
            f"{half['rate']:,.1f}",
            *(_ms(half["ms"][p]) for p in ("p50", "p99", "p99_9")),
            f"{half['cpu_ms']:.2f}",
            f"{half['failed'] + half['unanswered']}, {half['refused']}, {half['degraded']} "
            f"of {half['requests']}",
            _percent(over["goodput_ratio"]),
            _percent(over["degraded_ratio"]),
            f"{over['refused']} of {over['requests']}",
            str(over["failed"] + over["unanswered"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [
        *lines,
        "",
        "Open loop: requests come at the times of a Poisson process, and a latency counts from when its "
        "request was due. The tail of `null` is that of machine and client at the same processor time: set "
        "no goal below it. At three times the capacity, answers within the goal are counted over the time in "
        "which they were due; those of a fallback stand beside, as no capacity counts them.",
    ]


def _rounds(result: Mapping[str, Any]) -> list[str]:
    """Tell how often each arm was asked the same again, and what one that keeps answers had of it."""
    arms = {name: arm for name, arm in result["arms"].items() if arm["laps"] is not None}
    told = ", ".join(f"{name} {arm['laps']:.1f}" for name, arm in arms.items())
    lines = ["## How often the list of requests was gone round", "", f"{told}."]
    for name, arm in arms.items():
        if cache := arm.get("cache"):
            looks = sum(count for kind, count in cache["lookups"].items() if kind.startswith("process "))
            lines.append(
                f"`{name}` had {_percent(cache['hit_ratio'])} of {looks:,} answers already while its "
                f"capacity was looked for; {cache['laps']:.1f} times round at its end."
            )
    wrapped = ", ".join(f"`{name}`" for name, arm in arms.items() if arm["laps"] > 1)
    if result["mixed"] is not None and wrapped:
        lines.append(
            f"The replay was too short for {wrapped}: what was asked in the first round was asked again, so "
            "that kept answers are found more often than in a shop."
        )
    return lines


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
        "Bytes are those of bodies and messages, without HTTP's heads. The gRPC client is Python's. "
        "Binary tensors over REST have no row: they are refused on purpose (400), so that whatever comes "
        "over REST is one JSON document, checked before anything reads it; who wants bytes has gRPC.",
    ]


def _priority(found: Mapping[str, Any] | None, goal_ms: float) -> list[str]:
    if found is None:
        return []
    rows = []
    for name in ("checkout", "prefetch"):
        kind = found[name]
        lost = kind["refused"] + kind["failed"] + kind["unanswered"]
        rows.append(
            f"| {name} | {kind['requests']:,} | {_percent(kind['good_ratio'], 1)} "
            f"| {_percent(kind['full_ratio'], 1)} | {kind['shed']:,} | {kind['late']:,} | {lost} |"
        )
    shed, recovery = found["shed"], found["recovery"]
    back_s, half = recovery["back_s"], _ms(recovery["half_p99_ms"])
    told = f"not within {recovery['watched_s']} s" if back_s is None else f"in second {back_s}"
    told = told if recovery["second_p99_ms"] else "in a time that so few requests do not tell"
    each = ", ".join(_ms(ms) for ms in recovery["second_p99_ms"].values())
    return [
        "## Three times the capacity, most of it prefetches (ours)",
        "",
        f"| of {found['rate']:,.0f} requests/s for {found['seconds']:g} s | requests "
        f"| in full within {goal_ms:g} ms | in full | best sellers at once | late | lost |",
        "|" + "---|" * 7,
        *rows,
        "",
        f"Checkouts are nine tenths of the capacity. Of {shed['requests']:,} that were answered "
        f"`overloaded`, p50 {_ms(shed['ms']['p50'])} ms, p99 {_ms(shed['ms']['p99'])} ms. "
        f"Asked half of the capacity right after it, p99 was back within 1.5 x of what it was before "
        f"({half} ms) {told}; second by second: {each or '–'} ms.",
        "",
    ]


def _swap(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    rows = [
        f"| {name} | {row['requests']:,} | {_ms(row['p50_ms'])} | {_ms(row['p99_ms'])} | {row['failed']} "
        f"| {row['degraded']} | {row['late']} |"
        for name, row in found["phases"].items()
    ]
    took = ", ".join("not in time" if took_s is None else f"{took_s:.1f} s" for took_s in found["swap_s"])
    return [
        "## The champion is swapped twice at half of the capacity (ours)",
        "",
        "| of the swaps | requests | p50 ms | p99 ms | failed | degraded | late |",
        "|" + "---|" * 7,
        *rows,
        "",
        f"At {found['rate']:,.0f} requests/s. During: from the pointer's move until a second after the other "
        f"bundle took over ({took}): p99 against before {_ratio(found['p99_ratio'])}.",
        "",
    ]


def _canary(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    rows = [
        f"| {number} | {_ms(one['without_p99_ms'])} | {_ms(one['with_p99_ms'])} | {_ratio(one['ratio'])} "
        f"| {one['failed']}, {one['degraded']}, {one['late']} of {one['requests']:,} |"
        for number, one in enumerate(found["rounds"], 1)
    ]
    medians = [_ms(found[name]) for name in ("without_p99_ms", "with_p99_ms")]
    return [
        "## A canary beside stable (ours twice on this machine)",
        "",
        "| round | p99 of stable alone, ms | with the canary | ratio | failed, degraded, late with it |",
        "|" + "---|" * 5,
        *rows,
        f"| median | {' | '.join(medians)} | {_ratio(found['ratio'])} | |",
        "",
        f"Stable at {found['rate']:,.0f} requests/s, half of its capacity; the canary at "
        f"{found['canary_rate']:,.1f}, with a p99 of {_ms(found['canary_p99_ms'])} ms.",
        "",
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


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else _ms(rate)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _percent(ratio: float | None, digits: int = 0) -> str:
    return "–" if ratio is None else f"{ratio:.{digits}%}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}x"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def draw_load(result: Mapping[str, Any], file: Path) -> None:
    """Draw a picture: p99 over the rate for each arm, and where the time goes."""
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
    draw_stages(right, {name: arm["stages"] for name, arm in result["arms"].items() if arm["stages"]})
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_stages(axes: Any, stages: Mapping[str, Mapping[str, Any]]) -> None:
    """Stack the means of each arm's stages; a bar that is too long for the others to be seen is cut."""
    names = list(stages)
    totals = {name: float(rows["client"]["mean"]) for name, rows in stages.items()}
    end = min(max(totals.values(), default=1.0), CUT * totals.get(OURS, np.inf))
    left = np.zeros(len(names))
    kinds: Iterable[str] = dict.fromkeys(
        stage for rows in stages.values() for stage in rows if stage != "client"
    )
    for kind in sorted(kinds, key=lambda stage: stage == "unexplained"):
        means = np.array([stages[name].get(kind, {"mean": 0.0})["mean"] for name in names])
        colour = "lightgrey" if kind == "unexplained" else None
        shown = np.clip(left + np.maximum(means, 0), None, end) - left
        axes.barh(names, shown, left=left, label=kind, color=colour)
        left += shown
    for row, name in enumerate(names):
        is_cut = totals[name] > end
        if is_cut:
            axes.plot([0.91 * end, 0.93 * end], [row + 0.45, row - 0.45], color="white", linewidth=4)
        told = f" {_ms(totals[name])} ms" + (", cut" if is_cut else "")
        axes.text(left[row], row, told, va="center", fontsize=8, weight="bold" if is_cut else "normal")
    axes.set_xlim(0, 1.3 * end)  # room for the numbers
    axes.invert_yaxis()
    axes.set(xlabel="mean milliseconds, one request at a time")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
