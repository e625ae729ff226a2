"""A pipeline -> IR YAML in a file; or a run, or a schedule, on a Kubeflow Pipelines API."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from feature_repo.atomic_files import read_json, write_output
from feature_repo.errors import CONFLICT, UNREACHABLE, USAGE, RecoError, without_password
from pipelines.run.graph import read_spec

API = "/apis/v2beta1"
CONNECT_TIMEOUT_S = 10.0
# What a Secret may hold for the steps that take one of these inputs; a parameter can be read by each user.
PASSWORDS = {
    "RECO_STORE_PASSWORD": "online_store",
    "MLFLOW_TRACKING_USERNAME": "tracking_uri",
    "MLFLOW_TRACKING_PASSWORD": "tracking_uri",
    "MLFLOW_TRACKING_TOKEN": "tracking_uri",
}
CUT = "train_until"  # an argument of trainings alone
ENDED = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}
WENT_WELL = {"SUCCEEDED": True, "FAILED": False}  # a training that was cancelled says nothing


class ApiRefused(RecoError):
    """The pipelines API answers, but refuses the request."""

    exit_code = USAGE


class ApiUnreachable(RecoError):
    """Nothing that speaks the pipelines API answers at this address."""

    exit_code = UNREACHABLE


class NotRepeated(RecoError):
    """A training on the cluster waits or works already."""

    exit_code = CONFLICT


class NoTraining(RecoError):
    """No training of the experiment on the cluster succeeded, so none can be run again."""

    exit_code = USAGE


@dataclass(frozen=True)
class Kubeflow:
    """A Kubeflow Pipelines API, and what its runs belong to."""

    host: str  # root URL
    experiment: str
    namespace: str = ""  # where the cluster has several users
    token: str = field(default="", repr=False)

    @property
    def root(self) -> str:
        """Return the root URL with its scheme, without a slash at its end."""
        return _root(self.host)


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


def write_ir(pipeline: Any, file: Path) -> int:
    """Compile a pipeline to `file` and return how many steps it has."""
    from kfp import compiler

    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch, "pipeline.yaml")
        compiler.Compiler().compile(pipeline, str(made))
        write_output(file, made.read_text(encoding="utf-8"))
    return len(read_spec(pipeline)["deploymentSpec"]["executors"])


def equipped(pipeline: Any, image: str = "", mount: Mount | None = None, secret: str = "") -> Any:
    """Return a pipeline with the equipment of a cluster in each step; the same one without any.

    `secret` names the Secret whose keys are PASSWORDS; a step gets those that it needs.
    """
    if not (image or mount or secret):
        return pipeline
    from kfp import dsl, kubernetes
    from kfp.dsl.pipeline_context import Pipeline

    @dsl.pipeline(name=pipeline.name, description=pipeline.description)
    @functools.wraps(pipeline.pipeline_func)
    def with_equipment(*inputs: Any, **named: Any) -> None:
        pipeline.pipeline_func(*inputs, **named)
        for task in Pipeline.get_default_pipeline().tasks.values():
            if image:
                task.set_container_image(image)
            if mount:
                kubernetes.mount_pvc(task, mount.claim, mount.path)
            needed = {name: name for name, input_name in PASSWORDS.items() if input_name in task.inputs}
            if secret and needed:
                kubernetes.use_secret_as_env(task, secret, needed, optional=True)

    return with_equipment


def submit_pipeline(pipeline: Any, cluster: Kubeflow, arguments: Mapping[str, Any]) -> Submitted:
    """Upload a pipeline as a new version, run it, and return at once.

    Raises:
        ApiUnreachable: nothing answers, or something else does.
        ApiRefused: the API wants credentials or does not take the pipeline.
    """
    with _experiment(cluster) as (client, experiment_id):
        ids = _upload(client, pipeline, cluster.namespace)
        return _start(client, cluster, experiment_id, pipeline.name, dict(arguments), ids)


def _start(
    client: Any,
    cluster: Kubeflow,
    experiment_id: str,
    name: str,
    arguments: dict[str, Any],
    ids: tuple[str, str],
) -> Submitted:
    run = client.run_pipeline(experiment_id, _stamped(name), None, arguments, *ids)
    return Submitted(run.run_id, _page_of(cluster, run.run_id), *ids, run.state or "PENDING")


def _page_of(cluster: Kubeflow, run_id: str) -> str:
    return f"{cluster.root}/#/runs/details/{run_id}"


def repeat_training(cluster: Kubeflow) -> Submitted:
    """Run the newest training that succeeded again, on all data of now, and return at once.

    It has the same version of the pipeline and the same arguments, without the cut.

    Raises:
        NotRepeated: a training waits or works.
        NoTraining: none succeeded.
        ApiUnreachable: nothing answers, or something else does.
        ApiRefused: the API wants credentials or refuses the run.
    """
    with _experiment(cluster) as (client, experiment_id):
        for run in _trainings(client, experiment_id):
            if run.state not in ENDED:
                raise NotRepeated(f"run {run.run_id} trains already: {_page_of(cluster, run.run_id)}")
            if run.state == "SUCCEEDED":
                break
        else:
            raise NoTraining(
                f"no training of experiment {cluster.experiment!r} succeeded: start one with "
                "`reco submit --release --data DIR`"
            )
        made_by = run.pipeline_version_reference
        arguments = {**run.runtime_config.parameters, CUT: ""}
        ids = (made_by.pipeline_id, made_by.pipeline_version_id)
        return _start(client, cluster, experiment_id, "retraining", arguments, ids)


@contextlib.contextmanager
def _experiment(cluster: Kubeflow) -> Iterator[tuple[Any, str]]:
    """Yield a client and the experiment's id; inside the block, the client's errors are ours."""
    ask_health(cluster.root, cluster.token)
    with _api(cluster.root):
        client = _client(cluster.root, cluster.namespace, cluster.token)
        namespace = cluster.namespace or None
        yield client, client.create_experiment(cluster.experiment, namespace=namespace).experiment_id


def _trainings(client: Any, experiment_id: str) -> Iterator[Any]:
    """Yield the runs of an experiment that train, newest first."""
    for listed in _pages(lambda page: client.list_runs(page, 100, "created_at desc", experiment_id)):
        for run in listed.runs or ():
            if run.runtime_config and CUT in (run.runtime_config.parameters or {}):
                yield run


def _pages(read: Callable[[str], Any]) -> Iterator[Any]:
    """Yield every page of a list of the API; `read` takes the token of one."""
    page = read("")
    yield page
    while page.next_page_token:
        page = read(page.next_page_token)
        yield page


def schedule_pipeline(
    pipeline: Any, cluster: Kubeflow, arguments: Mapping[str, Any], cron: str
) -> dict[str, Any]:
    """Upload a pipeline as a new version and give it a recurring run, in place of its earlier ones.

    Returns:
        The ids, the page of the recurring run, and how many it `replaced`.

    Raises:
        ApiUnreachable: nothing answers, or something else does.
        ApiRefused: the API wants credentials or does not take the pipeline.
    """
    with _experiment(cluster) as (client, experiment_id):
        pipeline_id, version_id = _upload(client, pipeline, cluster.namespace)
        earlier = list(_schedules(client, experiment_id, pipeline.name))
        made = client.create_recurring_run(
            experiment_id,
            pipeline.name,
            cron_expression=cron,
            no_catchup=True,
            params=dict(arguments),
            pipeline_id=pipeline_id,
            version_id=version_id,
        )
        for one in earlier:  # last: a schedule that fails leaves the old one
            client.delete_recurring_run(one)
    return {
        "recurring_run_id": made.recurring_run_id,
        "url": f"{cluster.root}/#/recurringrun/details/{made.recurring_run_id}",
        "pipeline_id": pipeline_id,
        "version_id": version_id,
        "replaced": len(earlier),
    }


def _schedules(client: Any, experiment_id: str, name: str) -> Iterator[str]:
    """Yield the ids of an experiment's recurring runs of that name."""
    for listed in _pages(lambda page: client.list_recurring_runs(page, 100, experiment_id=experiment_id)):
        yield from (one.recurring_run_id for one in listed.recurring_runs or () if one.display_name == name)


def _root(host: str) -> str:
    return host.rstrip("/") if "://" in host else f"https://{host.rstrip('/')}"


def _upload(client: Any, pipeline: Any, namespace: str) -> tuple[str, str]:
    """Upload a pipeline as a new version of the one of its name; return the ids of pipeline and version."""
    name = pipeline.name
    # Client.get_pipeline_id sends no namespace: it finds the pipelines that all users share.
    named = {"operation": "EQUALS", "key": "display_name", "stringValue": name}
    wanted = json.dumps({"predicates": [named]})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.yaml")
        write_ir(pipeline, file)
        found = client.list_pipelines(namespace=namespace or None, filter=wanted).pipelines
        if found:
            version = client.upload_pipeline_version(
                str(file), _stamped(name), pipeline_id=found[0].pipeline_id
            )
        else:
            made = client.upload_pipeline(str(file), name, namespace=namespace or None)
            version = client.list_pipeline_versions(made.pipeline_id).pipeline_versions[0]
    return version.pipeline_id, version.pipeline_version_id


def _stamped(name: str) -> str:
    return f"{name} {time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"


def training_since(cluster: Kubeflow, run_id: str, failed_at: datetime | None) -> bool | None:
    """Return whether the newest training since a start went well; None: not known. See `newest_result`.

    Raises:
        ApiUnreachable: nothing answers, or something else does.
        ApiRefused: the API wants credentials.
    """
    from monitoring.retraining import newest_result

    with _experiment(cluster) as (client, experiment_id):
        runs = _trainings(client, experiment_id)
        results = ((run.run_id, run.created_at, WENT_WELL.get(run.state)) for run in runs)
        return newest_result(results, run_id, failed_at)


def wait_for_run(
    host: str, run_id: str, token: Callable[[], str] = str, every_s: float = 5.0, patience_s: float = 300.0
) -> str:
    """Return how a run on a cluster ended. The API may stay away for `patience_s` meanwhile.

    `token` returns the bearer token of now: one lives an hour, a training may take longer.

    Raises:
        ApiUnreachable: nothing answered for so long.
        ApiRefused: the API wants other credentials, or does not know the run.
    """
    host, seen = _root(host), time.monotonic()
    while True:
        try:
            ask_health(host, now := token())
            with _api(host):
                state = str(_client(host, "", now).get_run(run_id).state)
            seen = time.monotonic()
        except (ApiUnreachable, ApiRefused) as error:
            # The API may answer while its database is away.
            is_away = isinstance(error, ApiUnreachable) or getattr(error.__cause__, "status", 0) >= 500
            if not is_away or time.monotonic() - seen > patience_s:
                raise
            state = ""
        if state in ENDED:
            return state
        time.sleep(every_s)


def ask_health(host: str, token: str = "") -> None:
    """Fail in seconds and say why when no pipelines API answers; KFP's client would try for half a minute.

    Raises:
        ApiUnreachable: nothing answers, or something else does.
        ApiRefused: it wants credentials.
    """
    import httpx

    shown = without_password(host)
    try:
        answer = httpx.get(
            f"{host}{API}/healthz",
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=CONNECT_TIMEOUT_S,
            follow_redirects=True,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ApiUnreachable(
            f"nothing answers at {shown} ({error}): is the address right, is the cluster up?"
        ) from error
    if answer.status_code in (401, 403):
        raise ApiRefused(f"{shown} answers {answer.status_code}: give a token with --token-file")
    if not answer.is_success or "json" not in answer.headers.get("Content-Type", ""):
        raise ApiUnreachable(
            f"{shown} is not a Kubeflow Pipelines v2 API: {API}/healthz answers {answer.status_code} "
            "and no JSON; expected its root URL as --host"
        )


def _client(host: str, namespace: str, token: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it greets with a warning about old servers
        from kfp import Client

        return Client(host, namespace=namespace or "kubeflow", existing_token=token or None)


@contextlib.contextmanager
def _api(host: str) -> Iterator[None]:
    """Turn the client's errors into ours; its output goes to stderr."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ApiException as error:
        said = _message(error.body) or error.reason
        raise ApiRefused(f"{without_password(host)} answers {error.status}: {said}") from error
    except HTTPError as error:
        raise ApiUnreachable(
            f"{without_password(host)} stopped answering ({error}): look whether the run exists, "
            "then try again"
        ) from error


def _message(body: Any) -> str:
    try:
        found = read_json(body)
    except (ValueError, TypeError):
        return ""
    return (
        str(found.get("message") or found.get("error_message") or "")[:500] if isinstance(found, dict) else ""
    )
