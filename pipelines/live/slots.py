"""InferenceServices of a small cluster -> endpoint processes of this machine, as KServe makes pods of them.

A slot that is not parked gets one process. A change of its environment starts another one, and the old one
ends when the new one is ready, so that the slot always answers.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from components.rollout import NAMESPACE
from components.rollout.cluster import Document
from components.rollout.manifests import (
    BUNDLE_VARIABLE,
    LOG_VARIABLE,
    ROUTE,
    SLOT_HEADER,
    SLOTS,
    STOP,
    backend,
    log_of,
    service,
    source_of,
)
from pipelines.live.cluster_api import Objects
from pipelines.live.ports import answers, free_port
from pipelines.live.supervisor import await_end, tail, until_parent_ends
from serving.settings import Settings

LOOK_S = 0.2
AGAIN_S, LONGEST_AGAIN_S = 5.0, 60.0  # between two starts that fail, of a bundle that was ready before
SERVER = (sys.executable, "-P", "-m", "serving.server")
Launch = Callable[[Path], Sequence[str]]


def shipped(bundle: Path) -> Sequence[str]:
    """Return the program that serves a bundle; a drill starts a worse one."""
    return SERVER


def new_cluster(source: str, log_dir: Path) -> Objects:
    """Return a cluster with the route and two slots; the first one serves the bundle of a URI."""
    objects = Objects()
    rules: list[Document] = []
    for slot in SLOTS:
        path = {"path": {"type": "PathPrefix", "value": "/v1"}}
        header = {"type": "Exact", "name": SLOT_HEADER, "value": slot}
        backends = [{"name": backend(slot), "port": 80}]
        rules.append({"matches": [{**path, "headers": [header]}], "backendRefs": backends})
    paths = [{"path": {"type": "PathPrefix", "value": value}} for value in ("/v1", "/v2")]
    split = [{"name": backend(slot), "port": 80, "weight": 100 if slot == SLOTS[0] else 0} for slot in SLOTS]
    rules.append({"matches": paths, "backendRefs": split})
    route = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "HTTPRoute", "metadata": {}}
    objects.write(("httproutes", NAMESPACE, ROUTE), {**route, "spec": {"rules": rules}})
    for slot in SLOTS:
        settings = {BUNDLE_VARIABLE: source, LOG_VARIABLE: str(log_dir)}
        environment = [{"name": name, "value": value} for name, value in settings.items()]
        container = {"name": "kserve-container", "env": environment}
        stop = {STOP: "false" if slot == SLOTS[0] else "true"}
        its = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService"}
        spec = {"predictor": {"containers": [container]}}
        document = {**its, "metadata": {"annotations": stop}, "spec": spec}
        objects.write(("inferenceservices", NAMESPACE, service(slot)), document)
    return objects


@dataclass
class _Pod:
    name: str
    found: Document  # the InferenceService that it was started for
    process: subprocess.Popen[bytes]
    port: int
    ready: bool = False
    restarts: int = 0
    started: float = field(default_factory=time.monotonic)


class Slots:
    """Plays KServe and the kubelet for both slots, in a thread, until `close`."""

    def __init__(
        self,
        objects: Objects,
        settings: Settings,
        logs: Path,
        launch: Launch,
    ) -> None:
        """Begin.

        Args:
            objects: of the cluster.
            settings: of each endpoint; ports and log are its own.
            logs: folder of the processes' output.
            launch: returns the program that serves a bundle; its options follow.
        """
        self._objects, self._settings, self._logs, self._launch = objects, settings, logs, launch
        self._patience_s = settings.drain_s + settings.grace_s + 2.0
        self._pods: dict[str, list[_Pod]] = {slot: [] for slot in SLOTS}
        self._failed: dict[str, Document] = {}  # slot -> the InferenceService whose first start failed
        self._ending: list[subprocess.Popen[bytes]] = []
        self._number, self._over = 0, threading.Event()
        logs.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._run, name="slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all processes as an operator would."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                for slot in SLOTS:
                    self._reconcile(slot)
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End all processes, in the thread that started them: the kernel kills those that outlive it."""
        for pod in [pod for pods in self._pods.values() for pod in pods]:
            self._ending.append(pod.process)
            pod.process.terminate()
        for process in self._ending:
            await_end(process, self._patience_s)

    def _reconcile(self, slot: str) -> None:
        found = self._objects.get(("inferenceservices", NAMESPACE, service(slot)))
        pods, source = self._pods[slot], source_of(found)
        if not source:
            self._failed.pop(slot, None)  # filled again, it starts again
        for pod in list(pods):
            self._look_at(slot, pod, found)
        newest = [pod for pod in pods if pod.found["spec"] == found["spec"]] if source else []
        if source and not newest and self._failed.get(slot) != found["spec"]:
            pods.append(self._start(slot, found))
        if not source or any(pod.ready for pod in newest):
            for pod in [pod for pod in pods if pod not in newest]:
                self._remove(slot, pod)
        self._report(slot, found)

    def _start(self, slot: str, found: Document, restarts: int = 0) -> _Pod:
        self._number += 1
        name, port = f"{backend(slot)}-{self._number}", free_port()
        bundle = Path(url2pathname(urlsplit(source_of(found)).path))
        own = replace(
            self._settings, http_port=port, grpc_port=0, log_dir=Path(log_of(found)), metrics_address=""
        )
        command = [*self._launch(bundle), "--bundle", str(bundle)]
        with (self._logs / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(
                until_parent_ends(command), env=own.to_env(), stdout=out, stderr=out, start_new_session=True
            )
        return _Pod(name, found, process, port, restarts=restarts)

    def _look_at(self, slot: str, pod: _Pod, found: Document) -> None:
        if pod.process.poll() is None:
            if not pod.ready and not answers(f"http://127.0.0.1:{pod.port}/v2/health/ready"):
                pod.ready = True
                self._show(slot, pod)
            return
        is_wanted = bool(source_of(found)) and (pod.ready or pod.restarts > 0)  # its bundle was ready before
        if is_wanted and not pod.ready:
            if time.monotonic() < pod.started + min(AGAIN_S * pod.restarts, LONGEST_AGAIN_S):
                return
            (self._logs / f"{pod.name}.log").unlink()  # the next one says the same
        self._drop(slot, pod)
        if is_wanted:  # the kubelet starts it again
            self._pods[slot].append(self._start(slot, pod.found, pod.restarts + 1))
        else:
            self._failed[slot] = pod.found["spec"]

    def _remove(self, slot: str, pod: _Pod) -> None:
        """Take a pod from its Service, then end it: requests in flight are answered."""
        self._drop(slot, pod)
        self._ending = [process for process in self._ending if process.poll() is None]
        self._ending.append(pod.process)
        pod.process.terminate()
        threading.Thread(target=await_end, args=(pod.process, self._patience_s), daemon=True).start()

    def _drop(self, slot: str, pod: _Pod) -> None:
        self._pods[slot].remove(pod)
        if pod.ready:
            self._objects.delete(("pods", NAMESPACE, pod.name))

    def _show(self, slot: str, pod: _Pod) -> None:
        ports = [{"name": name, "containerPort": pod.port} for name in ("http1", "metrics")]
        document = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"labels": {"serving.kserve.io/inferenceservice": service(slot)}},
            "spec": {"containers": [{"name": "kserve-container", "ports": ports}]},
            "status": {
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "kserve-container", "restartCount": pod.restarts}],
            },
        }
        self._objects.write(("pods", NAMESPACE, pod.name), document)

    def _report(self, slot: str, found: Document) -> None:
        """Write the Deployment that KServe would make, if anything of it changed."""
        key = ("deployments", NAMESPACE, backend(slot))
        existing = self._objects.find(key)
        if not source_of(found):
            if existing:
                self._objects.delete(key)
            return
        spec = {"replicas": 1, "template": {"spec": found["spec"]["predictor"]}}
        newest = [pod for pod in self._pods[slot] if pod.found["spec"] == found["spec"]]
        ready = sum(pod.ready for pod in newest)
        status: dict[str, Any] = {"replicas": len(self._pods[slot]), "updatedReplicas": len(newest)}
        generation = existing["metadata"]["generation"] if existing else 0
        generation += not existing or existing["spec"] != spec
        status |= {"availableReplicas": ready, "observedGeneration": generation}
        has_failed = any(pod.process.poll() is not None for pod in newest)  # it will be started again
        if has_failed or (self._failed.get(slot) == found["spec"] and not newest):
            last = {"type": "Progressing", "status": "False", "message": self._last_words(slot)}
            status["conditions"] = [last]
        if existing is None or (existing["spec"], existing.get("status")) != (spec, status):
            its = {"apiVersion": "apps/v1", "kind": "Deployment"}
            self._objects.write(key, {**its, "spec": spec, "status": status})

    def _last_words(self, slot: str) -> str:
        logs = sorted(self._logs.glob(f"{backend(slot)}-*.log"), key=lambda file: file.stat().st_mtime)
        lines = tail(logs[-1]).strip().splitlines() if logs else []
        return lines[-1][:300] if lines else "it ended without a word"
