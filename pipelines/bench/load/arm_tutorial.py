"""A bundle -> the serving stack that tutorials build of it: the honest other side of the load report.

A KServe transformer asks a KServe predictor over REST and JSON; users, and in one form also the candidates'
items, are read through Feast's SDK; PyTorch runs eagerly in FP32; nothing is joined, kept or frozen, and both
servers log as KServe does. Catalogue, candidates, features and re-ranking are those of the bundle, so that
its lists are ours.

`python -m pipelines.bench.load.arm_tutorial JSON`, the JSON being the fields of `Tutorial`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from kserve import Model

from components.data.feast_store import feature_store, quiet_feast
from feature_repo.aggregates import no_events, unpack
from feature_repo.queries import Rows
from feature_repo.schema import ITEM, USER, model_inputs
from feature_repo.snapshots import HISTORY, ITEM_VIEW, USER_VIEW
from pipelines.bench.load.arm_variants import eager, serve_stock
from pipelines.bench.load.measured_server import started
from serving.release.bundle import load_bundle
from serving.schemas import DEFAULT_PROFILE, Request, parse_request
from serving.settings import Settings
from serving.stages.reranking import rerank
from serving.stages.retrieval import SOURCES, Candidates, build_query, retrieve

ITEM_FEATURES = [f"{ITEM_VIEW}:{feature.__name__}" for feature in ITEM]


@dataclass(frozen=True)
class Tutorial:
    """Which of the two servers to be, and of what."""

    bundle: str
    feast_home: str
    student: str
    items_from_feast: bool = True  # the candidates' features, too, not the user's row alone
    role: str = "transformer"  # or predictor


@dataclass(frozen=True)
class Turn:
    """One request between the two servers."""

    request: Request
    candidates: Candidates
    rows: list[dict[str, list[float]]]  # of each candidate, as JSON takes them
    stage_ms: dict[str, float]


class Transformer(Model):
    """Reads features, retrieves candidates, asks the predictor, sorts."""

    def __init__(self, tutorial: Tutorial, store_url: str) -> None:
        """Load all but the ranker."""
        super().__init__("checkout")
        self._bundle = load_bundle(Path(tutorial.bundle))
        self._profile = self._bundle.profiles[DEFAULT_PROFILE]
        self._items_from_feast = tutorial.items_from_feast
        with quiet_feast():
            self._feast = feature_store(Path(tutorial.feast_home), store_url)
        self.ready = True

    async def preprocess(self, payload: Mapping[str, Any], headers: dict[str, str] | None = None) -> Turn:
        """Read the user's row, retrieve candidates, compute their features."""
        return self.prepare(parse_request(payload["instances"][0], now=time.time(), default_id=""))

    def prepare(self, request: Request) -> Turn:
        """Do what `preprocess` does for a request that was checked."""
        began = time.perf_counter()
        query = build_query(self._bundle.statistics, request.basket, self._events(request), request.at)
        read = time.perf_counter()
        row = self._bundle.statistics.store_row.get(request.store_id or "")
        popular = None if row is None else self._bundle.statistics.store_popular[row]
        near = self._profile.tower.search([query], self._profile.quotas.tower)[0]
        candidates = retrieve(query, popular, self._profile.quotas, near)
        retrieved = time.perf_counter()
        dense, categorical = model_inputs(Rows(query, candidates.codes))
        if self._items_from_feast and len(dense):
            dense[:, len(USER) : len(USER) + len(ITEM)] = self._item_features(candidates.codes)
        rows = [
            {"dense": numbers, "categorical": codes}
            for numbers, codes in zip(dense.tolist(), categorical.tolist(), strict=True)
        ]
        features = read - began + time.perf_counter() - retrieved
        stage_ms = {"features": features * 1e3, "retrieval": (retrieved - read) * 1e3}
        return Turn(request, candidates, rows, stage_ms)

    async def predict(
        self,
        payload: Turn,
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> tuple[Turn, list[float]]:
        """Ask the predictor for the candidates' scores."""
        began = time.perf_counter()
        found = await super().predict({"instances": payload.rows}, headers, response_headers)
        payload.stage_ms["ranking"] = (time.perf_counter() - began) * 1e3
        return payload, found["predictions"]

    async def postprocess(
        self,
        result: tuple[Turn, list[float]],
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Sort and write the list."""
        return {"predictions": [self.finish(*result)]}

    def finish(self, turn: Turn, found: list[float]) -> dict[str, Any]:
        """Return the answer as plain JSON types."""
        began = time.perf_counter()
        statistics, codes = self._bundle.statistics, turn.candidates.codes
        scores = np.array(found, np.float32)
        types = statistics.categorical[codes, 0]
        worth = self._bundle.worth(codes, scores)
        rare = self._bundle.rarity_of(codes), self._bundle.novel
        rows = rerank(worth, types, turn.request.k, self._bundle.settings.type_penalty, *rare)
        items = [
            {
                "item_id": str(statistics.item_ids[codes[row]]),
                "score": round(float(scores[row]), 6),
                "source": SOURCES[turn.candidates.source[row]],
            }
            for row in rows.tolist()
        ]
        stage_ms = {**turn.stage_ms, "reranking": (time.perf_counter() - began) * 1e3}
        stage_ms["total"] = sum(stage_ms.values())
        return {
            "request_id": turn.request.request_id,
            "items": items,
            "bundle_id": self._bundle.bundle_id,
            "degraded": False,
            "degraded_reason": None,
            "stage_ms": stage_ms,
        }

    def _events(self, request: Request) -> Any:
        if request.user_id is None:
            return no_events()
        asked = [{"user_id": request.user_id}]
        history = self._feast.get_online_features([f"{USER_VIEW}:{HISTORY}"], asked).to_dict()[HISTORY][0]
        return unpack(history) if history else no_events()

    def _item_features(self, codes: np.ndarray) -> np.ndarray:
        """Return the items' features out of Feast, (n, len(ITEM)) float32."""
        asked = [{"item_id": item} for item in self._bundle.statistics.item_ids[codes].tolist()]
        found = self._feast.get_online_features(ITEM_FEATURES, asked).to_dict()
        return np.array([found[feature.__name__] for feature in ITEM], np.float32).T


class Predictor(Model):
    """The student in PyTorch, row by row as JSON brings them."""

    def __init__(self, student: Path) -> None:
        """Load the weights."""
        super().__init__("checkout")
        self._rank = eager(student)
        self.ready = True

    async def predict(
        self,
        payload: Mapping[str, Any],
        headers: dict[str, str] | None = None,
        response_headers: dict[str, str] | None = None,
    ) -> dict[str, list[float]]:
        """Return the score of each instance."""
        return {"predictions": self.score(payload["instances"])}

    def score(self, instances: Sequence[Mapping[str, Any]]) -> list[float]:
        """Score rows as JSON brought them."""
        if not instances:
            return []
        dense = np.array([instance["dense"] for instance in instances], np.float32)
        categorical = np.array([instance["categorical"] for instance in instances], np.int64)
        scores: list[float] = self._rank(dense, categorical).tolist()
        return scores


def serve_tutorial(tutorial: Tutorial, settings: Settings) -> None:
    """Serve until SIGTERM; the transformer starts its predictor and ends it."""
    if tutorial.role == "predictor":
        serve_stock([Predictor(Path(tutorial.student))])
        return
    own = json.dumps(asdict(replace(tutorial, role="predictor")))
    command = [sys.executable, "-m", "pipelines.bench.load.arm_tutorial", own]
    with (
        tempfile.TemporaryDirectory() as scratch,
        started(command, settings.to_env(), Path(scratch) / "predictor.log") as predictor,
    ):
        address = predictor.ready["http"].removeprefix("http://")
        serve_stock([Transformer(tutorial, settings.online_store_url)], address)


if __name__ == "__main__":
    serve_tutorial(Tutorial(**json.loads(sys.argv[1])), Settings.from_env())
