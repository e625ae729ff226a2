r"""The typed gRPC service: `recommendations.proto`, and what protoc makes of it.

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
        serving/proto/recommendations.proto

makes it again, from the root of the repository. The generated files are not edited.
"""
