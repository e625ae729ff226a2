"""The outcome of a drill -> its figures: those of every drill, and those of single drills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pipelines.bench.load.goals import Goal, Read, part_of
from pipelines.drills.outcome import CLIENT, RAW

RECOVERY_S = 3.0
STORE_WAIT_MS, STORE_MS = 15.0, 6.0  # of one request, and of the p99 over the healthy one
TOLD_S = 1.0
OWN_FAULTS = ("preprocess_error", "predict_error", "postprocess_error")  # reasons that name a bug
PAGE_S, RESOLVED_S = 60.0, 300.0  # from a fault to its page, from the repair to its end

Outcome = Mapping[str, Any]


def common_goals(raw_suffers: bool, late_ms: float, recovery_s: float) -> Iterator[Goal]:
    """Yield the goals of every drill.

    Args:
        raw_suffers: the stream without the client may get other answers than before.
        late_ms: the tolerance of a call after its deadline.
        recovery_s: how long after the end of a fault answers may be less.
    """
    labelled = (CLIENT,) if raw_suffers else (CLIENT, RAW)
    yield Goal("answers that failed at the client", "<=", 0, "", part_of("all", CLIENT, "failed"))
    late = f"answers later than the deadline + {late_ms:g} ms"
    yield Goal(late, "<=", 0, "", part_of("all", CLIENT, "late"))
    yield Goal("fallbacks that do not say so", "<=", 0, "", total(labelled, "unlabelled"))
    yield Goal("lists that cannot be shown", "<=", 0, "", total((CLIENT, RAW), "invalid"))
    yield Goal("answers of a lower rung because of a bug", "<=", 0, "", told("all", *OWN_FAULTS))
    yield Goal("until answers are whole again", "<=", recovery_s, " s", recovery)


def store_goals(*names: str) -> Iterator[Goal]:
    """Yield the goals while the store does not answer in time because of the faults `names`."""
    yield Goal("longest wait of a request for the store", "<=", STORE_WAIT_MS, " ms", waited_for_store)
    for name in names:
        yield Goal(f"p99 over the healthy one, {name}", "<=", STORE_MS, " ms", over_healthy(name))
        yield Goal(f"until every answer says so, {name}", "<=", TOLD_S, " s", of_fault(name, "told_s"))


def alert_goals(pages: bool) -> Iterator[Goal]:
    """Yield the goals of a drill that Prometheus watches; `pages`: a fault of it must page."""
    if pages:
        yield Goal("until the right page", "<=", PAGE_S, " s", slowest_page("paged_s"))
        yield Goal("until the page is resolved", "<=", RESOLVED_S, " s", slowest_page("resolved_s"))
    yield Goal(
        "wrong pages", "<=", 0, "", lambda found: float(sum(len(one["wrong"]) for one in found["pages"]))
    )


def slowest_page(name: str) -> Read:
    """Return a reader of the longest of a time of the expected pages; infinite if one is missing."""

    def read(outcome: Outcome) -> float:
        times = [page[name] for page in outcome["pages"] if page["expected"]]
        return max(float("inf") if seconds is None else float(seconds) for seconds in times)

    return read


def recovery(outcome: Outcome) -> float:
    """Read the longest recovery; infinite if there was none."""
    recovery_s: float | None = outcome["recovery_s"]
    return float("inf") if recovery_s is None else recovery_s


def total(streams: Iterable[str], name: str) -> Read:
    """Return a reader of a count of some streams together, from first to last."""
    streams = tuple(streams)
    return lambda outcome: float(sum(outcome["all"][stream][name] for stream in streams))


def told(phase: str, *reasons: str) -> Read:
    """Return a reader of the number of degraded answers of both streams that say one of these reasons."""
    return lambda outcome: float(
        sum(outcome[phase][stream]["reasons"].get(one, 0) for stream in (CLIENT, RAW) for one in reasons)
    )


def raw_lost(outcome: Outcome) -> float | None:
    """Read how many requests without the client got no answer."""
    return part_of("all", RAW, "failed")(outcome)


def share(name: str, fault: str) -> Read:
    """Return a reader of a count of both streams during a fault, in per cent of their requests."""

    def read(outcome: Outcome) -> float | None:
        during = fault_of(outcome, fault)["during"]
        asked = sum(during[stream]["requests"] for stream in (CLIENT, RAW))
        return 100 * sum(during[stream][name] for stream in (CLIENT, RAW)) / asked if asked else None

    return read


def degraded(outcome: Outcome) -> float | None:
    """Read how many answers of both streams were degraded during the faults, in per cent."""
    during = [outcome["during"][stream] for stream in (CLIENT, RAW)]
    asked = sum(one["requests"] for one in during)
    return 100 * sum(one["degraded"] for one in during) / asked if asked else None


def client_share(name: str) -> Read:
    """Return a reader of a count of the client's answers during all faults, in per cent."""

    def read(outcome: Outcome) -> float | None:
        during = outcome["during"][CLIENT]
        return 100 * during[name] / during["requests"] if during["requests"] else None

    return read


def not_cut(name: str) -> Read:
    """Return a reader of how many of a crowd of slow callers were not cut off."""
    return lambda outcome: float(outcome["notes"][name]["crowd"] - outcome["notes"][name]["cut"])


def fault_of(outcome: Outcome, name: str) -> Mapping[str, Any]:
    """Return the figures of one fault."""
    found: Mapping[str, Any] = next(row for row in outcome["faults"] if row["name"] == name)
    return found


def of_fault(name: str, *path: str) -> Read:
    """Return a reader of a figure of one fault."""
    return lambda outcome: part_of(*path)(fault_of(outcome, name))


def note(*path: str) -> Read:
    """Return a reader of something that a fault noted."""
    return part_of("notes", *path)


def most(name: str) -> Read:
    """Return a reader of the largest of the values that a fault noted, one each time."""
    return lambda outcome: max(outcome["notes"].get(name, ()), default=None)


def longest(name: str) -> Read:
    """Return a reader of the longest of the times that a fault noted; 0 if there was none."""
    return lambda outcome: max(outcome["notes"][name], default=0.0)


def count(name: str) -> Read:
    """Return a reader of how often a fault noted a value."""
    return lambda outcome: float(len(outcome["notes"].get(name, ())))


def over_healthy(fault: str) -> Read:
    """Return a reader of the number of milliseconds a fault raised the client's p99."""

    def read(outcome: Outcome) -> float | None:
        before, during = _before_and_during(outcome, fault, "p99_ms")
        return None if before is None or during is None else max(during - before, 0.0)

    return read


def times_before(fault: str) -> Read:
    """Return a reader of the client's p95 during a fault, in multiples of that before it."""

    def read(outcome: Outcome) -> float | None:
        before, during = _before_and_during(outcome, fault, "p95_ms")
        return None if before is None or during is None else during / before

    return read


def _before_and_during(outcome: Outcome, fault: str, name: str) -> tuple[float | None, float | None]:
    return outcome["before"][CLIENT].get(name), fault_of(outcome, fault)["during"][CLIENT].get(name)


def waited_for_store(outcome: Outcome) -> float | None:
    """Read the longest time that an answer spent, or may have spent, on features while the store was down."""
    found = [outcome["during"][stream]["features_max_ms"] for stream in (CLIENT, RAW)]
    return max((ms for ms in found if ms is not None), default=None)


def more_files(outcome: Outcome) -> float | None:
    """Read how many more files the endpoint has open at the end than at the beginning."""
    before, after = outcome["notes"]["files"]
    return float(after - before)


def served(outcome: Outcome) -> float | None:
    """Read how many of the client's calls the endpoint itself answered in time, in per cent."""
    during = outcome["during"][CLIENT]
    lost = during["failed"] + during["late"] + during["from_client"]
    return 100 * (1 - lost / during["requests"]) if during["requests"] else None


def goodput(outcome: Outcome) -> float | None:
    """Read whole answers a second under overload, in per cent of the endpoint's capacity."""
    notes, during = outcome["notes"], outcome["during"]
    whole = sum(during[s]["requests"] - during[s]["failed"] - during[s]["degraded"] for s in (CLIENT, RAW))
    rate = whole / sum(row["seconds"] for row in outcome["faults"]) + (notes["good_per_s"] or 0.0)
    return 100 * rate / notes["capacity"] if notes["capacity"] else None


def asked_again(outcome: Outcome) -> float | None:
    """Read how many more answers the endpoint gave than were asked for by then, in per cent of these."""
    first, last = outcome["notes"]["answers"]
    asked = sum(outcome["all"][s]["requests"] - outcome["before"][s]["requests"] for s in (CLIENT, RAW))
    return max(100 * ((last - first) / asked - 1), 0.0) if asked else None


def computed_for_one(outcome: Outcome) -> float | None:
    """Read how many requests of the greedy one got a whole answer, in per cent."""
    notes = outcome["notes"]
    return 100 * notes["whole"] / notes["asked"] if notes["asked"] else None


def bundles(outcome: Outcome) -> float:
    """Read from how many bundles the answers came."""
    return float(len({one for stream in (CLIENT, RAW) for one in outcome["all"][stream]["bundles"]}))


def score_moved(outcome: Outcome) -> float | None:
    """Read how far a score of the client's answers is from its value before."""
    found: float = outcome["during"][CLIENT]["moved"]
    return found
