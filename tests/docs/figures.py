"""Result files of the benches and drills -> the page of figures and the README's small table."""

import json
import re
from collections.abc import Mapping
from functools import cache, partial
from statistics import median
from typing import Any

from pipelines.bench.compression import whole_ensemble
from pipelines.bench.drift import injected_lines
from pipelines.bench.figures import PLAN
from pipelines.bench.load.report import difference, goal_table
from pipelines.bench.quality import judge_quality
from pipelines.bench.report import busy_line, change, fixed
from pipelines.bench.scale import lookup_lines
from pipelines.drills.report import alerts_verdict
from tests.docs.reference import HEAD, code, table
from tests.docs.source import ROOT

FIGURES = ROOT / "docs" / "figures"
# Measured apart: 100 minutes of waiting for pages, an hour of tuning, and ten minutes of releases.
BESIDE = ("alerts", "peers", "release")
REMOVED = ("batching", "cache", "load-mixed")  # their mechanisms are gone; the results say why
FASTER = "faster"  # of another machine: an extract of its results
FULL = "full"  # of `reco run` and `reco run --full`, one after the other: an extract of their evaluations
PUBLISHED = (*(bench.name for bench in PLAN), *BESIDE)


@cache
def measured(name: str) -> Any:
    """Return the result file of a bench."""
    return json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))


def older(results: Mapping[str, Any]) -> list[str]:
    """Return the results of another commit than the newest of the plan: after `make figures`, none of it."""
    planned = [result for name, result in results.items() if name not in BESIDE]
    newest = max(planned, key=lambda result: result["measured_at"])
    return [name for name, result in results.items() if result["commit"] != newest["commit"]]


def older_results() -> list[str]:
    """Return the published results of another commit than the newest of `make figures`."""
    return older({name: measured(name) for name in PUBLISHED})


def disagreements(results: Mapping[str, Any]) -> list[str]:
    """Return in what the results of each commit differ, and what the newest ones lack."""
    found = []
    for commit in sorted({result["commit"] for result in results.values()}):
        together = [result for result in results.values() if result["commit"] == commit]
        if not re.fullmatch("[0-9a-f]{7,40}", commit):
            found.append(f"{commit}: not a commit")
        states = {
            "bundle": {result.get("bundle_id") for result in together} - {None},
            "processor": {result["machine"]["cpu"] for result in together},
        }
        found += [
            f"{commit}, {name}: {', '.join(sorted(them))}" for name, them in states.items() if len(them) > 1
        ]
    newest = set(results) - set(older(results))
    if silent := sorted(name for name in newest if "busy" not in results[name]):
        found.append(f"without the state of the machine: {', '.join(silent)}")
    return found


def provenance() -> str:
    """Return which results belong together, which are older, and where each comes from."""
    rows = []
    for name in (*PUBLISHED, *REMOVED):
        document = measured(name)
        machine = document["machine"]
        rows.append(
            (
                f"[`{name}`]({name}.md)",
                document["commit"],
                document.get("bundle_id", "none"),
                f"{machine['cores']} cores of an {machine['cpu']}{busy_line(document)}",
                document["measured_at"][:10],
            )
        )
    old = older_results()
    together = [name for name in PUBLISHED if name not in old]
    text = (
        f"The newest results of `make figures` are of commit {measured(together[0])['commit']}: "
        f"{', '.join(map(code, together))}.\n"
    )
    if old:
        text += (
            f"Of other commits: {', '.join(map(code, old))}.\n"
            "Compare only figures of the same commit, bundle and machine.\n"
        )
    text += (
        f"`make figures` measures all results at once, except {', '.join(map(code, BESIDE))}, "
        "which take too long,\n"
        "and the results of removed mechanisms.\n\n"
    )
    return text + table(("result", "commit", "bundle", "machine", "date"), rows)


def made(name: str) -> str:
    """Return which report has all of a result, and whether its commit is that of the others."""
    commit = measured(name)["commit"]
    old = ", not that of the newest results" if name in (*older_results(), *REMOVED) else ""
    return f"[`{name}.md`]({name}.md) has all of it. Commit {commit}{old}."


def missed_drills() -> list[str]:
    """Return the drills that missed a figure."""
    return [name for name, drill in measured("drills")["drills"].items() if not drill["passed"]]


def client_calls(phase: str) -> dict[str, int]:
    """Return how many calls of the client all drills made, how many failed, came late, or it answered itself.

    Args:
        phase: `all`, or `during` the faults.
    """
    calls = [drill[phase]["client"] for drill in measured("drills")["drills"].values()]
    names = ("requests", "failed", "late", "from_client")
    return {name: sum(call[name] for call in calls) for name in names}


# -------------------------------------------------------------------------------------------- README


def headline() -> str:
    """Return the README's table: quality, speed, size, robustness, with the misses."""
    quality, load, drills = measured("quality"), measured("load"), measured("drills")["drills"]
    ours, goals = load["arms"]["ours"], load["goals"]
    compression, features = measured("compression"), measured("features")
    judged, rankers = judge_quality(quality), compression["rankers"]
    whole, served = whole_ensemble(compression), rankers["served"]
    faster = whole["latency_ms"]["500"]["p50"] / served["latency_ms"]["500"]["p50"]
    calls, replay, teachers = client_calls("during"), features["replay"], compression["teachers"]
    rows = [
        (
            "NDCG@10 on later weeks, full catalogue",
            f"{quality['served']['ndcg_at_10']:.4f}, "
            f"{quality['ratios']['blend']['ndcg_at_10']:.2f} x the untrained blend",
        ),
        (
            "one answer over HTTP, p50 / p99",
            f"{ours['alone']['p50_ms']:.1f} / {ours['alone']['p99_ms']:.1f} ms",
        ),
        ("answers a second, one process, 99 % within 50 ms", f"{ours['capacity']['rate']:.0f}"),
        ("these two on a faster machine of the same name", _faster_headline(measured(FASTER))),
        (
            f"served ranker against its {f'{teachers} teachers' if teachers > 1 else 'teacher'}",
            f"{whole['bytes'] / served['bytes']:.0f} x smaller, {faster:.0f} x faster",
        ),
        (
            "logged answers computed again, equal in every bit",
            f"{replay['equal']:,} of {replay['compared']:,}",
        ),
        (
            "client calls that failed while parts were broken",
            f"{calls['failed']} of {calls['requests']:,}; "
            f"the client itself answered {calls['from_client']:,}",
        ),
        ("fault drills that reach every figure", f"{len(drills) - len(missed_drills())} of {len(drills)}"),
        ("quality goals reached", f"{sum(goal['reached'] is True for goal in judged)} of {len(judged)}"),
        ("load goals reached", f"{sum(goal['reached'] is True for goal in goals)} of {len(goals)}"),
    ]
    return table(("figure", "measured"), rows)


def _faster_headline(found: Any) -> str:
    goals = {goal["name"].partition(",")[0]: goal["measured"] for goal in found["load_goals"]}
    p50, p99 = (goals[f"{name} over KServe REST"] for name in ("p50", "p99"))
    return f"{p50:.1f} / {p99:.1f} ms; {goals['answers a second']:.0f}, at commit {found['commit']}"


# --------------------------------------------------------------------------------- the page of figures


def figures_page() -> str:
    """Return the page of figures, each section from one result file."""
    parts = [
        quality(measured("quality")),
        full(measured(FULL)),
        peers(measured("peers")),
        load(measured("load")),
        latency(),
        features(measured("features")),
        compression(measured("compression")),
        scale(measured("scale")),
        retrieval(),
        rerank(measured("rerank")),
        batching(),
        kept_answers(),
        drift(measured("drift")),
        drills(),
        faster(measured(FASTER)),
    ]
    return (
        HEAD
        + "# Figures\n\n"
        + "Each comes from a command of `reco bench` or `reco drill`; `make figures` runs them. The data\n"
        + "set is Complete Journey if nothing else is said. A goal that is missed is listed as missed.\n"
        + "Absolute times drift on a shared machine: ratios come from one run, and a range is that of its\n"
        + "rounds.\n\n"
        + "## Where they come from\n\n"
        + provenance()
        + "\n"
        + "\n".join(parts)
    )


def quality(found: Any) -> str:
    """Return the served path beside untrained baselines."""
    systems = {
        "**as served**": "served",
        "history frozen at the cut": "served_frozen_history",
        "untrained blend of the next two rows": "blend",
        "what this shopper buys, decayed": "personal",
        "bought together with the basket": "together",
        "two-tower and Faiss alone": "two_tower",
        "best sellers of four weeks": "popularity",
    }
    rows = []
    for label, name in systems.items():
        result = found[name] if name in found else found["baselines"][name]
        ratio = found["ratios"].get(name)
        rows.append(
            (
                label,
                *(f"{result[metric]:.3f}" for metric in ("ndcg_at_10", "recall_at_20", "hit_ratio_at_10")),
                f"{ratio['ndcg_at_10']:.2f} x" if ratio else "",
            )
        )
    intervals = found["served"]["interval"]
    cold = found["cold"]["no_history"]
    calibration = found["calibration"]
    return (
        "## Quality\n\n"
        f"{found['baskets']:,} baskets of the five weeks after the cut. A seeded fifth of each "
        f"basket is hidden, and all\n"
        f"{found['catalogue_items']:,} items of the catalogue are ranked. Every purchase before "
        f"the request is known, none after\n"
        "it. Answers come through the served path; the same run computes the baselines.\n\n"
        + "\n".join(goal_table(judge_quality(found), partial(fixed, digits=5)))
        + "\n\n"
        + table(("system", "NDCG@10", "Recall@20", "HitRate@10", "as served is better (NDCG@10)"), rows)
        + f"\n95 % intervals over households: NDCG@10 {intervals['ndcg_at_10'][0]:.3f} to "
        f"{intervals['ndcg_at_10'][1]:.3f}, "
        f"Recall@20 {intervals['recall_at_20'][0]:.3f} to {intervals['recall_at_20'][1]:.3f}.\n"
        f"Households without any history: Recall@20 {cold['recall_at_20']:.3f}.\n"
        f"Probabilities are off by {calibration['expected_calibration_error']:.5f} on average; "
        f"{calibration['purchase_rate']:.4f} of the candidates are bought.\n"
        f"{found['served']['coverage_at_10']:.0%} of the catalogue appears in at least one answer.\n\n"
        + (two_stages(found) if "two_stages" in found else "")
        + made("quality")
        + "\n\n![NDCG@10 of the served path and of the baselines](quality.png)\n"
    )


def full(found: Any) -> str:
    """Return both sizes of a training: what they serve, how long they take and how much memory."""
    metrics = ("ndcg_at_10", "recall_at_20", "new_recall_at_20", "strangers_recall_at_20")
    rows = [
        (
            code(command),
            *(f"{run[m]:.4f} [{run['interval'][m][0]:.3f}, {run['interval'][m][1]:.3f}]" for m in metrics),
            f"{run['elapsed_s'] / 60:.0f}",
            f"{run['peak_memory_mib']:,}",
        )
        for command, run in zip(("reco run", "reco run --full"), found["runs"].values(), strict=True)
    ]
    columns = ("run", "NDCG@10", "Recall@20", "of new items", "of strangers", "minutes", "MiB")
    machine = f"{found['machine']['cores']} cores of an {found['machine']['cpu']}"
    return (
        "## All five teachers\n\n"
        f"Commit {found['commit']}, {machine}. The second run had the tests beside it.\n\n"
        + table(columns, rows)
        + "\nAn interval is of one run alone: it does not compare the two. `full.json` has these numbers.\n"
    )


def peers(found: Any) -> str:
    """Return the served path beside published methods."""
    rows = [("**as served**", "this project", found["served"], "")]
    for name, row in sorted(found["peers"].items(), key=lambda pair: -pair[1]["ndcg_at_10"]):
        ratio = found["served_against"][name]
        low, high = ratio["ndcg_at_10_interval"]
        rows.append((name, row["library"], row, f"{ratio['ndcg_at_10']:.2f} x [{low:.2f}, {high:.2f}]"))
    metrics = ("ndcg_at_10", "recall_at_20", "new_recall_at_20")
    cells = [
        (name, library, *(f"{row[m]:.3f}" for m in metrics), ratio) for name, library, row, ratio in rows
    ]
    head = ("method", "library", "NDCG@10", "Recall@20", "of new items", "as served is better (NDCG@10)")
    return (
        "## Published methods\n\n"
        f"The same {found['baskets']:,} baskets. Each method chose among its parameters on the four weeks "
        "before the cut, and\n"
        f"was asked once on the test weeks; all {len(found['tried'])} choices are in `peers.json`. "
        '"+ own purchases" adds what the shopper\n'
        "buys, with a weight that was chosen the same way. SASRec had minutes of a CPU: no ceiling of it.\n"
        "All know the shopper's own purchases up to the request. Ours and LightGBM also know what the shop\n"
        "sold up to the day before; the others were fitted at the cut. EASE sees the 10,000 items that are\n"
        "bought most.\n\n" + table(head, cells) + "\n`reco bench peers` repeats it. " + made("peers") + "\n"
    )


def towers() -> str:
    """Return what the towers' items change, in each kind of requests."""
    rows = []
    for one in measured("quality")["sources"]:
        if one["source"] == "tower":
            cells = (
                f"{one[metric]:.3f} [{', '.join(f'{end:.3f}' for end in one[f'{metric}_interval'])}]"
                for metric in ("ndcg_at_10", "new_recall_at_20")
            )
            rows.append((one["requests"], *cells))
    return table(("requests", "NDCG@10", "Recall@20 of new items"), rows)


def two_stages(found: Any) -> str:
    """Return the price of two stages, AUC beside the baselines, and items that are new."""
    both, new = found["two_stages"], found["new_items"]
    slower, low, high = both["times_slower"]
    areas = [(name, f"{row['auc']:.3f}", f"{row['gauc']:.3f}") for name, row in both["auc"].items()]
    recall = "not measured" if new["recall_at_20"] is None else f"{new['recall_at_20']:.3f}"
    return (
        f"Two stages keep {both['kept']['recall_at_20']:.1%} of the Recall@20 of the same ranker over the\n"
        f"whole catalogue, which takes {slower:.1f} x the time (5 % to 95 % of {both['baskets']} baskets: "
        f"{low:.1f} to {high:.1f}).\n"
        f"{new['items']:,} items first sold after the cut. Added with `reco extend`, their Recall@20 is "
        f"{recall}.\n\n"
        + table(("scores of the served candidates by", "AUC", "AUC in a basket"), areas)
        + "\n"
    )


def load(found: Any) -> str:
    """Return the load report's sentence, its goals and its arms."""
    rows = []
    for name, arm in found["arms"].items():
        alone = arm["alone"]
        rows.append(
            (
                f"`{name}`: {arm['what']}",
                f"{alone['p50_ms']:.1f}",
                f"{alone['p99_ms']:.1f}" if alone["p99_ms"] else "–",
                _range(arm["capacity"]),
                f"{arm['cpu_ms']:.1f}",
                *(
                    difference(arm["ratio"].get(name)) if "ratio" in arm else ""
                    for name in ("p50_ms", "cpu_ms", "capacity")
                ),
            )
        )
    verdict = (FIGURES / "load.md").read_text(encoding="utf-8").split("\n\n")[1]
    goals = "\n".join(goal_table(found["goals"]))
    held = [mb for _, mb in found["endurance"]["rss_mb"]]
    head = ("arm", "p50 ms", "p99 ms", "answers a second", "processor ms")
    return (
        "## Load\n\n"
        f"{verdict}\n\n"
        "Each arm replaces one part of ours, or is a server that others build. Answers a second: the\n"
        f"rate of an open loop at which 99 % come in full within {found['goal_ms']:g} ms. Servers, Redis\n"
        "and client share the cores, and the arms take turns. Ratios are those of a round; a range that\n"
        "holds 1 is no difference.\n\n"
        + table((*head, "p50 against `ours`", "processor", "answers a second"), rows)
        + "\n"
        + goals
        + "\n\nThe growth of memory is a slope: "
        + f"the process held {min(held):.0f} to {max(held):.0f} MB, up and down.\n\n"
        + made("load")
        + "\n\n![p99 against the rate, and answers a second of every arm](load.png)\n"
    )


def _range(capacity: Mapping[str, Any]) -> str:
    rates = capacity["rates"]
    spread = ", once" if len(rates) == 1 else f" [{min(rates):.0f}, {max(rates):.0f}]"
    return f"{capacity['rate']:.0f}{spread}" if capacity["rate"] else "none"


def latency() -> str:
    """Return the latency in process and over HTTP."""
    arms = measured("latency")["arms"]
    rows = [
        (label, *(f"{arms[arm]['ms'][line][p]:.1f}" for p in ("p50", "p95", "p99")))
        for label, arm, line in (
            ("in process, ten items from the full catalogue", "in_process", "total"),
            ("over HTTP, one request at a time", "http_one_at_a_time", "client"),
        )
    ]
    return "## Latency\n\n" + table(("milliseconds", "p50", "p95", "p99"), rows) + f"\n{made('latency')}\n"


def features(found: Any) -> str:
    """Return the online store, the stream and the point-in-time join."""
    read, seen, hard = (found[name] for name in ("online_read", "visible", "hard_stream"))
    kills, again = found["kills"], found["replay"]

    def ms(percentiles: Mapping[str, float], digits: int) -> str:
        return f"{percentiles['p50']:.{digits}f} / {percentiles['p99']:.{digits}f}"

    is_old = "item_features" in found  # then ours also made the session and the last items
    rows = [
        (
            f"read {'' if is_old else 'and decode '}a shopper's row from Redis, ms",
            ms(read["ours_ms"], 2),
            ms(read["feast_ms"], 2),
        ),
        ("event published until a request sees it, 1,000 events a second, ms", ms(seen["ms"], 0), ""),
        ("events folded in a second of one core", f"{found['fold']['per_core_second']:,}", ""),
        ("stream killed at random: state equal to the batch's", f"{kills['equal']} of {kills['kills']}", ""),
        (
            "10,000 events, some poisoned, repeated, late: shoppers equal to the clean batch",
            f"{hard['users_equal']} of {hard['users']}, {hard['dead_letters']} letters for {hard['poison']}",
            "",
        ),
        (
            "logged answers computed again: features equal in every bit",
            f"{again['equal']:,} of {again['compared']:,}",
            "",
        ),
    ]
    return (
        "## Features\n\nTwo values are p50 / p99. One Valkey, one broker, the stream and the load "
        "generator share the cores.\n\n"
        + table(("measurement", "here", "Feast's SDK"), rows)
        + "\n"
        + made("features")
        + "\n"
    )


def compression(found: Any) -> str:
    """Return the way from the teachers to one file."""
    rankers, engines = found["rankers"], found["engines"]
    whole = whole_ensemble(found)
    teachers = (
        f"the {found['teachers']} teachers together"
        if found["teachers"] > 1
        else "the only teacher's ensemble"
    )
    labels = {"ensemble": teachers, "served": "**as served**"}
    rows = []
    for name, ranker in sorted(rankers.items(), key=lambda pair: -pair[1]["ndcg_at_10"]):
        p50 = ranker["latency_ms"]["500"]["p50"]
        rows.append(
            (
                labels.get(name, name),
                f"{ranker['ndcg_at_10']:.4f}",
                f"{ranker['recall_at_20']:.4f}",
                f"{ranker['bytes'] / 1e3:,.0f}",
                f"{p50:.2f}",
                f"{whole['bytes'] / ranker['bytes']:.1f} x smaller, "
                f"{whole['latency_ms']['500']['p50'] / p50:.1f} x faster",
            )
        )

    def faster(variants: Mapping[str, Any], variant: str) -> str:
        return f"{variants['torch_eager']['500']['p50'] / variants[variant]['500']['p50']:.2f} x"

    served = found["certificates"][-2]["variant"]
    static, plain = (engines["pruned"][name]["500"]["p50"] for name in ("int8_static", "fp32"))
    return (
        "## From teachers to one file\n\n"
        "Each ranker scores the served candidates. Milliseconds are for 500 candidates on one thread; all\n"
        "rankers take turns.\n\n"
        + table(("ranker", "NDCG@10", "Recall@20", "kB", "p50 ms", "against the teachers"), rows)
        + "\nTwo results disappoint:\n\n"
        f"- With 500 candidates ONNX Runtime is only {faster(engines['student'], 'fp32')} as fast "
        f"as eager PyTorch for the student.\n"
        f"  For the pruned ranker it is {faster(engines['pruned'], 'fp32')} in float32 and "
        f"{faster(engines['pruned'], served)} in the served form.\n"
        f"- INT8 activations are {'no faster' if static > plain else 'faster'} than float32 on this "
        f"processor ({static:.2f} and {plain:.2f} ms).\n"
        + "\n"
        + made("compression")
        + "\n\n![NDCG@10 against the bytes of each ranker](compression-bytes.png)\n"
    )


def scale(found: Any) -> str:
    """Return the training steps on a synthetic shop of millions."""
    steps = found["steps"]
    minutes, most = sum(step["seconds"] for step in steps) / 60, max(step["gib"] for step in steps)
    rows = []
    for label, name in (("FP16", "fp16"), ("INT8", "int8"), ("INT4", "int4")):
        row = found["variants"][name]
        rows.append(
            (
                label,
                f"{row['parent_bytes'] / row['bytes']:.2f} x",
                f"{row['ndcg_at_10']['ratio']:.2%}",
                f"{row['auc']['ratio']:.2%}",
            )
        )
    return (
        "## Scale\n\n"
        f"A synthetic shop of {found['items']:,} items and {found['users']:,} shoppers. The steps "
        f"from raw events to the\n"
        f"precisions of a DLRM with a row for each item end in {minutes:.0f} minutes and at most "
        f"{most:.1f} GiB.\n\n"
        + table(("whole ranker", "smaller", "NDCG@10 kept", "AUC kept"), rows)
        + "\n"
        + ("\n".join(lookup_lines(found)) + "\n\n" if "lookups" in found else "")
        + made("scale")
        + "\n"
    )


def retrieval() -> str:
    """Return the fastest search of each index type that finds enough."""
    large = measured("retrieval")["catalogues"][0]
    reaching = [point for point in large["curve"] if point["recall"] >= large["target_recall"]]
    kinds = dict.fromkeys(point["kind"] for point in reaching)
    rows = []
    for kind in kinds:
        point = min((point for point in reaching if point["kind"] == kind), key=lambda point: point["p99_ms"])
        searched = ", ".join(f"{name} {value}" for name, value in point["search"].items())
        rows.append(
            (
                f"{point['description']} {searched}".strip(),
                f"{point['recall']:.3f}",
                f"{point['p50_ms']:.2f}",
                f"{point['p99_ms']:.2f}",
                f"{point['bytes'] / 1e6:,.0f}",
            )
        )
    return (
        "## Retrieval\n\n"
        f"{large['items']:,} synthetic items of {large['dimension']} columns. The goal is "
        f"{large['target_recall']:.0%} of the {large['k']} nearest with a\n"
        f"p99 of at most {large['target_p99_ms']:g} ms. Reached by: "
        f"{', '.join(map(code, large['reached_by'])) or 'no type'}.\n"
        f"Too slow to build here: {', '.join(map(code, large['left_out'])) or 'none'}. The table "
        f"shows, of each type that finds\n"
        "enough, the search with the lowest p99.\n\n"
        + table(("index", "recall", "p50 ms", "p99 ms", "MB"), rows)
        + "\n"
        + made("retrieval")
        + "\n"
    )


def rerank(found: Any) -> str:
    """Return the price and the gain of the bundle's re-ranking weights."""
    gains, (low, high) = found["served"]["gains"], map(change, found["served"]["ndcg_interval"])
    return (
        "## Re-ranking\n\n"
        f"The weights that the bundle serves, on {found['judged_on']:,} baskets after the cut:\n\n"
        + table(
            ("figure", "change"),
            [
                ("catalogue shown", f"{gains['coverage']:+.1%}"),
                ("new manufacturers shown", f"{gains['new_manufacturers']:+.0%}"),
                ("items new to the shopper that are found", f"{gains['new_recall_at_10']:+.1%}"),
                ("NDCG@10", f"{gains['ndcg_at_10']:+.2%} [{low}, {high}]"),
            ],
        )
        + "\n"
        + made("rerank")
        + "\n"
    )


def batching() -> str:
    """Return the measurement that removed batching from the processor's path."""
    loads = {load["load"]: load["policies"] for load in measured("batching")["loads"]["ranker"]}
    rows = [
        (
            f"{at:g} of the capacity",
            *(f"{loads[at][name]['p99_ms']:.1f}" for name in ("one a call", "all that is ready", "steered")),
        )
        for at in (0.5, 0.9)
    ]
    pays = all(
        loads[at]["all that is ready"]["p99_ms"] < loads[at]["one a call"]["p99_ms"] for at in (0.5, 0.9)
    )
    return (
        "## Batching\n\n"
        f"Joining requests for one call of the ranker {'pays' if pays else 'does not pay'} on this "
        f"processor. The p99 of ranking in ms:\n\n"
        + table(("load", "one request a call", "all that is ready", "steered batch size"), rows)
        + "\nThe steering ended at one request a call, so it was removed: "
        "[why](../explanation/batching-and-caching.md).\n\n" + made("batching") + "\n"
    )


def kept_answers() -> str:
    """Return the measurement that made the answer cache small."""
    mixed, cache_file = measured("load-mixed")["arms"], measured("cache")
    level, kept = cache_file["levels"], cache_file["answers"]["kept"]
    kinds = {kind: row for kind, row in cache_file["answers"]["regret"].items() if row["answers"]}
    rows = [
        ("answers a second without", f"{mixed['ours']['capacity']['rate']:.0f}"),
        ("answers a second with", f"{mixed['answer-cache']['capacity']['rate']:.0f}"),
        ("hits under that load", f"{mixed['answer-cache']['cache']['hit_ratio']:.0%}"),
        ("hits in the process, weeks after the cut", f"{level['process_hit_ratio']:.1%}"),
        ("hits in Redis, of the rest", f"{level['redis_hit_ratio_of_the_rest']:.1%}"),
        (
            f"hits that show other items than an answer computed now, of {kept['answers']:,}",
            f"{kept['other_items']:,} ({kept['other_items_ratio']:.2%}; bound {kept['bound']:.0%} "
            f"{'reached' if kept['reached'] else 'missed'})",
        ),
        *((f"the same, {kind} shoppers", f"{row['other_items_ratio']:.2%}") for kind, row in kinds.items()),
    ]
    return (
        "## Answer cache\n\n"
        "An earlier cache with two levels and clustered warm-up, with baskets that grow as in a "
        "shop. Whole answers\n"
        "seldom repeat, so that cache became a small one: "
        "[why](../explanation/batching-and-caching.md).\n\n"
        + table(("figure", "measured"), rows)
        + "\n"
        + made("cache")
        + " "
        + made("load-mixed")
        + "\n"
    )


def drift(found: Any) -> str:
    """Return the weeks that raise the alarm, and injected changes."""
    weeks = [
        week["week"] for week in found["weeks"] if week["column"] == "category" and week["status"] == "alarm"
    ]
    return (
        "## Drift\n\n"
        f"Each week against the first nine, category mix. Alarms in the weeks of: {', '.join(weeks)}.\n"
        "These are Easter, Memorial Day, high summer, Thanksgiving and Christmas. A fixed limit of "
        "PSI 0.2 raises no\n"
        "alarm in any of them.\n\n"
        + ("\n".join(injected_lines(found)[1:]) + "\n\n" if "delays" in found else "")
        + made("drift")
        + "\n\n![PSI of the category mix, week by week](drift.png)\n"
        + "\n![Days until the alarm against the share of changed lines](drift-delay.png)\n"
    )


def faster(found: Any) -> str:
    """Return the goals of load and drills of an earlier set on a faster machine of the same name."""
    reached = sum(goal["reached"] is True for goal in found["load_goals"])
    missed = [name for name, passed in found["drills"].items() if not passed]
    every, now = len(found["drills"]), measured("latency")["arms"]["in_process"]["ms"]["total"]["p50"]
    there, here = found["in_process_p50_ms"], median(found["same_code_on_the_other_machine_p50_ms"])
    machine = f"{found['machine']['cores']} cores of another {found['machine']['cpu']}{busy_line(found)}"
    return (
        "## On a faster machine\n\n"
        f"An earlier set: commit {found['commit']}, bundle {found['bundle_id']}, {machine}.\n"
        f"An answer in process took {there:.1f} ms there, and takes {now:.1f} ms above. On a machine like\n"
        f"the one above that older code took {here:.1f} ms. So the processor makes the difference, and its\n"
        "name does not show it. Benches of load and drills were mended since then, so their other figures\n"
        f"differ for that reason, too. {reached} of {len(found['load_goals'])} load goals and "
        f"{every - len(missed)} of {every} drills\n"
        f"were reached.\nMissed drills: {', '.join(map(code, missed))}.\n\n"
        + "\n".join(goal_table(found["load_goals"]))
        + "\n\n`faster.json` has these numbers.\n"
    )


def drills() -> str:
    """Return the counts of all drills; the table is in their own page."""
    calls, missed = client_calls("all"), missed_drills()
    every = measured("drills")["drills"]
    return (
        "## Drills\n\n"
        f"{len(every) - len(missed)} of {len(every)} drills reach every figure. Missed: "
        f"{', '.join(map(code, missed)) or 'none'}.\n"
        f"Of {calls['requests']:,} calls of the client {calls['failed']} failed and "
        f"{calls['late']} came late.\n"
        "[Drills](../reference/drills.md) has the table; [drills.md](drills.md) has each fault.\n\n"
        + made("drills")
        + "\n\n![Latencies at the client in each drill](drills.png)\n\n"
        + "With Prometheus and Alertmanager beside them:\n"
        + f"{alerts_verdict(measured('alerts')['drills'])}\n"
        + f"{made('alerts')}\n"
    )
