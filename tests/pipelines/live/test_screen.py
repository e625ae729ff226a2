"""The screen of `reco up`: figures of a real HTTP endpoint, on a terminal, as lines and as JSON."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from components.home import command
from pipelines.live import screen as module
from pipelines.live.screen import Counted, Screen, described
from pipelines.live.supervisor import State
from tests.chaos.listening import http_answers
from tests.chaos.procs import eventually

BEFORE = {"full": 100, "cached": 0, "0.001": 60, "0.005": 100, "+Inf": 100}
AFTER = {"full": 280, "cached": 20, "0.001": 90, "0.005": 299, "+Inf": 300}


@pytest.fixture
def looks() -> list[str]:
    """The paths that were asked for."""
    return []


@pytest.fixture
def states(tmp_path: Path, looks: list[str]) -> Iterator[list[State]]:
    """The states of a system that runs: an endpoint with metrics, a stream and a replay."""
    (tmp_path / "up").mkdir()
    with (tmp_path / "up" / "replay.log").open("ab") as log:
        log.truncate(1 << 40)  # of many weeks: its end is read alone
        log.write(b"\n5 of 9 messages\n7 of 9 messages, asked 3\n")
    (tmp_path / "stream.json").write_text('{"events": 1234, "lag": 5}')

    def metrics(path: str) -> tuple[int, bytes]:
        numbers = AFTER if looks else BEFORE
        looks.append(path)
        lines = ["# TYPE reco_responses counter", "# TYPE reco_answer_seconds histogram"]
        for name, number in numbers.items():
            label = f'rung="{name}",degraded_reason=""' if name.isalpha() else f'le="{name}"'
            metric = "reco_responses_total" if name.isalpha() else "reco_answer_seconds_bucket"
            lines.append(f"{metric}{{{label}}} {number}")
        return 200, "\n".join(lines).encode() + b"\n"

    with http_answers(metrics) as url:
        yield [State("endpoint", url, 1, "ok"), State("stream", "topic", 2, "ok"), State("replay", "toy", 3)]


def test_figures_are_those_since_the_last_look(tmp_path: Path, states: list[State]) -> None:
    screen = Screen(tmp_path, as_json=True)
    screen.show(states)
    assert "answers_per_s" not in screen.figures(), "nothing to compare with yet"
    found = screen.figures()
    assert found.pop("answers_per_s") > 0
    assert found == {
        "p99_ms": 5.0,
        "rungs": {"full": 0.9, "cached": 0.1},
        "events": 1234,
        "lag": 5,
        "replay": "7 of 9 messages, asked 3",
    }
    text = described({**found, "answers_per_s": 1234.5})
    assert text.splitlines() == [
        "answers  1,234.5 a second, p99 within 5 ms, full 90.0%, cached 10.0%",
        "stream   1,234 events, lag 5 messages",
        "replay   7 of 9 messages, asked 3",
    ]
    screen.show([State("endpoint", "http://127.0.0.1:1", None, "died"), State("stream", "topic")])
    assert screen.figures() == {}, "no part runs"


def test_figures_come_from_the_port_of_metrics_alone(
    tmp_path: Path, states: list[State], looks: list[str]
) -> None:
    """The port of shoppers shows none beside it."""
    endpoint, *others = states
    screen = Screen(tmp_path, as_json=True, metrics=endpoint.address.removeprefix("http://"))
    screen.show([State("endpoint", "http://127.0.0.1:1", 1, "ok"), *others])
    screen.figures()
    assert screen.figures()["answers_per_s"] > 0
    assert looks == ["/metrics"] * 2


def test_figures_are_left_out_where_another_process_counts() -> None:
    """A gateway asks the larger slot, which changes; an endpoint may have begun again."""
    before = Counted(1.0, {"full": 10.0})
    assert Counted(2.0, {"full": 8.0, "popular": 2.0}).since(before) == {}
    assert Counted(2.0, {}).since(before) == {}
    assert Counted(2.0, {"full": 15.0}).since(before)["answers_per_s"] == 5.0


def test_a_terminal_gets_one_screen_and_what_is_said_above_it(tmp_path: Path, states: list[State]) -> None:
    terminal = io.StringIO()
    with Screen(tmp_path, console=Console(file=terminal, force_terminal=True, width=120)) as screen:
        screen.show(states)
        screen.say("all parts are ready")
    shown = terminal.getvalue()
    assert "all parts are ready" in shown
    for word in ("endpoint", "part", "lag 5 messages", "7 of 9 messages"):
        assert word in shown.rpartition("all parts are ready")[2]


def test_a_file_gets_lines(
    tmp_path: Path,
    states: list[State],
    looks: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "LINE_S", 0.01)
    with Screen(tmp_path, as_json=True) as screen:
        screen.show(states)
        screen.say("`reco run` makes more")
        eventually(lambda: len(looks) >= 3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = {kind: [line for line in lines if line["event"] == kind] for kind in ("parts", "said", "figures")}
    assert [part["name"] for part in kinds["parts"][0]["parts"]] == ["endpoint", "stream", "replay"]
    assert kinds["said"] == [{"event": "said", "text": f"`{command(tmp_path, 'run')}` makes more"}]
    assert any("answers_per_s" in line for line in kinds["figures"])
