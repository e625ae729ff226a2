"""infra/terraform as its own tool sees it: valid, and its tests pass, with the provider mocked."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.infra.conftest import TERRAFORM, terraform
from tests.programs import unguarded

pytestmark = pytest.mark.slow


def test_its_own_tests_pass(initialised: Path) -> None:
    """Each run of a test does what `terraform validate` does, too."""
    done = terraform(initialised, "test", "-no-color")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = (TERRAFORM / "tests" / "plan.tftest.hcl").read_text(encoding="utf-8").count('\nrun "')
    assert f"{runs} passed, 0 failed" in done.stdout


def test_its_files_are_formatted(initialised: Path) -> None:
    assert terraform(initialised, "fmt", "-check", "-recursive").returncode == 0


def test_checkov_has_no_finding() -> None:
    if shutil.which("checkov") is None:
        pytest.skip("checkov is not installed")
    command = ["checkov", "--quiet", "--compact", "--config-file", "infra/terraform/.checkov.yaml"]
    root = TERRAFORM.parents[1]
    done = subprocess.run(command, cwd=root, env=unguarded(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_changed_group_of_nodes_is_there_before_the_old_one_goes() -> None:
    """AWS changes no type and no zone of a group: Terraform replaces it, and two groups need two names."""
    text = (TERRAFORM / "cluster.tf").read_text(encoding="utf-8")
    groups = re.findall(r'resource "aws_eks_node_group" "\w+" {\n(.*?)\n}', text, re.DOTALL)
    assert len(groups) == 2
    for group in groups:
        lines = {" ".join(line.split("#")[0].split()) for line in group.splitlines()}
        assert {"create_before_destroy = true", "version = aws_eks_cluster.main.version"} <= lines
        assert [line for line in lines if line.startswith("node_group_name_prefix = ")]


def test_a_nat_gateway_is_made_after_the_internet_gateway_and_goes_before_it() -> None:
    """No argument names the internet gateway, so Terraform would make both at the same time."""
    text = (TERRAFORM / "network.tf").read_text(encoding="utf-8")
    [gateway] = re.findall(r'resource "aws_nat_gateway" "\w+" {\n(.*?)\n}', text, re.DOTALL)
    assert re.search(r"depends_on += \[aws_internet_gateway\.main\]", gateway)


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


def test_the_plan_of_the_workflow_has_every_variable_of_the_apply() -> None:
    variables = (TERRAFORM / "variables.tf").read_text(encoding="utf-8")
    needed = {
        name
        for name, body in re.findall(r'variable "(\w+)" {\n(.*?)\n}', variables, re.DOTALL)
        if not re.search(r"^  default", body, re.MULTILINE)
    }
    given = re.findall(
        r"^(\w+)", (TERRAFORM / "environments/staging.tfvars").read_text("utf-8"), re.MULTILINE
    )
    workflow = TERRAFORM.parents[1] / ".github" / "workflows" / "infra.yml"
    job = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]["plan"]
    by_job = {name.removeprefix("TF_VAR_"): text for name, text in job["env"].items() if "TF_VAR_" in name}
    assert needed - set(given) == {"store_password"}
    # Without these the plan would remove its own role, or make a second provider.
    assert set(by_job) == {"store_password", "github_repository", "github_provider", "state_bucket"}
    assert by_job["state_bucket"] == job["env"]["STATE"], "the bucket that `init` reads"


def test_the_guide_names_each_variable_of_the_workflows() -> None:
    root = TERRAFORM.parents[1]
    guide = (root / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")
    files = (root / ".github" / "workflows").glob("*.yml")
    used = {name for file in files for name in re.findall(r"\bvars\.(\w+)", file.read_text(encoding="utf-8"))}
    assert len(used) > 10
    assert sorted(name for name in used if f"`{name}`" not in guide) == []


def test_each_workflow_takes_the_role_of_its_github_environment() -> None:
    roles = (TERRAFORM / "roles.tf").read_text(encoding="utf-8")
    trusted = dict(re.findall(r'ci-(\w+) = {\s+environment = "?([^"\n]+)"?\n', roles))
    taken = {}
    for file in (TERRAFORM.parents[1] / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values():
            for step in job["steps"]:
                if role := step.get("with", {}).get("role-to-assume"):
                    [name] = re.findall(r"vars\.AWS_(\w+)_ROLE", role)
                    taken[name.lower()] = (job["environment"], step["with"].get("role-duration-seconds"))
    assert {name: environment for name, (environment, _) in taken.items()} == {
        "images": trusted["images"],
        "release": trusted["release"].replace("var.environment", "${{ inputs.environment }}"),
        "plan": trusted["plan"].replace("${var.environment}", "staging"),
    }
    assert f'each.key == "ci-release" ? {taken["release"][1]} :' in roles
    rights = (TERRAFORM.parent / "kserve" / "release" / "rights.yaml").read_text(encoding="utf-8")
    [group] = re.findall(r'kubernetes_groups = \["(.+)"\]', roles)
    [binding] = [
        one
        for one in yaml.safe_load_all(rights)
        if one["kind"] == "RoleBinding" and one["roleRef"]["name"] == "start-release"
    ]
    assert binding["subjects"] == [{"kind": "Group", "name": group, "apiGroup": "rbac.authorization.k8s.io"}]
