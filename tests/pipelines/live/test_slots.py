"""InferenceServices as processes: a fake endpoint in a few lines keeps the times short."""

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from components.rollout import NAMESPACE
from components.rollout.cluster import Document
from pipelines.live.cluster_api import Objects
from pipelines.live.slots import Slots, new_cluster
from serving.settings import Settings
from tests.chaos.procs import eventually

pytestmark = pytest.mark.slow
# Ready at once, unless its bundle is called `broken` and its home holds no file `mended`. It takes a moment
# to end, and then leaves a file.
ENDPOINT = """
import http.server, os, pathlib, signal, sys, time
def end(*_):
    time.sleep(0.2)
    pathlib.Path(os.environ["RECO_HOME"], os.environ["RECO_HTTP_PORT"] + ".ended").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
if sys.argv[2].endswith("broken") and not pathlib.Path(os.environ["RECO_HOME"], "mended").exists():
    sys.exit("golden request 3 is wrong")
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(os.environ["RECO_HTTP_PORT"])), Ready).serve_forever()
"""
SLOT = ("inferenceservices", NAMESPACE, "checkout-green")


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[Objects]:
    objects, slots = start(tmp_path)
    yield objects
    slots.close()


def start(home: Path) -> tuple[Objects, Slots]:
    objects = new_cluster("file:///store/b1", home / "log")

    def launch(bundle: Path) -> Sequence[str]:
        return (sys.executable, "-c", ENDPOINT)

    slots = Slots(objects, Settings(home, drain_s=0.0, grace_s=60.0), home / "logs", launch)
    eventually(lambda: len(objects.list("pods")) == 1)
    return objects, slots


def fill(objects: Objects, source: str, stop: str = "false") -> None:
    found = objects.get(SLOT)
    found["spec"]["predictor"]["containers"][0]["env"][0]["value"] = source
    found["metadata"]["annotations"]["serving.kserve.io/stop"] = stop
    objects.write(SLOT, found)


def deployment(objects: Objects) -> Document:
    found = [one for one in objects.list("deployments") if "green" in one["metadata"]["name"]]
    return found[0] if found else {}


def is_available(objects: Objects) -> bool:
    return bool(deployment(objects).get("status", {}).get("availableReplicas") == 1)


def pods(objects: Objects) -> list[Document]:
    return [one for one in objects.list("pods") if "green" in one["metadata"]["name"]]


def kill(pod: Document) -> None:
    port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
    ours = psutil.Process().children(recursive=True)
    [process] = [one for one in ours if any(c.laddr.port == port for c in one.connections("tcp"))]
    process.send_signal(signal.SIGKILL)


def test_a_slot_is_filled_changed_and_parked(objects: Objects, tmp_path: Path) -> None:
    place = tmp_path / "my höme" / "ab%c"
    assert pods(objects) == []
    fill(objects, "file:///store/b2")
    eventually(lambda: is_available(objects) and pods(objects))
    [first] = pods(objects)
    fill(objects, place.as_uri())
    eventually(
        lambda: [one["metadata"]["name"] for one in pods(objects)] not in ([], [first["metadata"]["name"]])
    )
    found = eventually(lambda: deployment(objects) if is_available(objects) else {})
    assert found["status"]["observedGeneration"] == found["metadata"]["generation"] == 2
    # An ended child of another test may still be there: it has no command line.
    assert any(str(place) in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))
    fill(objects, place.as_uri(), stop="true")
    eventually(lambda: not pods(objects) and not deployment(objects))


def test_a_process_that_does_not_start_ends_the_rollout_and_is_tried_again_after_parking(
    objects: Objects, tmp_path: Path
) -> None:
    fill(objects, "file:///store/broken")
    found = eventually(lambda: deployment(objects).get("status", {}).get("conditions"))
    assert found == [{"type": "Progressing", "status": "False", "message": "golden request 3 is wrong"}]
    assert pods(objects) == []
    (tmp_path / "mended").touch()
    fill(objects, "file:///store/broken", stop="true")
    eventually(lambda: not deployment(objects))
    fill(objects, "file:///store/broken")
    eventually(lambda: pods(objects))


def test_a_process_that_dies_is_started_again_and_counted(objects: Objects) -> None:
    fill(objects, "file:///store/b2")
    [pod] = eventually(lambda: pods(objects))
    kill(pod)
    restarted = eventually(
        lambda: [p for p in pods(objects) if p["status"]["containerStatuses"][0]["restartCount"]]
    )
    assert restarted[0]["metadata"]["name"] != pod["metadata"]["name"]


def test_a_process_whose_restart_fails_is_started_until_it_is_ready(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken rules file, for example, stops no endpoint that runs, and each that starts."""
    monkeypatch.setattr("pipelines.live.slots.AGAIN_S", 0.5)
    (tmp_path / "mended").touch()
    fill(objects, "file:///store/broken")
    [pod] = eventually(lambda: pods(objects))
    (tmp_path / "mended").unlink()
    kill(pod)
    logs: set[str] = set()

    def is_started_again() -> bool:
        logs.update(file.name for file in (tmp_path / "logs").glob("*green*"))
        return len(logs) >= 4

    eventually(is_started_again)
    [why] = eventually(lambda: deployment(objects)["status"].get("conditions"))
    assert (why["message"], pods(objects)) == ("golden request 3 is wrong", [])
    (tmp_path / "mended").touch()
    eventually(lambda: pods(objects))


@pytest.mark.parametrize("park", [False, True], ids=["both serve", "one ends already"])
def test_closing_lets_each_process_end_by_itself(tmp_path: Path, park: bool) -> None:
    """It answers the requests in flight, and writes the rest of its log."""
    objects, slots = start(tmp_path)
    fill(objects, "file:///store/b2")
    eventually(lambda: pods(objects))
    if park:
        fill(objects, "file:///store/b2", stop="true")
        eventually(lambda: not pods(objects))
    slots.close()
    assert len(list(tmp_path.glob("*.ended"))) == 2
