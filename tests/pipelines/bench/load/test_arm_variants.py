"""A variant of the endpoint has another part, and the same answers."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn

from pipelines.bench.load.arm_variants import (
    fastapi_app,
    open_with_graph,
    open_with_weights,
    serve_fastapi,
    serve_variant,
)
from pipelines.bench.load.arms import PREDICT, fill_store
from pipelines.bench.load.measured_server import started
from serving import server
from serving.answer.recommender import open_bundle, open_recommender
from serving.release.bundle import Bundle, open_session
from serving.schemas import parse_request
from serving.settings import Settings
from serving.stores.online_features import MemoryStore
from serving.wiring import Wiring, wire
from tests.chaos.procs import eventually

OWN = {"at_end", "log", "freshness", "open_facts", "observers", "cleanup"}  # opened again by each `wire`


@pytest.mark.parametrize(("kind", "part"), [("kserve", "door"), ("graph", "open_bundle")])
def test_a_variant_is_served_by_the_server_itself_and_differs_in_one_part(
    kind: str, part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[list[str], Any]] = []

    def main(arguments: list[str], wire: Any) -> int:
        calls.append((arguments, wire))
        return 3

    monkeypatch.setattr(server, "main", main)
    assert serve_variant(kind, "bundle", "pruned") == 3
    [(arguments, wire_it)] = calls
    assert arguments == ["--bundle", "bundle"]
    settings = Settings(home=tmp_path, log=False, request_log=False)
    shipped, changed = wire(settings), wire_it(settings)
    with shipped.cleanup, changed.cleanup:
        names = {field.name for field in fields(Wiring)} - OWN
        differing = {name for name in names if getattr(shipped, name) != getattr(changed, name)}
        assert differing - {"store"} == {part}
        assert type(changed.store) is type(shipped.store)


@pytest.mark.slow
def test_kserves_server_pays_for_metrics_and_features(
    toy_line: Path, valkey: tuple[str, object], tmp_path: Path
) -> None:
    """A line of JSON per request, metrics, and the stream's heartbeat; the other variant has our door."""
    url = valkey[0]
    fill_store(toy_line / "home" / "offline_store", tmp_path / "feast", url)
    write_heartbeat(url, time.time() - 3_600)
    settings = Settings(home=tmp_path, http_port=0, grpc_port=0, store_url=url, deadline_ms=60_000.0)
    module = ["-m", "pipelines.bench.load.arm_variants", "kserve", str(toy_line / "evaluated")]
    with started([sys.executable, *module], settings.to_env(), tmp_path / "server.log") as running:
        ask = {"user_id": "nobody", "basket": ["item-001"], "at": "2024-06-12T10:00:00Z"}
        ids: list[str] = []
        reasons: list[str | None] = []
        # On a busy machine the store may answer too late: then the reason is another one.
        while len(ids) < 3 or ("stale_features" not in reasons and len(ids) < 500):
            ids.append(f"r{len(ids)}")
            document = {"instances": [{**ask, "request_id": ids[-1]}]}
            answer = httpx.post(running.ready["http"] + PREDICT, json=document, timeout=60, trust_env=False)
            [prediction] = answer.json()["predictions"]
            reasons.append(prediction["degraded_reason"])
            assert len(prediction["items"]) == 10
            assert {"features", "retrieval", "ranking", "reranking"} <= set(prediction["stage_ms"])
        assert "stale_features" in reasons, "it does not look at the heartbeat"
        log = tmp_path / "server.log"
        eventually(lambda: len(logged(log)) >= len(ids))  # a thread writes it
        assert logged(log) == ids
        assert running.samples("reco_answer_seconds_count") == {(): float(len(ids))}


def write_heartbeat(url: str, at: float) -> None:
    """Write the last heartbeat of a silent stream, in Feast's row layout."""
    import redis
    from google.protobuf.timestamp_pb2 import Timestamp

    from feature_repo.snapshots import HEARTBEAT
    from serving.stores.online_features import HISTORY_FIELD, PROJECT, WRITTEN_FIELD, entity_key

    written = Timestamp(seconds=int(at)).SerializeToString()
    row: dict[Any, Any] = {HISTORY_FIELD: b"\x0a\x05alive", WRITTEN_FIELD: written}
    with redis.Redis.from_url(url) as client:
        client.hset(entity_key(HEARTBEAT) + PROJECT.encode(), mapping=row)


def logged(log: Path) -> list[str]:
    """Return the requests in a log."""
    written = [line for line in log.read_bytes().splitlines() if line.startswith(b"{")]
    return [line["request_id"] for line in map(json.loads, written) if "request_id" in line]


@pytest.mark.slow
@pytest.mark.parametrize("open_it", [open_with_weights, open_with_graph])
def test_a_variant_ranks_with_its_configured_ranker(
    open_it: Callable[[Path, Path], Bundle], toy_line: Path
) -> None:
    """Not with the bundle's own ranker, which differs; eager PyTorch scores as the graph does."""
    line = {"basket": ["item-001"], "at": "2024-06-12T10:00:00Z", "request_id": "r"}
    scores, rows = {}, None
    for name, opener in (("as it ships", open_bundle), ("changed", partial(open_it, toy_line / "student"))):
        recommender = open_recommender(toy_line / "evaluated", MemoryStore(), open_bundle=opener)
        rows = recommender.prepare(parse_request(line, now=0.0, default_id=""))
        scores[name] = recommender.rank(rows.dense, rows.categorical)
        recommender.facts.close()
    assert rows is not None
    graph = open_session(toy_line / "student" / "ranker.onnx")
    [expected] = graph.run(["score"], {"dense": rows.dense, "categorical": rows.categorical})
    assert scores["changed"] == pytest.approx(expected, abs=1e-6)
    assert np.abs(scores["as it ships"] - expected).max() > 1e-6


@pytest.mark.slow
def test_fastapi_answers_as_the_recommender_does(toy_line: Path) -> None:
    recommender = open_recommender(toy_line / "evaluated", MemoryStore())
    line = {"basket": ["item-001"], "at": "2024-06-12T10:00:00Z", "request_id": "r"}

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(fastapi_app(recommender))
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(PREDICT, json={"instances": [line]})

    [found] = asyncio.run(ask()).json()["predictions"]
    expected = recommender.recommend(parse_request(line, now=0.0, default_id="")).to_dict()
    recommender.facts.close()
    assert found["items"] == expected["items"]
    assert len(found["items"]) == 10


@pytest.mark.slow
def test_fastapi_holds_the_port_that_it_announces(
    toy_line: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[str] = []

    def run(_: uvicorn.Server, sockets: list[socket.socket]) -> None:
        served.append("http://{}:{}".format(*sockets[0].getsockname()))
        with pytest.raises(OSError, match="in use"):
            socket.create_server(sockets[0].getsockname())
        sockets[0].close()

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    serve_fastapi(toy_line / "evaluated", toy_line / "student", Settings(home=tmp_path))
    assert served == [json.loads(capsys.readouterr().err.splitlines()[-1])["http"]]
