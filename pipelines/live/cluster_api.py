"""Objects of a small cluster behind the Kubernetes API: the part of it that kubectl and a release use.

It plays the API server alone: objects, resource versions, merge patches, server-side apply and watches. There
are no schemas, no field owners and no rights. Whoever plays a controller follows the writes by `watch`.
"""

from __future__ import annotations

import http.server
import json
import queue
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

Document = dict[str, Any]
Key = tuple[str, str, str]  # plural, namespace, name
KINDS = {
    ("v1", "pods"): "Pod",
    ("v1", "services"): "Service",
    ("v1", "configmaps"): "ConfigMap",
    ("apps/v1", "deployments"): "Deployment",
    ("batch/v1", "cronjobs"): "CronJob",
    ("batch/v1", "jobs"): "Job",
    ("gateway.networking.k8s.io/v1", "httproutes"): "HTTPRoute",
    ("serving.kserve.io/v1beta1", "inferenceservices"): "InferenceService",
}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_APPLY = "application/apply-patch+yaml"


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class Objects:
    """The objects of the cluster; each write gets the next resource version."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._objects: dict[Key, str] = {}  # as JSON: a copy is cheap
        self._version = 0
        self._watchers: list[tuple[str, queue.SimpleQueue[tuple[str, Document]]]] = []

    def get(self, key: Key) -> Document:
        """Return a copy of an object."""
        with self._lock:
            if key not in self._objects:
                raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
            return dict(json.loads(self._objects[key]))

    def list(self, plural: str, namespace: str = "") -> list[Document]:
        """Return copies of all objects of a kind."""
        with self._lock:
            keys = [key for key in self._objects if key[0] == plural and namespace in ("", key[1])]
            return [json.loads(self._objects[key]) for key in sorted(keys)]

    def write(self, key: Key, document: Document, expected: str = "") -> Document:
        """Create or replace an object.

        Args:
            key: of the object.
            document: all of it.
            expected: resource version that it must have now; empty: any.
        """
        with self._lock:
            before = self.get(key) if key in self._objects else None
            if expected and (before is None or before["metadata"]["resourceVersion"] != expected):
                raise Refused(409, "Conflict", f'{key[0]} "{key[2]}": the object has been modified')
            self._version += 1
            after: Document = json.loads(json.dumps(document))
            its = after.setdefault("metadata", {})
            old: Document = before["metadata"] if before else {"uid": str(uuid.uuid4()), "generation": 0}
            is_same = before is not None and before.get("spec") == after.get("spec")
            its |= {"name": key[2], "namespace": key[1], "uid": old["uid"]}
            its |= {
                "generation": old["generation"] + (not is_same),
                "resourceVersion": str(self._version),
            }
            self._objects[key] = json.dumps(after)
            self._tell("MODIFIED" if before else "ADDED", key)
            return after

    def merge(self, key: Key, changes: Document, expected: str = "") -> Document:
        """Merge changes into an object, in one step."""
        with self._lock:
            return self.write(key, merged(self.get(key), changes), expected)

    def delete(self, key: Key) -> Document:
        """Remove an object."""
        with self._lock:
            gone = self.get(key)
            self._tell("DELETED", key)
            del self._objects[key]
            self._version += 1
            return gone

    def watch(self, plural: str) -> queue.SimpleQueue[tuple[str, Document]]:
        """Return a queue of the changes of a kind from now on: ADDED, MODIFIED or DELETED, and the object."""
        changes: queue.SimpleQueue[tuple[str, Document]] = queue.SimpleQueue()
        with self._lock:
            self._watchers.append((plural, changes))
        return changes

    def unwatch(self, changes: queue.SimpleQueue[tuple[str, Document]]) -> None:
        """End a watch."""
        with self._lock:
            self._watchers = [one for one in self._watchers if one[1] is not changes]

    @property
    def version(self) -> str:
        """The resource version of the last write."""
        return str(self._version)

    def _tell(self, change: str, key: Key) -> None:
        for plural, changes in self._watchers:
            if plural == key[0]:
                changes.put((change, self.get(key)))


def merged(document: Any, changes: Any) -> Any:
    """Return a document after a JSON merge patch (RFC 7396)."""
    if not isinstance(changes, dict):
        return changes
    result = dict(document) if isinstance(document, dict) else {}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def answer(
    objects: Objects, method: str, url: str, body: bytes, content_type: str = ""
) -> tuple[int, Document]:
    """Return status and document of a call; a watch is not among them."""
    split = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(split.query).items()}
    try:
        return 200, _routed(objects, method, split.path, query, body, content_type)
    except Refused as refused:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": str(refused)}
        return refused.status, {**status, "reason": refused.reason, "code": refused.status}


def _routed(
    objects: Objects, method: str, path: str, query: dict[str, str], body: bytes, content_type: str
) -> Document:
    words = path.strip("/").split("/")
    if (found := _discovery(words)) is not None:
        return found
    api, plural, namespace, name = _place(words)
    kind = KINDS[api, plural]
    if method == "GET" and not name:
        if query.get("sendInitialEvents") == "true":
            raise Refused(422, "Invalid", "sendInitialEvents is not known here")
        items = [one for one in objects.list(plural, namespace) if _selected(one, query)]
        version = {"resourceVersion": objects.version}
        return {"kind": f"{kind}List", "apiVersion": api, "metadata": version, "items": items}
    given: Document = _parsed(body, content_type) if body else {}
    key = (plural, namespace, name or given.get("metadata", {}).get("name", ""))
    if method == "GET":
        return objects.get(key)
    if method == "DELETE":
        return objects.delete(key)
    head = {"apiVersion": api, "kind": kind}
    return _written(objects, method, key, head, query, given, content_type.startswith(_APPLY))


def _written(
    objects: Objects,
    method: str,
    key: tuple[str, str, str],
    head: Document,
    query: dict[str, str],
    given: Document,
    is_apply: bool,
) -> Document:
    plural, namespace, name = key
    expected = given.get("metadata", {}).get("resourceVersion", "")
    exists = any(one["metadata"]["name"] == name for one in objects.list(plural, namespace))
    dry = "dryRun" in query
    if method == "POST":
        if exists:
            raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
        after = given
    elif method == "PUT":
        objects.get(key)
        after = given
    elif method == "PATCH":
        if is_apply and "fieldManager" not in query:
            raise Refused(400, "BadRequest", "an apply needs a fieldManager")
        before = objects.get(key) if exists or not is_apply else {}
        if not dry and exists:  # in one step: no other write comes between
            return objects.merge(key, given, expected)
        after = merged(before, given)
    else:
        raise Refused(405, "MethodNotAllowed", f"{method} is not allowed here")
    after = {**head, **after}
    return after if dry else objects.write(key, after, expected)


def _parsed(body: bytes, content_type: str) -> Document:
    if content_type.startswith(_APPLY):
        import yaml

        return dict(yaml.safe_load(body))
    return dict(json.loads(body))


def _place(words: list[str]) -> tuple[str, str, str, str]:
    """Return API, plural, namespace and name of a path."""
    start = 2 if words[0] == "api" else 3
    api, rest = "/".join(words[1:start]), words[start:]
    namespace, rest = (rest[1], rest[2:]) if rest[:1] == ["namespaces"] and len(rest) > 2 else ("", rest)
    if not rest or (api, rest[0]) not in KINDS:
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    return api, rest[0], namespace, rest[1] if len(rest) > 1 else ""


def _discovery(words: list[str]) -> Document | None:
    if words == ["version"]:
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if words == ["api"]:
        return {"kind": "APIVersions", "versions": ["v1"]}
    if words == ["apis"]:
        names = {api for api, _ in KINDS if "/" in api}
        groups = [{"groupVersion": api, "version": api.partition("/")[2]} for api in sorted(names)]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {"name": one["groupVersion"].partition("/")[0], "versions": [one], "preferredVersion": one}
                for one in groups
            ],
        }
    api = "/".join(words[1:])
    resources = [
        {"name": plural, "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": _VERBS}
        for (its, plural), kind in KINDS.items()
        if its == api
    ]
    if not resources:
        return None
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": resources}


def _selected(document: Document, query: dict[str, str]) -> bool:
    labels = document["metadata"].get("labels", {})
    fields = {f"metadata.{name}": document["metadata"].get(name) for name in ("name", "namespace")}
    for wanted, values in (("labelSelector", labels), ("fieldSelector", fields)):
        for term in filter(None, query.get(wanted, "").split(",")):
            name, _, value = term.partition("=")
            if values.get(name) != value.removeprefix("="):
                return False
    return True


class LocalServer(http.server.ThreadingHTTPServer):
    """HTTP on 127.0.0.1, a thread for each connection."""

    daemon_threads = True
    request_queue_size = 512

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, but not of a client that went away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class ApiServer(LocalServer):
    """The API, without credentials."""

    def __init__(self, objects: Objects, port: int = 0) -> None:
        self.objects = objects
        super().__init__(("127.0.0.1", port), _Call)


class _Call(http.server.BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        query = parse_qs(urlsplit(self.path).query)
        if query.get("watch", [""])[-1] in ("1", "true") and "sendInitialEvents" not in query:
            self._watch({name: values[-1] for name, values in query.items()})
            return
        kind = self.headers.get("content-type", "")
        status, document = answer(self.server.objects, self.command, self.path, body, kind)
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer

    def _watch(self, query: dict[str, str]) -> None:
        _, plural, _, _ = _place(urlsplit(self.path).path.strip("/").split("/"))
        changes = self.server.objects.watch(plural)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        try:
            for line in _events(changes, query, float(query.get("timeoutSeconds", "60"))):
                self.wfile.write(line)
                self.wfile.flush()
        except OSError:
            pass  # the client went away, which ends a watch
        finally:
            self.server.objects.unwatch(changes)
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Write no log of calls."""


def _events(
    changes: queue.SimpleQueue[tuple[str, Document]], query: dict[str, str], wait_s: float
) -> Iterator[bytes]:
    while True:
        try:
            change, document = changes.get(timeout=wait_s)
        except queue.Empty:
            return
        if _selected(document, query):
            yield json.dumps({"type": change, "object": document}).encode() + b"\n"
