"""Pipelines of trivial steps: they exercise a run without any training."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kfp import dsl
from kfp.dsl import Dataset, Input, Model, Output

from monitoring.verdict import DriftVerdict
from monitoring.windows import Window
from pipelines.run.graph import Spec, read_spec
from pipelines.run.runs import Run, new_run
from serving.release.champion import Champion, write_champion
from serving.release.manifest import read_manifest

VERDICT = DriftVerdict("drifted", "category PSI 0.3", "answers", Window(), Window(), ())


@pytest.fixture(scope="session", autouse=True)
def quick_limits() -> Iterator[None]:
    """KFP reads the whole stack at each limit of a step, for an error's text: a second a pipeline here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kfp.dsl.pipeline_task.PipelineTask._ensure_container_spec_exists", lambda task: None)
        yield


step = partial(dsl.component, base_image="test-python:1", install_kfp_package=False)


@step
def make_numbers(count: int, params: dict[str, Any], numbers: Output[Dataset]) -> str:
    """Write some numbers."""
    import logging
    from pathlib import Path

    Path(numbers.path).mkdir(parents=True)
    Path(numbers.path, "numbers.txt").write_text(
        "\n".join(str(n * params.get("times", 1)) for n in range(count))
    )
    logging.info("%d numbers written", count)
    return "2017-11-27"


@step
def add_up(numbers: Input[Dataset], cut: str, fail_while: str, total: Output[Model]) -> dict[str, Any]:
    """Add them up; fail as long as a file exists."""
    from pathlib import Path

    if fail_while and Path(fail_while).exists():
        raise ValueError(f"{fail_while} exists\nexpected it to be gone: remove it")
    Path(total.path).mkdir(parents=True)
    lines = Path(numbers.path, "numbers.txt").read_text().split()
    Path(total.path, "total.txt").write_text(str(sum(map(float, lines))))
    return {"lines": len(lines), "cut": cut, "mean": 0.25}


@step
def report(total: Input[Model], wait_s: float) -> str:
    """Print the total, or take long."""
    import time
    from pathlib import Path

    time.sleep(wait_s)
    return Path(total.path, "total.txt").read_text()


@dsl.pipeline(name="sums")
def sums(
    count: int = 4,
    times: dict[str, Any] = {},  # noqa: B006 - as in pipelines.training
    fail_while: str = "",
    wait_s: float = 0.0,
) -> None:
    numbers = make_numbers(count=count, params=times)
    total = add_up(numbers=numbers.outputs["numbers"], cut=numbers.outputs["Output"], fail_while=fail_while)
    report(total=total.outputs["total"], wait_s=wait_s)


@pytest.fixture(scope="session")
def spec() -> Spec:
    return read_spec(sums)


@step
def meet(folder: str, own: str, other: str, fail: bool) -> str:
    """Wait for the file that the other step writes; or write one and fail."""
    import time
    from pathlib import Path

    Path(folder, own).touch()
    if fail:
        raise ValueError(f"{own} fails")
    deadline = time.monotonic() + 120
    while not Path(folder, other).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{other} does not run beside {own}")
        time.sleep(0.05)
    return own


@dsl.pipeline(name="pairs")
def pairs(folder: str, right_waits_for: str = "left", left_fails: bool = False) -> None:
    left = meet(folder=folder, own="left", other="right", fail=left_fails)
    right = meet(folder=folder, own="right", other=right_waits_for, fail=False)
    meet(folder=folder, own=left.output, other=right.output, fail=False)


@pytest.fixture(scope="session")
def pair_spec() -> Spec:
    return read_spec(pairs)


def toy_home(home: Path, toy_line: Path) -> Path:
    """Make the toy bundle the champion of a home, whose online store the toy run filled."""
    (home / "bundles").mkdir(parents=True)
    (home / "bundles" / "toy").symlink_to(toy_line / "evaluated")
    (home / "online_store.db").symlink_to(toy_line / "home" / "online_store.db")
    manifest = read_manifest(toy_line / "evaluated")
    champion = Champion(manifest["bundle_id"], "1", "toy", "bundles/toy", manifest["cut"], "2026-01-01")
    write_champion(home, champion)
    return home


def promote_run(home: Path, data: str = "toy", bundle_id: str = "b1", version: str = "1") -> Run:
    """Record a run with these data, and that its bundle is the champion; no bundle is written."""
    run = new_run(home, "training", {"data": data}, ["promote-bundle"])
    step = run.step("promote-bundle")
    step.status = "done"
    step.parameters = {"Output": {"bundle_id": bundle_id, "version": version, "changed": True}}
    run.save()
    place = f"bundles/{bundle_id}"
    write_champion(home, Champion(bundle_id, version, "reco", place, "2024-01-01", "2024-01-02"))
    return run


@pytest.fixture
def home(toy_line: Path, tmp_path: Path) -> Path:
    return toy_home(tmp_path, toy_line)
