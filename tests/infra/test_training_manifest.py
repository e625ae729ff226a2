"""infra/kubeflow: a strict schema, a command line that exists, and the one name of each image."""

import copy
import re
import sys
from pathlib import Path

import pytest
import yaml

from components import steps
from components.data.examples import ContractViolation
from components.ranker import train_ranker
from tests.infra.policies import schemas

pytestmark = pytest.mark.slow  # importing kfp takes seconds
INFRA = Path(__file__).parents[2] / "infra"
JOB = yaml.safe_load((INFRA / "kubeflow" / "train-ranker.yaml").read_text(encoding="utf-8"))


def test_the_job_is_valid_and_an_unknown_field_is_found() -> None:
    assert list(schemas([JOB])) == []
    wrong = copy.deepcopy(JOB)
    wrong["spec"]["trainer"]["nodes"] = 2
    assert "nodes" in " ".join(schemas([wrong]))


def test_its_command_line_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = JOB["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "-m", train_ranker.__name__]
    arguments = [one.replace("/state", str(tmp_path)) for one in trainer["args"]]
    monkeypatch.setattr(sys, "argv", ["train_ranker", *arguments])
    with pytest.raises(ContractViolation, match=str(tmp_path)):  # read, and then there are no examples
        train_ranker.main()


def test_every_image_is_one_that_is_built_and_has_a_repository() -> None:
    built = {
        f"checkout-{file.name.removesuffix('.Dockerfile')}" for file in INFRA.glob("images/*.Dockerfile")
    }
    storage = (INFRA / "terraform" / "storage.tf").read_text(encoding="utf-8")
    [repositories] = re.findall(r'"aws_ecr_repository" "main" \{\s+for_each += toset\(\[(.+)\]\)', storage)
    guide = (INFRA.parent / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")
    texts = [file.read_text(encoding="utf-8") for file in (INFRA).rglob("*.yaml")]
    named = {
        name for text in texts for name in re.findall(r"\bimage: (?:registry\.example/)?([\w-]+)", text)
    } | {*re.findall(r"--image registry\.example/([\w-]+)", guide), steps.IMAGE}
    assert named == built == set(re.findall(r'"(.+?)"', repositories))
