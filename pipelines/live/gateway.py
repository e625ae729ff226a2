"""The HTTPRoute of a small cluster -> requests passed on by header, path and weight, and mirrored."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError, ProtocolError

from components.rollout.cluster import Document
from components.rollout.manifests import is_ready
from pipelines.live.cluster_api import LocalCall, LocalServer, Objects

PATIENCE_S = 5.0  # for an answer of a slot; the endpoint has a deadline of its own
MIRRORS = 4  # mirrored requests at a time; more are dropped, as a gateway may
Call = tuple[str, str, bytes, dict[str, str]]  # method, path, body, headers
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}  # of one connection alone
# Before it sends, a pool replaces a connection that its pod has closed.
_pods = urllib3.PoolManager(maxsize=512, block=True)


def choose(rules: list[Document], path: str, headers: Any, dice: float) -> tuple[str, int, Document | None]:
    """Return Service, port and mirror of a request; a path without a rule goes where most requests go.

    Args:
        rules: of the HTTPRoute, in their order.
        path: of the request.
        headers: of the request, by name in lower case.
        dice: a number from 0 to 1 that chooses among weights.
    """
    rule = next((one for one in rules if _matches(one, path, headers)), None)
    if rule is None:  # on a small cluster alone: health and metrics
        largest = max(rules[-1]["backendRefs"], key=lambda one: int(one["weight"]))
        return largest["name"], largest["port"], None
    shares = list(itertools.accumulate(one.get("weight", 1) for one in rule["backendRefs"]))
    number = next(number for number, share in enumerate(shares) if dice * shares[-1] < share)
    chosen = rule["backendRefs"][number]
    filters = [one for one in rule.get("filters", ()) if one["type"] == "RequestMirror"]
    return chosen["name"], chosen["port"], filters[0]["requestMirror"] if filters else None


def _matches(rule: Document, path: str, headers: Any) -> bool:
    return any(
        path.startswith(match["path"]["value"])
        and all(headers.get(one["name"]) == one["value"] for one in match.get("headers", ()))
        for match in rule["matches"]
    )


class Gateway(LocalServer):
    """Passes requests on to the ready pods of the route's Services."""

    def __init__(self, objects: Objects, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Request)
        self._objects, self._mirrors = objects, ThreadPoolExecutor(MIRRORS)
        self._room = threading.Semaphore(MIRRORS * 4)
        self._seen, self._rules, self._pods = "", list[Document](), dict[str, list[int]]()
        self._lock = threading.Lock()

    def rules(self) -> list[Document]:
        """Return the route's rules as they are now."""
        self._refresh()
        return self._rules

    def ports(self, service: str) -> list[int]:
        """Return where the ready pods of a Service take HTTP, in a random order."""
        self._refresh()
        ports = list(self._pods.get(service, ()))
        random.shuffle(ports)
        return ports

    def mirror(self, service: str, call: Call) -> None:
        """Send a copy of a request; its answer is dropped."""
        if self._room.acquire(blocking=False):
            self._mirrors.submit(self._copy, service, call)

    def _copy(self, service: str, call: Call) -> None:
        try:
            for port in self.ports(service)[:1]:
                with contextlib.suppress(HTTPError):  # nothing waits for it
                    ask(port, call)
        finally:
            self._room.release()

    def _refresh(self) -> None:
        """Read the objects again if one of them changed."""
        with self._lock:
            if self._seen == (now := self._objects.version):
                return
            routes = self._objects.list("httproutes")
            pods: dict[str, list[int]] = {}
            for pod in self._objects.list("pods"):
                if is_ready(pod):
                    name = pod["metadata"]["labels"]["serving.kserve.io/inferenceservice"]
                    port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
                    pods.setdefault(f"{name}-predictor", []).append(port)
            self._rules = routes[0]["spec"]["rules"] if routes else []
            self._seen, self._pods = now, pods


def ask(port: int, call: Call) -> urllib3.BaseHTTPResponse:
    """Return a pod's answer, over a connection that is kept for the next request."""
    method, path, body, headers = call
    return _pods.connection_from_host("127.0.0.1", port).urlopen(  # a path cannot name another host here
        method, path, body, headers, retries=False, timeout=PATIENCE_S, decode_content=False
    )


class _Request(LocalCall):
    server: Gateway
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet

    def _pass_on(self) -> None:
        body = self.body()
        headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in _HOP}
        if not self.path.startswith("/"):
            self.reply(400, {}, b"expected a path")
            return
        headers.setdefault("x-request-id", uuid.uuid4().hex)
        service, _, mirror = choose(self.server.rules(), self.path, headers, random.random())
        call = (self.command, self.path, body, headers)
        if mirror and random.random() * 100 < mirror.get("percent", 100):
            self.server.mirror(mirror["backendRef"]["name"], call)
        ports = self.server.ports(service)
        for port in [*ports, *ports][:2]:
            try:
                answer = ask(port, call)
            except (NewConnectionError, ProtocolError):
                continue  # it ended, or its connection broke, just now: another pod, or the same once more
            except HTTPError as error:
                self.reply(504, {}, str(error).encode())
                return
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            self.reply(answer.status, kept, answer.data)
            return
        self.reply(503, {}, f"no pod of {service} is ready".encode())

    do_GET = do_POST = _pass_on
