"""Options that several commands share, as a command receives them."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pipelines.cli.options import (
    Context,
    common_options,
    question_options,
    read_token,
    results_folder,
)
from pipelines.cli.shell import main


def call(*arguments: str) -> dict[str, Any]:
    """Return the arguments that a command with these options gets."""
    received: dict[str, Any] = {}

    @click.command()
    @question_options
    @results_folder("bench")
    @common_options
    def command(context: Context, **options: Any) -> None:
        received.update(options, home=context.home, output=context.output)

    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    return received


@pytest.mark.parametrize("content", [b"a\nb", b"a b", b"\xff"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_text("abc\n")
    assert (read_token(file), read_token(None)) == ("abc", "")
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"token holds no token"):
        read_token(file)


def test_the_options_form_one_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RECO_HOME", str(tmp_path))
    assert call()["line"] == {"basket": [], "k": 10}
    line = call(
        "--user", "u", "--basket", "a, b,", "--store", "s", "--at", "now", "-k", "3", "--profile", "p"
    )
    assert line["line"] == {
        "user_id": "u",
        "store_id": "s",
        "at": "now",
        "k": 3,
        "profile": "p",
        "basket": ["a", "b"],
    }


def test_the_home_comes_from_the_option_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RECO_HOME", str(tmp_path))
    assert call()["home"] == tmp_path
    given = call("--out", "there", "--home", str(tmp_path / "mine"), "--output", "json")
    assert (given["home"], given["out"], given["output"]) == (tmp_path / "mine", Path("there"), "json")
    empty = CliRunner().invoke(main, ["runs", "--home", ""]), CliRunner().invoke(main, ["--home", "", "runs"])
    assert [(done.exit_code, "'--home': it is empty" in done.stderr) for done in empty] == [(2, True)] * 2
    assert call("--home", str(tmp_path / "mine"))["out"] == tmp_path / "mine" / "bench"


def test_commands_in_an_answer_can_be_pasted(tmp_path: Path) -> None:
    @click.command()
    @common_options
    def command(context: Context) -> None:
        context.answer({"cure": "`reco run`"}, "gone: `reco run`, then `reco serve`")

    for output, shown in (
        ("text", f"gone: `reco --home {tmp_path} run`, then `reco --home {tmp_path} serve`\n"),
        ("json", '{\n "cure": "`reco run`"\n}\n'),
    ):
        done = CliRunner().invoke(command, ["--home", str(tmp_path), "--output", output])
        assert done.stdout == shown
