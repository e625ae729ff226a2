"""Canary strings: no log line, metric, span or refusal holds a secret or a shopper, for any request."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from serving.settings import Settings
from tests.chaos.listening import http_answers
from tests.chaos.procs import eventually
from tests.serving.conftest import Running, starting, tensors

pytestmark = pytest.mark.slow

PASSWORD, KEY, SHOPPER, ITEM = "CANARY-PASSWORD", "CANARY-KEY", "CANARY-SHOPPER", "CANARY-ITEM"
CANARY = "CANARY"
OWN, V1, V2 = "/v1/recommendations", "/v1/models/checkout:predict", "/v2/models/checkout/infer"
NASTY = [
    f"{CANARY}\nERROR forged line",
    f"{CANARY}\r\n\r\nHTTP/1.1 200 OK",
    f"\x1b[2J{CANARY}",
    f"{CANARY}\x00",
    f"{CANARY}\u2028",
    f"\u202e{CANARY}",
    f"{CANARY}" * 40,
]


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The bytes that OpenTelemetry sends."""
    got: list[bytes] = []

    with http_answers(lambda path: (200, b""), got) as url:
        yield f"{url}/v1/traces", got


@pytest.fixture(scope="module")
def running(
    toy_bundle: Path,
    collector: tuple[str, list[bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Running]:
    """An endpoint with a missing store, so that the log has the messages about the store, too."""
    settings = Settings(
        home=tmp_path_factory.mktemp("home"),
        store_url=f"redis://:{PASSWORD}@127.0.0.1:1/0",
        request_log_key=KEY,
        trace_url=collector[0],
        deadline_ms=30_000.0,
        log=False,
    )
    with starting() as begin:
        yield begin(toy_bundle, settings)


def refused_bodies(client: httpx.Client) -> Iterator[httpx.Response]:
    """Every way of being refused, each with a canary in it."""
    basket: dict[str, Any] = {"basket": []}
    for text in NASTY:
        for field in ("user_id", "store_id", "request_id", "profile", "at", "k", "basket"):
            yield client.post(OWN, json={**basket, field: text})
            yield client.post(V1, json={"instances": [{**basket, field: text}]})
        for spoilt in (
            {"basket": [text]},
            {**basket, text: 1},
            {**basket, f"x` - at `$.instances[5].{text}": 1},
            text,
        ):
            yield client.post(OWN, json=spoilt)
            yield client.post(V1, json={"instances": [spoilt]})
        yield client.post(V2, json=tensors(basket=[text]))
        yield client.post(V2, json={**tensors(**{text: "x"}), text: text})
    yield client.post(OWN, content=f'{{"basket": ["{CANARY}"'.encode())
    yield client.post(OWN, content=f'"{CANARY}"'.encode())
    yield client.post(OWN, content=CANARY.encode() * 50_000)
    yield client.post(OWN, json=basket, headers={"x-deadline-ms": CANARY})
    yield client.post(OWN, json=basket, headers={"x-priority": CANARY})
    yield client.post(OWN, json=basket, headers={CANARY: "x" * 20_000})
    for path in (CANARY, f"v1/models/{CANARY}", f"v2/models/{CANARY}", f"v1/models/{CANARY}:predict"):
        yield client.get(f"/{path}")
        yield client.post(f"/{path}", json={"inputs": [], "instances": []})
        yield client.put(f"/{path}?{CANARY}={CANARY}", json={CANARY: 1})


def test_request_values_and_secrets_are_written_nowhere(
    running: Any, collector: tuple[str, list[bytes]]
) -> None:
    from serving.proto.recommendations_pb2 import RecommendRequest
    from serving.proto.recommendations_pb2_grpc import RecommendationsStub

    good: dict[str, Any] = {"user_id": SHOPPER, "basket": [ITEM, "1000005"], "request_id": "till-4", "k": 3}
    with httpx.Client(base_url=running.http, timeout=30) as client:
        for path, body in (
            (OWN, good),
            (V1, {"instances": [good, good]}),
            (V2, tensors(basket=[ITEM], user_id=SHOPPER)),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 200
            assert CANARY not in answer.text  # the store is missing: a labelled degraded answer
            assert "features_unavailable" in answer.text
        refusals = list(refused_bodies(client))
        strange = [
            (answer.status_code, str(answer.request.url))
            for answer in refusals
            if answer.status_code // 100 != 4
        ]
        assert not strange
        assert all(CANARY not in answer.text for answer in refusals)
        assert all(CANARY not in str(answer.headers) for answer in refusals)
        assert max(len(answer.content) for answer in refusals) < 2_048
        metrics = client.get("/metrics").text
    with grpc.insecure_channel(running.grpc) as channel:
        recommend = RecommendationsStub(channel).Recommend
        recommend(RecommendRequest(**good), timeout=30)
        for text in NASTY[3:]:
            with pytest.raises(grpc.RpcError) as refused:
                recommend(RecommendRequest(user_id=text), timeout=30)
            assert CANARY not in refused.value.details()
    eventually(lambda: sum('"till-4"' in line for line in running.stderr) >= 4)
    # Spans come in their order, in batches: the last good request is in the last.
    eventually(lambda: b"".join(collector[1]).count(b"till-4") >= 4)
    said = "".join(running.stderr)
    assert "answering without the user's history" in said
    for place, text in (("log", said), ("metrics", metrics)):
        assert CANARY not in text, place
    assert CANARY.encode() not in b"".join(collector[1])


def test_an_id_cannot_forge_a_line_of_the_log(running: Any) -> None:
    printable = ['till "7"', "till\\n7", "till', 'x", '{"event": "answered"}', "Käse 🧀", "${jndi:x}", "%s%n"]
    with httpx.Client(base_url=running.http, timeout=30) as client:
        for text in printable:
            body = {"basket": [], "request_id": text, "store_id": text, "k": 0}
            assert client.post(OWN, json=body).json()["request_id"] == text
        for text in NASTY:
            answer = client.post(OWN, json={"basket": [], "request_id": text})
            assert answer.status_code == 422
    eventually(lambda: any("%s%n" in line for line in running.stderr))
    lines = [json.loads(line) for line in running.stderr if line.startswith("{")]
    found = [line["request_id"] for line in lines if line.get("store_id") in printable]
    assert found == printable
    said = "".join(running.stderr)
    assert "forged" not in said
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u2028\u202e]", said)
