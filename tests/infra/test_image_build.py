"""The endpoint's image, built from the lock by buildah, looked at, and started as a pod would start it.

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

from serving.release.bundle import read_manifest

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
            ["mmdebstrap", *options, "bookworm", archive],
            capture_output=True,
            text=True,
            check=False,
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


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """Have `make image` build the endpoint's image."""
    if "BUILD_IMAGES" not in os.environ:
        pytest.skip(f"{MISSING}: `make infra` does, which sets BUILD_IMAGES")
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"{MISSING}: root is needed, and {', '.join(missing) or 'all programs are there'}")
    place = tmp_path_factory.mktemp("image")
    builder, wheels = Builder(place), place / "wheels"
    fetched = subprocess.run(
        [
            # -I: without the guard of connections
            *(sys.executable, "-I", "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"),
            *("--python-version", "3.11", "--only-binary=:all:"),  # the image's Python, not this one
            *("-r", ROOT / "requirements" / "endpoint.lock", "-d", wheels),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if fetched.returncode:
        pytest.skip(f"{MISSING}: the wheels of the lock are not to be had ({fetched.stderr[-200:]})")
    arguments = {**builder.bases(), "PIP_ARGS": "'--no-index --find-links /wheels'"}
    command = [
        "buildah",
        *builder.options,
        "bud",
        "--quiet",
        "--isolation",
        "chroot",
        f"--volume {wheels}:/wheels:ro",
    ]
    command += [f"--build-arg {name}={value}" for name, value in arguments.items()]
    built = subprocess.run(
        ["make", "image", f"BUILDER={' '.join(command)}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3_000:]
    yield builder
    builder("rm", "--all")
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def inspected(builder: Builder) -> dict[str, Any]:
    """What skopeo says of the image."""
    saved = builder.place / "saved"
    builder("push", "--quiet", "--disable-compression", "checkout-endpoint", f"dir:{saved}")
    done = subprocess.run(
        ["skopeo", "inspect", "--config", f"dir:{saved}"], capture_output=True, text=True, check=True
    )
    manifest = json.loads((saved / "manifest.json").read_bytes())
    found: dict[str, Any] = json.loads(done.stdout)["config"]
    return {**found, "bytes": sum(layer["size"] for layer in manifest["layers"])}


def test_the_image_has_a_user_ports_a_program_and_few_bytes(inspected: dict[str, Any]) -> None:
    assert inspected["User"] == "10001:10001"
    assert set(inspected["ExposedPorts"]) == {"8080/tcp", "8081/tcp", "9090/tcp"}
    assert inspected["Entrypoint"] == ["/opt/reco/start"]
    assert inspected["Cmd"] == ["--bundle", "/mnt/models"]
    print(f"{inspected['bytes'] / 1e6:.0f} MB")  # noqa: T201
    assert inspected["bytes"] <= MOST_BYTES


def test_it_holds_the_lock_and_no_program_that_installs(builder: Builder) -> None:
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
    builder: Builder, inspected: dict[str, Any]
) -> None:
    root, bundle = builder("mount", builder("from", "checkout-endpoint")), ROOT / "build" / "kernel-bundle"
    config = json.dumps(
        {name: inspected[name] for name in ("User", "Env", "WorkingDir", "Entrypoint", "Cmd")}
    )
    done = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-m", "tests.infra.container", root, config, bundle],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    seen = json.loads(done.stdout)
    print(f"first answer {seen['seconds']:.1f} s after the start")  # noqa: T201
    assert seen["answer"]["bundle_id"] == read_manifest(bundle)["bundle_id"]
    assert len(seen["answer"]["items"]) == 5
    assert seen["answer"]["rung"] == "full"
    assert set(seen["uids"]) == {"10001"}
    assert int(seen["capabilities"], 16) == 0
    assert seen["write_to_root"] == "EROFS", "not even root may write"
