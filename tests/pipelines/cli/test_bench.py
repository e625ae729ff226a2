"""`reco bench` and `reco drill` where their modules are missing, as in the wheel."""

import contextlib
import importlib.util
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.bench.compression import TrainingLine
from pipelines.bench.load.waiting import wait_for
from pipelines.cli.bench import _require_instruments
from pipelines.live.up import reco as program
from pipelines.run.runs import new_run
from serving.release.bundle import RankingSettings, seal_bundle
from serving.release.champion import Champion, write_champion
from serving.stages.retrieval import Quotas
from tests.pipelines.cli.conftest import reco
from tests.pipelines.conftest import promote_run


@pytest.mark.parametrize(
    ("arguments", "package"),
    [(["bench", "drift"], "pipelines.bench"), (["drill", "--list"], "pipelines.drills")],
    ids=" ".join,
)
def test_without_a_clone_the_error_names_the_folder_to_run_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], package: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = reco(tmp_path, *arguments)
    assert done.exit_code == 2
    assert f"{package} is not installed: benches and drills run from a clone" in done.output


def test_results_are_written_under_the_home_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    monkeypatch.setattr("pipelines.cli.bench._dataset", lambda context, data: tmp_path)
    monkeypatch.setattr("pipelines.cli.bench._bundle", lambda context: tmp_path)

    def measure(bundle: Path, data: Path, out: Path) -> dict[str, Any]:
        out.mkdir(parents=True)
        (out / "drift.md").write_text("| week of |")
        folders.append(out)
        return {}

    monkeypatch.setattr("pipelines.bench.drift.bench_drift", measure)
    monkeypatch.chdir(tmp_path)
    assert reco(tmp_path, "bench", "drift").stdout == "| week of |\n"
    assert reco(tmp_path, "bench", "drift", "--home", str(tmp_path / "other")).exit_code == 0
    assert reco(tmp_path, "bench", "drift", "--out", "there").exit_code == 0
    assert folders == [tmp_path / "bench", tmp_path / "other" / "bench", Path("there")]


def test_new_items_get_vectors_of_the_champions_own_towers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a newer run that the gate refused lie in another space, though they know the same items."""
    promoted, refused = promote_run(tmp_path), new_run(tmp_path, "training", {}, ["promote-bundle"])
    for run in (promoted, refused):
        (run.artifacts("train-retriever") / "checkpoint").mkdir(parents=True)
    evaluated = refused.artifacts("evaluate-bundle") / "evaluated"
    evaluated.mkdir(parents=True)
    (evaluated / "manifest.json").touch()
    monkeypatch.setattr("pipelines.cli.bench._dataset", lambda context, data: tmp_path)
    used: list[Path] = []

    def measure(bundle: Path, data: Path, retriever: Path, out: Path, ceiling: bool) -> dict[str, Any]:
        out.mkdir(parents=True)
        (out / "quality.md").touch()
        used.append(retriever)
        return {}

    monkeypatch.setattr("pipelines.bench.quality.bench_quality", measure)
    monkeypatch.setattr("pipelines.cli.bench._bundle", lambda context: tmp_path)
    assert reco(tmp_path, "bench", "quality").exit_code == 0
    assert used == [promoted.artifacts("train-retriever") / "checkpoint"]


def test_the_rankers_are_those_of_the_champions_run_and_its_bundle_is_the_refreshed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A night was promoted since, and the gate refused a newer run: figures of either name another bundle."""

    def seal(folder: Path, **made_from: str) -> str:
        folder.mkdir(parents=True)
        settings = RankingSettings(Quotas(), 1.0)
        return seal_bundle(folder, cut="2024-01-01", settings=settings, made_from=made_from)

    lines: list[TrainingLine] = []

    def measure(line: TrainingLine, out: Path) -> dict[str, Any]:
        out.mkdir(parents=True, exist_ok=True)
        (out / "compression.md").touch()
        lines.append(line)
        return {}

    monkeypatch.setattr("pipelines.bench.compression.bench_compression", measure)
    runs = [new_run(tmp_path, "training", {"ranker_params": {}}, ["evaluate-bundle"]) for _ in range(2)]
    evaluated = [run.artifacts("evaluate-bundle") / "evaluated" for run in runs]
    trained, _ = (seal(place, data_hash=str(number)) for number, place in enumerate(evaluated))
    assert reco(tmp_path, "bench", "compression").exit_code == 0
    assert lines[-1].bundle == evaluated[1], "without a champion the newest run is measured"
    night = seal(tmp_path / "bundles" / "night", parent=trained)
    (tmp_path / "bundles" / "night").rename(tmp_path / "bundles" / night)
    write_champion(tmp_path, Champion(night, "2", "reco", f"bundles/{night}", "2024-01-01", "2024-01-02"))
    assert reco(tmp_path, "bench", "compression").exit_code == 0
    assert lines[-1].bundle == tmp_path / "bundles" / night
    assert lines[-1].dataset == runs[0].artifacts("ingest-events") / "dataset"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the handlers of signals after a test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_a_bench_and_a_second_one_does_not_interrupt_its_end(
    first: signal.Signals,
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _require_instruments("pipelines.bench")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(first)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.raise_signal(number)


@pytest.mark.usefixtures("handlers")
def test_under_nohup_a_terminal_may_close() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _require_instruments("pipelines.bench")
    signal.raise_signal(signal.SIGHUP)


@pytest.mark.slow
def test_a_signal_ends_the_servers_of_a_bench(home: Path, tmp_path: Path) -> None:
    """`reco figures` starts each bench as its own process, as a person does."""
    command = program("--home", str(home), "figures", "latency", "--short", "--out", str(tmp_path))
    with subprocess.Popen(command) as process:
        started = psutil.Process(process.pid)

        def serves() -> bool:
            with contextlib.suppress(psutil.Error):  # a child has just ended
                return any("serving.server" in child.cmdline() for child in started.children(recursive=True))
            return False

        try:
            wait_for(serves, "the bench starts an endpoint")
            parts = started.children(recursive=True)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    _, alive = psutil.wait_procs(parts, timeout=60)
    for part in alive:
        part.kill()
    assert not alive
