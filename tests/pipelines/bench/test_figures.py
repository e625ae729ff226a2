"""The plan of the published results: commands that exist, resumed where they ended."""

import json
from pathlib import Path

import pytest

from pipelines.bench import figures
from pipelines.bench.figures import ONLY_BY_NAME, PLAN, FiguresIncomplete, measure_figures, plan_table
from pipelines.cli.shell import main
from pipelines.drills.canary import CASES
from serving.errors import NoChampion
from serving.release.champion import Champion, write_champion
from tests.pipelines.cli.conftest import home

__all__ = ["home"]


@pytest.fixture
def champion(tmp_path: Path) -> Path:
    """A home whose champion is a name without files."""
    (tmp_path / "home").mkdir()
    write_champion(tmp_path / "home", Champion("b1", "1", "toy", "bundles/b1", "2024-01-01", ""))
    return tmp_path / "home"


def test_the_plan_measures_every_goal_of_the_load_report() -> None:
    [load] = [bench for bench in PLAN if bench.name == "load"]
    assert "--endurance" in load.command.split()


@pytest.mark.parametrize("bench", [*PLAN, *ONLY_BY_NAME], ids=lambda bench: bench.name)
@pytest.mark.parametrize("is_short", [False, True], ids=["full", "short"])
def test_each_command_of_the_plan_exists(bench: figures.PublishedBench, is_short: bool) -> None:
    words = f"{bench.command} {bench.short if is_short else ''} --out somewhere".split()
    with main.make_context("reco", ["--home", "somewhere", *words]) as top:
        name, command, rest = main.resolve_command(top, words)
        while hasattr(command, "resolve_command"):
            with command.make_context(name, rest, parent=top) as group:
                name, command, rest = command.resolve_command(group, rest)
        assert command.make_context(name, rest, parent=top).params["out"] == Path("somewhere")


def test_the_list_tells_what_is_measured_only_by_name(champion: Path, tmp_path: Path) -> None:
    rows = plan_table(champion, tmp_path).splitlines()[1:]
    assert sum("to do" in row for row in rows) == len(PLAN)
    assert [row.split()[0] for row in rows if "only by name" in row] == ["peers", "alerts"]


def test_the_short_release_drill_is_one_of_its_cases() -> None:
    [release] = [bench for bench in PLAN if bench.name == "release"]
    assert release.short in {case.name for case in CASES}


def test_changed_files_and_unknown_names_are_refused(
    champion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "commit", lambda: "abc+")
    with pytest.raises(FiguresIncomplete, match="files differ from commit abc: commit them"):
        measure_figures(champion, tmp_path)
    with pytest.raises(ValueError, match="no result 'speed': choose among quality, "):
        measure_figures(champion, tmp_path, ["speed"], short=True)
    with pytest.raises(ValueError, match="'alerts' has no short form: leave out --short"):
        measure_figures(champion, tmp_path, ["quality", "alerts"], short=True)


@pytest.mark.slow
def test_results_are_measured_once_for_a_commit_and_a_champion(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [retrieval] = [bench for bench in PLAN if bench.name == "retrieval"]
    assert measure_figures(home, tmp_path, ["retrieval"], short=True) == ["retrieval"]
    assert {file.name for file in (tmp_path / "short").iterdir()} == {"retrieval.json", "retrieval.md"}
    assert measure_figures(home, tmp_path, ["retrieval"], short=True) == []
    states = {
        line.split()[0]: line.split()[2] for line in plan_table(home, tmp_path / "short").splitlines()[1:]
    }
    assert [name for name, state in states.items() if state == "measured"] == ["retrieval"]
    assert not figures.is_measured(home, tmp_path, retrieval), "a short result is never published"
    with pytest.raises(FiguresIncomplete, match="compression: exit code 2"):  # this home has no run
        measure_figures(home, tmp_path, ["retrieval", "compression"], short=True)
    monkeypatch.setattr(figures, "commit", lambda: "another")
    assert "retrieval" in plan_table(home, tmp_path / "short")
    assert not figures.is_measured(home, tmp_path / "short", retrieval)


def test_a_result_with_a_drill_that_was_broken_off_is_to_be_measured_again(
    champion: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "commit", lambda: "abc")
    monkeypatch.setattr(figures, "processor", lambda: "a processor")
    [drills] = [bench for bench in PLAN if bench.name == "drills"]
    result = {"commit": "abc", "machine": {"cpu": "a processor"}, "busy": {}, "bundle_id": "b1"}
    for broken_off, is_measured in (({}, True), ({"store-killed": "it never was ready"}, False)):
        (tmp_path / "drills.json").write_text(json.dumps(result | {"broken_off": broken_off}))
        assert figures.is_measured(champion, tmp_path, drills) is is_measured


def test_a_missing_champion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "commit", lambda: "abc")
    with pytest.raises(NoChampion):
        measure_figures(tmp_path, tmp_path / "figures", short=True)
