"""The DAG of a pipeline -> which step starts next, and with how many threads.

A step starts when all it needs is done, and a process and its memory are free. A step that measures time runs
alone. Of several, the first in the order of the DAG starts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from components.measurement import cores
from pipelines.run.graph import Spec, downstream
from pipelines.run.runs import StepState

# They choose, or decide, by milliseconds: another step on the other core would be in the figures.
TIMED = frozenset({"build-index", "compile-ranker", "promote-bundle"})
MEMORY_MIB = 5 * 1024  # of all steps at once; with this process, below 6 GiB
FIRST_MIB = 2_048  # assumed for a step that no finished run has measured


class StepOrder:
    """The steps of one run that are to be executed."""

    def __init__(
        self, spec: Spec, todo: Sequence[str], usual: Mapping[str, StepState], jobs: int = 0
    ) -> None:
        tasks = spec["root"]["dag"]["tasks"]
        self._usual, self._todo = usual, todo
        self._jobs = jobs or cores()
        self._needs = {name: set(tasks[name].get("dependentTasks", ())) & set(todo) for name in todo}
        after = {name: downstream(spec, name) for name in tasks}
        self._beside = {
            name: {other for other in tasks if not {name, other} & TIMED and other != name}
            - after[name]
            - {other for other in tasks if name in after[other]}
            for name in todo
        }

    def _memory_mib(self, name: str) -> int:
        return (self._usual[name].memory_mib if name in self._usual else 0) or FIRST_MIB

    def next(self, running: Collection[str], done: Collection[str]) -> str | None:
        """Return the step to start now; None: wait for one that runs, or all are done."""
        ready = (
            name
            for name in self._todo
            if name not in running
            and name not in done
            and self._needs[name] <= set(done)
            and not (running and name in TIMED)
        )
        if (first := next(ready, None)) is None or len(running) >= self._jobs or TIMED & set(running):
            return None
        memory = sum(map(self._memory_mib, running)) + self._memory_mib(first)
        return None if running and memory > MEMORY_MIB else first

    def threads(self, name: str) -> int:
        """Return the threads of a step: its share of the cores if another may ever run beside it.

        The DAG alone decides, not the moment: the same run gives the same sums of floats again.
        """
        return max(1, cores() // min(self._jobs, 1 + len(self._beside[name])))
