"""The client as a separate distribution: only its modules, with httpx as the only dependency."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipelines.cli.shell import main
from serving.release.champion import Champion, write_champion
from serving.release.manifest import read_manifest
from tests.serving.conftest import Running

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
def test_the_program_of_the_page_runs(
    installed: Path, endpoint: Running, toy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "how-to" / "ask-from-the-checkout.md").read_text(encoding="utf-8")
    home = tmp_path / "home"
    shutil.copytree(toy_bundle, home / "bundles" / "toy")
    manifest = read_manifest(toy_bundle)
    write_champion(home, Champion(manifest["bundle_id"], "1", "toy", "bundles/toy", manifest["cut"], ""))
    monkeypatch.chdir(tmp_path)
    [command] = re.findall(r"^reco (best-sellers .*)$", page, re.MULTILINE)
    made = CliRunner().invoke(main, ["--home", str(home), *command.split()])
    assert made.exit_code == 0, made.output
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for published, here in (
        ("http://127.0.0.1:8080", endpoint.http),
        ("deadline_ms=50", "deadline_ms=20_000"),
    ):
        assert published in program
        program = program.replace(published, here)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{program}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert re.match(r"\['\d+'(, '\d+'){4}\] None\n", done.stdout), done.stdout


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
