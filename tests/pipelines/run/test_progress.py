import io

import pytest

from pipelines.run.progress import Progress, duration, spoken, summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (61, "1 min 01"), (3599.4, "59 min 59"), (7260, "2 h 01")],
)
def test_durations_are_short(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_line_of_a_step_is_shown_without_the_prefix_of_kfp() -> None:
    assert spoken("    [KFP Executor 2026-11-21 07:03:03,460 INFO]: 12 rows written") == "12 rows written"
    assert spoken("    [KFP Executor 2026-11-21 07:03:03,460 INFO]: Got executor_input:") == ""
    assert spoken('    "inputs": {') == ""


def test_outputs_are_summed_up_on_one_line() -> None:
    given = {
        "Output": {"rows": 1439000.0, "ndcg": 0.15512345, "changed": True, "checks": [], "cpu_seconds": 8.5},
        "cut": "2017-11-27",
    }
    assert summary(given) == "changed yes, ndcg 0.1551, rows 1,439,000, cut 2017-11-27"
    assert summary({"Output": "7"}) == "7"
    assert summary({}) == ""


HEARD = "    [KFP Executor 2026-11-21 07:03:03,460 INFO]: loss 0.3"


def test_a_file_gets_one_line_per_step() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.begin("r1", ["a", "bb"], 1)
        progress.start("bb")
        progress.hear("bb", HEARD)
        progress.refresh()
        progress.done("bb", {})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run r1: 2 steps, 1 kept from before"
    assert lines[1].startswith("[2/2] bb")
    assert lines[1].endswith("0.0 s  loss 0.3")
    assert len(lines) == 2


def test_a_file_gets_a_heartbeat_of_each_running_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.run.progress.HEARTBEAT_S", 0.0)
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.begin("r1", ["a", "bb"], 0)
        progress.start("a")
        progress.start("bb")
        progress.hear("bb", HEARD)
        progress.refresh()
    assert [line.split()[0] for line in stream.getvalue().splitlines()] == ["run", "a", "bb"]
    assert stream.getvalue().endswith("loss 0.3\n")


def test_a_terminal_shows_all_running_steps_and_wipes_them_before_the_result() -> None:
    stream = Terminal()
    with Progress(stream) as progress:
        progress.begin("r1", ["a", "b"], 0)
        progress.start("a")
        progress.start("b")
        progress.refresh()
        shown = stream.getvalue()
        progress.failed("a")
    lines = [line.rpartition("\x1b[2K")[2].split() for line in shown.splitlines()]
    assert [line[0] for line in lines[-3:]] == ["a", "b", "0"]
    assert "0 of 2 steps done" in shown
    assert "\x1b[2K" in stream.getvalue().removeprefix(shown)
    assert "failed" in stream.getvalue().removeprefix(shown)


def test_a_long_line_stays_one_line_in_a_file() -> None:
    stream = io.StringIO()
    Progress(stream).say("[red] " + "x" * 500)
    assert stream.getvalue() == "[red] " + "x" * 500 + "\n"
