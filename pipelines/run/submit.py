"""The training pipeline -> IR YAML in a file, or a run on a Kubeflow Pipelines API."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feature_repo.atomic_files import replaced
from feature_repo.errors import UNREACHABLE, USAGE, RecoError

API = "/apis/v2beta1"
CONNECT_TIMEOUT_S = 10.0
ENDED = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}


class ApiRefused(RecoError):
    """The pipelines API answers, but does not do what was asked."""

    exit_code = USAGE


class ApiUnreachable(RecoError):
    """Nothing that speaks the pipelines API answers at this address."""

    exit_code = UNREACHABLE


@dataclass(frozen=True)
class Submitted:
    """A run on a cluster."""

    run_id: str
    url: str
    pipeline_id: str
    version_id: str
    state: str


@dataclass(frozen=True)
class Mount:
    """A PersistentVolumeClaim, and where every step finds it."""

    claim: str
    path: str


def write_ir(pipeline: Any, file: Path, image: str = "", mount: Mount | None = None) -> int:
    """Compile a pipeline to `file` and return how many steps it has.

    Args:
        pipeline: the pipeline function.
        file: where the IR goes.
        image: replaces the steps' image.
        mount: what every step gets mounted.
    """
    import yaml
    from kfp import compiler

    with replaced(file, suffix=".part.yaml") as part:  # the compiler takes no other extension
        compiler.Compiler().compile(pipeline, str(part))
        documents = list(yaml.safe_load_all(part.read_text(encoding="utf-8")))
        executors = documents[0]["deploymentSpec"]["executors"]
        for executor in executors.values() if image else ():
            executor["container"]["image"] = image
        if mount:
            documents[1:] = [_mounted(documents[1] if documents[1:] else {}, executors, mount)]
        if image or mount:
            part.write_text(yaml.safe_dump_all(documents, sort_keys=True), encoding="utf-8")
    return len(executors)


def _mounted(platform: dict[str, Any], executors: Iterable[str], mount: Mount) -> dict[str, Any]:
    """Add a claim to the IR's second document, which says what a step's pod has on Kubernetes."""
    pods = platform
    for key in ("platforms", "kubernetes", "deploymentSpec", "executors"):
        pods = pods.setdefault(key, {})
    for executor in executors:
        name = {"runtimeValue": {"constant": mount.claim}}
        # The name stands there twice, as kfp-kubernetes writes it: older servers read `constant`.
        claim = {"mountPath": mount.path, "pvcNameParameter": name, "constant": mount.claim}
        pods.setdefault(executor, {}).setdefault("pvcMount", []).append(claim)
    return platform


def submit_pipeline(
    pipeline: Any,
    host: str,
    arguments: Mapping[str, Any],
    image: str = "",
    experiment: str = "checkout-recommender",
    namespace: str = "",
    token: str = "",
    mount: Mount | None = None,
) -> Submitted:
    """Upload a pipeline as a new version, run it, and return at once.

    Raises:
        ApiUnreachable: nothing answers, or something else does.
        ApiRefused: the API wants credentials or does not take the pipeline.
    """
    host = host.rstrip("/") if "://" in host else f"https://{host.rstrip('/')}"
    ask_health(host, token)
    name = str(pipeline.pipeline_spec.pipeline_info.name)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    with tempfile.TemporaryDirectory() as folder, _api(host):
        file = Path(folder) / f"{name}.yaml"
        write_ir(pipeline, file, image, mount)
        client = _client(host, namespace, token)
        pipeline_id = client.get_pipeline_id(name)
        if pipeline_id is None:
            pipeline_id = client.upload_pipeline(str(file), name, namespace=namespace or None).pipeline_id
            version_id = client.list_pipeline_versions(pipeline_id).pipeline_versions[0].pipeline_version_id
        else:
            version = client.upload_pipeline_version(str(file), f"{name} {stamp}", pipeline_id=pipeline_id)
            version_id = version.pipeline_version_id
        home = client.create_experiment(experiment, namespace=namespace or None)
        run = client.run_pipeline(
            home.experiment_id, f"{name} {stamp}", None, dict(arguments), pipeline_id, version_id
        )
    return Submitted(
        run.run_id, f"{host}/#/runs/details/{run.run_id}", pipeline_id, version_id, run.state or "PENDING"
    )


def wait_for_run(host: str, run_id: str, token: str = "", every_s: float = 5.0) -> str:
    """Return how a run on a cluster ended."""
    with _api(host):
        client = _client(host, "", token)
        while (state := str(client.get_run(run_id).state)) not in ENDED:
            time.sleep(every_s)
    return state


def ask_health(host: str, token: str = "") -> None:
    """Fail in seconds and say why when no pipelines API answers; KFP's client would try for half a minute.

    Raises:
        ApiUnreachable: nothing answers, or something else does.
        ApiRefused: it wants credentials.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(f"{host}{API}/healthz", headers=headers)
        with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S) as answer:
            json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise ApiRefused(f"{host} answers {error.code}: give a token with --token-file") from error
        raise _something_else(host, f"{API}/healthz answers {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", None) or error
        raise ApiUnreachable(
            f"nothing answers at {host} ({cause}): is the address right, is the cluster up?"
        ) from error
    except ValueError as error:
        raise _something_else(host, f"{API}/healthz does not answer with JSON") from error


def _something_else(host: str, found: str) -> ApiUnreachable:
    return ApiUnreachable(
        f"{host} is not a Kubeflow Pipelines v2 API: {found}; expected its root URL as --host"
    )


def _client(host: str, namespace: str, token: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it greets with a warning about old servers
        from kfp import Client

        return Client(host, namespace=namespace or "kubeflow", existing_token=token or None)


@contextlib.contextmanager
def _api(host: str) -> Iterator[None]:
    """Turn the client's errors into ours; what it prints goes to stderr."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ApiException as error:
        said = _message(error.body) or error.reason
        raise ApiRefused(f"{host} answers {error.status}: {said}") from error
    except HTTPError as error:
        raise ApiUnreachable(
            f"{host} stopped answering ({error}): look whether the run exists, then try again"
        ) from error


def _message(body: Any) -> str:
    try:
        found = json.loads(body)
    except (ValueError, TypeError):
        return ""
    return (
        str(found.get("message") or found.get("error_message") or "")[:500] if isinstance(found, dict) else ""
    )
