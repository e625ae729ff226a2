import re
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from prometheus_client import REGISTRY

from feature_repo.schema import DENSE_NAMES
from feature_repo.stream.configuration import setting
from serving.errors import RecommendError
from serving.settings import Settings
from tests.docs import figures, reference
from tests.docs.generate import fill, stale
from tests.docs.source import ROOT, exit_code, expected_errors


def test_the_generated_pages_are_fresh() -> None:
    pages = [path.relative_to(ROOT).as_posix() for path in stale()]
    assert not pages, "run `python -m tests.docs.generate`"


def test_a_section_is_replaced_and_the_rest_stays() -> None:
    page = "before\n<!-- generated: a -->\nold\n<!-- end of a -->\nafter\n"
    once = fill(page, {"a": lambda: "new \\1\n"})
    assert once == "before\n<!-- generated: a -->\n\nnew \\1\n\n<!-- end of a -->\nafter\n"
    assert fill(once, {"a": lambda: "new \\1\n"}) == once
    with pytest.raises(ValueError, match="no section 'b'"):
        fill(page, {"b": str})


def test_every_expected_error_is_listed_with_its_exit_code() -> None:
    page = reference.command_errors()
    names = [name for name, _, _ in expected_errors()]
    assert len(names) > 20
    for name in names:
        assert re.search(rf"^\| [1-4] \| `{name}` \| .+ \|", page, re.MULTILINE), name
    assert [exit_code(name) for name in ("NoChampion", "GateFailed", "Conflict")] == [2, 1, 4]
    assert exit_code("DeadlineNear") == RecommendError.exit_code, "inherited"


def test_every_command_and_option_is_listed_and_explains_itself() -> None:
    page = reference.commands_page()
    for path, command in reference.commands(reference.program()):
        section = page.split(f"## `reco {' '.join(path)}`\n")[1].split("\n## ")[0]
        assert command.get_short_help_str(limit=200), path
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help, (path, option.opts)
                common = option.name in {"home", "output", "debug"}
                assert common or f"`{option.opts[-1]}`" in section, (path, option.opts)


def test_every_metric_of_ours_is_listed() -> None:
    page = reference.metrics_page()  # imports the metrics
    names = {family.name for family in REGISTRY.collect() if family.name.startswith("reco_")}
    assert len(names) > 10
    assert not [name for name in names if f"`{name}" not in page]


def test_every_feature_is_listed_and_feast_has_those_of_users_and_items() -> None:
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in reference.features_page().split("\n")
    ]
    listed = {row[0]: row for row in rows if len(row) == 4}
    assert set(DENSE_NAMES) <= set(listed)
    assert all(listed[name][3] for name in DENSE_NAMES), "a meaning is missing"
    for name in DENSE_NAMES:
        assert bool(listed[name][2]) == (listed[name][1] != "request"), name


def test_every_group_of_parameters_is_listed() -> None:
    page = reference.parameters_page()
    groups = re.findall(r"(\w+_params): dict", (ROOT / "pipelines/training.py").read_text(encoding="utf-8"))
    assert len(groups) >= 10
    assert [group for group in groups if f"## `{group}`" not in page] == []


def test_the_defaults_of_smaller_runs_are_written_as_options() -> None:
    written = list(reference.as_params({"a": {"b": 2, "c": [0.5]}, "d": 1.0}))
    assert written == ["`a.b=2`", "`a.c=[0.5]`", "`d=1.0`"]


def test_a_secret_is_never_shown_as_a_default() -> None:
    rows = reference.settings_rows(Settings, {})
    assert not [row for row in rows if re.search("password|key", row[0], re.IGNORECASE) and row[1]]


def test_a_setting_has_its_values_and_its_meaning() -> None:
    @dataclass
    class Described:
        first: int = setting(1, "Of two", ge=0, le=9)
        second: str = setting("", "Any text")

    assert reference.settings_rows(Described, {"first": "OTHER_FIRST"}) == [
        ("`OTHER_FIRST`", "`1`", "0 to 9", "Of two"),
        ("`RECO_SECOND`", "", "", "Any text"),
    ]


@pytest.mark.parametrize(
    ("default", "expected"),
    [
        (None, ""),
        (True, "on"),
        (False, "off"),
        (50.0, "50"),
        (0.5, "0.5"),
        ("", ""),
        (Path(".reco"), ".reco"),
    ],
)
def test_a_default_is_written_for_readers(default: object, expected: str) -> None:
    assert reference.shown(default) == expected


def test_a_missed_goal_is_counted_as_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = figures.measured
    load = {**real("load"), "goals": [{"reached": True}, {"reached": False}, {"reached": None}]}
    monkeypatch.setattr(figures, "measured", lambda name: load if name == "load" else real(name))
    assert "| load goals reached | 1 of 3 |" in figures.headline()


def test_each_report_is_of_the_commit_of_its_result() -> None:
    """The page shows the reports, and names the commits of the results."""
    for name in figures.PUBLISHED:
        assert figures.measured(name)["commit"] in " ".join(figures.blocks(name)), name
