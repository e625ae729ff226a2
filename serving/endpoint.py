"""A checkout -> a KServe `ModelServer` with its two models on given sockets, and what a public door needs.

KServe's own server listens on every interface, writes three lines per request, echoes input in error
bodies, logs a traceback for each mistake of a client and lets anyone unload a model. The subclass here
keeps its protocols and models and replaces just that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, NoReturn, cast

import grpc
import orjson
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from grpc_interceptor import AsyncExceptionToStatusInterceptor
from kserve import ModelServer
from kserve.errors import InvalidInput, ModelNotFound, ModelNotReady, ServerNotReady, UnsupportedProtocol
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.checkout import Checkout
from serving.errors import InvalidRequest, Overloaded
from serving.grpc_service import RecommendationsService, read_metadata
from serving.http_routes import ARRIVED, GONE, RECOMMENDATIONS, TASK, routes
from serving.limits import Limits
from serving.metrics import count_rejected, exposition
from serving.openapi import openapi
from serving.predictor import Predictor
from serving.proto.recommendations_pb2_grpc import add_RecommendationsServicer_to_server
from serving.rehearsal import rehearse
from serving.settings import Settings
from serving.transformer import Transformer

# Routes of KServe's that are not offered: they come first in the application, and say 404.
_HIDDEN = (
    "/v2/repository/{rest:path}",
    "/v1/models/{name}:explain",
    "/v2/models/{name}/versions/{rest:path}",
)
_FIELDS = frozenset({"id", "parameters", "inputs", "outputs", "name", "shape", "datatype", "data"})
_REFUSALS: dict[type[Exception], tuple[int, grpc.StatusCode, str]] = {
    InvalidInput: (400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_input"),
    InvalidRequest: (400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_input"),
    UnsupportedProtocol: (400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_input"),
    Overloaded: (429, grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded.reason),
    ModelNotFound: (404, grpc.StatusCode.NOT_FOUND, "unknown_model"),
    ModelNotReady: (503, grpc.StatusCode.UNAVAILABLE, "not_ready"),
    ServerNotReady: (503, grpc.StatusCode.UNAVAILABLE, "not_ready"),
    NotImplementedError: (404, grpc.StatusCode.UNIMPLEMENTED, "not_offered"),
}
_MESSAGES = {
    "unknown_model": "no such model: this endpoint has checkout and ranker",
    "not_ready": "not ready",
    "not_offered": "not offered here",
}
LAST_CALL_S = 0.5  # who connected just before the door shut gets this time to send its request
# Among processes that accept on one socket, one waits this long per connection it has, so that the one with
# the fewest is the quickest.
SHY_S, SHYEST_S = 0.0005, 0.02
_log = logging.getLogger(__name__)


class Endpoint(ModelServer):
    """Serves models on one HTTP and one gRPC port until told to stop, then drains."""

    def __init__(self, settings: Settings, http_socket: socket.socket) -> None:
        logging.getLogger("kserve").addHandler(logging.NullHandler())  # else KServe configures its own
        super().__init__(workers=1, enable_latency_logging=False, grace_period=int(settings.grace_s))
        self.dataplane = _DataPlane(model_registry=self.registered_models)
        self._settings = settings
        self._http_socket = http_socket
        self._stopping: asyncio.Task[None] | None = None

    def start(
        self,
        checkout: Checkout,
        on_ready: Callable[[str, str], None] | None = None,
        at_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Serve until SIGTERM or SIGINT.

        Args:
            checkout: what answers; it may change its recommender at any time.
            on_ready: called with the HTTP and the gRPC address once both listen.
            at_end: awaited when the last request has its answer, for what belongs to the loop.
        """
        self._register_and_check_atleast_one_model_is_ready([Transformer(checkout), Predictor(checkout)])
        self._checkout = checkout
        self._app = app = build_app(self.dataplane, self.model_repository_extension, checkout, self._settings)
        config = uvicorn.Config(
            app,
            http=_HttpProtocol,
            log_config=None,
            access_log=False,
            proxy_headers=False,  # nobody asks who the client is
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=self.grace_period,
            timeout_keep_alive=self.timeout_keep_alive,
        )
        self._http = (_SharedHttpServer if self._settings.processes > 1 else _HttpServer)(config)
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self._run(app, on_ready, at_end))

    def stop(self, sig: int) -> None:
        """Turn readiness off and drain; a second signal does not wait for requests in flight."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._http.force_exit = True

    def on_loop(self, act: Callable[[], None]) -> None:
        """Do something between two steps of requests, and return when it is done; for other threads.

        Raises:
            RuntimeError: the endpoint has ended.
        """
        done: Future[None] = Future()

        def acted() -> None:
            try:
                act()
                done.set_result(None)
            except Exception as error:  # noqa: BLE001 - it belongs to the thread that asked
                done.set_exception(error)

        self._loop.call_soon_threadsafe(acted)
        while not done.done():
            if self._loop.is_closed():
                raise RuntimeError("the endpoint has ended")
            wait([done], timeout=0.1)
        done.result()

    async def _run(
        self,
        app: Limits,
        on_ready: Callable[[str, str], None] | None,
        at_end: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(sig, self.stop, sig)
        self._grpc = self._make_grpc()
        await rehearse(app, self._checkout)
        gc.collect()
        gc.freeze()  # a full collection over what the libraries hold would stop requests for 100 ms and more
        grpc_address = self._open_grpc()  # not before: callers would be let in, and wait
        await self._grpc.start()
        serving = asyncio.create_task(self._http.serve(sockets=[self._http_socket]))
        while not self._http.started and not serving.done():
            await asyncio.sleep(0.005)
        if self._http.started and on_ready is not None:
            on_ready(f"http://{_address(self._http_socket)}", grpc_address)
        await serving
        if self._stopping is not None:
            await self._stopping
        if at_end is not None:
            await at_end()

    async def _drain(self) -> None:
        self.dataplane.draining = self._app.draining = True
        await asyncio.sleep(self._settings.drain_s)
        self._http.should_exit = True
        await self._grpc.stop(self._settings.grace_s)

    def _make_grpc(self) -> grpc.aio.Server:
        limit = self._settings.body_limit_bytes
        server = grpc.aio.server(
            interceptors=(_Statuses(),),
            options=[
                ("grpc.max_receive_message_length", limit),
                # Of one endpoint only: else two could share the port by accident, each getting some requests.
                ("grpc.so_reuseport", int(self._settings.processes > 1)),
            ],
        )
        add_GRPCInferenceServiceServicer_to_server(
            _Servicer(self.dataplane, self.model_repository_extension), server
        )
        add_RecommendationsServicer_to_server(RecommendationsService(self._checkout), server)
        return server

    def _open_grpc(self) -> str:
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        return f"{host}:{self._grpc.add_insecure_port(f'{host}:{self._settings.grpc_port}')}"


def build_app(dataplane: DataPlane, extension: Any, checkout: Checkout, settings: Settings) -> Limits:
    """Return the ASGI application: our routes and KServe's, /metrics and /healthz behind `Limits`."""
    app = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, default_response_class=_Json
    )
    for path in _HIDDEN:
        app.add_api_route(path, _hidden, methods=["GET", "POST", "PUT", "DELETE"])
    app.add_api_route(RECOMMENDATIONS, _hidden, methods=["POST"])  # never called: so that a GET is a 405
    document = Response(orjson.dumps(openapi(settings)), media_type="application/json")

    async def openapi_json() -> Response:
        return document

    app.add_api_route("/openapi.json", openapi_json)
    app.add_api_route("/", dataplane.live)
    app.add_api_route("/metrics", _metrics)
    register_v1_endpoints(app, dataplane, extension)
    register_v2_endpoints(app, dataplane, extension)

    async def healthz() -> dict[str, str]:
        if not await dataplane.ready():
            raise ServerNotReady()
        return {"status": "ready"}

    app.add_api_route("/healthz", healthz)
    for error in _REFUSALS:
        app.add_exception_handler(error, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_schema)
    for status in (400, 404, 405):
        app.add_exception_handler(status, _refuse_route)
    app.add_exception_handler(Exception, _broken)
    return Limits(app, settings, routes(checkout))


class _Json(JSONResponse):
    """A response written by orjson."""

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class _DataPlane(DataPlane):
    """KServe's, ready when every model is and the process is not about to stop."""

    draining = False

    async def ready(self) -> bool:
        models = self.model_registry.get_models().values()
        return not self.draining and bool(models) and all(model.ready for model in models)


class _Joined:
    """A transport that sends an answer's head with its body: one system call and one packet, not two."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if not self._head and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head = b""

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HttpProtocol(HttpToolsProtocol):
    """uvicorn's, telling when a request was here whole and, at once, that its client has left."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(cast("asyncio.Transport", _Joined(transport)))

    def on_response_complete(self) -> None:
        cast(_Joined, self.transport).flush()  # an answer without a body
        super().on_response_complete()

    def on_message_complete(self) -> None:
        scope: Any = self.scope
        scope[ARRIVED] = time.perf_counter()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in (self.cycle, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                scope: Any = cycle.scope
                scope[GONE] = True
                if TASK in scope:
                    scope[TASK].cancel()
        super().connection_lost(exc)


class _HttpServer(uvicorn.Server):
    """uvicorn's, leaving the signals to `Endpoint`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut the door, but answer those who are through it: whom the kernel took in, and their requests."""
        for listening in sockets or ():
            for connection in _waiting(listening):
                await self._take(connection)
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        await asyncio.sleep(LAST_CALL_S)
        await super().shutdown(sockets)

    async def _take(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # it went away again
            await loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> asyncio.Protocol:
        """Return what uvicorn makes for each connection."""
        made: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class _SharedHttpServer(_HttpServer):
    """One of several that accept on the same socket: the one with the fewest connections comes first.

    Left to themselves, the process that wakes up first takes all who wait, and keeps them as long as
    they keep their connections. What waits for a process that dies is taken by the others.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup([])
        assert sockets is not None
        (self._listening,) = sockets
        self._listening.setblocking(False)
        self._listening.listen(self.config.backlog)
        self._loop = asyncio.get_running_loop()
        self._coming: set[asyncio.Task[None]] = set()
        self._watch()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listening)
        await asyncio.gather(*self._coming)
        await super().shutdown(sockets)

    def _watch(self) -> None:
        if not self.should_exit:
            self._loop.add_reader(self._listening, self._seen)

    def _seen(self) -> None:
        self._loop.remove_reader(self._listening)
        shy_s = min(len(self.server_state.connections) * SHY_S, SHYEST_S)
        self._loop.call_later(shy_s, self._accept)

    def _accept(self) -> None:
        if self.should_exit:
            return
        for connection in itertools.islice(_waiting(self._listening), 1):
            coming = self._loop.create_task(self._take(connection))
            self._coming.add(coming)
            coming.add_done_callback(self._coming.discard)
        self._watch()


class _Servicer(InferenceServicer):
    """KServe's, without its model repository: what serves is decided by the registry, not by a caller."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        return await super().ModelInfer(request, _Told(context))

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


class _Told:
    """What KServe asks a gRPC context for; among the headers, the time that the call has left."""

    def __init__(self, context: Any) -> None:
        self._headers = [_Header(*header) for header in read_metadata(context).items()]

    def invocation_metadata(self) -> list[_Header]:
        return self._headers


class _Header(NamedTuple):
    key: str
    value: str


class _Statuses(AsyncExceptionToStatusInterceptor):
    """An exception -> a gRPC status: a client's fault is counted, only ours are logged."""

    async def handle_exception(
        self, ex: Exception, request_or_iterator: Any, context: Any, method_name: str
    ) -> NoReturn:
        _, status, reason = next(
            (r for kind, r in _REFUSALS.items() if isinstance(ex, kind)), (500, grpc.StatusCode.INTERNAL, "")
        )
        if reason:
            count_rejected(reason)
            await context.abort(status, _MESSAGES.get(reason, str(ex)))
        _log.error("gRPC %s failed", method_name, exc_info=ex)
        await context.abort(status, "internal error")
        raise AssertionError("abort raises")


def _metrics(request: Request) -> Response:
    # No coroutine: FastAPI calls it in a thread, and no request waits while it adds up.
    content, content_type = exposition(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})


async def _hidden() -> None:
    raise HTTPException(404)


async def _refuse(_: Request, error: Exception) -> _Json:
    status, _status, reason = next(r for kind, r in _REFUSALS.items() if isinstance(error, kind))
    count_rejected(reason)
    return _Json({"error": _MESSAGES.get(reason, str(error))}, status)


async def _refuse_schema(_: Request, error: Exception) -> _Json:
    """Name the place that breaks the V2 schema, and nothing that was sent."""
    assert isinstance(error, RequestValidationError)
    count_rejected("schema")
    places = {
        ".".join(str(p) for p in e["loc"] if p in _FIELDS or isinstance(p, int)) or "body"
        for e in error.errors()
    }
    listed = ", ".join(sorted(places)[:5])
    return _Json({"error": f"not an Open Inference Protocol request; look at: {listed}"}, 422)


async def _refuse_route(_: Request, error: Exception) -> _Json:
    status = getattr(error, "status_code", 404)
    count_rejected("route" if status in (404, 405) else "http")
    detail = {404: "no such path", 405: "method not allowed here"}.get(status, "bad request")
    return _Json({"error": detail}, status, headers=getattr(error, "headers", None))


async def _broken(_: Request, error: Exception) -> _Json:
    return _Json({"error": "internal error"}, 500)  # uvicorn logs the traceback


def _waiting(listening: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that nobody has accepted yet."""
    listening.setblocking(False)
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # none, or one that has gone
            return
        connection.setblocking(False)
        yield connection


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
