"""Calls of the Kubernetes API: get, list, patch and create, over HTTP and nothing else."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx

from components.home import Conflict
from feature_repo.errors import UNREACHABLE, USAGE, RecoError, without_password

Document = dict[str, Any]
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of a pod, mounted by Kubernetes
IN_POD = "pod"
TIMEOUT_S = 10.0
PAUSE_S = 0.3  # between two attempts
LONGEST_PAUSE_S = 10.0  # where the API asks for more
ATTEMPTS = 3  # a release must not end because one connection broke, or one answer said 429
# A patch names the version that it changes: if the first attempt was taken, the next one is refused as stale.
REPEATED = ("GET", "PATCH")
KINDS = {  # kind -> API and plural
    "HTTPRoute": ("apis/gateway.networking.k8s.io/v1", "httproutes"),
    "InferenceService": ("apis/serving.kserve.io/v1beta1", "inferenceservices"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "Pod": ("api/v1", "pods"),
    "ScaledObject": ("apis/keda.sh/v1alpha1", "scaledobjects"),
    "Job": ("apis/batch/v1", "jobs"),
    "CronJob": ("apis/batch/v1", "cronjobs"),
}


class NoCluster(RecoError):
    """No cluster was named."""

    exit_code = USAGE


class ClusterUnreachable(RecoError):
    """The Kubernetes API does not answer, or is too busy to."""

    exit_code = UNREACHABLE
    pause_s = 0.0  # as the API asked


class ClusterRefused(RecoError):
    """The Kubernetes API refuses a call: an object is missing, or a right."""


class Stale(Conflict):
    """An object changed between reading and writing it."""


class _AccountToken(httpx.Auth):
    """The pod's token, read at each call: Kubernetes replaces it each hour."""

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # type: ignore[override]
        request.headers["authorization"] = f"Bearer {(ACCOUNT / 'token').read_text()}"
        yield request


def connect(url: str) -> httpx.Client:
    """Return a connection to a URL without credentials (`kubectl proxy`); `pod` or empty: the pod's cluster.

    Raises:
        NoCluster: there is no URL, and this is no pod; or the URL is no address.
    """
    if url not in ("", IN_POD):
        with suppress(httpx.InvalidURL):
            if httpx.URL(url).scheme in ("http", "https") and httpx.URL(url).host:
                return httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        raise NoCluster(
            f"{without_password(url)!r:.200} is no address of a cluster; expected http://HOST:PORT or https://HOST"
        )
    if not (ACCOUNT / "token").is_file():
        raise NoCluster(
            "no cluster: give --cluster URL, for example of `kubectl proxy`, or start `reco up --slots`"
        )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    return httpx.Client(
        base_url="https://kubernetes.default.svc",
        verify=context,
        auth=_AccountToken(),
        timeout=TIMEOUT_S,
        trust_env=False,
    )


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, client: httpx.Client, namespace: str) -> None:
        self._client, self._namespace = client, namespace

    def get(self, kind: str, name: str) -> Document:
        """Return an object.

        Raises:
            ClusterRefused: it does not exist.
            ClusterUnreachable: the API does not answer.
        """
        return self._call("GET", self._path(kind, name))

    def find(self, kind: str, name: str) -> Document | None:
        """Return an object, or None."""
        found = self.list(kind, f"metadata.name={name}", "fieldSelector")
        return found[0] if found else None

    def list(self, kind: str, selector: str, by: str = "labelSelector") -> list[Document]:
        """Return the objects with some labels."""
        return list(self._call("GET", self._path(kind), params={by: selector})["items"])

    def patch(self, kind: str, name: str, changes: Document, version: str) -> Document:
        """Merge changes into an object if its resourceVersion is still this one; return the new object.

        Raises:
            Stale: it changed meanwhile; nothing was written.
        """
        metadata = {**changes.get("metadata", {}), "resourceVersion": version}
        body = json.dumps({**changes, "metadata": metadata})
        headers = {"content-type": "application/merge-patch+json"}
        params = {"fieldManager": "reco-release"}
        return self._call("PATCH", self._path(kind, name), params=params, content=body, headers=headers)

    def create(self, kind: str, document: Document) -> Document:
        """Create an object.

        Raises:
            Stale: there is one with its name.
        """
        return self._call("POST", self._path(kind), json=document)

    def _path(self, kind: str, name: str = "") -> str:
        api, plural = KINDS[kind]
        return f"/{api}/namespaces/{self._namespace}/{plural}" + (f"/{name}" if name else "")

    def _call(self, method: str, path: str, **options: Any) -> Document:
        for _ in range(ATTEMPTS - 1 if method in REPEATED else 0):
            try:
                return self._ask(method, path, **options)
            except ClusterUnreachable as error:
                time.sleep(max(error.pause_s, PAUSE_S))
        return self._ask(method, path, **options)

    def _ask(self, method: str, path: str, **options: Any) -> Document:
        try:
            answer = self._client.request(method, path, **options)
        except httpx.TransportError as error:
            address = without_password(str(self._client.base_url))
            raise ClusterUnreachable(
                f"the Kubernetes API at {address} does not answer ({error}): the route "
                "keeps its weights; `reco release --resume` goes on when it is back"
            ) from error
        if answer.is_success:
            return dict(answer.json())
        message = _message(answer)
        if answer.status_code == httpx.codes.CONFLICT:
            raise Stale(f"{path.rsplit('/', 1)[-1]} was changed meanwhile: {message}")
        if answer.is_server_error or answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            busy = ClusterUnreachable(
                f"the Kubernetes API answers {answer.status_code} ({message}): the route keeps its weights; "
                "`reco release --resume` goes on when it does"
            )
            busy.pause_s = min(_retry_after_s(answer.headers.get("retry-after", "")), LONGEST_PAUSE_S)
            raise busy
        raise ClusterRefused(
            f"the cluster refuses {method} {path} with {answer.status_code} ({message}): apply infra/kserve, "
            "and see that this account has the rights of infra/kserve/release/rights.yaml"
        )


def _retry_after_s(text: str) -> float:
    """Return the seconds of a header Retry-After, a number or a date; 0 for anything else."""
    if text.isdecimal():
        return float(text)
    with suppress(ValueError, TypeError, OverflowError):
        return parsedate_to_datetime(text).timestamp() - time.time()
    return 0.0


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return answer.text[:300]
