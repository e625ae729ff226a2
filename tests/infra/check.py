"""`make infra`: every check of images, manifests, Terraform and alerts whose tool is installed.

A missing tool is named together with its check. A check with skipped tests has not passed: it is named with
their reason. The exit code is 1 if a check fails.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-ra", "-n", "0", "-m", "slow or not slow"]
# What is checked, the program that it needs, and the command.
CHECKS: list[tuple[str, str, list[str]]] = [
    ("manifests: schemas and rules", "kubectl", [*PYTEST, "tests/infra/test_manifests.py"]),
    (
        "manifests of a release",
        "kubectl",
        [*PYTEST, "tests/infra/test_release_manifests.py", "tests/infra/test_release_workflow.py"],
    ),
    ("manifests of the live parts", "kubectl", [*PYTEST, "tests/infra/test_live_manifests.py"]),
    ("manifest of a training job", "sh", [*PYTEST, "tests/infra/test_training_manifest.py"]),
    ("format of Terraform", "terraform", ["terraform", "fmt", "-check", "-recursive", "infra/terraform"]),
    ("Terraform: validate and test", "terraform", [*PYTEST, "tests/infra/test_terraform.py"]),
    (
        "Terraform: applied to a double of AWS",
        "terraform",
        ["env", "APPLY_TERRAFORM=1", *PYTEST, "tests/infra/test_terraform_apply.py"],
    ),
    (
        "Terraform: AWS's good practice",
        "checkov",
        ["checkov", "--quiet", "--compact", "--config-file", "infra/terraform/.checkov.yaml"],
    ),
    ("alerts: rules that fire, and only then", "promtool", [*PYTEST, "tests/monitoring/test_alerting.py"]),
    ("alerts: who is paged", "amtool", ["amtool", "check-config", "infra/monitoring/alertmanager.yml"]),
    ("images: hadolint, files, users, compiled loops", "sh", [*PYTEST, "tests/infra/test_images.py"]),
    (
        "images: built, started, asked",
        "buildah",
        ["env", "BUILD_IMAGES=1", *PYTEST, "-s", "tests/infra/test_image_build.py"],
    ),
]


def program(name: str) -> str | None:
    """The path of a program, of this environment first."""
    own = Path(sys.executable).with_name(name)
    return str(own) if own.exists() else shutil.which(name)


def skips(output: str) -> list[str]:
    """Return the reasons for which pytest skipped tests, each once."""
    return list(dict.fromkeys(re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", output, re.MULTILINE)))


def main(checks: list[tuple[str, str, list[str]]] = CHECKS) -> int:
    """Run the checks; return the exit code."""
    failed, skipped = [], []
    for what, tool, command in checks:
        path = program(tool)
        if path is None:
            skipped.append((what, f"{tool} is not installed"))
            continue
        click.echo(f"--- {what}")
        arguments = [path, *command[1:]] if command[0] == tool else command
        done = subprocess.run(
            arguments, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        click.echo(done.stdout, nl=False)
        if done.returncode:
            failed.append(what)
        elif reasons := skips(done.stdout):
            skipped.append((what, "; ".join(reasons)))
    for what, reason in skipped:
        click.echo(f"skipped  {what}: {reason}")
    for what in failed:
        click.echo(f"FAILED   {what}")
    passed = len(checks) - len(skipped) - len(failed)
    click.echo(f"{passed} checks passed, {len(failed)} failed, {len(skipped)} skipped, in part or whole")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
