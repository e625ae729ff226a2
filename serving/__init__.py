"""Request -> response -> log: the bundle and the endpoint that answers with it."""
