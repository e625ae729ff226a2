"""Objects of a small cluster behind the Kubernetes API: the calls of it that a release makes.

It plays the API server alone: get, list, create and merge patches, with resource versions. There are no
schemas, no rights and no watches. A controller runs in this process and looks at the objects again and again.
`LocalServer` and `LocalCall` also serve the gateway and the receiver of alerts.
"""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from components.rollout.cluster import KINDS, Document

Key = tuple[str, str, str]  # plural, namespace, name
PATH = re.compile(r"/(apis?/.+)/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?")
_KINDS = {place: kind for kind, place in KINDS.items()}


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

    def get(self, key: Key) -> Document:
        """Return a copy of an object."""
        if (found := self.find(key)) is None:
            raise Refused(404, "NotFound", f'{key[0]} "{key[2]}" not found')
        return found

    def find(self, key: Key) -> Document | None:
        """Return a copy of an object, or None."""
        text = self._objects.get(key)
        return None if text is None else dict(json.loads(text))

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
            before = self.find(key)
            if expected and (before is None or before["metadata"]["resourceVersion"] != expected):
                raise Refused(409, "Conflict", f'{key[0]} "{key[2]}": the object has been modified')
            self._version += 1
            after: Document = json.loads(json.dumps(document))
            its = after.setdefault("metadata", {})
            old: Document = before["metadata"] if before else {"uid": str(uuid.uuid4()), "generation": 0}
            is_same = before is not None and before.get("spec") == after.get("spec")
            its |= {"name": key[2], "namespace": key[1], "uid": old["uid"]}
            its |= {"generation": old["generation"] + (not is_same), "resourceVersion": str(self._version)}
            self._objects[key] = json.dumps(after)
            return after

    def merge(self, key: Key, changes: Document, expected: str = "") -> Document:
        """Merge changes into an object, in one step."""
        with self._lock:
            return self.write(key, merged(self.get(key), changes), expected)

    def create(self, key: Key, document: Document) -> Document:
        """Create an object; there must be none of its name."""
        with self._lock:
            if key in self._objects:
                raise Refused(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
            return self.write(key, document)

    def delete(self, key: Key) -> None:
        """Remove an object."""
        with self._lock:
            del self._objects[key]
            self._version += 1

    @property
    def version(self) -> str:
        """The resource version of the last write."""
        return str(self._version)


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


def answer(objects: Objects, method: str, url: str, body: bytes) -> tuple[int, Document]:
    """Return status and document of a GET, PATCH or POST."""
    split = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(split.query).items()}
    try:
        return 200, _routed(objects, method, split.path, query, body)
    except Refused as refused:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": str(refused)}
        return refused.status, {**status, "reason": refused.reason, "code": refused.status}


def _routed(objects: Objects, method: str, path: str, query: dict[str, str], body: bytes) -> Document:
    found = PATH.fullmatch(path)
    if found is None or found.group(1, 3) not in _KINDS:
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    api, namespace, plural, name = found.groups()
    if method == "GET" and name:
        return objects.get((plural, namespace, name))
    if method == "GET":
        return {"items": [one for one in objects.list(plural, namespace) if _selected(one, query)]}
    given: Document = json.loads(body)
    if method == "PATCH":
        expected = given.get("metadata", {}).get("resourceVersion", "")
        return objects.merge((plural, namespace, name), given, expected)
    head = {"apiVersion": api.partition("/")[2], "kind": _KINDS[api, plural]}
    return objects.create((plural, namespace, given["metadata"]["name"]), {**head, **given})


def _selected(document: Document, query: dict[str, str]) -> bool:
    labels = document["metadata"].get("labels", {})
    fields = {"metadata.name": document["metadata"]["name"]}
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


class LocalCall(http.server.BaseHTTPRequestHandler):
    """One call of a `LocalServer`, read and answered whole."""

    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        """Return the body."""
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def reply(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Send status, headers and content."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write no log of calls: the endpoint has its own, and a page of an alert is no line for people."""


class ApiServer(LocalServer):
    """The API, without credentials."""

    def __init__(self, objects: Objects, port: int = 0) -> None:
        self.objects = objects
        super().__init__(("127.0.0.1", port), _Call)


class _Call(LocalCall):
    server: ApiServer

    def _call(self) -> None:
        status, document = answer(self.server.objects, self.command, self.path, self.body())
        self.reply(status, {"content-type": "application/json"}, json.dumps(document).encode())

    do_GET = do_POST = do_PATCH = _call
