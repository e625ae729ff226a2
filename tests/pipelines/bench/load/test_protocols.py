"""A request line is the same request in each protocol."""

from typing import Any

from pipelines.bench.load.protocols import grpc_message, typed_message, v2_inputs

LINE = {"user_id": "u", "basket": ["a", "b"], "at": "2024-06-12T10:00:00Z", "k": 5}


def test_a_request_is_the_same_as_tensors() -> None:
    assert v2_inputs(LINE) == [
        {"name": "user_id", "shape": [1], "datatype": "BYTES", "data": ["u"]},
        {"name": "basket", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]},
        {"name": "at", "shape": [1], "datatype": "BYTES", "data": ["2024-06-12T10:00:00Z"]},
        {"name": "k", "shape": [1], "datatype": "INT64", "data": [5]},
    ]


def test_a_request_is_the_same_as_a_message() -> None:
    from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest

    message = ModelInferRequest.FromString(grpc_message(LINE))
    assert message.model_name == "checkout"
    found = {
        i.name: list(i.contents.bytes_contents) or list(i.contents.int64_contents) for i in message.inputs
    }
    assert found == {"user_id": [b"u"], "basket": [b"a", b"b"], "at": [b"2024-06-12T10:00:00Z"], "k": [5]}


def test_a_request_is_the_same_as_a_typed_message() -> None:
    from google.protobuf.json_format import MessageToDict

    from serving.proto.recommendations_pb2 import RecommendRequest

    lines: list[dict[str, Any]] = [LINE, {"basket": []}]
    for line in lines:
        message = RecommendRequest.FromString(typed_message(line))
        assert MessageToDict(message, preserving_proto_field_name=True) == {
            name: value for name, value in line.items() if value != []
        }
