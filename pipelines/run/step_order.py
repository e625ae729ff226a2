"""The DAG of a pipeline -> which step starts next, and with how many threads.

A step starts when all it needs is done and fewer than `--jobs` run. A step that measures time runs alone. Of
several, the first in the order of the DAG starts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from components.measurement import cores
from pipelines.run.graph import Spec, downstream

# They choose, or decide, by milliseconds: another step on the other core would be in the figures.
TIMED = frozenset({"build-index", "compile-ranker", "promote-bundle"})
USUAL_JOBS = 2  # on Complete Journey two steps and this process stay below 6 GiB


class StepOrder:
    """The steps of one run that are to be executed."""

    def __init__(self, spec: Spec, todo: Sequence[str], jobs: int = 0) -> None:
        """Take the pipeline, the steps to execute in the order of the DAG, and how many may run at once."""
        tasks = spec["root"]["dag"]["tasks"]
        self._todo, self._jobs = todo, jobs or min(cores(), USUAL_JOBS)
        self._needs = {name: set(tasks[name].get("dependentTasks", ())) & set(todo) for name in todo}
        after = {name: downstream(spec, name) for name in tasks}
        self._beside = {
            name: {other for other in tasks if not {name, other} & TIMED and other != name}
            - after[name]
            - {other for other in tasks if name in after[other]}
            for name in todo
        }

    def next(self, running: Collection[str], done: Collection[str]) -> str | None:
        """Return the step to start now; None: wait for one that runs, or all are done."""
        if len(running) >= self._jobs or TIMED & set(running):
            return None
        ready = (
            name
            for name in self._todo
            if name not in running
            and name not in done
            and self._needs[name] <= set(done)
            and not (running and name in TIMED)
        )
        return next(ready, None)

    def threads(self, name: str) -> int:
        """Return the threads of a step: its share of the cores if another may ever run beside it.

        The DAG alone decides, not the moment: the same run gives the same sums of floats again.
        """
        return max(1, cores() // min(self._jobs, 1 + len(self._beside[name])))
