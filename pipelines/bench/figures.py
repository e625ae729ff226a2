"""A champion and a commit -> every result that the docs publish, all measured on one machine.

Each bench runs in a process of its own, through its command. A result is kept as long as commit, bundle and
processor stay the same, so that an interrupted run goes on where it ended.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.measurement import commit, processor
from feature_repo.errors import RecoError
from pipelines.live.up import reco
from pipelines.tables import table
from serving.release.champion import read_champion

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedBench:
    """One result file, the command that measures it, and its usual minutes on two idle cores."""

    name: str
    minutes: int
    command: str
    short: str  # words that prove that it works; their figures mean nothing


# The sizes below take 80 minutes; the commands' own defaults take longer.
PLAN = (
    PublishedBench("quality", 4, "bench quality", ""),
    PublishedBench("drift", 2, "bench drift", ""),
    PublishedBench("latency", 1, "bench latency", "--seconds 1"),
    PublishedBench("rerank", 3, "bench rerank", ""),
    PublishedBench("retrieval", 2, "bench retrieval --items 200000", "--items 2000"),
    PublishedBench("features", 9, "bench features --seconds 20", "--seconds 1 --kills 1"),
    PublishedBench("compression", 17, "bench compression", ""),
    PublishedBench("scale", 4, "bench scale --items 100000 --users 50000", "--items 2000 --users 1000"),
    PublishedBench("drills", 13, "drill all", "--short"),
    PublishedBench("release", 11, "drill release", "slow"),
    PublishedBench("load", 15, "bench load --endurance", "--quick"),
)
# An hour of tuning, and two of waiting for pages: measured only if they are named. They have no short form.
ONLY_BY_NAME = (
    PublishedBench("peers", 60, "bench peers", ""),
    PublishedBench("alerts", 104, "drill all --with-alerts", ""),
)


class FiguresIncomplete(RecoError):
    """A published result is missing: its bench failed."""


def plan_table(home: Path, out: Path) -> str:
    """Return the plan: each result with its usual minutes, and whether it is still to be measured."""
    left = {bench: "to do" for bench in PLAN} | {bench: "only by name" for bench in ONLY_BY_NAME}
    rows = [
        [bench.name, bench.minutes, "measured" if is_measured(home, out, bench) else state, bench.command]
        for bench, state in left.items()
    ]
    return table(["result", "minutes", "state", "command"], rows)


def measure_figures(home: Path, out: Path, names: Sequence[str] = (), short: bool = False) -> list[str]:
    """Measure the results that are missing; return the names of those that were measured now.

    Args:
        home: of the champion.
        out: of the results.
        names: of the results; none: those of PLAN.
        short: prove in seconds that each bench works.

    Raises:
        ValueError: there is no result of a name, or no short form of it.
        FiguresIncomplete: files differ from the commit, or a bench failed.
    """
    wanted = _chosen(names, short)
    out = out / "short" if short else out
    read_champion(home)
    at = commit()
    if at.endswith("+") and not short:
        raise FiguresIncomplete(
            f"files differ from commit {at[:-1]}: commit them, so that the figures can be repeated"
        )
    measured, left = [], []
    for bench in wanted:
        if is_measured(home, out, bench):
            continue
        log.info("%s: usually %d minutes", bench.name, bench.minutes)
        options = f"{bench.command} {bench.short if short else ''}".split()
        code = _end_of(reco("--home", str(home), *options, "--out", str(out)))
        if is_measured(home, out, bench):  # a drill that misses a figure ends with 1 and is a result
            measured.append(bench.name)
        else:
            left.append(f"{bench.name}: exit code {code}")
    if left:
        raise FiguresIncomplete(f"not measured: {'; '.join(left)}. The same command goes on from here")
    return measured


def _chosen(names: Sequence[str], short: bool) -> Sequence[PublishedBench]:
    existing = {bench.name: bench for bench in (*PLAN, *ONLY_BY_NAME)}
    if unknown := sorted(set(names) - existing.keys()):
        raise ValueError(f"no result {unknown[0]!r}: choose among {', '.join(existing)}")
    wanted = [bench for name, bench in existing.items() if name in names] or PLAN
    if short and (long := [bench.name for bench in wanted if bench in ONLY_BY_NAME]):
        raise ValueError(f"{long[0]!r} has no short form: leave out --short")
    return wanted


def _end_of(command: Sequence[str]) -> int:
    """Run a bench to its end and return its exit code; if this process is stopped, the bench is first.

    In a session of its own, so that one signal reaches it: a second would interrupt the end of its servers.
    """
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=sys.stderr, start_new_session=True
    ) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise


def is_measured(home: Path, out: Path, bench: PublishedBench) -> bool:
    """Return whether a result is there, of this commit, this processor and, if it has any, this bundle.

    A result with a drill that was broken off is incomplete.
    """
    file = out / f"{bench.name}.json"
    if not file.is_file():
        return False
    result: dict[str, Any] = json.loads(file.read_bytes())
    bundle_id = read_champion(home).bundle_id
    found = (result["commit"], result["machine"]["cpu"], result.get("bundle_id", bundle_id))
    complete = "busy" in result and not result.get("broken_off")
    return complete and found == (commit(), processor(), bundle_id)
