"""What to change -> our endpoint without one of its parts, on its own port: what that part is worth.

`python -m pipelines.load_arms_variants JSON`, the JSON being the fields of `Variant`. What stays is the very
code that `serving.server` runs.
"""

from __future__ import annotations

import gc
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import Body, FastAPI, Response

from components.feast_store import feature_store, quiet_feast
from feature_repo.schema import DENSE_NAMES
from feature_repo.snapshots import HISTORY, USER_VIEW
from pipelines.load_arms_null import say_ready, serve_app
from serving.fact_store import open_fact_store
from serving.online_features import OnlineStore, UserRow, open_store
from serving.prediction_log import PredictionLog
from serving.recommender import Recommender, open_recommender
from serving.schemas import parse_request
from serving.server import SWITCH_S
from serving.settings import Settings

DOORS = ("endpoint", "kserve", "fastapi")


@dataclass(frozen=True)
class Variant:
    """The endpoint, but for what is said here."""

    bundle: str
    door: str = "endpoint"  # one of DOORS: ours, KServe's stock server, plain FastAPI
    feast_home: str = ""  # read users' rows through Feast's SDK, whose registry is there
    student: str = ""  # rank with this one's torch weights, eager, FP32
    freezes: bool = True  # what was loaded is kept out of garbage collections
    joins: bool = True  # requests may share a ranker call where that pays

    def __post_init__(self) -> None:
        """Refuse a door that nobody built."""
        if self.door not in DOORS:
            raise ValueError(f"no door {self.door!r}: choose one of {', '.join(DOORS)}")


class FeastRows:
    """An online store behind Feast's SDK."""

    def __init__(self, home: Path, url: str) -> None:
        """Open the store; the first read reads the registry."""
        with quiet_feast():
            self._feast = feature_store(home, url)

    def read(self, user_id: str) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know."""
        found = self._feast.get_online_features([f"{USER_VIEW}:{HISTORY}"], [{"user_id": user_id}])
        history = found.to_dict()[HISTORY][0]
        # The SDK tells no time of the row: it counts as fresh.
        return UserRow(history, time.time()) if history else None

    def close(self) -> None:
        """Do nothing: Feast keeps its connection."""


def serve_variant(variant: Variant, settings: Settings) -> None:
    """Serve until SIGTERM."""
    sys.setswitchinterval(SWITCH_S)
    if not variant.freezes:
        gc.freeze = lambda: None
    store: OnlineStore = open_store(settings.online_store_url)
    if variant.feast_home:
        store = FeastRows(Path(variant.feast_home), settings.online_store_url)
    log = PredictionLog(settings.prediction_log_dir, DENSE_NAMES, segment_s=settings.log_segment_s)
    facts = open_fact_store(settings.fact_store_url)
    recommender = open_recommender(Path(variant.bundle), store, log, settings.availability_path, facts)
    if variant.student:
        recommender.rank = eager(Path(variant.student))  # type: ignore[method-assign, assignment]
    try:
        if variant.door == "fastapi":
            serve_app(fastapi_app(recommender))
        else:
            _serve_kserve(variant, recommender, settings)
    finally:
        log.close()
        recommender.facts.close()


def _serve_kserve(variant: Variant, recommender: Recommender, settings: Settings) -> None:
    from serving.checkout import Checkout, Rank, rank_here, rank_together
    from serving.endpoint import Endpoint
    from serving.predictor import Predictor
    from serving.server import RANKING_SHARE
    from serving.transformer import Transformer

    rank: Rank = rank_here
    if variant.joins and not variant.student:
        goal_ms = RANKING_SHARE * settings.deadline_ms
        rank = rank_together(goal_ms, settings.batch_max_wait_ms, settings.batch_max_rows)
    checkout = Checkout(recommender, settings.deadline_ms, rank)
    if variant.door == "kserve":
        serve_stock([Transformer(checkout), Predictor(checkout)])
    else:
        # As `serving.server` has it: KServe logs each request, and each mistake of a client.
        logging.getLogger("kserve").setLevel(logging.CRITICAL)
        Endpoint(settings, _listening()).start(checkout, say_ready)


def _listening() -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", 0))
    return bound


def serve_stock(models: list[Any], predictor: str = "") -> None:
    """Serve models in KServe's own server as it comes, with its logs, until SIGTERM.

    Args:
        models: ready to answer.
        predictor: address of the predictor that a transformer asks over REST V1, if there is one.
    """
    from kserve import ModelServer
    from kserve.predictor_config import PredictorConfig

    http, grpc = free_port(), free_port()
    config = PredictorConfig(predictor) if predictor else None
    server = ModelServer(http_port=http, grpc_port=grpc, predictor_config=config)
    addresses = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
    threading.Thread(target=_announce, args=(http, *addresses), daemon=True).start()
    server.start(models)


def _announce(port: int, http: str, grpc: str) -> None:
    """Say that a server is ready once it takes connections."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            say_ready(http, grpc)
            return


def free_port() -> int:
    """Return a port that nobody listens on now: KServe's server cannot choose one itself."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def fastapi_app(recommender: Recommender) -> Any:
    """Return what a good engineer writes in an hour: FastAPI, its own checks, our recommender behind."""
    app = FastAPI()

    @app.post("/v1/models/checkout:predict")
    async def predict(instances: Annotated[list[dict[str, Any]], Body(embed=True)]) -> Response:
        now = time.time()
        asked = [parse_request(raw, now=now, default_id="") for raw in instances]
        answers = [recommender.recommend(request).to_dict() for request in asked]
        return Response(orjson.dumps({"predictions": answers}), media_type="application/json")

    gc.collect()
    gc.freeze()
    return app


def eager(student: Path) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return what scores rows with a ranker's torch weights, in FP32 and one thread, nothing compiled.

    Raises:
        ContractViolation: there is no ranker of torch's there.
    """
    import torch

    from components.ranker_artefact import read_ranker
    from components.train_ranker import load_ranker

    model = load_ranker(read_ranker(student))
    torch.set_num_threads(1)  # a second one costs more to wake than it saves: 50 ms in the tail

    def rank(dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            scores: np.ndarray = model(torch.from_numpy(dense), torch.from_numpy(categorical)).numpy()
        return scores

    return rank


if __name__ == "__main__":
    serve_variant(Variant(**json.loads(sys.argv[1])), Settings.from_env())
