"""A ranker and held-out lists -> how those that are made from it are certified and written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.data.examples import RankerExamples
from components.ranker.certificate import certify
from components.ranker.ranker_artefact import GRAPH, Cost, RankerArtefact, finish_ranker, graph_id
from components.ranker.scoring import OnnxRanker, measure


def certify_child(
    step: str,
    tolerance: str,
    place: Path,
    parents: Sequence[RankerArtefact],
    parent_scores: np.ndarray,
    held_out: RankerExamples,
    **measured: Any,
) -> dict[str, Any]:
    """Return the certificate of the graph in `place`; bytes and milliseconds of both sides are measured.

    Those of several parents, an ensemble, are their sums; its scores are its own. See `certify`.
    """
    graph = place / GRAPH
    child = OnnxRanker(graph)
    latency, *theirs = measure([child, *(OnnxRanker(parent.graph) for parent in parents)], held_out)
    return certify(
        step,
        tolerance,
        (graph_id(graph), child.scores(held_out)),
        [parent.id for parent in parents],
        parent_scores,
        held_out,
        **measured,
        bytes=graph.stat().st_size,
        latency_ms=latency,
        parent_bytes=sum(parent.graph.stat().st_size for parent in parents),
        parent_latency_ms={
            size: {name: round(sum(one[size][name] for one in theirs), 4) for name in latency[size]}
            for size in latency
        },
    )


class Parent:
    """What children are held against: the scores of a ranker on the held-out lists, computed once."""

    def __init__(self, artefact: RankerArtefact, held_out: RankerExamples) -> None:
        self.artefact, self.held_out = artefact, held_out
        self.scores = OnnxRanker(artefact.graph).scores(held_out)

    def certify(self, step: str, tolerance: str, place: Path, **measured: Any) -> dict[str, Any]:
        """Return the certificate of a child's graph in `place`, see `certify_child`."""
        return certify_child(step, tolerance, place, [self.artefact], self.scores, self.held_out, **measured)

    def finish(
        self, place: Path, certificate: dict[str, Any], cost: Cost, params: dict[str, Any], **fields: Any
    ) -> None:
        """Write a child's certificates and manifest: the parent's, and the changes of the step.

        `place` holds the child's graph; the cost is still running; params are the step's own, under its name.
        """
        known = {name: value for name, value in self.artefact.manifest.items() if name not in ("kind", "id")}
        changed = {
            "step": certificate["step"],
            "parents": [self.artefact.id],
            "params": {**known["params"], **params},
            "cost": cost.spent(),
            **fields,
        }
        finish_ranker(place, [*self.artefact.certificates, certificate], **{**known, **changed})
