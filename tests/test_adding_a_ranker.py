"""The how-to's way to add a ranker, step by step: the class, its line and its test pass every check."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.programs import ROOT, copy_packages, run_python

PAGE = (ROOT / "docs" / "how-to" / "own-ranker.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_ranker_of_the_how_to_passes_the_tests_of_every_ranker(tmp_path: Path) -> None:
    copy_packages(tmp_path, "feature_repo", "serving", "components", "monitoring", "pipelines", "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ranker, test = blocks("python")
    [line] = blocks("text")
    (tmp_path / "components" / "models" / "two_layers.py").write_text(ranker, "utf-8")
    (tmp_path / "tests" / "components" / "models" / "test_two_layers.py").write_text(test, "utf-8")
    table = tmp_path / "components" / "hyper_parameters.py"
    before, after = table.read_text("utf-8").split("RANKERS: Mapping", 1)
    rows, rest = after.split("\n}\n", 1)
    table.write_text(f"{before}RANKERS: Mapping{rows}\n{line}}}\n{rest}", "utf-8")

    [command] = [block for block in blocks("sh") if "pytest" in block]
    program, *words = shlex.split(command)
    assert program == ".venv/bin/pytest"
    mirror = "test_each_module_has_its_test_module"
    *words, ours = words
    said = run_python(
        *("-m", "pytest", "-v", *words, f"{ours} or {mirror}", f"tests/test_architecture.py::{mirror}"),
        root=tmp_path,
    )
    assert re.search(r"= 1\d passed, \d+ deselected", said), said[-500:]
    assert f"{mirror} PASSED" in said
