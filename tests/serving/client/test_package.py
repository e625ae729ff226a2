"""The client as a separate distribution: only its modules, with httpx as the only dependency."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = "checkout_recommender_client"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the unpacked wheel."""
    folder = tmp_path_factory.mktemp("client")
    shutil.copytree(ROOT / "serving" / "client", folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder, folder / "source"], check=True, timeout=300)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.mark.slow
def test_the_wheel_holds_one_package_and_its_types(installed: Path) -> None:
    folders = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert folders == {PACKAGE}
    modules = {path.name for path in (ROOT / "serving" / "client").glob("*.py")}
    assert {path.name for path in (installed / PACKAGE).iterdir() if path.is_file()} == {*modules, "py.typed"}
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert needed == ["Requires-Dist: httpx<1,>=0.27"]


@pytest.mark.slow
def test_the_installed_package_answers_without_this_repository(installed: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(installed)!r})
from {PACKAGE} import Client
with Client("http://127.0.0.1:9", ["i1", "i2"], deadline_ms=20_000) as client:
    answer = client.recommend(["i1"])
assert [item.item_id for item in answer.items] == ["i2"], answer
assert answer.degraded_reason == "connection_failed", answer
ours = {{"serving", "feature_repo", "components", "monitoring", "pipelines"}}
assert not ours & {{name.split(".")[0] for name in sys.modules}}
"""
    subprocess.run([sys.executable, "-I", "-c", program], check=True, timeout=120)
