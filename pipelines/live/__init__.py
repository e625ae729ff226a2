"""The whole system on one machine: store, broker, stream, endpoint, feedback."""
