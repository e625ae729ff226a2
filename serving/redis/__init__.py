"""The address of a Redis and the clients for it."""
