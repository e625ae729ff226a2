"""The doors: HTTP, gRPC, KServe, OpenAPI."""
