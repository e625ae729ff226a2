"""A real `terraform apply` of buckets, roles, images and keys, against moto's double of AWS.

`make infra` runs it, because it installs moto, and takes two minutes. What moto lacks stays with the mocked
tests: EKS' add-ons and pod identities, and ElastiCache.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.live.ports import answers, free_port
from tests.infra.conftest import TERRAFORM, terraform
from tests.programs import unguarded

pytestmark = pytest.mark.slow
MOTO = "moto[server]==5.2.5"
APPLIED = ("aws_s3_bucket", "aws_iam_role", "aws_ecr_repository", "aws_kms_key")
OVERRIDE = 'terraform {\n  backend "local" {}\n}\nprovider "aws" {\n  s3_use_path_style = true\n}\n'
START_S = 60.0


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a double of AWS, to which terraform and its provider are sent."""
    if "APPLY_TERRAFORM" not in os.environ:
        pytest.skip("no double of AWS here: `make infra` has one, which sets APPLY_TERRAFORM")
    env = unguarded()
    programs = tmp_path / "moto" / "bin"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "moto")], env=env, check=True)
    command = [str(programs / "pip"), "install", "-q", "--disable-pip-version-check", MOTO]
    if (done := subprocess.run(command, env=env, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no double of AWS here: moto is not to be had ({done.stderr[-200:]})")
    port = free_port()
    env |= {"MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    with (tmp_path / "moto.log").open("wb") as log:
        server = subprocess.Popen([programs / "moto_server", "-p", str(port)], env=env, stderr=log)
    url = f"http://127.0.0.1:{port}"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    try:
        until = time.monotonic() + START_S
        while answers(f"{url}/moto-api/"):
            assert server.poll() is None, (tmp_path / "moto.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.2)
        yield url
    finally:
        server.kill()
        server.wait()


def test_buckets_roles_images_and_keys_are_applied_and_stay_as_applied(initialised: Path, aws: str) -> None:
    (initialised / "override.tf").write_text(OVERRIDE)
    assert terraform(initialised, "init", "-reconfigure", *_mirror(initialised)).returncode == 0
    text = "".join(file.read_text(encoding="utf-8") for file in TERRAFORM.glob("*.tf"))
    found = re.findall(rf'^resource "((?:{"|".join(APPLIED)})\w*)" "(\w+)"', text, re.MULTILINE)
    targets = [f"-target={kind}.{name}" for kind, name in found]
    given = ["-var-file=environments/small.tfvars", f"-var=store_password={'0123456789' * 4}", "-input=false"]
    try:
        done = terraform(initialised, "apply", "-auto-approve", "-no-color", *given, *targets)
        assert done.returncode == 0, done.stderr[-3_000:]
        made = re.findall(r"^(\w+)\.\S+: Creation complete", done.stdout, re.MULTILINE)
        assert {kind for kind, _ in found} <= set(made)
        assert terraform(initialised, "plan", "-out=again", "-no-color", *given, *targets).returncode == 0
        plan = json.loads(terraform(initialised, "show", "-json", "again").stdout)
        again = plan["resource_changes"]
        # moto forgets attributes of other services, on which the roles' rights depend.
        changed = [one["address"] for one in again if one["change"]["actions"] not in (["no-op"], ["read"])]
        assert not [address for address in changed if address.startswith(APPLIED)], changed
        # As the double of AWS gave them back.
        there = plan["prior_state"]["values"]["root_module"]["resources"]
        assert len([one for one in there if one["type"] == "aws_s3_bucket"]) == 2
        [lock] = [one for one in there if one["type"] == "aws_s3_bucket_object_lock_configuration"]
        assert lock["values"]["rule"][0]["default_retention"][0]["mode"] == "GOVERNANCE"
    finally:
        (initialised / "override.tf").unlink()


def _mirror(folder: Path) -> list[str]:
    providers = folder / ".terraform" / "providers"
    return [f"-plugin-dir={providers}"] if providers.is_dir() else []
