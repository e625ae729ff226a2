"""The drills, by name: the faults in a running system, and the figures that must hold meanwhile.

A drill is its faults (`pipelines.drills.faults`) and its figures (`pipelines.drills.goals`);
`pipelines.drills.run` carries it out. To add a drill is to add an entry here. MLflow, the Feast registry,
Kafka, Prometheus and a collector of spans are away during every one of them: answers need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feature_repo.ids import closest
from pipelines.bench.load.goals import Goal, part_of
from pipelines.drills import crowds, faults, goals
from pipelines.drills.faults import Break, Notes
from pipelines.drills.goals import none, note, some
from pipelines.drills.outcome import CLIENT, LATE_MS, RAW
from pipelines.drills.system import (
    CLOCKED,
    KEEPS_ANSWERS,
    LIMITED,
    REMOTE_RANKER,
    STALE_AFTER_S,
    STANDARD,
    TWO_PROCESSES,
    Setup,
    System,
)

HOUR_S, DAY_S = 3_600.0, 86_400.0
NOW_AND_THEN = "one in 50 after 200 ms"
# Alerts that page.
DEGRADED, STALE, FACTS, GONE = "CheckoutDegraded", "FeaturesStale", "FactsStale", "CheckoutGone"
ALL = "all"
OWN_FAULTS = ("preprocess_error", "predict_error", "postprocess_error")  # reasons that name a bug


@dataclass(frozen=True)
class Drill:
    """One drill."""

    name: str
    proves: str  # in a line
    breaks: Mapping[str, Break]  # by name, in turn
    own_goals: Sequence[Goal] = ()  # beside those of every drill
    setup: Setup = STANDARD
    during_s: float = 0.0  # of each fault, at least: some show late
    in_front: bool = False  # the client connects through the proxy before the endpoint
    raw_suffers: bool = False  # the stream without the client may get other answers than before
    late_ms: float = LATE_MS  # the tolerance of a call after its deadline
    recovery_s: float = goals.RECOVERY_S  # how long after the end of a fault answers may be less
    prepare: Callable[[System, Notes], None] | None = None  # called before the first request
    counts: Mapping[str, Callable[[System], float]] = field(default_factory=dict)  # their growth is noted
    pages: Mapping[str, str] = field(default_factory=dict)  # the alert by fault; another fault must not page

    def goals(self, with_alerts: bool = False) -> Iterator[Goal]:
        """Yield everything that must hold."""
        labelled = (CLIENT,) if self.raw_suffers else (CLIENT, RAW)
        late = f"answers later than the deadline + {self.late_ms:g} ms"
        yield none("answers that failed at the client", part_of("all", CLIENT, "failed"))
        yield none(late, part_of("all", CLIENT, "late"))
        yield none("fallbacks that do not say so", goals.total(labelled, "unlabelled"))
        yield none("lists that cannot be shown", goals.total((CLIENT, RAW), "invalid"))
        yield none("answers of a lower rung because of a bug", goals.told("all", *OWN_FAULTS))
        yield Goal("until answers are whole again", "<=", self.recovery_s, " s", goals.recovery)
        yield from self.own_goals
        if with_alerts and self.pages:
            paged, over = goals.slowest_page("paged_s"), goals.slowest_page("resolved_s")
            yield Goal("until the right page", "<=", goals.PAGE_S, " s", paged)
            yield Goal("until the page is resolved", "<=", goals.RESOLVED_S, " s", over)
        if with_alerts:
            yield none("wrong pages", goals.wrong_pages)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON types."""
        figures = [{"name": goal.name, "wanted": goal.wanted} for goal in self.goals()]
        return {"name": self.name, "proves": self.proves, "faults": list(self.breaks), "figures": figures}


RAW_ANSWERED = none("requests straight to the endpoint without an answer", part_of("all", RAW, "failed"))
FULL = Goal("degraded", "<=", 1, " %", goals.share("degraded"))


def _p99(bound: float) -> Goal:
    return Goal("p99 meanwhile", "<=", bound, " ms", part_of("during", CLIENT, "p99_ms"))


def _p95(fault: str, bound: float) -> Goal:
    return Goal(f"p95 against the one before, {fault}", "<=", bound, " x", goals.times_before(fault))


DRILLS = (
    Drill(
        "store-killed",
        "without the online store answers come in time and say so; it is found again when it is back",
        {"killed": faults.store_killed},
        (*goals.store_goals("killed"), RAW_ANSWERED),
        recovery_s=2.0,
        pages={"killed": DEGRADED},
    ),
    Drill(
        "store-frozen",
        "a frozen store holds no request: none waits for it beyond its budget, and new ones skip it",
        {"frozen": faults.store_frozen},
        (*goals.store_goals("frozen"), RAW_ANSWERED),
        pages={"frozen": DEGRADED},
    ),
    Drill(
        "store-slow",
        "a slow store costs its features, not the answer; one slow reply in fifty costs one answer in fifty",
        {
            NOW_AND_THEN: faults.store_late_now_and_then(50, 0.2),
            "each after 20 ms": faults.store_late(0.02),
            "each after 5 s": faults.store_late(5.0),
        },
        (
            Goal("degraded, one in 50", "<=", 2.5, " %", goals.share("degraded", NOW_AND_THEN)),
            Goal("degraded, one in 50, at least", ">=", 1, " %", goals.share("degraded", NOW_AND_THEN)),
            Goal("p99, one in 50", "<=", 50, " ms", goals.of_fault(NOW_AND_THEN, "during", CLIENT, "p99_ms")),
            *goals.store_goals("each after 20 ms", "each after 5 s"),
        ),
        pages={"each after 20 ms": DEGRADED, "each after 5 s": DEGRADED},
    ),
    Drill(
        "half-answers",
        "replies that are cut, drip or are reset are no replies, and nothing of them is left behind",
        {
            "cut": faults.answers_cut(after_bytes=7),
            "dripping": faults.answers_drip(size=1, pause_s=0.01),
            "reset": faults.connections_reset,
        },
        (
            *goals.store_goals("cut", "dripping"),
            some("connections to the store that were opened again", note("opened_again")),
            Goal("open files more than at the beginning", "<=", 3, "", note("more_files")),
        ),
        counts={"more_files": faults.open_files},
        pages={"cut": DEGRADED, "dripping": DEGRADED},
    ),
    Drill(
        "ranker-killed",
        "without the ranker that it asks the endpoint offers best sellers, and ranks again when it is back",
        {"killed": faults.ranker_killed},
        (
            goals.told_goal("killed"),
            Goal("calls of the ranker that failed", "<=", 20, "", note("failed_calls")),
            _p99(55),
            RAW_ANSWERED,
        ),
        REMOTE_RANKER,
        pages={"killed": DEGRADED},
    ),
    Drill(
        "worker-killed",
        "one of two processes dies: the client asks the other one, and a new one comes",
        {"first": faults.worker_killed, "second": faults.worker_killed},
        (
            Goal("degraded, through the client", "<=", 1, " %", goals.share("degraded", streams=(CLIENT,))),
            _p99(50),
            Goal("until the process is back", "<=", 5, " s", goals.most("back_s")),
            Goal("answered more often than asked", "<=", 5, " %", goals.asked_again),
        ),
        TWO_PROCESSES,
        counts={"more_answers": faults.answers_given},
    ),
    Drill(
        "workers-killed",
        "a process dies every 2 s at 60 % of the capacity: the endpoint lives, no call fails at the client",
        {"every 2 s": crowds.at_share_of_capacity(0.6, faults.workers_killed)},
        (
            some("processes that were killed", note("kills")),
            Goal("longest time without any process", "<=", 0, " s", note("longest_empty_s")),
            Goal("longest time with one process too few", "<=", 2, " s", note("longest_short_s")),
        ),
        TWO_PROCESSES,
        during_s=60.0,
        recovery_s=2.0,
        prepare=crowds.note_capacity,
    ),
    Drill(
        "corrupt-bundle",
        "a champion with a changed byte or half a file is refused; the one before answers as if nothing were",
        {
            "a byte changed": faults.broken_champion(faults.flip_a_byte),
            "half an index": faults.broken_champion(faults.cut_in_half),
        },
        (
            Goal("broken bundles that were refused", ">=", 2, "", goals.count("refused_s")),
            Goal("bundles that answered", "<=", 1, "", goals.bundles),
            FULL,
        ),
    ),
    Drill(
        "stale-features",
        "each answer is labelled while the stream is silent or rows are too old",
        {"stream silent": faults.stream_silent, "rows too old": faults.rows_of_long_ago},
        (goals.told_goal("stream silent", STALE_AFTER_S + 1.5), goals.told_goal("rows too old")),
        CLOCKED,
        during_s=6.0,
        pages={"stream silent": STALE, "rows too old": STALE},
    ),
    Drill(
        "cold-herd",
        "however many requests ask for a list that is not cached, it is computed once",
        {"for one list": crowds.herd_for_one, "for many lists": crowds.herd_for_many},
        (
            Goal("computed, all asking for one list", "<=", 1, "", note("one_list", "computed_most")),
            Goal("computed, two asking for each list", "<=", 1, "", note("many_lists", "computed_most")),
            some("lists computed, all asking for one list", note("one_list", "computed")),
            some("lists computed, two asking for each list", note("many_lists", "computed")),
            none("of the herd without an answer", note("one_list", "failed")),
            none("of the herd for many without an answer", note("many_lists", "failed")),
            some("of the herd with the list itself", note("one_list", "whole")),
            Goal("p99 of the herd", "<=", 100, " ms", note("one_list", "p99_ms")),
        ),
        KEEPS_ANSWERS,
    ),
    Drill(
        "overload",
        "prefetches at three times its capacity: they are refused, checkouts are served",
        {"3 x": crowds.overload},
        (
            Goal("checkouts served by the endpoint in time", ">=", 99, " %", goals.served),
            none("prefetches that failed and were not refused", note("not_refused_but_failed")),
            Goal("whole answers, of what it can", ">=", 90, " %", goals.goodput),
            Goal("until a prefetch is refused, p50", "<=", 5, " ms", note("refused_p50_ms")),
        ),
        prepare=crowds.note_capacity,
    ),
    Drill(
        "greedy-shopper",
        "one shopper who asks as often as all others together gets less, and takes nothing from them",
        {"half of all": crowds.one_asks_for_all},
        (
            _p95("half of all", 1.2),
            Goal("degraded, of the others", "<=", 1, " %", goals.share("degraded")),
            none("requests of the one without an answer", note("failed")),
            Goal("answers that are computed for the one", "<=", 75, " %", goals.computed_for_one),
        ),
        LIMITED,
    ),
    Drill(
        "processors-taken",
        "where others take the processors, answers are less, and come in time",
        {"two for each": faults.processors_taken},
        (Goal("processors that the others take", ">=", 25, " %", note("taken")), RAW_ANSWERED),
        late_ms=30.0,
    ),
    Drill(
        "poisoned-row",
        "an invalid row affects only its own shopper; a list comes without it",
        {"a sixth of each kind": faults.rows_poisoned},
        (
            some("answers that say the row is invalid", goals.told("during", "features_invalid")),
            Goal("change of another shopper's score", "<=", 1e-6, "", part_of("during", CLIENT, "moved")),
            none("owners without an answer", part_of("all", RAW, "failed")),
        ),
        raw_suffers=True,
    ),
    Drill(
        "slow-clients",
        "clients that send half a request or nothing are cut off and delay no other",
        {
            "half a body": crowds.slow_callers(crowds.half_a_body, "half"),
            "nothing": crowds.slow_callers(lambda system: b"", "idle"),
        },
        (
            *(_p95(fault, 1.3) for fault in ("half a body", "nothing")),
            none("half-sent bodies not cut off", note("half", "left")),
            Goal("until the last half-sent body is cut off", "<=", 5, " s", note("half", "last_s")),
            none("idle connections not cut off", note("idle", "left")),
            Goal("until the last idle connection is cut off", "<=", 5, " s", note("idle", "last_s")),
            RAW_ANSWERED,
        ),
    ),
    Drill(
        "bundle-swap",
        "another bundle takes over, and the first one again, between two requests",
        {"another one": faults.another_champion(1), "the first again": faults.another_champion(0)},
        (
            Goal("bundles that answered", ">=", 2, "", goals.bundles),
            Goal("until the bundle answers", "<=", 10, " s", goals.most("swap_s")),
            _p95("another one", 2),
            FULL,
            RAW_ANSWERED,
        ),
    ),
    Drill(
        "disk-full",
        "a full disk costs records of the log, which are counted, and no answer; then it writes again",
        {"full": faults.disk_full},
        (
            FULL,
            some("records counted as dropped", note("dropped")),
            Goal("until records are written again", "<=", 5, " s", note("written_again_s")),
            RAW_ANSWERED,
        ),
    ),
    Drill(
        "clock-jump",
        "a clock that jumps moves no deadline and spoils no cached answer; old features are labelled",
        {
            "an hour back": faults.clock_off(-HOUR_S),
            "an hour on": faults.clock_off(HOUR_S),
            "400 days on": faults.clock_off(400 * DAY_S),
        },
        (
            goals.told_goal("an hour on"),
            goals.told_goal("400 days on"),
            Goal("endpoint's clock, an hour back", "<=", -3_500, " s", note("clock_s", f"{-HOUR_S:g}")),
            Goal("degraded, an hour back", "<=", 1, " %", goals.share("degraded", "an hour back")),
            _p99(50),
            RAW_ANSWERED,
        ),
        CLOCKED,
        # A wrong clock is worth a page: the times of rules and promotions hold by it.
        pages={"an hour back": FACTS, "an hour on": STALE, "400 days on": STALE},
    ),
    Drill(
        "service-gone",
        "without any endpoint the client answers from its best sellers, in time, and raises nothing",
        {
            "refused": crowds.service_refuses,
            "silent": crowds.service_silent,
            "no such name": crowds.name_gone,
        },
        (
            Goal("slowest answer", "<=", 100, " ms", part_of("during", CLIENT, "max_ms")),
            Goal("slowest answer, no such name", "<=", 100, " ms", note("nameless", "max_ms")),
            none("failed, no such name", note("nameless", "failed")),
            some("answered by the client, no such name", note("nameless", "degraded")),
            goals.told_goal("refused"),
            goals.told_goal("silent"),
        ),
        in_front=True,
        pages={"refused": GONE, "silent": GONE},
    ),
)


def choose_drills(names: Sequence[str]) -> tuple[Drill, ...]:
    """Return the drills of these names, in their own order; `all` are all.

    Raises:
        ValueError: there is no drill of a name.
    """
    known = [drill.name for drill in DRILLS]
    for name in names:
        if name != ALL and name not in known:
            raise ValueError(f"no drill {name!r}: {closest(name, [ALL, *known])}")
    return tuple(drill for drill in DRILLS if ALL in names or drill.name in names)
