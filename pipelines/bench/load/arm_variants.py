"""A kind of server and a bundle -> our endpoint with one other part, on its own port.

`python -m pipelines.bench.load.arm_variants KIND BUNDLE [RANKER]`; KIND is `kserve`, `graph` or `fastapi`.
`serving.server` itself runs, with another part in its `Wiring`: logs, metrics and all other costs are the
same. Plain FastAPI is no variant of ours, but another stack.
"""

from __future__ import annotations

import contextlib
import gc
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import uvicorn
from fastapi import Body, FastAPI, Response

from feature_repo.schema import DENSE_NAMES
from pipelines.live.ports import free_port
from serving import server
from serving.answer.recommender import Recommender, open_bundle, open_recommender
from serving.checkout.checkout import Checkout
from serving.prediction_log import PredictionLog
from serving.release.bundle import Bundle, open_session
from serving.schemas import parse_request
from serving.settings import Settings
from serving.shop.fact_store import open_fact_store
from serving.stores.online_features import open_store
from serving.wiring import SWITCH_S, Wiring, wire


class EagerSession:
    """A ranker's torch weights in the place of the bundle's graph: FP32, one thread, not compiled."""

    def __init__(self, ranker: Path) -> None:
        """Load the weights.

        Raises:
            ContractViolation: the folder holds no ranker with torch weights.
        """
        import torch

        from components.ranker.ranker_artefact import read_ranker
        from components.ranker.train_ranker import load_ranker

        self._torch, self._model = torch, load_ranker(read_ranker(ranker))
        torch.set_num_threads(1)  # a second one costs more to wake than it saves: 50 ms in the tail

    def run(self, outputs: Sequence[str], inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Score rows as an `ort.InferenceSession` does."""
        with self._torch.inference_mode():
            rows = (self._torch.from_numpy(inputs[name]) for name in ("dense", "categorical"))
            return [self._model(*rows).numpy()]


class StockServer:
    """KServe's own server in the place of `serving.api.endpoint.Endpoint`; it follows no home."""

    def __init__(self, settings: Settings, http_socket: socket.socket) -> None:
        """Close the socket: KServe's server binds its own."""
        http_socket.close()

    def start(self, checkout: Checkout, on_ready: Callable[[str, str], None], at_end: object) -> None:
        """Serve until SIGTERM, with KServe's logs as they come; here the ranker has no channel to close."""
        from kserve import ModelServer

        from serving.api.predictor import Predictor
        from serving.api.transformer import Transformer

        http, grpc = free_port(), free_port()  # KServe's server cannot choose them itself
        _announce(http, partial(on_ready, f"http://127.0.0.1:{http}", f"127.0.0.1:{grpc}"))
        ModelServer(http_port=http, grpc_port=grpc).start([Transformer(checkout), Predictor(checkout)])

    def on_loop(self, act: Callable[[], None]) -> None:
        """Refuse: a bench never swaps the bundle."""
        raise RuntimeError("KServe's own server swaps no bundle")


def wire_kserve(settings: Settings) -> Wiring:
    """Return the parts that ship, behind KServe's own server."""
    return replace(wire(settings), door=StockServer)


def wire_graph(ranker: Path, settings: Settings) -> Wiring:
    """Return the parts that ship, with a ranker's graph as exported."""
    return replace(wire(settings), open_bundle=partial(open_with_graph, ranker))


# The golden requests ask the bundle's own ranker: they are answered before it is replaced.


def open_with_graph(ranker: Path, bundle: Path) -> Bundle:
    """Open a bundle with the graph of another ranker."""
    return replace(open_bundle(bundle), ranker=open_session(ranker / "ranker.onnx"))


def open_with_weights(ranker: Path, bundle: Path) -> Bundle:
    """Open a bundle with the torch weights of another ranker, eager, FP32."""
    session: Any = EagerSession(ranker)
    return replace(open_bundle(bundle), ranker=session)


def serve_variant(kind: str, bundle: str, ranker: str = "") -> int:
    """Serve until SIGTERM; return the exit code of the process."""
    if kind == "fastapi":
        serve_fastapi(Path(bundle), Path(ranker), Settings.from_env())
        return 0
    return server.main(
        ["--bundle", bundle], wire_kserve if kind == "kserve" else partial(wire_graph, Path(ranker))
    )


def serve_fastapi(bundle: Path, ranker: Path, settings: Settings) -> None:
    """Serve the recommender, with the weights of another ranker, behind FastAPI until SIGTERM."""
    sys.setswitchinterval(SWITCH_S)
    log = PredictionLog(settings.prediction_log_dir, DENSE_NAMES, segment_s=settings.log_segment_s)
    facts = open_fact_store(settings.fact_store_url)
    store = open_store(settings.online_store_url)
    opener = partial(open_with_weights, ranker)
    recommender = open_recommender(bundle, store, log, facts, open_bundle=opener)
    app = fastapi_app(recommender)
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off")
    # From here on callers wait, and no other process gets the port.
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    sys.stderr.write(json.dumps({"event": "ready", "http": address, "grpc": ""}) + "\n")
    try:
        uvicorn.Server(config).run([listening])
    finally:
        log.close()
        recommender.facts.close()


def _announce(port: int, on_ready: Callable[[], object]) -> None:
    """Say in a thread that a server is ready, once it takes connections."""

    def announce() -> None:
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.05)
        on_ready()

    threading.Thread(target=announce, daemon=True).start()


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


if __name__ == "__main__":
    sys.exit(serve_variant(*sys.argv[1:]))
