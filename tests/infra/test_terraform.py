"""infra/terraform as its own tool sees it: valid, and its tests pass, with the provider mocked."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TERRAFORM = Path(__file__).parents[2] / "infra" / "terraform"
# Mirrors of the provider on this machine, beside those that terraform looks at by itself.
MIRRORS = [path.parents[2] for path in Path("/opt").glob("*/registry.terraform.io/hashicorp/aws")]


def terraform(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TF_CLI_CONFIG_FILE": os.devnull, "TF_IN_AUTOMATION": "1"}
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


def test_every_file_is_formatted() -> None:
    if shutil.which("terraform") is None:
        pytest.skip("terraform is not installed")
    done = terraform(TERRAFORM, "fmt", "-check", "-recursive", "-diff")
    assert done.returncode == 0, done.stdout


def test_its_own_tests_pass(initialised: Path) -> None:
    assert terraform(initialised, "validate", "-no-color").returncode == 0
    done = terraform(initialised, "test", "-no-color")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = (TERRAFORM / "tests" / "plan.tftest.hcl").read_text(encoding="utf-8").count('\nrun "')
    assert f"{runs} passed, 0 failed" in done.stdout


def test_each_profile_has_a_state_of_its_own_that_is_locked() -> None:
    """With one key for all, an apply of production would replace the small cluster."""
    backend = (TERRAFORM / "main.tf").read_text(encoding="utf-8").split('backend "s3" {')[1].split("}")[0]
    assert re.findall(r"(\w+) += true", backend) == ["use_lockfile", "encrypt"]
    root = TERRAFORM.parents[1]
    for name in ("docs/how-to/cluster.md", ".github/workflows/infra.yml"):
        text = (root / name).read_text(encoding="utf-8")
        [key] = re.findall(r"-backend-config=key=(\w+)", text)
        assert set(re.findall(r"-var-file=environments/(\w+)\.tfvars", text)) == {key}, name


@pytest.mark.parametrize("profile", ["production", "small", "staging"])
def test_a_profile_lets_its_administrators_reach_the_cluster(profile: str) -> None:
    """With an empty list the API is private, and every command of the guide after the third fails."""
    text = (TERRAFORM / "environments" / f"{profile}.tfvars").read_text(encoding="utf-8")
    assert re.search(r'^api_cidrs += \["[0-9./]+"\]', text, re.MULTILINE)


def test_a_wildcard_in_a_role_is_found(initialised: Path) -> None:
    """The tests must see the actions of a policy, though the provider is mocked."""
    file = initialised / "workloads.tf"
    good = file.read_text(encoding="utf-8")
    try:
        file.write_text(
            good.replace('actions = ["kms:Decrypt"], resources', 'actions = ["kms:*"], resources')
        )
        done = terraform(initialised, "test", "-no-color")
    finally:
        file.write_text(good)
    assert done.returncode == 1
    assert "A workload's role names a wildcard." in done.stdout + done.stderr
