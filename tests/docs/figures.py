"""Result files of the benches and drills -> the page of figures and the README's small table."""

import json
import re
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

from pipelines.bench.compression import whole_ensemble
from pipelines.bench.figures import ONLY_BY_NAME, PLAN
from pipelines.bench.load.report import goal_table
from pipelines.bench.quality import judge_quality
from pipelines.bench.report import busy_line, with_interval
from tests.docs.reference import HEAD, code, table
from tests.docs.source import ROOT

FIGURES = ROOT / "docs" / "figures"
BESIDE = tuple(bench.name for bench in ONLY_BY_NAME)
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
        f"The newest results are of commit {measured(together[0])['commit']}: "
        f"{', '.join(map(code, together))}.\n"
    )
    if old:
        text += (
            f"Of other commits: {', '.join(map(code, old))}.\n"
            "Compare only figures of the same commit, bundle and machine.\n"
        )
    text += (
        "`make figures` measures all results one after the other, except those of removed mechanisms and\n"
        f"the longest: `reco figures {' '.join(BESIDE)}` measures these. Each comes from a command\n"
        "of `reco bench` or `reco drill`.\n\n"
    )
    return text + table(("result", "commit", "bundle", "machine", "date"), rows)


def made(name: str) -> str:
    """Return which report has all of a result, and whether its commit is that of the others."""
    commit = measured(name)["commit"]
    old = ", not that of the newest results" if name in (*older_results(), *REMOVED) else ""
    return f"[`{name}.md`]({name}.md) has all of it. Commit {commit}{old}."


# -------------------------------------------------------------------------------------------- README


def headline() -> str:
    """Return the README's table: quality, speed, size, robustness, with the misses."""
    quality, load, drills = measured("quality"), measured("load"), measured("drills")["drills"]
    ours, goals = load["arms"]["ours"], load["goals"]
    compression, features = measured("compression"), measured("features")
    judged, rankers = judge_quality(quality), compression["rankers"]
    whole, served = whole_ensemble(compression), rankers["served"]
    faster = whole["latency_ms"]["500"]["p50"] / served["latency_ms"]["500"]["p50"]
    calls = [drill["during"]["client"] for drill in drills.values()]
    sent, failed, own = (sum(call[kind] for call in calls) for kind in ("requests", "failed", "from_client"))
    replay, teachers = features["replay"], compression["teachers"]
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
        ("these two on a faster machine", _faster_headline(measured(FASTER))),
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
            f"{failed} of {sent:,}; the client itself answered {own:,}",
        ),
        (
            "fault drills that reach every figure",
            f"{sum(drill['passed'] for drill in drills.values())} of {len(drills)}",
        ),
        ("quality goals reached", f"{sum(goal['reached'] is True for goal in judged)} of {len(judged)}"),
        ("load goals reached", f"{sum(goal['reached'] is True for goal in goals)} of {len(goals)}"),
    ]
    return table(("figure", "measured"), rows)


def _faster_headline(found: Any) -> str:
    goals = {goal["name"].partition(",")[0]: goal["measured"] for goal in found["load_goals"]}
    p50, p99 = (goals[f"{name} over KServe REST"] for name in ("p50", "p99"))
    return f"{p50:.1f} / {p99:.1f} ms; {goals['answers a second']:.0f}, at commit {found['commit']}"


# --------------------------------------------------------------------------------- the page of figures

HIDDEN = (
    "The baskets of the five weeks after the cut. A seeded fifth of each basket is hidden: these items are\n"
    "the right answers. A list may hold any item of the catalogue that the visible basket lacks; no\n"
    "negatives are sampled. The shopper's purchases before the request are known, and none after it. The\n"
    "best sellers of a store are those at the cut. Answers come through the served path; the same run\n"
    "computes the baselines."
)
PUBLISHED_METHODS = (
    "The same baskets. The parameters of each method were chosen on the four weeks before the cut, and the\n"
    'test weeks were asked once. "+ own purchases" adds the shopper\'s own items, with a weight that was\n'
    "chosen the same way. SASRec was trained for minutes on a CPU: more training may raise its figures. All\n"
    "are given the basket and the shopper's own purchases up to the request. Alone, EASE, item-kNN and ALS\n"
    "on baskets read only the basket; BPR reads only what the shopper bought before the cut. Ours and\n"
    "LightGBM also know the sales of the shop up to the day before; the others were fitted at the cut. EASE\n"
    "sees the 10,000 items that are bought most. `reco bench peers` repeats it."
)
ARMS = (
    "Each arm replaces one part of our server, or the whole server. Answers a second: the highest rate of\n"
    "an open loop at which 99 % are full and in time. Servers, Redis and client share the cores, and the\n"
    "arms take turns. A ratio compares two arms of one round; if its range over the rounds holds 1, there\n"
    "is no difference."
)
# Measured before the mechanisms went, and never again.
BATCHING = (
    "Joining requests for one call of the ranker does not pay on this processor. At half of the capacity\n"
    "the p99 of ranking is 1.7 ms with one request a call, 2.4 ms with all that is ready, and 1.7 ms with\n"
    "a steered batch size; at 0.9 of the capacity it is 9.7, 18.1 and 10.0 ms. So the steering\n"
    "[was removed](../explanation/batching-and-caching.md)."
)
ANSWER_CACHE = (
    "An earlier cache with two levels and clustered warm-up, asked about baskets that grow as in a shop.\n"
    "8 % of the answers were hits, and answers a second rose from 345 to 372\n"
    "([`load-mixed.md`](load-mixed.md)). In the weeks after the cut 3.2 % of the requests were hits in the\n"
    "process, and 5.8 % of the rest in Redis. 1 of 199 hits showed other items than a new answer.\n"
    "So that cache [became a small one](../explanation/batching-and-caching.md)."
)
WEEKS = (
    "The category mix of each week against that of the first nine weeks. Alarms in the weeks of: {}.\n"
    "These are Easter, Memorial Day, high summer, Thanksgiving and Christmas. A fixed limit of PSI 0.2\n"
    "raises no alarm in any of them."
)


def figures_page() -> str:
    """Return the page of figures: of each result what its report says first, and what it goes on with."""
    weeks = [week for week in measured("drift")["weeks"] if week["column"] == "category"]
    alarms = ", ".join(week["week"] for week in weeks if week["status"] == "alarm")
    sections = [
        section(
            "Quality",
            "quality",
            HIDDEN,
            "| goal",
            "| system",
            "95 %",
            "Two",
            "| way",
            "Kept",
            "| scores",
            "| new",
        )
        + "\n![NDCG@10 of the served path and of the baselines](quality.png)\n",
        full(measured(FULL)),
        section("Published methods", "peers", PUBLISHED_METHODS, "| method", "The ratio"),
        section("Load", "load", ARMS, "An answer", "| arm | p50", "| goal", "- ours", "60,000")
        + "\n![p99 against the rate, and answers a second of every arm](load.png)\n",
        section("Latency", "latency", "", "| arm"),
        section("Features", "features", "", "| figure"),
        section("From teachers to one file", "compression", "", "| ranker", "Engines")
        + "\n![NDCG@10 against the bytes of each ranker](compression-bytes.png)\n",
        section("Scale", "scale", "", "| step", "The ranker", "| tables", "Time in", "| items"),
        section("Retrieval", "retrieval", "", "The champion", "A synthetic"),
        section("Re-ranking", "rerank", "", "Chosen:", "| weights", "Combinations"),
        section("Batching", "batching", BATCHING),
        section("Answer cache", "cache", ANSWER_CACHE),
        section("Drift", "drift", WEEKS.format(alarms), "Injected", "| share", "| dep", "| store", "| low")
        + "\n![PSI of the category mix, week by week](drift.png)\n\n"
        + "![Days until the alarm against the share of changed lines](drift-delay.png)\n",
        section("Drills", "drills", blocks("drills")[1])
        + "\n![Latencies at the client in each drill](drills.png)\n\n"
        + "With Prometheus and Alertmanager beside them:\n"
        + f"{blocks('alerts')[1]}\n{made('alerts')}\n",
        faster(measured(FASTER)),
    ]
    return (
        HEAD
        + "# Figures\n\n"
        + "The data set is Complete Journey if nothing else is said. A goal that is missed is listed as\n"
        + "missed. Absolute times drift on a shared machine. So ratios compare the parts of one run, and a\n"
        + "range is that of its rounds.\n\n"
        + "## Where they come from\n\n"
        + provenance()
        + "\n"
        + "\n".join(sections)
    )


def blocks(name: str) -> list[str]:
    """Return the paragraphs and tables of a report."""
    report = (FIGURES / f"{name}.md").read_text(encoding="utf-8")
    return [block.strip() for block in report.split("\n\n")]


def section(title: str, name: str, says: str = "", *starts: str) -> str:
    """Return a section: its own words, then the blocks of a report that begin with one of `starts`."""
    found = blocks(name)
    missing = [start for start in starts if not any(block.startswith(start) for block in found)]
    assert not missing, f"{name}.md has no paragraph that begins with {missing}"
    parts = [says, *(block for block in found if block.startswith(starts)), made(name)]
    return f"## {title}\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def full(found: Any) -> str:
    """Return both sizes of a training: what they serve and take, and what becomes of five teachers."""
    metrics = ("ndcg_at_10", "recall_at_20", "new_recall_at_20", "strangers_recall_at_20")
    rows = [
        (
            code(command),
            *(f"{run[m]:.4f} [{run['interval'][m][0]:.3f}, {run['interval'][m][1]:.3f}]" for m in metrics),
            f"{run['elapsed_s'] / 60:.0f}",
            f"{run['peak_memory_mib']:,}",
            run["commit"],
        )
        for command, run in zip(("reco run", "reco run --full"), found["runs"].values(), strict=True)
    ]
    columns = ("run", "NDCG@10", "Recall@20", "of new items", "of strangers", "minutes", "MiB", "commit")
    machine = f"{found['machine']['cores']} cores of an {found['machine']['cpu']}"
    teachers, student, served = (found["distilled"][name] for name in ("teachers", "student", "served"))
    ratio, faster = student["of_teachers"], teachers["p50_ms_at_500"] / student["p50_ms_at_500"]
    low, high = student["interval"]
    size = [part["bytes"] / 1e6 for part in (teachers, student, served)]
    return (
        f"## All five teachers\n\nOn {machine}, one run after the other.\n\n"
        + table(columns, rows)
        + "\nAn interval is that of one run: it does not compare the two.\n\n"
        f"The five teachers take {size[0]:.1f} MB, their student {size[1]:.2f} MB and the served file\n"
        f"{size[2]:.2f} MB: {size[0] / size[2]:.0f} x smaller. On the held-out lists the student has\n"
        f"{ratio:.1%} [{low:.1%}, {high:.1%}] of the teachers' NDCG@10; the interval is over lists.\n"
        f"The certificate of the step times both in turns: the student ranks 500 candidates {faster:.0f} x\n"
        "faster than the five. `full.json` has these numbers.\n"
    )


def towers() -> str:
    """Return what the towers' items change, in each kind of requests."""
    rows = [
        (row["requests"], *(with_interval(row, metric, 3) for metric in ("ndcg_at_10", "new_recall_at_20")))
        for row in measured("quality")["sources"]
        if row["source"] == "tower"
    ]
    return table(("requests", "NDCG@10", "Recall@20 of new items"), rows)


def faster(found: Any) -> str:
    """Return the goals of load and drills of an earlier set on a faster machine."""
    reached = sum(goal["reached"] is True for goal in found["load_goals"])
    missed = [name for name, passed in found["drills"].items() if not passed]
    latency, cpu, every = measured("latency"), found["machine"]["cpu"], len(found["drills"])
    here, there = latency["arms"]["in_process"]["ms"]["total"]["p50"], found["in_process_p50_ms"]
    elsewhere = median(found["same_code_on_the_other_machine_p50_ms"])
    return (
        "## On a faster machine\n\n"
        f"An earlier set: commit {found['commit']}, bundle {found['bundle_id']}, {found['machine']['cores']} "
        f"cores of an {cpu}{busy_line(found)}.\n"
        f"An answer in process took {there:.1f} ms there, and takes {here:.1f} ms above, on an "
        f"{latency['machine']['cpu']}.\n"
        f"Machines of one name differ, too: the older code took {elsewhere:.1f} ms on another {cpu}.\n"
        "The benches of load and drills were corrected since then, so their other figures differ for that\n"
        f"reason, too. {reached} of {len(found['load_goals'])} load goals and "
        f"{every - len(missed)} of {every} drills were reached.\n"
        f"Missed drills: {', '.join(map(code, missed))}.\n\n"
        + "\n".join(goal_table(found["load_goals"]))
        + "\n\n`faster.json` has these numbers.\n"
    )
