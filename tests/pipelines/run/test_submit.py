"""IR in a file, and a run over real HTTP on a server with the calls of KFP's v2beta1 API."""

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from kfp import components

from monitoring.retraining import COOL_DOWN
from monitoring.windows import Window
from pipelines.run.launch import retrain_on_cluster, retraining_result
from pipelines.run.submit import (
    ApiRefused,
    ApiUnreachable,
    Kubeflow,
    Mount,
    NoTraining,
    NotRepeated,
    equipped,
    repeat_training,
    schedule_pipeline,
    submit_pipeline,
    wait_for_run,
    write_ir,
)
from pipelines.training import TEACHERS, training_of
from tests.chaos.procs import free_port
from tests.pipelines.conftest import VERDICT, sums

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


STEPS = 21


class Cluster(ThreadingHTTPServer):
    """Keeps the uploads and the runs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Api)
        self.pipelines: dict[str, str] = {}
        self.namespace = ""  # of the pipelines
        self.versions: list[dict[str, Any]] = []
        self.uploads: list[str] = []
        self.experiments: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.ended: dict[str, str] = {}  # the state of a run, PENDING without one
        self.recurring: dict[str, dict[str, Any]] = {}
        self.states = ["PENDING", "RUNNING", "SUCCEEDED"]
        self.fail: tuple[int, dict[str, Any]] | None = None
        self.tokens: set[str] = set()
        self.token = ""
        self.away = 0  # looks that find no API, and the last one its database away

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def asked(self, experiment: str = "shop", **options: str) -> Kubeflow:
        return Kubeflow(self.url, experiment, **options)


class Api(BaseHTTPRequestHandler):
    server: Cluster

    def do_GET(self) -> None:
        if self._denied():
            return
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path == "/apis/v2beta1/healthz":
            if self.server.away > 1:
                self.server.away -= 1
                return self._answer({}, 503)
            return self._answer({"multi_user": False})
        if path == "/apis/v2beta1/pipelines":
            wanted = json.loads(query["filter"][0])["predicates"][0]
            wanted = wanted.get("string_value") or wanted["stringValue"]
            is_there = query.get("namespace", [""])[0] == self.server.namespace
            names = self.server.pipelines if is_there else {}
            found = [{"pipeline_id": i, "display_name": n} for i, n in names.items() if n == wanted]
            return self._answer({"pipelines": found, "total_size": len(found)} if found else {})
        if re.fullmatch(r"/apis/v2beta1/pipelines/\w+/versions", path):
            return self._answer({"pipeline_versions": self.server.versions[::-1]})
        if path == "/apis/v2beta1/experiments":
            found = [{"experiment_id": i, "display_name": n} for n, i in self.server.experiments.items()]
            return self._answer({"experiments": found})
        if path == "/apis/v2beta1/recurringruns":
            first, held = int(query.get("page_token", ["0"])[0]), list(self.server.recurring.values())
            more = {"next_page_token": str(first + 1)} if first + 1 < len(held) else {}
            return self._answer({"recurringRuns": held[first : first + 1], **more})  # one of a page
        if path == "/apis/v2beta1/runs":
            assert (query["experiment_id"], query["sort_by"]) == (["e1"], ["created_at desc"])
            first = int(query.get("page_token", ["0"])[0])
            newest = list(enumerate(self.server.runs, 1))[::-1][first : first + 2]  # two of a page
            listed = [
                {**run, "run_id": f"r{n}", "state": self.server.ended.get(f"r{n}", "PENDING")}
                for n, run in newest
            ]
            more = {"next_page_token": str(first + 2)} if first + 2 < len(self.server.runs) else {}
            return self._answer({"runs": listed, **more})
        if match := re.fullmatch(r"/apis/v2beta1/runs/(\w+)", path):
            if self.server.away:
                self.server.away -= 1
                return self._answer({"message": "no database"}, 503)
            return self._answer({"run_id": match[1], "state": self.server.states.pop(0)})
        self._answer({"message": f"no {path}"}, 404)

    def do_DELETE(self) -> None:
        del self.server.recurring[urlsplit(self.path).path.rsplit("/", 1)[-1]]
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._denied():
            return
        if self.server.fail:
            status, document = self.server.fail
            return self._answer(document, status)
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        if path.startswith("/apis/v2beta1/pipelines/upload"):
            header = f"Content-Type: {self.headers['Content-Type']}\n\n".encode()
            _, part = message_from_bytes(header + body).walk()  # the envelope, then its content
            if path.endswith("upload") and query["name"][0] in self.server.pipelines.values():
                return self._answer({"message": f"the name {query['name'][0]} already exists"}, 409)
            self.server.uploads.append(bytes(part.get_payload(decode=True)).decode())
            version = {"pipeline_version_id": f"v{len(self.server.uploads)}", "pipeline_id": "p1"}
            self.server.versions.append(version)
            if path.endswith("upload_version"):
                assert query["pipelineid"] == ["p1"]
                return self._answer({**version, "display_name": query["name"][0]})
            self.server.pipelines["p1"] = query["name"][0]
            self.server.namespace = query.get("namespace", [""])[0]
            return self._answer({"pipeline_id": "p1", "display_name": query["name"][0]})
        document = json.loads(body)
        if path == "/apis/v2beta1/experiments":
            self.server.experiments[document["display_name"]] = "e1"
            return self._answer({"experiment_id": "e1", "display_name": document["display_name"]})
        if path == "/apis/v2beta1/recurringruns":
            number = f"s{len(self.server.uploads)}"
            self.server.recurring[number] = {**document, "recurring_run_id": number}
            return self._answer(self.server.recurring[number])
        if path == "/apis/v2beta1/runs":
            self.server.runs.append({**document, "created_at": datetime.now(UTC).isoformat()})
            return self._answer({"run_id": f"r{len(self.server.runs)}", "state": "PENDING"})
        self._answer({"message": f"no {path}"}, 404)

    def _denied(self) -> bool:
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._answer({"message": "who are you"}, 401)
            return True
        return False

    def _answer(self, document: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


ARGUMENTS = {"count": 5, "times": {"times": 2}}  # of `sums`, three steps that are compiled fast


def test_the_ir_has_image_size_and_retries_and_installs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "training.yaml"
    assert write_ir(equipped(training_of("full"), "registry.example/reco-python:1"), file) == STEPS
    text = file.read_text()
    assert "pip install" not in text
    spec = yaml.safe_load(text)
    for name, executor in spec["deploymentSpec"]["executors"].items():
        container = executor["container"]
        assert container["image"] == "registry.example/reco-python:1", name
        assert container["resources"]["resourceCpuLimit"] in {"1", "2"}, name
        assert container["resources"]["resourceMemoryLimit"] in {"4Gi", "8Gi"}, name
    tasks = spec["root"]["dag"]["tasks"]
    for name, task in tasks.items():
        assert not task["cachingOptions"].get("enableCache"), name
        assert ("retryPolicy" in task) == (name != "promote-bundle"), name
        assert "triggerPolicy" not in task, name
        assert "iteratorPolicy" not in task, name
    assert tasks["ingest-events"]["retryPolicy"]["maxRetryCount"] == 2
    loaded = components.load_component_from_text(text)
    assert set(loaded.required_inputs) == {"home", "tracking_uri"}
    kinds = {n: p["parameterType"] for n, p in spec["root"]["inputDefinitions"]["parameters"].items()}
    assert kinds["max_quarantine_ratio"] == "NUMBER_DOUBLE"
    assert kinds["ranker_params"] == "STRUCT"
    assert [file.name for file in tmp_path.iterdir()] == ["training.yaml"]


@pytest.mark.parametrize("name", ["training", "watch"])
def test_a_volume_is_mounted_in_every_step(tmp_path: Path, name: str) -> None:
    from pipelines.watch import watch

    file = tmp_path / "mounted.yaml"
    pipeline = training_of("full") if name == "training" else watch
    write_ir(equipped(pipeline, mount=Mount("shop-state", "/mnt/reco")), file)
    spec, platform = yaml.safe_load_all(file.read_text())
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert set(pods) == set(spec["deploymentSpec"]["executors"])
    for name, pod in pods.items():
        [mount] = pod["pvcMount"]
        assert mount["mountPath"] == "/mnt/reco", name
        assert mount["pvcNameParameter"] == {"runtimeValue": {"constant": "shop-state"}}, name
    loaded = components.load_component_from_file(str(file))
    read = loaded.platform_spec.platforms["kubernetes"].deployment_spec.executors
    assert set(read) == set(pods)


def test_a_step_gets_the_passwords_that_it_needs_from_the_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret.yaml"
    write_ir(equipped(training_of("full"), secret="reco-passwords"), file)
    _, platform = yaml.safe_load_all(file.read_text())
    pods = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    given = {}
    for name, pod in pods.items():
        [secret] = pod["secretAsEnv"]
        assert secret["secretNameParameter"] == {"runtimeValue": {"constant": "reco-passwords"}}
        assert secret["optional"]
        given[name] = {pair["envVar"] for pair in secret["keyToEnv"]}
    mlflow = {"MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"}
    models = ("", *(f"-{number}" for number in range(2, len(TEACHERS) + 1)))
    trained = [
        *(f"exec-{name}" for name in ("train-retriever", "distill-ranker", "prune-ranker")),
        *(f"exec-{name}" for name in ("quantize-ranker", "compile-ranker")),
        *(f"exec-train-ranker{model}" for model in models),
    ]
    assert given == {
        **dict.fromkeys(trained, mlflow),
        "exec-register-bundle": mlflow,
        "exec-promote-bundle": mlflow,
        "exec-publish-features": {"RECO_STORE_PASSWORD"},
    }


def test_image_and_mount_change_nothing_else(tmp_path: Path) -> None:
    image = "registry.example/reco-python:1"
    write_ir(sums, tmp_path / "bare.yaml")
    write_ir(equipped(sums, image, Mount("shop", "/mnt")), tmp_path / "equipped.yaml")
    [bare] = yaml.safe_load_all((tmp_path / "bare.yaml").read_text())
    more, _ = yaml.safe_load_all((tmp_path / "equipped.yaml").read_text())
    for executor in bare["deploymentSpec"]["executors"].values():
        executor["container"]["image"] = image
    assert more == bare


def test_a_first_submission_uploads_the_pipeline_and_runs_it(cluster: Cluster) -> None:
    mount = Mount("shop-state", "/mnt/reco")
    run = submit_pipeline(equipped(sums, "x-python:2", mount), cluster.asked(), ARGUMENTS)
    assert (run.run_id, run.pipeline_id, run.version_id, run.state) == ("r1", "p1", "v1", "PENDING")
    assert run.url == f"{cluster.url}/#/runs/details/r1"
    assert cluster.pipelines == {"p1": "sums"}
    assert cluster.experiments == {"shop": "e1"}
    [asked] = cluster.runs
    assert asked["experiment_id"] == "e1"
    assert asked["pipeline_version_reference"] == {"pipeline_id": "p1", "pipeline_version_id": "v1"}
    assert asked["runtime_config"]["parameters"] == ARGUMENTS
    assert "x-python:2" in cluster.uploads[0]
    assert cluster.uploads[0].count("constant: shop-state") == 2 * 3, "two for each step"


@pytest.mark.parametrize("namespace", ["", "team"])
def test_a_second_submission_adds_a_version(cluster: Cluster, namespace: str) -> None:
    submit_pipeline(sums, cluster.asked(namespace=namespace), ARGUMENTS)
    run = submit_pipeline(sums, cluster.asked(namespace=namespace), ARGUMENTS)
    assert (run.run_id, run.pipeline_id, run.version_id) == ("r2", "p1", "v2")
    assert wait_for_run(cluster.url, "r2", every_s=0.01) == "SUCCEEDED"


def test_a_wait_reads_the_token_at_each_look_and_outlives_a_restart(cluster: Cluster) -> None:
    def token() -> str:
        cluster.token = f"token-{len(cluster.states)}"
        return cluster.token

    cluster.states, cluster.away = ["PENDING", "RUNNING", "RUNNING", "SUCCEEDED"], 2
    assert wait_for_run(cluster.url, "r1", token, every_s=0.01) == "SUCCEEDED"
    assert (cluster.states, cluster.away, cluster.token) == ([], 0, "token-1")
    with pytest.raises(ApiRefused, match="--token-file"):
        wait_for_run(cluster.url, "r1", lambda: "token-0", every_s=0.01)
    cluster.away = 2
    with pytest.raises(ApiUnreachable, match="503"):
        wait_for_run(cluster.url, "r1", token, every_s=0.01, patience_s=0)


def test_a_schedule_takes_the_place_of_the_one_before(cluster: Cluster) -> None:
    first = schedule_pipeline(sums, cluster.asked(), ARGUMENTS, "0 0 6 * * *")
    assert (first["recurring_run_id"], first["replaced"]) == ("s1", 0)
    again = schedule_pipeline(sums, cluster.asked(), ARGUMENTS, "0 0 7 * * *")
    assert (again["recurring_run_id"], again["version_id"], again["replaced"]) == ("s2", "v2", 1)
    assert again["url"] == f"{cluster.url}/#/recurringrun/details/s2"
    [made] = cluster.recurring.values()
    assert made["trigger"]["cron_schedule"]["cron"] == "0 0 7 * * *"
    assert made["runtime_config"]["parameters"] == ARGUMENTS
    assert made["pipeline_version_reference"] == {"pipeline_id": "p1", "pipeline_version_id": "v2"}
    assert (made["mode"], made["no_catchup"], made["max_concurrency"]) == ("ENABLE", True, 1)
    cluster.recurring = {"s0": {"recurring_run_id": "s0", "display_name": "of others"}, "s2": made}
    third = schedule_pipeline(sums, cluster.asked(), ARGUMENTS, "0 0 7 * * *")
    assert third["replaced"] == 1, "it was on the second page"
    assert list(cluster.recurring) == ["s0", third["recurring_run_id"]]


def run_of(
    version: str, at: datetime = datetime(2024, 1, 1, tzinfo=UTC), **parameters: object
) -> dict[str, Any]:
    reference = {"pipeline_id": "p1", "pipeline_version_id": version}
    given = {"created_at": at.isoformat(), "runtime_config": {"parameters": parameters}}
    return {"pipeline_version_reference": reference, **given}


@pytest.fixture
def trained(cluster: Cluster) -> Cluster:
    """A cluster with a good training, a failed one, and two looks for drift after them."""
    cluster.runs = [
        run_of("v1", data="/shop", train_until="2024-01-01"),
        run_of("v2", data="/shop", train_until="2024-02-01"),
        run_of("v3", bundle="/mnt/reco"),
        run_of("v3", bundle="/mnt/reco"),
    ]
    cluster.ended = {"r1": "SUCCEEDED", "r2": "FAILED", "r3": "SUCCEEDED", "r4": "RUNNING"}
    return cluster


def test_the_last_good_training_runs_again_on_all_data_and_once_at_a_time(trained: Cluster) -> None:
    again = repeat_training(trained.asked())
    assert (again.run_id, again.version_id, again.url) == ("r5", "v1", f"{trained.url}/#/runs/details/r5")
    made = trained.runs[-1]
    assert made["runtime_config"]["parameters"] == {"data": "/shop", "train_until": ""}
    assert made["pipeline_version_reference"] == {"pipeline_id": "p1", "pipeline_version_id": "v1"}
    with pytest.raises(NotRepeated, match="run r5 trains already"):
        repeat_training(trained.asked())
    trained.ended["r5"] = "FAILED"
    assert repeat_training(trained.asked()).version_id == "v1"
    trained.runs = trained.runs[1:4]
    trained.ended = {"r1": "FAILED"}
    with pytest.raises(NoTraining, match=r"experiment 'shop' succeeded: .* --release --data DIR"):
        repeat_training(trained.asked())


def test_drift_submits_one_training_and_a_refusal_does_not_use_the_cool_down(
    trained: Cluster, tmp_path: Path
) -> None:
    def retrain() -> dict[str, Any]:
        return retrain_on_cluster(tmp_path, VERDICT, trained.asked(), COOL_DOWN)

    trained.fail = (500, {"message": "no disk"})
    with pytest.raises(ApiRefused, match="no disk"):
        retrain()
    trained.fail = None
    first = retrain()
    assert (first["started"], first["run_id"], len(trained.runs)) == (True, "r5", 5)
    trained.ended["r5"] = "SUCCEEDED"
    second = retrain()
    assert (second["started"], len(trained.runs)) == (False, 5)
    assert "the next may start at" in second["said"]


def test_the_result_of_a_retraining_is_known_when_its_run_has_ended(trained: Cluster, tmp_path: Path) -> None:
    def result() -> bool | None:
        return retraining_result(tmp_path, trained.asked(), None)

    assert result() is None, "none was started"
    retrain_on_cluster(tmp_path, VERDICT, trained.asked(), COOL_DOWN)
    for state, expected in (("RUNNING", None), ("CANCELED", None), ("SUCCEEDED", True), ("FAILED", False)):
        trained.ended["r5"] = state
        assert result() is expected, state
    trained.runs.append(run_of("v1", data="/shop", train_until=""))
    assert result() is False, "a training by hand works"
    trained.ended["r6"] = "SUCCEEDED"
    assert result() is True, "it repaired the failure"


def test_a_deleted_run_leaves_no_result_to_the_trainings_before_it(trained: Cluster, tmp_path: Path) -> None:
    retrain_on_cluster(tmp_path, VERDICT, trained.asked(), COOL_DOWN)
    trained.runs.pop()
    assert trained.ended["r2"] == "FAILED"
    assert retraining_result(tmp_path, trained.asked(), None) is None


def test_a_refused_start_is_not_covered_by_the_result_of_the_run_before(
    trained: Cluster, tmp_path: Path
) -> None:
    retrain_on_cluster(tmp_path, VERDICT, trained.asked(), timedelta(0))
    trained.ended["r5"] = "SUCCEEDED"
    trained.fail = (500, {"message": "no disk"})
    later = replace(VERDICT, window=Window(None, None))
    with pytest.raises(ApiRefused, match="no disk"):
        retrain_on_cluster(tmp_path, later, trained.asked(), timedelta(0))
    trained.fail = None
    assert retraining_result(tmp_path, trained.asked(), None) is None
    failed_at = datetime.now(UTC)
    assert retraining_result(tmp_path, trained.asked(), failed_at) is None
    trained.runs.append(run_of("v1", failed_at, data="/shop", train_until=""))
    assert retraining_result(tmp_path, trained.asked(), failed_at) is None, "a training by hand works"
    for state, expected in (("FAILED", False), ("SUCCEEDED", True)):
        trained.ended["r6"] = state
        assert retraining_result(tmp_path, trained.asked(), failed_at) is expected


def test_a_token_is_sent_and_a_missing_one_is_reported(cluster: Cluster) -> None:
    cluster.token = "sesame"
    with pytest.raises(ApiRefused, match="answers 401: give a token with --token-file"):
        submit_pipeline(sums, cluster.asked(), ARGUMENTS)
    assert submit_pipeline(sums, cluster.asked(token="sesame"), ARGUMENTS).run_id == "r1"


def test_a_missing_server_is_reported_within_seconds() -> None:
    with pytest.raises(ApiUnreachable, match="nothing answers at"):
        submit_pipeline(sums, Kubeflow(f"http://127.0.0.1:{free_port()}", "shop"), ARGUMENTS)


def test_a_server_that_is_not_kfp_is_reported(cluster: Cluster) -> None:
    with pytest.raises(ApiUnreachable, match=r"is not a Kubeflow Pipelines v2 API: .*healthz answers 404"):
        submit_pipeline(sums, Kubeflow(f"{cluster.url}/elsewhere", "shop"), ARGUMENTS)
