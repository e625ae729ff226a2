"""The outcome of a drill -> its figures: those of every drill, and those of single drills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipelines.bench.load.goals import Goal, Read, part_of
from pipelines.drills.outcome import CLIENT, RAW

RECOVERY_S = 3.0
STORE_WAIT_MS, STORE_MS = 15.0, 6.0  # of one request, and of the p99 over the healthy one
TOLD_S = 1.0
PAGE_S, RESOLVED_S = 60.0, 300.0  # from a fault to its page, from the repair to its end

Outcome = Mapping[str, Any]


def none(name: str, read: Read) -> Goal:
    """Return the goal that something never happens."""
    return Goal(name, "<=", 0, "", read)


def some(name: str, read: Read) -> Goal:
    """Return the goal that something happens: a fault without its effect misses it."""
    return Goal(name, ">=", 1, "", read)


def store_goals(*names: str) -> Iterator[Goal]:
    """Yield the goals while the store does not answer in time because of the faults `names`."""
    yield Goal("longest wait of a request for the store", "<=", STORE_WAIT_MS, " ms", waited_for_store)
    for name in names:
        yield Goal(f"p99 over the healthy one, {name}", "<=", STORE_MS, " ms", over_healthy(name))
        yield told_goal(name)


def told_goal(fault: str, most_s: float = TOLD_S) -> Goal:
    """Return the goal that soon after a fault every answer says that it is less."""
    return Goal(f"until every answer says so, {fault}", "<=", most_s, " s", of_fault(fault, "told_s"))


def wrong_pages(outcome: Outcome) -> float:
    """Read how many alerts paged that should not."""
    return float(sum(len(page["wrong"]) for page in outcome["pages"]))


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


def total(streams: Sequence[str], name: str) -> Read:
    """Return a reader of a count of some streams together, from first to last."""
    return lambda outcome: float(sum(outcome["all"][stream][name] for stream in streams))


def told(phase: str, *reasons: str) -> Read:
    """Return a reader of the number of degraded answers of both streams that say one of these reasons."""
    return lambda outcome: float(
        sum(outcome[phase][stream]["reasons"].get(one, 0) for stream in (CLIENT, RAW) for one in reasons)
    )


def share(name: str, fault: str = "", streams: Sequence[str] = (CLIENT, RAW)) -> Read:
    """Return a reader of a count during a fault, or during all, in per cent of the streams' requests."""

    def read(outcome: Outcome) -> float | None:
        during = (fault_of(outcome, fault) if fault else outcome)["during"]
        counted, asked = (sum(during[stream][key] for stream in streams) for key in (name, "requests"))
        return _percent(counted, asked)

    return read


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


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


def count(name: str) -> Read:
    """Return a reader of how often a fault noted a value."""
    return lambda outcome: float(len(outcome["notes"].get(name, ())))


def over_healthy(fault: str) -> Read:
    """Return a reader of the number of milliseconds a fault raised the client's p99."""
    return _against_before(fault, "p99_ms", lambda before, during: max(during - before, 0.0))


def times_before(fault: str) -> Read:
    """Return a reader of the client's p95 during a fault, in multiples of that before it."""
    return _against_before(fault, "p95_ms", lambda before, during: during / before)


def _against_before(fault: str, name: str, compare: Callable[[float, float], float]) -> Read:
    def read(outcome: Outcome) -> float | None:
        before = outcome["before"][CLIENT].get(name)
        during = fault_of(outcome, fault)["during"][CLIENT].get(name)
        return None if before is None or during is None else compare(before, during)

    return read


def waited_for_store(outcome: Outcome) -> float | None:
    """Read the longest time that an answer spent, or may have spent, on features while the store was down."""
    found = [outcome["during"][stream]["features_max_ms"] for stream in (CLIENT, RAW)]
    return max((ms for ms in found if ms is not None), default=None)


def served(outcome: Outcome) -> float | None:
    """Read how many of the client's calls the endpoint itself answered in time, in per cent."""
    during = outcome["during"][CLIENT]
    lost = during["failed"] + during["late"] + during["from_client"]
    return _percent(during["requests"] - lost, during["requests"])


def goodput(outcome: Outcome) -> float | None:
    """Read whole answers a second under overload, in per cent of the endpoint's capacity."""
    notes, during = outcome["notes"], outcome["during"]
    whole = sum(during[s]["requests"] - during[s]["failed"] - during[s]["degraded"] for s in (CLIENT, RAW))
    rate = whole / sum(row["seconds"] for row in outcome["faults"]) + (notes["good_per_s"] or 0.0)
    return _percent(rate, notes["capacity"])


def asked_again(outcome: Outcome) -> float | None:
    """Read how many more answers the endpoint gave than were asked for by then, in per cent of these."""
    asked = sum(outcome["all"][s]["requests"] - outcome["before"][s]["requests"] for s in (CLIENT, RAW))
    return _percent(max(outcome["notes"]["more_answers"] - asked, 0.0), asked)


def computed_for_one(outcome: Outcome) -> float | None:
    """Read how many requests of the greedy one got a whole answer, in per cent."""
    notes = outcome["notes"]
    return _percent(notes["whole"], notes["asked"])


def bundles(outcome: Outcome) -> float:
    """Read from how many bundles the answers came."""
    return float(len({one for stream in (CLIENT, RAW) for one in outcome["all"][stream]["bundles"]}))
