"""A Redis that freezes under load -> how long requests waited for features, before, while and after."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from pipelines.bench.report import percentiles
from serving.errors import FeaturesUnavailable
from serving.stores.online_features import GuardedStore
from serving.stores.redis_store import TIMEOUT_MS, RedisStore


def frozen_under_load(
    url: str,
    pid: int,
    *,
    reads_per_s: float = 200.0,
    healthy_s: float = 2.0,
    frozen_s: float = 3.0,
    recovered_s: float = 3.0,
    users: int = 1_000,
) -> dict[str, Any]:
    """Read users' rows at a constant rate, stop the server in the middle (SIGSTOP), and let it go on.

    Args:
        url: of the Redis; its content does not matter.
        pid: its process, on this machine; it always runs on when this returns.
        reads_per_s: a read that comes due while another waits is made late, not left out.
        healthy_s: before the freeze, in seconds.
        frozen_s: the freeze itself.
        recovered_s: after it.
        users: different ones that are asked for.

    Returns:
        For each phase reads, answered, unavailable, failures (any other exception), largest and 99th
        percentile of the wait in milliseconds; `open_ms` from the freeze until reads no longer ask the
        server, `close_ms` from its end until they do again, None where that did not happen.
    """
    store = GuardedStore(RedisStore(url))
    phases: dict[str, list[tuple[float, str]]] = {"healthy": [], "frozen": [], "recovered": []}
    ends = np.cumsum([healthy_s, frozen_s, recovered_s]).tolist()
    turned: dict[str, float] = {}
    try:
        store.read("warm-up")
        began = time.perf_counter()
        with _frozen(pid, began + ends[0], began + ends[1], turned):
            for number in range(int(ends[-1] * reads_per_s)):
                due = began + number / reads_per_s
                time.sleep(max(due - time.perf_counter(), 0))
                asked = time.perf_counter()
                recovered = "thawed" in turned
                outcome = _outcome(store, f"user {number % users}")
                answered = time.perf_counter()
                # A read under way when the server froze, or went on, belongs to the freeze.
                phase = "recovered" if recovered else "frozen" if "frozen" in turned else "healthy"
                phases[phase].append(((answered - asked) * 1e3, outcome))
                if store.is_open and phase == "frozen":
                    turned.setdefault("opened", answered)
                if outcome == "answered" and phase == "recovered":
                    turned.setdefault("closed", answered)
    finally:
        store.close()
    return {
        "reads_per_s": reads_per_s,
        "timeout_ms": TIMEOUT_MS,
        **{name: _summary(waits) for name, waits in phases.items()},
        "open_ms": _between(turned, "frozen", "opened"),
        "close_ms": _between(turned, "thawed", "closed"),
    }


def _outcome(store: GuardedStore, user_id: str) -> str:
    try:
        store.read(user_id)
    except FeaturesUnavailable:
        return "unavailable"
    except Exception:  # noqa: BLE001 - whatever a request would fail with is counted here
        return "failures"
    return "answered"


def _summary(waits: list[tuple[float, str]]) -> dict[str, float | None]:
    took = percentiles([ms for ms, _ in waits])
    outcomes = [outcome for _, outcome in waits]
    return {
        "reads": len(waits),
        **{name: outcomes.count(name) for name in ("answered", "unavailable", "failures")},
        "max_ms": took["max"],
        "p99_ms": took["p99"],
    }


def _between(turned: dict[str, float], start: str, end: str) -> float | None:
    return round((turned[end] - turned[start]) * 1e3, 1) if end in turned else None


@contextlib.contextmanager
def _frozen(pid: int, since: float, until: float, turned: dict[str, float]) -> Iterator[None]:
    """Stop and continue a process at two moments, from a thread of its own; note when that was done."""
    over = threading.Event()

    def turn() -> None:
        for at, name, order in ((since, "frozen", signal.SIGSTOP), (until, "thawed", signal.SIGCONT)):
            if over.wait(max(at - time.perf_counter(), 0)):
                return
            os.kill(pid, order)
            turned[name] = time.perf_counter()

    turning = threading.Thread(target=turn, name="freeze", daemon=True)
    turning.start()
    try:
        yield
    finally:
        over.set()
        turning.join()
        os.kill(pid, signal.SIGCONT)
