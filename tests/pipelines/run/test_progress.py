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
        "Output": {"rows": 1439000.0, "ndcg": 0.15512345, "changed": True, "checks": []},
        "cut": "2017-11-27",
    }
    assert summary(given) == "changed yes, ndcg 0.1551, rows 1,439,000, cut 2017-11-27"
    assert summary({"Output": "7"}) == "7"
    assert summary({}) == ""


def test_a_file_gets_one_line_per_step() -> None:
    stream = io.StringIO()
    progress = Progress(stream, {"a": 60.0, "bb": 120.0})
    progress.begin("r1", ["a", "bb"], 1)
    with progress.step("bb", 2, ["a", "bb"]) as step:
        step.hear("    [KFP Executor 2026-11-21 07:03:03,460 INFO]: loss 0.3")
    step.done({})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run r1: 2 steps, 1 kept from before, about 2 min 00"
    assert lines[1].startswith("[2/2] bb")
    assert lines[1].endswith("0.0 s  loss 0.3")


def test_a_terminal_shows_the_running_step_and_wipes_it_before_the_result() -> None:
    stream = Terminal()
    with Progress(stream).step("a", 1, ["a"]) as step:
        pass
    step.failed()
    shown, _, result = stream.getvalue().partition("\x1b[2K")
    assert "[1/1] a" in shown
    assert "failed" in result.splitlines()[-1]


def test_a_long_line_stays_one_line_in_a_file() -> None:
    stream = io.StringIO()
    Progress(stream).say("[red] " + "x" * 500)
    assert stream.getvalue() == "[red] " + "x" * 500 + "\n"
