"""A change -> our endpoint with one other part, on its own port: the worth of that part.

`python -m pipelines.bench.load.arm_variants JSON`, the JSON being the fields of `ArmVariant`.
`serving.server` itself runs, with another part in its `Wiring`: logs, metrics and all other costs are the
same. Plain FastAPI is no variant of ours, but another stack.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import uvicorn
from fastapi import Body, FastAPI, Response

from components.data.feast_store import feature_store, quiet_feast
from feature_repo.schema import DENSE_NAMES
from feature_repo.snapshots import HISTORY, USER_VIEW
from pipelines.live.ports import free_port
from serving import server
from serving.answer.recommender import Recommender, open_bundle, open_recommender
from serving.checkout.checkout import Checkout
from serving.prediction_log import PredictionLog
from serving.release.bundle import Bundle, open_session
from serving.schemas import parse_request
from serving.settings import Settings
from serving.shop.fact_store import open_fact_store
from serving.stores.online_features import LocalStore, OnlineStore, UserRow, open_store
from serving.wiring import SWITCH_S, Wiring, wire

SERVERS = ("endpoint", "kserve", "fastapi")


@dataclass(frozen=True)
class ArmVariant:
    """The endpoint with these changes."""

    bundle: str
    server: str = "endpoint"  # one of SERVERS: ours, KServe's stock server, plain FastAPI
    feast_home: str = ""  # Feast's registry: users' rows are read through its SDK
    weights: str = ""  # a ranker whose torch weights rank, eager, FP32
    graph: str = ""  # a ranker whose graph ranks as exported

    def __post_init__(self) -> None:
        """Refuse an unknown server."""
        if self.server not in SERVERS:
            raise ValueError(f"no server {self.server!r}: choose one of {', '.join(SERVERS)}")
        if self.weights and self.graph:
            raise ValueError("a variant ranks with weights or with a graph: give one of them")


class FeastRows(LocalStore):
    """An online store behind Feast's SDK."""

    def __init__(self, home: Path, url: str, plain: OnlineStore) -> None:
        """Open the store; the first read reads the registry; `plain` is closed with it."""
        self._plain = plain
        with quiet_feast():
            self._feast = feature_store(home, url)

    def read(self, user_id: str, deadline: float = math.inf) -> UserRow | None:
        """Return the user's row, or None for a user the store does not know; Feast keeps no deadline."""
        rows = self._feast.get_online_features([f"{USER_VIEW}:{HISTORY}"], [{"user_id": user_id}])
        history = rows.to_dict()[HISTORY][0]
        # The SDK returns no time of the row: it counts as fresh.
        return UserRow(history, time.time()) if history else None

    def close(self) -> None:
        """Close the store that reads the heartbeat; Feast keeps its connection."""
        self._plain.close()


class EagerSession:
    """A ranker's torch weights in the place of the bundle's graph."""

    def __init__(self, ranker: Path) -> None:
        """Load the weights."""
        self._rank = eager(ranker)

    def run(self, outputs: Sequence[str], inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Score rows as an `ort.InferenceSession` does."""
        return [self._rank(inputs["dense"], inputs["categorical"])]


class StockServer:
    """KServe's own server in the place of `serving.api.endpoint.Endpoint`; it follows no home."""

    def __init__(self, settings: Settings, http_socket: socket.socket) -> None:
        """Close the socket: KServe's server binds its own."""
        http_socket.close()

    def start(self, checkout: Checkout, on_ready: Callable[[str, str], None], at_end: object) -> None:
        """Serve until SIGTERM, with KServe's logs as they come; here the ranker has no channel to close."""
        from serving.api.predictor import Predictor
        from serving.api.transformer import Transformer

        serve_stock([Transformer(checkout), Predictor(checkout)], on_ready)

    def on_loop(self, act: Callable[[], None]) -> None:
        """Refuse: a bench never swaps the bundle."""
        raise RuntimeError("KServe's own server swaps no bundle")


def wire_variant(variant: ArmVariant, settings: Settings) -> Wiring:
    """Return the parts that ship, but for the one that the variant changes."""
    wiring = replace(wire(settings), open_bundle=opener(variant))
    if variant.server == "kserve":
        wiring = replace(wiring, door=StockServer)
    if variant.feast_home:
        rows = FeastRows(Path(variant.feast_home), settings.online_store_url, wiring.store)
        wiring = replace(wiring, store=rows)
    return wiring


def opener(variant: ArmVariant) -> Callable[[Path], Bundle]:
    """Return the function that opens the bundle: `open_bundle`, or the same with the variant's ranker."""
    if not (variant.weights or variant.graph):
        return open_bundle

    def open_with_ranker(path: Path) -> Bundle:
        session: Any = (
            EagerSession(Path(variant.weights))
            if variant.weights
            else open_session(Path(variant.graph) / "ranker.onnx")
        )
        return replace(open_bundle(path), ranker=session)  # the golden requests ask the bundle's own ranker

    return open_with_ranker


def serve_variant(variant: ArmVariant) -> int:
    """Serve until SIGTERM; return the exit code of the process."""
    if variant.server == "fastapi":
        serve_fastapi(variant, Settings.from_env())
        return 0
    return server.main(["--bundle", variant.bundle], partial(wire_variant, variant))


def serve_fastapi(variant: ArmVariant, settings: Settings) -> None:
    """Serve the recommender, with the variant's ranker, behind FastAPI until SIGTERM."""
    sys.setswitchinterval(SWITCH_S)
    log = PredictionLog(settings.prediction_log_dir, DENSE_NAMES, segment_s=settings.log_segment_s)
    facts = open_fact_store(settings.fact_store_url)
    store = open_store(settings.online_store_url)
    recommender = open_recommender(Path(variant.bundle), store, log, facts, open_bundle=opener(variant))
    try:
        serve_app(fastapi_app(recommender))
    finally:
        log.close()
        recommender.facts.close()


def serve_app(app: Any) -> None:
    """Serve an ASGI application on a port that the system chooses, until SIGTERM; say when it is ready."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off")
    server = uvicorn.Server(config)

    async def serve() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        ready = {"event": "ready", "http": f"http://127.0.0.1:{listening.getsockname()[1]}", "grpc": ""}
        sys.stderr.write(json.dumps(ready) + "\n")
        sys.stderr.flush()
        await serving

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())


def serve_stock(models: list[Any], on_ready: Callable[[str, str], None]) -> None:
    """Serve models in KServe's own server as it comes, with its logs, until SIGTERM.

    Args:
        models: ready to answer.
        on_ready: called with the HTTP and the gRPC address once it takes connections.
    """
    from kserve import ModelServer

    http, grpc = free_port(), free_port()  # KServe's server cannot choose them itself
    server = ModelServer(http_port=http, grpc_port=grpc)
    addresses = f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"
    threading.Thread(target=_announce, args=(http, addresses, on_ready), daemon=True).start()
    server.start(models)


def _announce(port: int, addresses: tuple[str, str], on_ready: Callable[[str, str], None]) -> None:
    """Say that a server is ready once it takes connections."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            on_ready(*addresses)
            return


def fastapi_app(recommender: Recommender) -> Any:
    """Return the application of an hour's work: FastAPI, its checks, our recommender behind."""
    app = FastAPI()

    @app.post("/v1/models/checkout:predict")
    async def predict(instances: Annotated[list[dict[str, Any]], Body(embed=True)]) -> Response:
        now = time.time()
        requests = [parse_request(raw, now=now, default_id="") for raw in instances]
        answers = [recommender.recommend(request).to_dict() for request in requests]
        return Response(orjson.dumps({"predictions": answers}), media_type="application/json")

    gc.collect()
    gc.freeze()
    return app


def eager(ranker: Path) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that scores rows with a ranker's torch weights: FP32, one thread, not compiled.

    Raises:
        ContractViolation: the folder holds no ranker with torch weights.
    """
    import torch

    from components.ranker.ranker_artefact import read_ranker
    from components.ranker.train_ranker import load_ranker

    model = load_ranker(read_ranker(ranker))
    torch.set_num_threads(1)  # a second one costs more to wake than it saves: 50 ms in the tail

    def rank(dense: np.ndarray, categorical: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            scores: np.ndarray = model(torch.from_numpy(dense), torch.from_numpy(categorical)).numpy()
        return scores

    return rank


if __name__ == "__main__":
    sys.exit(serve_variant(ArmVariant(**json.loads(sys.argv[1]))))
