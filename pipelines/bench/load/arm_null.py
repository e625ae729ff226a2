"""A number of milliseconds -> a server that only burns them: the floor of machine and client.

It runs the same uvicorn as the endpoint. The tail of its answers comes from the machine, from the client
and from requests that arrive together: no recommender can be better at the same work.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import Any

import uvicorn

ANSWER = b'{"predictions":[' + b" " * 1_500 + b"]}"  # as long as one of ours


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Burn as many milliseconds of processor time as the body says, then answer."""
    message = await receive()
    body = message["body"]
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    burn(float(body))
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": ANSWER})


def burn(ms: float) -> None:
    """Use so much of this thread's processor time."""
    until = time.thread_time() + ms / 1e3
    while time.thread_time() < until:
        pass


def serve_app(app: Any) -> None:
    """Serve an ASGI application on a port that the system chooses, until SIGTERM; say when it is ready."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", lifespan="off")
    server = uvicorn.Server(config)

    async def serve() -> None:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        say_ready(f"http://127.0.0.1:{listening.getsockname()[1]}")
        await serving

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(serve())


def say_ready(http: str, grpc: str = "") -> None:
    """Write the ready line, which the starter of this server waits for."""
    sys.stderr.write(json.dumps({"event": "ready", "http": http, "grpc": grpc}) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    serve_app(app)
