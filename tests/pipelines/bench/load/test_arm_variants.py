"""A variant of the endpoint has another part, and the same answers."""

import asyncio
import json
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pipelines.bench.load.arm_variants import (
    ArmVariant,
    StockServer,
    eager,
    fastapi_app,
    opener,
    serve_variant,
    wire_variant,
)
from pipelines.bench.load.arms import OURS, PREDICT, fill_store
from pipelines.bench.load.measured_server import started
from serving import server
from serving.answer.recommender import open_recommender
from serving.schemas import parse_request
from serving.settings import Settings
from serving.stores.online_features import MemoryStore
from serving.wiring import Wiring, wire

# The arm -> the variant's fields, and the parts of the wiring that differ from those that ship.
LEFT_OUT: dict[str, tuple[dict[str, Any], set[str]]] = {
    "kserve-stock": ({"server": "kserve"}, {"door"}),
    "onnx-fp32": ({"graph": "pruned"}, {"open_bundle"}),
    "eager": ({"weights": "pruned"}, {"open_bundle"}),
    "feast-sdk": ({"feast_home": "feast"}, {"store"}),
    "ours": ({}, set()),
}
OWN = {"at_end", "log", "freshness", "open_facts", "observers", "cleanup"}  # opened again by each `wire`


def test_an_unknown_server_is_refused() -> None:
    with pytest.raises(ValueError, match="no server 'triton': choose one of endpoint, kserve, fastapi"):
        ArmVariant("bundle", server="triton")


def test_a_variant_has_one_ranker() -> None:
    with pytest.raises(ValueError, match="with weights or with a graph"):
        ArmVariant("bundle", weights="student", graph="pruned")


@pytest.mark.parametrize("name", [name for name in LEFT_OUT if name != "feast-sdk"])
def test_a_variant_differs_in_one_part(name: str, tmp_path: Path) -> None:
    given, expected = LEFT_OUT[name]
    settings = Settings(home=tmp_path, log=False, request_log=False)
    shipped, changed = wire(settings), wire_variant(ArmVariant("bundle", **given), settings)
    with shipped.cleanup, changed.cleanup:
        differing = {
            part.name
            for part in fields(Wiring)
            if part.name not in OWN and getattr(shipped, part.name) != getattr(changed, part.name)
        }
        assert differing - {"store"} == expected
        assert type(changed.store) is type(shipped.store)


def test_a_variant_is_served_by_the_server_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[list[str], Any]] = []

    def main(arguments: list[str], wire: Any) -> int:
        calls.append((arguments, wire))
        return 3

    monkeypatch.setattr(server, "main", main)
    assert serve_variant(ArmVariant("bundle", server="kserve")) == 3
    [(arguments, wire_it)] = calls
    assert arguments == ["--bundle", "bundle"]
    wiring = wire_it(Settings(home=tmp_path, log=False, request_log=False))
    with wiring.cleanup:
        assert wiring.door is StockServer


@pytest.mark.slow
def test_each_variant_pays_for_logging_metrics_and_features(
    toy_line: Path, valkey: tuple[str, object], tmp_path: Path
) -> None:
    """A line of JSON per request, metrics, the stream's heartbeat, and calls that may be shared."""
    url, feast_home = valkey[0], tmp_path / "feast"
    fill_store(toy_line / "home" / "offline_store", feast_home, url)
    write_heartbeat(url, time.time() - 3_600)
    for name, (given, _) in LEFT_OUT.items():
        if name == OURS:
            continue  # it leaves nothing out: the endpoint as its own tests ask it
        variant = ArmVariant(str(toy_line / "evaluated"), **paths(given, toy_line, feast_home))
        place = tmp_path / name
        place.mkdir()
        settings = Settings(home=place, http_port=0, grpc_port=0, store_url=url, deadline_ms=60_000.0)
        command = [sys.executable, "-m", "pipelines.bench.load.arm_variants", json.dumps(asdict(variant))]
        with started(command, settings.to_env(), place / "server.log") as running:
            ask = {"user_id": "nobody", "basket": ["item-001"], "at": "2024-06-12T10:00:00Z"}
            ids: list[str] = []
            reasons: list[str | None] = []
            # On a busy machine the store may answer too late: then the reason is another one.
            while len(ids) < 3 or ("stale_features" not in reasons and len(ids) < 500):
                ids.append(f"r{len(ids)}")
                document = {"instances": [{**ask, "request_id": ids[-1]}]}
                answer = httpx.post(
                    running.ready["http"] + PREDICT, json=document, timeout=60, trust_env=False
                )
                [prediction] = answer.json()["predictions"]
                reasons.append(prediction["degraded_reason"])
                assert len(prediction["items"]) == 10
                assert {"features", "retrieval", "ranking", "reranking"} <= set(prediction["stage_ms"]), name
            assert "stale_features" in reasons, f"{name} does not look at the heartbeat"
            lines = request_lines(place / "server.log", len(ids))
            assert [line["request_id"] for line in lines] == ids, name
            assert running.samples("reco_answer_seconds_count") == {(): float(len(ids))}, name


def paths(given: dict[str, Any], toy_line: Path, feast_home: Path) -> dict[str, Any]:
    known = {name: str(toy_line / name) for name in ("student", "pruned")} | {"feast": str(feast_home)}
    return {name: known.get(value, value) for name, value in given.items()}


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


def request_lines(log: Path, count: int) -> list[dict[str, Any]]:
    """Wait until the log's thread has written so many lines."""
    until = time.monotonic() + 30
    while True:
        written = [line for line in log.read_bytes().splitlines() if line.startswith(b"{")]
        found = [line for line in map(json.loads, written) if "request_id" in line]
        if len(found) >= count or time.monotonic() > until:
            return found
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("ranker", ["student", "pruned"])
@pytest.mark.parametrize("field", ["weights", "graph"])
def test_a_variant_ranks_with_its_configured_ranker(field: str, ranker: str, toy_line: Path) -> None:
    """On every route: not with the bundle's own ranker, which differs from both."""
    from serving.release.bundle import open_session

    line = {"basket": ["item-001"], "at": "2024-06-12T10:00:00Z", "request_id": "r"}
    bundle = toy_line / "evaluated"
    given: dict[str, Any] = {"server": "fastapi", field: str(toy_line / ranker)}
    variants = {"as it ships": ArmVariant(str(bundle)), "changed": ArmVariant(str(bundle), **given)}
    scores, rows = {}, None
    for name, one in variants.items():
        recommender = open_recommender(bundle, MemoryStore(), open_bundle=opener(one))
        rows = recommender.prepare(parse_request(line, now=0.0, default_id=""))
        scores[name] = recommender.rank(rows.dense, rows.categorical)
        recommender.facts.close()
    assert rows is not None
    graph = open_session(toy_line / ranker / "ranker.onnx")
    inputs = {"dense": rows.dense, "categorical": rows.categorical}
    [expected] = graph.run(["score"], inputs)
    assert scores["changed"] == pytest.approx(expected, abs=1e-6)
    assert np.abs(scores["as it ships"] - expected).max() > 1e-6


@pytest.mark.slow
def test_eager_torch_scores_as_the_graph_does(toy_line: Path) -> None:
    from components.data.examples import read_ranker_examples
    from components.ranker.ranker_artefact import GRAPH
    from components.ranker.scoring import OnnxRanker

    data = read_ranker_examples(toy_line / "examples", "calibration")
    found = eager(toy_line / "student")(
        np.array(data.dense, np.float32), np.array(data.categorical, np.int64)
    )
    assert np.abs(found - OnnxRanker(toy_line / "student" / GRAPH).scores(data)).max() < 1e-5


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
