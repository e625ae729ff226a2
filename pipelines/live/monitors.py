"""The shipped rules, Prometheus, Alertmanager -> the alerts that reach a person, and when.

Routes and inhibition are those of `infra/monitoring`; only the receivers differ. `BundleOld` is left out: it
would always fire, because demo data never grow.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from monitoring.alerting import SLO, read_slo, rules
from pipelines.live.cluster_api import LocalCall, LocalServer
from pipelines.live.ports import answers, free_port, page
from pipelines.live.supervisor import until_parent_ends

EXEMPT = "BundleOld"
SCRAPE_S = 5
MOST_POINTS = 400  # of one series
START_S = 60.0  # for a program to answer on a busy machine
INSTALL = "apt install prometheus prometheus-alertmanager"


@dataclass(frozen=True)
class Programs:
    """The two programs that are installed here."""

    prometheus: str
    alertmanager: str


@dataclass(frozen=True)
class Notice:
    """An alert that reached a receiver, firing or resolved."""

    alert: str
    severity: str
    is_firing: bool
    at: float  # the machine's monotonic clock


@dataclass
class Monitors:
    """A Prometheus and an Alertmanager that run, and the notices of their receiver."""

    url: str  # of Prometheus
    began: float  # monotonic
    notices: list[Notice] = field(default_factory=list)

    def since(self, began: float) -> list[Notice]:
        """Return the notices from a moment on."""
        return [notice for notice in list(self.notices) if notice.at >= began]

    def series(self, query: str) -> dict[str, list[tuple[float, float]]]:
        """Return the values of a query since the beginning, by its labels: seconds and value of each."""
        now, span_s = time.time(), time.monotonic() - self.began
        times = {"start": now - span_s, "end": now, "step": max(span_s / MOST_POINTS, SCRAPE_S)}
        asked = urllib.parse.urlencode({"query": query, **times})
        result = json.loads(page(f"{self.url}/api/v1/query_range?{asked}", START_S))["data"]["result"]
        return {
            ", ".join(value for name, value in row["metric"].items() if name != "__name__"): [
                (at - times["start"], float(text)) for at, text in row["values"]
            ]
            for row in result
        }

    def open_pages(self) -> set[str]:
        """Return the alerts that paged and are not resolved."""
        pages: dict[str, bool] = {}
        for notice in list(self.notices):
            if notice.severity == "page":
                pages[notice.alert] = notice.is_firing
        return {alert for alert, is_firing in pages.items() if is_firing}


def monitor_programs() -> Programs | None:
    """Return Prometheus and Alertmanager, None unless both are on the path; Debian renames the second."""
    prometheus = shutil.which("prometheus")
    alertmanager = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    rules_are_here = SLO.is_file()  # they come with a clone, not with the wheel
    return Programs(prometheus, alertmanager) if prometheus and alertmanager and rules_are_here else None


def configure(folder: Path, target: str, alertmanager: str, hook: str = "", watch: str = "") -> None:
    """Write the files of both programs.

    Args:
        folder: for the files and for Prometheus' data.
        target: HOST:PORT of the endpoint.
        alertmanager: HOST:PORT.
        hook: gets each notice; empty: they are seen on Alertmanager's page only.
        watch: HOST:PORT of `reco watch`, if it runs.
    """
    written = rules(read_slo())
    for group in written["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") != EXEMPT]
    jobs = {"checkout": target, "watch": watch}
    scraped = [{"job_name": name, "static_configs": [{"targets": [at]}]} for name, at in jobs.items() if at]
    prometheus = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S - 1}s"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": scraped,
    }
    shipped = yaml.safe_load(SLO.with_name("alertmanager.yml").read_text(encoding="utf-8"))
    to_hook = {"webhook_configs": [{"url": hook, "send_resolved": True}]} if hook else {}
    own = {
        "route": shipped["route"],
        "inhibit_rules": shipped["inhibit_rules"],
        "receivers": [{"name": receiver["name"], **to_hook} for receiver in shipped["receivers"]],
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {"rules.yml": written, "prometheus.yml": prometheus, "alertmanager.yml": own}
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def monitor_commands(programs: Programs, folder: Path, prometheus: str, alertmanager: str) -> list[list[str]]:
    """Return the commands of Alertmanager and of Prometheus, which listen at HOST:PORT each."""
    return [
        [
            programs.alertmanager,
            f"--config.file={folder / 'alertmanager.yml'}",
            f"--web.listen-address={alertmanager}",
            f"--storage.path={folder / 'alertmanager'}",
            "--cluster.listen-address=",
            "--log.level=warn",
        ],
        [
            programs.prometheus,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--web.listen-address={prometheus}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            "--log.level=warn",
        ],
    ]


@contextlib.contextmanager
def watched(programs: Programs, folder: Path, target: str) -> Iterator[Monitors]:
    """Watch an endpoint (HOST:PORT) with the shipped rules until the block ends; the folder is an empty one.

    Raises:
        TimeoutError: a program does not answer.
    """
    prometheus, alertmanager = (f"127.0.0.1:{free_port()}" for _ in range(2))
    monitors = Monitors(f"http://{prometheus}", time.monotonic())
    with _receiver(monitors.notices) as hook, contextlib.ExitStack() as stack:
        configure(folder, target, alertmanager, hook)
        commands = monitor_commands(programs, folder, prometheus, alertmanager)
        for command, address in zip(commands, (alertmanager, prometheus), strict=True):
            stack.enter_context(_running(command, address, folder))
        monitors.began = time.monotonic()
        yield monitors


@contextlib.contextmanager
def _running(command: Sequence[str], address: str, folder: Path) -> Iterator[None]:
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(until_parent_ends(command), stdout=output, stderr=output)
    try:
        until = time.monotonic() + START_S
        while fault := answers(f"http://{address}/-/ready"):
            if process.poll() is not None or time.monotonic() > until:
                raise TimeoutError(f"{command[0]} does not answer ({fault}): {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def _receiver(notices: list[Notice]) -> Iterator[str]:
    """Take the webhooks of Alertmanager; yield the address."""

    class Hook(LocalCall):
        def do_POST(self) -> None:
            at = time.monotonic()
            notices.extend(_notices(json.loads(self.body()), at))
            self.reply(200, {}, b"")

    with LocalServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever, name="receiver", daemon=True)
        thread.start()
        try:
            yield f"{server.url}/"
        finally:
            server.shutdown()
            thread.join()


def _notices(body: dict[str, Any], at: float) -> list[Notice]:
    return [
        Notice(alert["labels"]["alertname"], alert["labels"]["severity"], alert["status"] == "firing", at)
        for alert in body["alerts"]
    ]


def pages_of(
    notices: Sequence[Notice], faults: Sequence[tuple[str, float, float]], expected: dict[str, str]
) -> list[dict[str, Any]]:
    """Return for each fault the time to its page and to the end of it, and the pages that are wrong.

    Args:
        notices: of the drill, in the order of time.
        faults: name, beginning, end of each, in the order of time.
        expected: the alert that must page, by fault; a fault without one must not page.
    """
    ends = [*(began for _, began, _ in faults[1:]), float("inf")]
    begins = [float("-inf"), *(began for _, began, _ in faults[1:])]  # a page before the first is wrong, too
    rows = []
    for (name, began, mended), begin, end in zip(faults, begins, ends, strict=True):
        own = [notice for notice in notices if begin <= notice.at < end]
        alert, fired = expected.get(name, ""), [one for one in own if one.is_firing]
        right = [one for one in own if one.alert == alert and one.severity == "page"]
        paged = [one.at for one in right if one.is_firing and one.at >= began]
        is_over = paged and not right[-1].is_firing  # an alert that fires again is not over at its first end
        rows.append(
            {
                "fault": name,
                "expected": alert,
                "paged_s": min(paged) - began if paged else None,
                "resolved_s": max(right[-1].at - mended, 0.0) if is_over else None,
                "wrong": sorted(
                    {one.alert for one in fired if one.severity == "page" and one.alert != alert}
                ),
                "tickets": sorted({one.alert for one in fired if one.severity == "ticket"}),
            }
        )
    return rows
