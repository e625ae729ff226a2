"""The check of callers: as a function, and as clients of a running endpoint meet it."""

from collections.abc import Callable

import grpc
import httpx
import pytest
from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest, ServerReadyRequest
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from serving.api.callers import Callers
from serving.proto.recommendations_pb2 import RecommendRequest
from serving.proto.recommendations_pb2_grpc import RecommendationsStub
from serving.settings import SettingInvalid, Settings
from tests.serving.conftest import Running

OLD, NEW = "old-token-of-the-tills", "new-token-of-the-tills"
ASKING = ("/v1/recommendations", "/v1/models/checkout:predict", "/v2/models/checkout/infer")
READING = (
    "/healthz",
    "/v2/health/live",
    "/v2/health/ready",
    "/metrics",
    "/v2/models/checkout",
    "/openapi.json",
)


@pytest.mark.parametrize(
    ("header", "admitted"),
    [
        (f"Bearer {OLD}", True),
        (f"bearer  {NEW}", True),
        (OLD, False),
        (f"Basic {OLD}", False),
        (f"Bearer {OLD}x", False),
        (f"Bearer {OLD[:-1]}", False),
        (f"Bearer {OLD},{NEW}", False),
        ("Bearer ", False),
        ("", False),
        ("Bearer \xe9", False),
    ],
)
def test_a_caller_needs_one_of_the_tokens(header: str, admitted: bool) -> None:
    assert Callers(f"{OLD}, {NEW}").may_ask(header) is admitted
    assert Callers("").may_ask(header)


@pytest.mark.parametrize("tokens", ["short", f"{OLD},", f"{OLD} x", "päßwörter-von-kassen"])
def test_a_weak_token_is_refused_and_not_shown(tokens: str) -> None:
    with pytest.raises(SettingInvalid, match="at least 16 characters") as refused:
        Settings.from_env({"RECO_CALLER_TOKENS": tokens, "RECO_CONFIG": "off"})
    assert tokens not in str(refused.value)


@pytest.mark.slow
def test_only_callers_with_a_token_may_ask(start_toy: Callable[..., Running]) -> None:
    endpoint = start_toy(store_url="memory:", caller_tokens=f"{OLD},{NEW}")
    body = {"basket": ["1000005"]}
    with httpx.Client(base_url=endpoint.http, timeout=60) as client:
        for path in ASKING:
            for headers in ({}, {"authorization": "Bearer wrong-token-of-a-till"}):
                answer = client.post(path, content=b"x" * 100_000, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["status"] == 401
        for path in READING:
            assert client.get(path).status_code == 200, path
        for token in (OLD, NEW):
            answer = client.post(ASKING[0], json=body, headers={"authorization": f"Bearer {token}"})
            assert answer.json()["items"], answer.text
        assert 'reco_rejected_total{reason="caller"} 6.0' in client.get("/metrics").text
        assert client.get("/openapi.json").json()["components"]["securitySchemes"]
    with grpc.insecure_channel(endpoint.grpc) as channel:
        ours, open_protocol = RecommendationsStub(channel), GRPCInferenceServiceStub(channel)
        for ask, request in (
            (ours.Recommend, RecommendRequest(basket=["1000005"])),
            (open_protocol.ModelInfer, ModelInferRequest(model_name="checkout")),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                ask(request, timeout=60)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {NEW}"),)
        assert ours.Recommend(RecommendRequest(basket=["1000005"]), timeout=60, metadata=metadata).items
        assert open_protocol.ServerReady(ServerReadyRequest(), timeout=60).ready
