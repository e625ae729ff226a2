"""What `bench_cache` measured -> Markdown for people, and a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from serving.measurement import write_result

_COLOURS = ("#b0b7bf", "#7fa8c9", "#1f77b4", "#0b3d63")
_STYLES = (":", "-", "--", "-.")


def cache_table(result: dict[str, Any]) -> str:
    """Return the result of `bench_cache` as Markdown."""
    answers, level = result["answers"], result["levels"]
    typical, sizes = result["typical"], list(result["hits"][0]["hit_ratio"])
    best = max(row["hit_ratio"][sizes[-1]] for row in result["hits"])
    lines = [
        f"# Caching answers of bundle {result['bundle_id']}",
        "",
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores, load average "
        f"{result['machine']['load_average'][0]:.1f}; commit {result['commit']}; {result['measured_at']}.",
        "",
        f"{result['baskets']:,} baskets of {result['shoppers']:,} shoppers in {result['stores']} stores, "
        f"{result['items']:,} items, in their order of time. Assumed, as no data set says it: items come in "
        "an order of chance, one every 30 s; the shop asks after each of the first five and for the whole "
        "basket; a share of shoppers is anonymous, a share of questions is asked again a minute later; a "
        "known user's row does not change while the basket grows. Where impressions are fed back at once it "
        "does, and known users' answers are never met again.",
        "",
        "## Hits of whole answers, one process, by number of entries",
        "",
        "| anonymous | asked again | questions | distinct | "
        + " | ".join(f"{int(n):,}" for n in sizes)
        + " |",
        "|" + "---|" * (4 + len(sizes)),
    ]
    for row in result["hits"]:
        rates = " | ".join(f"{rate:.1%}" for rate in row["hit_ratio"].values())
        lines.append(_hit_line(row, result["questions"], rates))
    lines += [
        "",
        f"Asked for are 90 % with 100,000 entries; the best row has {best:.1%}. By the size of the basket:",
        "",
        "| items in the basket | questions | hits (all anonymous, none asked again) |",
        "|---|---|---|",
        *(
            f"| {row['items']} | {row['questions']:,} | {row['hit_ratio']:.1%} |"
            for row in result["by_size_of_basket"]
        ),
        "",
        f"The tables below: {typical['anonymous']:.0%} anonymous, {typical['again']:.0%} asked again.",
        "",
        "## Levels",
        "",
        f"{level['replicas']} processes with a cache each: {level['process_hit_ratio']:.1%} of questions hit "
        f"there, {level['redis_hit_ratio_of_the_rest']:.1%} of the rest in Redis; "
        f"{level['inference_avoided_ratio']:.1%} of inference is avoided.",
        "",
        "## What is worth caching",
        "",
        "| what | hits | made, anonymous ms | known ms | look, anonymous ms | known ms | "
        "saved per question ms | of all |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['what']} | {row['hit_ratio']:.1%} | {row['make_ms_anonymous']:.3f} | "
            f"{row['make_ms_known']:.3f} | {row['look_ms_anonymous']:.3f} | {row['look_ms_known']:.3f} | "
            f"{row['saved_ms_per_question']:.3f} | {row['saved_ratio']:.1%} |"
            for row in result["candidates"]
        ),
        "",
        "Processor time, medians; a cache without bounds. Built are whole answers alone. Item rows and "
        "bought-together lists of an item are arrays of the bundle already: looking is making.",
        "",
        f"## {answers['questions']:,} answers, with the cache and without, in turn",
        "",
        "| processor ms | p50 | p99 | mean |",
        "|---|---|---|---|",
        *(
            f"| {name} | " + " | ".join(f"{value:.3f}" for value in row.values()) + " |"
            for name, row in answers["ms"].items()
            if row
        ),
        "",
        f"{answers['hit_ratio']:.1%} of these questions hit.",
        "",
        "## Regret: answers that were kept against answers made now",
        "",
        "| answers | compared | other items | other order | overlap@10 | NDCG |",
        "|---|---|---|---|---|---|",
        *_regret_lines({f"hits, {kind}": row for kind, row in answers["regret"].items()}),
        *_regret_lines(
            {f"known user, {minutes} min later": row for minutes, row in result["hour_old"].items()}
        ),
        *_regret_lines({"key without the store": result["without_store"]["regret"]}),
        "",
        _kept_line(answers["kept"]),
        "",
        "A key without the store would hit "
        f"{result['without_store']['hit_ratio']['without_store']:.1%} instead of "
        f"{result['without_store']['hit_ratio']['with_store']:.1%} (all anonymous, none asked again).",
        "",
        "## The first minute after a deploy",
        "",
        "| anonymous | per second | questions | warmed with | misses | fewer |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["deploy"]:
        cold = row["misses"]["nothing"]
        lines += [
            f"| {row['anonymous']:.0%} | {row['per_second']} | {row['questions']:,} | {name} | {misses:,} | "
            f"{1 - misses / cold if cold else 0:.1%} |"
            for name, misses in row["misses"].items()
        ]
    ratios = result["expiry"]["busiest_against_mean"]
    lines += [
        "",
        f"{result['deploy'][0]['in_budget']:,} requests can be computed in {result['budget_s']:g} s. "
        "Asked for are 85 % fewer.",
        "",
        "## Expiry",
        "",
        f"{result['expiry']['keys']:,} keys written at once and asked for all the time; the busiest sixtieth "
        "of a life against the mean, by jitter: "
        + ", ".join(f"±{float(jitter):.0%} {ratio:.2f}" for jitter, ratio in ratios.items())
        + f". Chosen: ±{result['expiry']['chosen']:.0%}.",
        "",
        "![hits by number of entries](cache.png)",
        "",
    ]
    return "\n".join(lines)


def _hit_line(row: dict[str, Any], questions: dict[str, int], rates: str) -> str:
    asked = questions[f"{row['again']:g}"]
    return f"| {row['anonymous']:.0%} | {row['again']:.0%} | {asked:,} | {row['distinct']:,} | {rates} |"


def _kept_line(kept: dict[str, Any]) -> str:
    if not kept["answers"]:
        return f"No answer was kept, so nothing is said of the bound of {kept['bound']:.0%}."
    return (
        f"Of all {kept['answers']:,} hits together {kept['other_items']:,}, {kept['other_items_ratio']:.2%}, "
        f"show other items than an answer computed now; at most {kept['bound']:.0%} were asked for: "
        f"{'reached' if kept['reached'] else 'not reached'}."
    )


def _regret_lines(rows: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"| {name} | {row['answers']:,} | {row['other_items_ratio']:.2%} | {row['other_order_ratio']:.2%} | "
        f"{row['overlap_at_10']:.4f} | {row['ndcg']:.4f} |"
        for name, row in rows.items()
        if row["answers"]
    ]


def draw_hits(result: dict[str, Any], file: Path) -> None:
    """Draw the hits against the number of entries."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    colours = dict(zip(sorted({row["anonymous"] for row in result["hits"]}), _COLOURS, strict=False))
    styles = dict(zip(sorted({row["again"] for row in result["hits"]}), _STYLES, strict=False))
    for row in result["hits"]:
        rates = [100 * rate for rate in row["hit_ratio"].values()]
        axes.plot(
            [int(size) for size in row["hit_ratio"]],
            rates,
            styles[row["again"]],
            color=colours[row["anonymous"]],
            label=f"{row['anonymous']:.0%} anonymous, {row['again']:.0%} asked again",
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set_xlabel("entries")
    axes.set_ylabel("questions answered from the cache, %")
    axes.legend(fontsize=7, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=140)
    pyplot.close(figure)
    write_result(file, picture.getvalue())
