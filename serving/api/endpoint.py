"""A checkout -> a KServe `ModelServer` with its two models on given sockets, safe on a public port.

KServe's own server listens on every interface, writes three lines per request, echoes input in error
bodies, logs a traceback for each mistake of a client and lets anyone unload a model. The subclass here
keeps its protocols and models and replaces just that.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import wait
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import grpc
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from google.protobuf.message import DecodeError
from grpc_interceptor import AsyncExceptionToStatusInterceptor
from kserve import ModelServer
from kserve.errors import InvalidInput, ModelNotFound, ModelNotReady, ServerNotReady, UnsupportedProtocol
from kserve.protocol.dataplane import DataPlane
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from kserve.protocol.grpc.servicer import InferenceServicer
from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints

from serving.api.callers import CallerInterceptor, Callers
from serving.api.grpc_service import Health, RecommendationsService, read_metadata
from serving.api.http_routes import RECOMMENDATIONS, Limits, routes
from serving.api.http_server import FIRST_S, SHY_S, HttpServer, Waits, room_for
from serving.api.openapi import openapi
from serving.api.predictor import MAX_CALL_BYTES, Predictor
from serving.api.problems import MAX_DETAIL_LENGTH, MEDIA_TYPE, problem
from serving.api.rehearsal import rehearse
from serving.api.transformer import Transformer
from serving.checkout.checkout import Checkout
from serving.errors import InvalidRequest, Overloaded, UserOverLimit
from serving.metrics import count_fault, count_rejected, exposition
from serving.proto.recommendations_pb2_grpc import add_RecommendationsServicer_to_server
from serving.redis.address import host_port
from serving.settings import Settings, variable

# Routes of KServe's that are not offered: they come first in the application, and say 404.
_HIDDEN = (
    "/v2/repository/{rest:path}",
    "/v1/models/{name}:explain",
    "/v2/models/{name}/versions/{rest:path}",
)
_FIELDS = frozenset({"id", "parameters", "inputs", "outputs", "name", "shape", "datatype", "data"})
_REFUSALS: dict[type[Exception], tuple[int, grpc.StatusCode, str]] = {
    InvalidInput: (422, grpc.StatusCode.INVALID_ARGUMENT, "invalid_input"),
    InvalidRequest: (422, grpc.StatusCode.INVALID_ARGUMENT, "invalid_input"),
    UnsupportedProtocol: (400, grpc.StatusCode.INVALID_ARGUMENT, "invalid_input"),
    UserOverLimit: (429, grpc.StatusCode.RESOURCE_EXHAUSTED, UserOverLimit.reason),  # is an Overloaded, too
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
MAX_CALLS = 256  # of one gRPC connection at a time
GRPC_AGE_S = 300.0  # of a gRPC connection, give or take a tenth
GRPC_ENDING_S = 10.0  # at least, for calls in flight on a connection that has reached that age
_log = logging.getLogger(__name__)


class Endpoint(ModelServer):
    """Serves models on one HTTP and one gRPC port until a signal stops it, then drains."""

    def __init__(
        self, settings: Settings, http_socket: socket.socket, freeze: Callable[[], None] = gc.freeze
    ) -> None:
        logging.getLogger("kserve").addHandler(logging.NullHandler())  # else KServe configures its own
        super().__init__(workers=1, enable_latency_logging=False, grace_period=math.ceil(settings.grace_s))
        self.dataplane = _DataPlane(model_registry=self.registered_models)
        self._settings = settings
        self._http_socket = http_socket
        self._freeze = freeze
        self._stopping: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()

    def start(
        self,
        checkout: Checkout,
        on_ready: Callable[[str, str], None],
        at_end: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Serve until SIGTERM or SIGINT.

        Args:
            checkout: what answers; it may change its recommender at any time.
            on_ready: called with the HTTP and the gRPC address once both listen.
            at_end: awaited when the last request has its answer, for what belongs to the loop.
        """
        self._register_and_check_atleast_one_model_is_ready([Transformer(checkout), Predictor(checkout)])
        self._checkout = checkout
        settings = self._settings
        self._most_connections = most_connections(settings)
        self._app = app = build_app(self.dataplane, self.model_repository_extension, checkout, settings)
        self._callers = Callers(settings.caller_tokens)
        self._http = HttpServer(
            self._callers.guard(app),
            settings.body_timeout_ms / 1e3,
            self.timeout_keep_alive,
            self.grace_period,
            Waits(self._most_connections),
            SHY_S if settings.processes > 1 else 0.0,
        )
        with asyncio.Runner(loop_factory=self._http.config.get_loop_factory()) as runner:
            runner.run(self._run(app, on_ready, at_end))

    def stop(self, sig: int) -> None:
        """Turn readiness off and drain; a second signal waits neither for that nor for requests in flight."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._http.force_exit = True
            self._hurried.set()

    def on_loop(self, act: Callable[[], None]) -> None:
        """Do something between two steps of requests, and return when it is done; for other threads.

        Raises:
            RuntimeError: the endpoint has ended.
        """

        async def acted() -> None:
            act()

        done = asyncio.run_coroutine_threadsafe(acted(), self._loop)
        while not wait([done], timeout=0.1).done:
            if self._loop.is_closed():
                raise RuntimeError("the endpoint has ended")
        done.result()

    async def _run(
        self,
        app: Limits,
        on_ready: Callable[[str, str], None],
        at_end: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(sig, self.stop, sig)
        self._grpc = self._make_grpc()
        await rehearse(app, self._checkout)
        await self._checkout.recommender.connect()
        gc.collect()
        # A full collection over all that the libraries hold would stop requests for 100 ms and more.
        self._freeze()
        grpc_address = self._open_grpc()  # not before: callers would be let in, and wait
        await self._grpc.start()
        serving = asyncio.create_task(self._http.serve(sockets=[self._http_socket]))
        while not self._http.started and not serving.done():
            await asyncio.sleep(0.005)
        if self._http.started:
            on_ready(f"http://{host_port(*self._http_socket.getsockname()[:2])}", grpc_address)
        await serving
        if self._stopping is not None:
            await self._stopping
        if at_end is not None:
            await at_end()

    async def _drain(self) -> None:
        self.dataplane.draining = self._app.draining = True
        hurried = asyncio.create_task(self._hurried.wait())
        await asyncio.wait([hurried], timeout=self._settings.drain_s)
        self._http.should_exit = True
        stopped = asyncio.create_task(self._grpc.stop(self._settings.grace_s))
        await asyncio.wait([hurried, stopped], return_when=asyncio.FIRST_COMPLETED)
        await self._grpc.stop(None)

    def _make_grpc(self) -> grpc.aio.Server:
        settings = self._settings
        ending_ms = max(GRPC_ENDING_S * 1e3, settings.deadline_ms + 1e3)
        server = grpc.aio.server(
            interceptors=(CallerInterceptor(self._callers), _Statuses()),
            options=[
                # Of all methods. A bundle with more candidates may take over at any time.
                ("grpc.max_receive_message_length", max(settings.body_limit_bytes, MAX_CALL_BYTES)),
                # Of one endpoint only: else two could share the port by accident, each getting some requests.
                ("grpc.so_reuseport", int(settings.processes > 1)),
                ("grpc.max_allowed_incoming_connections", self._most_connections),
                ("grpc.max_concurrent_streams", MAX_CALLS),
                ("grpc.server_handshake_timeout_ms", int(FIRST_S * 1e3)),
                ("grpc.max_connection_idle_ms", int(self.timeout_keep_alive * 1e3)),
                # A message whose end never comes ends with its connection; callers then connect again.
                ("grpc.max_connection_age_ms", int(GRPC_AGE_S * 1e3)),
                ("grpc.max_connection_age_grace_ms", int(ending_ms)),
            ],
        )
        add_GRPCInferenceServiceServicer_to_server(
            _Servicer(self.dataplane, self.model_repository_extension), server
        )
        add_RecommendationsServicer_to_server(RecommendationsService(self._checkout), server)
        server.add_generic_rpc_handlers((Health(self.dataplane.ready),))
        return server

    def _open_grpc(self) -> str:
        host = self._settings.host
        return host_port(host, self._grpc.add_insecure_port(host_port(host, self._settings.grpc_port)))


def most_connections(settings: Settings) -> int:
    """Return how many connections of HTTP, and of gRPC, may be open; warn if that is fewer than set."""
    wanted = settings.max_connections
    most = room_for(wanted)
    if most < wanted:
        _log.warning(
            "%s is %d, but the limit of open files leaves room for %d connections only: "
            "raise it (`ulimit -Hn`), or lower the setting",
            variable("max_connections"),
            wanted,
            most,
        )
    return most


def build_app(dataplane: DataPlane, extension: Any, checkout: Checkout, settings: Settings) -> Limits:
    """Return the ASGI application: our routes and KServe's, /metrics and /healthz behind `Limits`."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for path in _HIDDEN:
        app.add_api_route(path, _hidden, methods=["GET", "POST", "PUT", "DELETE"])

    async def openapi_json() -> dict[str, Any]:
        return openapi(settings, checkout.recommender.bundle.profiles)

    app.add_api_route("/openapi.json", openapi_json)

    async def root() -> dict[str, str]:
        return {**await dataplane.live(), "ask": f"POST {RECOMMENDATIONS}", "described": "/openapi.json"}

    app.add_api_route("/", root)
    if not settings.metrics_address:
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


class _DataPlane(DataPlane):
    """KServe's, ready when every model is and the process is not about to stop."""

    draining = False

    async def ready(self) -> bool:
        models = self.model_registry.get_models().values()
        return not self.draining and bool(models) and all(model.ready for model in models)


class _Servicer(InferenceServicer):
    """KServe's, without its model repository: what serves is decided by the registry, not by a caller."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        return await super().ModelInfer(request, _CallHeaders(context))

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


class _CallHeaders:
    """Stands in for a gRPC context, of which KServe reads only the headers; adds the time left to them."""

    def __init__(self, context: Any) -> None:
        self._headers = [SimpleNamespace(key=k, value=v) for k, v in read_metadata(context).items()]

    def invocation_metadata(self) -> list[SimpleNamespace]:
        return self._headers


class _Statuses(AsyncExceptionToStatusInterceptor):
    """An exception -> a gRPC status: a client's fault is counted, only ours are logged."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Let bytes that are no message reach `intercept`: gRPC itself calls them an unknown error."""
        handler = await super().intercept_service(continuation, handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        return handler._replace(request_deserializer=partial(_decoded, handler.request_deserializer))

    async def intercept(self, method: Any, request_or_iterator: Any, context: Any, method_name: str) -> Any:
        """Call the method, or refuse bytes that are no message."""
        if isinstance(request_or_iterator, DecodeError):
            method = _refuse_bytes
        return await super().intercept(method, request_or_iterator, context, method_name)

    async def handle_exception(
        self, ex: Exception, request_or_iterator: Any, context: Any, method_name: str
    ) -> NoReturn:
        if isinstance(ex, grpc.aio.AbortError):  # a method has refused the call itself
            raise ex
        _, status, reason = next(
            (r for kind, r in _REFUSALS.items() if isinstance(ex, kind)), (500, grpc.StatusCode.INTERNAL, "")
        )
        if status in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE):
            count_fault("grpc")
        if reason:
            count_rejected(reason)
            await context.abort(status, _MESSAGES.get(reason, str(ex))[:MAX_DETAIL_LENGTH])
        _log.error("gRPC %s failed", method_name, exc_info=ex)
        await context.abort(status, "internal error")
        raise AssertionError("abort raises")


def _decoded(decode: Callable[[bytes], Any], content: bytes) -> Any:
    try:
        return decode(content)
    except DecodeError as error:
        return error


async def _refuse_bytes(error: DecodeError, context: Any) -> NoReturn:
    raise InvalidRequest("the bytes are no message of this method")


def _metrics(request: Request) -> Response:
    # No coroutine: FastAPI calls it in a thread, and no request waits while it adds up.
    content, content_type = exposition(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": content_type})


async def _hidden() -> None:
    raise HTTPException(404)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    status, _status, reason = next(r for kind, r in _REFUSALS.items() if isinstance(error, kind))
    count_rejected(reason)
    if status >= 500 and request.method == "POST":  # a probe that finds the endpoint not ready is no fault
        count_fault("http")
    return _problem(status, _MESSAGES.get(reason, str(error)))


async def _refuse_schema(_: Request, error: Exception) -> JSONResponse:
    """Name the place that breaks the V2 schema, and nothing that was sent."""
    assert isinstance(error, RequestValidationError)
    count_rejected("schema")
    places = {
        ".".join(str(p) for p in e["loc"] if p in _FIELDS or isinstance(p, int)) or "body"
        for e in error.errors()
    }
    listed = ", ".join(sorted(places)[:5])
    return _problem(422, f"not an Open Inference Protocol request; look at: {listed}")


async def _refuse_route(_: Request, error: Exception) -> JSONResponse:
    status = getattr(error, "status_code", 404)
    count_rejected("route" if status in (404, 405) else "http")
    detail = {404: "no such path", 405: "method not allowed here"}.get(status, "bad request")
    return _problem(status, detail, getattr(error, "headers", None))


async def _broken(_: Request, error: Exception) -> JSONResponse:
    count_fault("http")
    return _problem(500, "internal error")  # uvicorn logs the traceback


def _problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(problem(status, detail), status, headers, MEDIA_TYPE)
