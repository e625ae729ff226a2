"""The manifests as kustomize writes them, and the Terraform folder with its provider."""

import copy
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.infra.policies import Documents

TERRAFORM = Path(__file__).parents[2] / "infra" / "terraform"
# Mirrors of the provider on this machine, beside those that terraform looks at by itself.
MIRRORS = [path.parents[2] for path in Path("/opt").glob("*/registry.terraform.io/hashicorp/aws")]

KSERVE = Path(__file__).parents[2] / "infra" / "kserve"
Rendered = Callable[[str], Documents]


@pytest.fixture(scope="session")
def rendered() -> Rendered:
    """The documents of a folder of infra/kserve, as `kubectl apply -k` would send them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    seen: dict[str, Documents] = {}

    def render(folder: str) -> Documents:
        if folder not in seen:
            command = ["kubectl", "kustomize", str(KSERVE / folder)]
            text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
            seen[folder] = list(yaml.safe_load_all(text))
        return copy.deepcopy(seen[folder])

    return render


@pytest.fixture
def production(rendered: Rendered) -> Documents:
    return rendered("overlays/production")


def terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "TF_IN_AUTOMATION": "1"}
    environment |= {"GOMAXPROCS": "1", "GOGC": "400"}  # one thread, as the other tests; fewer collections
    return subprocess.run(
        ["terraform", f"-chdir={folder}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def initialised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the folder with its provider."""
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    folder = tmp_path_factory.mktemp("terraform") / "terraform"
    shutil.copytree(TERRAFORM, folder, ignore=shutil.ignore_patterns(".terraform*"))
    mirror = [f"-plugin-dir={MIRRORS[0]}"] if MIRRORS else []
    done = terraform(folder, "init", "-backend=false", "-input=false", "-no-color", *mirror)
    if done.returncode and "registry" in done.stderr:
        pytest.skip("terraform is not installed with its AWS provider, and the registry cannot be reached")
    assert done.returncode == 0, done.stderr
    return folder
