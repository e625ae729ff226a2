"""The service's methods, as the description names them."""

from serving.proto import recommendations_pb2, recommendations_pb2_grpc


def test_the_service_has_the_methods_of_its_description() -> None:
    service = recommendations_pb2.DESCRIPTOR.services_by_name["Recommendations"]
    assert service.full_name == "reco.v1.Recommendations"
    for method in service.methods:
        assert hasattr(recommendations_pb2_grpc.RecommendationsServicer, method.name)
