"""A component's program runs in the step's own process as it would in one that kfp.local starts."""

import builtins
import contextlib
import logging
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from kfp import dsl
from kfp.local import subprocess_task_handler
from kfp.local.config import LocalExecutionConfig

from pipelines.run.graph import Outputs, load_component, read_spec, step_alone
from pipelines.run.step_server import call, run_here

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:kfp.*")


@partial(dsl.component, base_image="test-python:1", install_kfp_package=False)
def speak(fail: bool) -> bool:
    """Say something; return whether `print` is Python's own, which numba wants."""
    import logging

    logging.info("by logging")
    if fail:
        raise ValueError("no\nsecond line")
    return type(print).__name__ == "builtin_function_or_method"


@dsl.pipeline(name="speaks")
def speaks(fail: bool) -> None:
    speak(fail=fail)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step changes in its process comes back."""
    name = "run_local_subprocess"
    monkeypatch.setattr(subprocess_task_handler, name, getattr(subprocess_task_handler, name))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(LocalExecutionConfig, "instance", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)  # the executor adds its program's folder


def test_a_component_that_installs_packages_is_refused() -> None:
    command = ["sh", "-c", "pip install x", "sh", "-ec", "ephemeral_component.py", "PROGRAM"]
    with pytest.raises(ValueError, match="installs no packages"):
        run_here(command)


@pytest.mark.parametrize("fail", [False, True])
def test_a_program_speaks_and_fails_as_in_a_process_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], fail: bool
) -> None:
    before = (builtins.print, [*logging.getLogger().handlers])
    component = load_component(step_alone(read_spec(speaks), "speak", {"fail": fail}, {}))
    with pytest.raises(ValueError, match="second line") if fail else contextlib.nullcontext():
        assert call(component, tmp_path) == Outputs({"Output": True}, {})
    assert (builtins.print, [*logging.getLogger().handlers]) == before
    said = "".join(capfd.readouterr())
    assert "INFO]: by logging" in said, "the executor's prefix, which the progress looks for"
