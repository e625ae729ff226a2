"""Both images, built from their locks by buildah, looked at, and started as a pod would start them.

`make infra` runs it, as root; it takes some minutes. No registry is needed: Debian's own Python is the base.
Its packages and the wheels come from the mirrors that apt and pip use.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.release.manifest import read_manifest
from tests.programs import unguarded

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MISSING = "no image can be built here"
NEEDED = ("buildah", "skopeo", "mmdebstrap", "unshare")
LEFT_OUT = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]
PACKAGES = "usr-is-merged,python3.11,python3.11-venv,ca-certificates,binutils"
MERGED = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"  # without it Debian merges by a program in Perl
MOST_BYTES = 700_000_000


class Builder:
    """buildah with a store of its own, which the test removes."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.base_images: dict[str, str] = {}
        self.options = ["--root", str(place / "store"), "--runroot", str(place / "run")]
        self.options += ["--storage-driver", "vfs"]

    def __call__(self, *words: str | Path) -> str:
        done = subprocess.run(
            ["buildah", *self.options, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"buildah {words[0]}: {done.stderr[-3_000:]}"
        return done.stdout.strip()

    def bases(self) -> dict[str, str]:
        """Make the image to build in, of Debian; and the base, which is the same without binutils."""
        archive = self.place / "debian.tar"
        options = ["--variant=minbase", MERGED, *LEFT_OUT, f"--include={PACKAGES}"]
        made = subprocess.run(
            ["mmdebstrap", *options, "bookworm", archive], capture_output=True, text=True, check=False
        )
        if made.returncode:
            pytest.skip(f"{MISSING}: Debian's packages are not to be had ({made.stderr[-200:]})")
        container = self("from", "scratch")
        self("add", "--quiet", container, archive, "/")
        self("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        run = ("run", "--isolation", "chroot", container, "--")
        self(*run, "ln", "-s", "/usr/bin/python3.11", "/usr/local/bin/python3")
        self("commit", "--quiet", container, "localhost/build")
        self(*run, "apt-get", "purge", "--yes", "-qq", "--auto-remove", "binutils")
        self("commit", "--quiet", "--rm", "--squash", container, "localhost/base")
        archive.unlink()
        return {"BUILD": "localhost/build", "BASE": "localhost/base"}

    def build(self, image: str, bases: dict[str, str]) -> None:
        """Have `make image` build an image, with wheels that are fetched before."""
        wheels = self.place / f"wheels-{image}"
        fetch(wheels, "--require-hashes", "-r", ROOT / "requirements" / f"{image}.lock")
        if image == "pipeline":
            fetch(wheels, "-r", ROOT / "requirements" / "torch.txt")
            fetch(wheels, "setuptools", "wheel")  # some packages of Kubeflow have no wheel
        arguments = {**bases, "PIP_ARGS": "'--no-index --find-links /wheels'"}
        command = ["buildah", *self.options, "bud", "--quiet", "--isolation", "chroot"]
        command += [f"--volume {wheels}:/wheels:ro"]
        command += [f"--build-arg {name}={value}" for name, value in arguments.items()]
        built = subprocess.run(
            ["make", "image", f"IMAGE={image}", f"BUILDER={' '.join(command)}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert built.returncode == 0, built.stderr[-3_000:]
        shutil.rmtree(wheels)

    def inspect(self, image: str) -> dict[str, Any]:
        """Return the words of skopeo about an image, and its size."""
        saved = self.place / f"saved-{image}"
        self("push", "--quiet", "--disable-compression", image, f"dir:{saved}")
        done = subprocess.run(
            ["skopeo", "inspect", "--config", f"dir:{saved}"], capture_output=True, text=True, check=True
        )
        manifest = json.loads((saved / "manifest.json").read_bytes())
        shutil.rmtree(saved)
        found: dict[str, Any] = json.loads(done.stdout)["config"]
        return {**found, "bytes": sum(layer["size"] for layer in manifest["layers"])}

    def start(self, image: str, config: dict[str, Any], *words: str | Path) -> dict[str, Any]:
        """Start an image as a pod would, see `tests.infra.container`."""
        root = self("mount", self("from", image))
        given = {name: config[name] for name in ("User", "Env", "WorkingDir", "Entrypoint", "Cmd")}
        module = [sys.executable, "-m", "tests.infra.container", root, json.dumps(given), *map(str, words)]
        done = subprocess.run(
            ["unshare", "--net", "--mount", *module], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3_000:]
        seen: dict[str, Any] = json.loads(done.stdout)
        return {**seen, "said": done.stderr}


def fetch(wheels: Path, *what: str | Path) -> None:
    """Fetch wheels for the image's Python, which need not be this one."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels)]
    command += ["--python-version", "3.11", *map(str, what)]
    fetched = subprocess.run(command, env=unguarded(), capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"{MISSING}: the wheels of the lock are not to be had ({fetched.stderr[-200:]})")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """A builder with the base images."""
    if "BUILD_IMAGES" not in os.environ:
        pytest.skip(f"{MISSING}: `make infra` does, which sets BUILD_IMAGES")
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"{MISSING}: root is needed, and {', '.join(missing) or 'all programs are there'}")
    place = tmp_path_factory.mktemp("image")
    builder = Builder(place)
    builder.base_images = builder.bases()
    yield builder
    builder("rm", "--all")
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def endpoint(builder: Builder) -> dict[str, Any]:
    """The endpoint's image, as skopeo describes it."""
    builder.build("endpoint", builder.base_images)
    return builder.inspect("checkout-endpoint")


@pytest.fixture(scope="module")
def pipeline(builder: Builder) -> dict[str, Any]:
    """The pipeline's image, as skopeo describes it."""
    builder.build("pipeline", {"BASE": builder.base_images["BASE"]})
    return builder.inspect("checkout-pipeline")


def test_the_image_has_a_user_ports_a_program_and_few_bytes(endpoint: dict[str, Any]) -> None:
    assert endpoint["User"] == "10001:10001"
    assert set(endpoint["ExposedPorts"]) == {"8080/tcp", "8081/tcp", "9090/tcp"}
    assert endpoint["Entrypoint"] == ["/opt/reco/start"]
    assert endpoint["Cmd"] == ["--bundle", "/mnt/models"]
    print(f"{endpoint['bytes'] / 1e6:.0f} MB")  # noqa: T201
    assert endpoint["bytes"] <= MOST_BYTES


def test_it_holds_the_lock_and_no_program_that_installs(builder: Builder, endpoint: dict[str, Any]) -> None:
    root = Path(builder("mount", builder("from", "checkout-endpoint")))
    packages = root / "opt/reco/lib/python3.11/site-packages"
    locked = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/endpoint.lock").read_text(), re.MULTILINE)
    installed = {place.name.lower().replace("-", "_") for place in packages.glob("*.dist-info")}
    left_out = {"setuptools"}
    for name, version in locked:
        info = f"{re.sub(r'[-_.]+', '_', name)}_{version}.dist_info"
        assert (info in installed) == (name not in left_out), info
    installers = ("pip", "pip3*", "pip-*", "ensurepip", "python-wheels")
    assert not [place for name in installers for place in root.rglob(name)]
    assert not list(packages.glob("torch*"))


def test_it_answers_as_a_numbered_user_with_a_read_only_root_and_no_network(
    builder: Builder, endpoint: dict[str, Any]
) -> None:
    bundle = ROOT / "build" / "kernel-bundle"
    seen = builder.start("checkout-endpoint", endpoint, bundle)
    print(f"first answer {seen['seconds']:.1f} s after the start")  # noqa: T201
    assert seen["answer"]["bundle_id"] == read_manifest(bundle)["bundle_id"]
    assert len(seen["answer"]["items"]) == 5
    assert seen["answer"]["rung"] == "full"
    assert set(seen["uids"]) == {"10001"}
    assert int(seen["capabilities"], 16) == 0
    assert seen["write_to_root"] == "EROFS", "not even root may write"


def test_a_step_runs_in_the_pipeline_s_image_as_kubeflow_starts_it(
    builder: Builder, pipeline: dict[str, Any]
) -> None:
    from components.steps import ingest_events

    print(f"pipeline: {pipeline['bytes'] / 1e6:,.0f} MB")  # noqa: T201
    assert pipeline["User"] == "10001:10001"
    dataset = {"name": "dataset", "uri": "/tmp/out/dataset", "metadata": {}}
    dataset["type"] = {"schemaTitle": "system.Dataset", "schemaVersion": "0.0.1"}
    given = {
        "inputs": {"parameterValues": {"data": "toy", "max_quarantine_ratio": 0.01, "train_until": ""}},
        "outputs": {
            "parameters": {name: {"outputFile": f"/tmp/out/{name}"} for name in ("cut", "data_hash")},
            "artifacts": {"dataset": {"artifacts": [dataset]}},
            "outputFile": "/tmp/out/executor_output.json",
        },
    }
    spec = ingest_events.component_spec.implementation.container
    words = [json.dumps(given) if word == "{{$}}" else word for word in [*spec.command, *spec.args]]
    seen = builder.start("checkout-pipeline", {**pipeline, "Entrypoint": [], "Cmd": words})
    assert seen["code"] == 0, seen["said"][-3_000:]
    assert {"dataset/events.parquet", "dataset/manifest.json", "executor_output.json"} <= set(seen["files"])
    assert seen["owners"] == [10_001]
    assert seen["write_to_root"] == "EROFS"
