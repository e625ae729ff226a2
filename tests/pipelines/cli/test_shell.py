"""`reco` as a whole: help, exit codes, wrong usage of any command."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipelines.cli.shell import main
from tests.pipelines.cli.conftest import reco


def test_help_lists_the_commands_in_the_order_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = reco(tmp_path, "--help").output
    assert "..." not in said.partition("Commands:")[2], "a line is cut at 80 columns"
    order = ["try", "run", "compile", "submit", "models", "promote", "serve", "recommend", "drift", "doctor"]
    places = [said.index(f"\n  {name} ") for name in order]
    assert places == sorted(places)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_each_command_takes_the_common_options(name: str) -> None:
    said = CliRunner().invoke(main, [name, "--help"]).output
    if not isinstance(main.commands[name], click.Group):
        assert {"--home", "--output", "--debug"} <= set(said.split())


SUBMIT, TRACKED = "submit --host http://127.0.0.1:1", "--tracking-uri http://127.0.0.1:1"
SCHEDULE = "schedule --host http://127.0.0.1:1 --data /mnt/reco/offline_store"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("rnu", "did you mean 'run'"),
        ("run --data toi", "did you mean 'toy'"),
        ("run --train-until tomorrow", "'tomorrow' is no date"),
        ("run --only train-ranker", "--only needs --resume"),
        ("run --resume nothing", "none yet: start one with `reco --home "),
        ("run --data toy --param ranker_params.epochs", "ranker_params.epochs"),
        ("run --data toy --param ranker_parms.epochs=1", "did you mean 'ranker_params'"),
        ("run --data toy --param epochs=3", "has no parameter 'epochs'"),
        ("run --param data=./mine", "--param data: give --data"),
        (f"{SUBMIT} {TRACKED} --volume v --param home=/data", "give --home, or --state of submit"),
        ("run --resume ''", "--resume is empty: name a run or `last`"),
        ("run --resume last --data complete-journey", "--data means nothing with --resume"),
        ("run --resume last --tracking-uri ''", "--tracking-uri means nothing"),
        ("why 1 --request-id r --user 5", "--user means nothing with --request-id"),
        ("recommend --requests - --basket 5", "--basket means nothing with --requests"),
        (SUBMIT, "needs --tracking-uri http"),
        (f"{SUBMIT} {TRACKED}", "they end with the pod that wrote them"),
        ("run --data toy --model-name My-Shop", "model name 'My-Shop': expected lower-case letters"),
        ("run --data toy --tracking-uri mlruns", "tracking URI with scheme 'mlruns': expected sqlite:///"),
        ("run --data toy --tracking-uri sqlite://rel.db", "tracking URI with scheme 'sqlite'"),
        (f"{SUBMIT} {TRACKED} --volume v --model-name My-Shop", "model name 'My-Shop'"),
        ("run --data toy --param online_store=http://cache", "is no scheme of an online store in Redis"),
        (f"{SUBMIT} {TRACKED} --volume v --online-store rediss+sentinel://cache/shop", "through TLS"),
        (f"{SUBMIT} {TRACKED} --volume v --release --fast", "gate has limits of its own"),
        (f"{SUBMIT} {TRACKED} --volume v --release --param gate_params.over_blend=1", "limits of its own"),
        (SCHEDULE, "needs --volume"),
        (f"{SCHEDULE} --volume v --cron '0 6 * * *'", "5 fields, expected six"),
        ("compile --state /data", "--state needs --volume"),
        ("compile --volume reco --state data", "it begins with /"),
        (f"doctor --home {__file__}", "is a file"),
        ("models --tracking-uri ftp://x", "tracking URI with scheme 'ftp'"),
        ("recommend --basket 1", "has no champion"),
        ("recommend -k -1", "-1 is not in the range 0<=x<=100"),
        ("recommend -k 500", "500 is not in the range 0<=x<=100"),
        ("refresh --data tyo", "no data 'tyo'"),
        ("serve", "has no champion"),
        ("run --data ''", "--data is empty"),
        ("run --data toy --param ranker_params.dlrm.epochs=-1", "epochs is -1, expected `int` >= 1"),
        ("promote --gate over_blend", "--gate 'over_blend': expected NAME=VALUE"),
        ("drift", "has no champion"),
        ("run --data toy --fast --full", "give one"),
        ("up", "has no champion"),
        ("up --replay complete-jurney", "complete-journey"),
        ("up --port 70000", "70000 is not in the range"),
        ("up --replay toy --speed -1", "'--speed': -1.0 is not in the range"),
        ("up --replay toy --speed inf", "'--speed': inf is no finite number"),
        ("replay-events --seed -1", "'--seed': -1 is not in the range"),
        ("watch --every nan", "'--every': nan is no finite number"),
        ("watch --every 0", "'--every': 0.0 is not in the range"),
        ("watch --every 7201", "'--every': 7201.0 is not in the range 0.1<=x<=7200.0"),
        ("watch --pipelines https://kfp.shop.example", "--pipelines needs --retrain"),
        ("watch --retrain --pipelines kfp.example", "is 'kfp.example', expected http(s)"),
        ("kpi --hours 169", "'--hours': 169.0 is not in the range"),
        ("kpi --hours 0", "'--hours': 0.0 is not in the range"),
        ("release --status --hold-s inf", "'--hold-s': inf is not in the range"),
        ("drill", "no drill named"),
        ("drill store-frosen", "no drill 'store-frosen': did you mean 'store-frozen'"),
        ("drill store-frozen --data real", "--data"),
        ("drill store-frozen", "no champion"),
        ("drill release --list", "takes no --short, --with-alerts or --list"),
        ("drill release good --short", "takes no --short, --with-alerts or --list"),
        ("drill release --with-alerts", "takes no --short, --with-alerts or --list"),
    ],
    ids=str,
)
def test_wrong_usage_exits_with_2_and_says_how_to_fix_it(tmp_path: Path, command: str, says: str) -> None:
    done = reco(tmp_path / "home", *shlex.split(command))
    assert done.exit_code == 2
    assert says in done.output
    assert "Traceback" not in done.output
    assert not (tmp_path / "home").exists(), "a command that did nothing left something behind"


@pytest.mark.slow
def test_a_pipe_whose_reader_has_ended_is_no_error(tmp_path: Path) -> None:
    """As in `reco params | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-P", "-m", "pipelines.cli", "--home", str(tmp_path), "params"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.slow
def test_a_missing_package_is_named_and_the_doctor_still_works(tmp_path: Path) -> None:
    # None in sys.modules: Python takes the package for one that is not installed.
    start = "import sys; sys.modules.update(dict.fromkeys(['faiss', 'onnxruntime', 'numba']))\n"
    start += "from pipelines.cli.shell import main; main(prog_name='reco')"

    def without_packages(*arguments: str) -> tuple[int, str, str]:
        command = [sys.executable, "-P", "-c", start, "--home", str(tmp_path / "home"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    code, _, said = without_packages("check", "toy")
    assert code == 2
    assert re.fullmatch(r"reco: numba is not installed: `\S*reco --home \S+ doctor` looks .* where\n", said)
    code, _, said = without_packages("check", "toy", "--debug")
    assert (code, "Traceback" in said) == (1, True)
    code, told, said = without_packages("doctor")
    assert ("packages" in told, said) == (True, ""), (code, told)


def test_a_home_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/data/x")

    monkeypatch.setattr("pipelines.run.launch.start_training", train)
    done = reco(tmp_path / "home", "run", "--data", "toy")
    assert (done.exit_code, done.output) == (3, "reco: [Errno 30] Read-only file system: '/data/x'\n")


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [("serve", "promote champion"), ("runs last", "run"), ("history", "run --data DIR")],
)
def test_the_cure_in_an_error_names_the_home_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, cure: str
) -> None:
    """Else the command that is pasted changes another home."""
    (tmp_path / "champion.json").write_text("{")
    monkeypatch.setattr("sys.argv", [".venv/bin/reco"])
    monkeypatch.setenv("PATH", str(tmp_path))  # no environment is active
    for done in (
        reco(tmp_path / "other", *arguments.split(), "--home", str(tmp_path)),
        reco(tmp_path, *arguments.split()),
    ):
        assert done.exit_code == 2
        assert f"`.venv/bin/reco --home {tmp_path} {cure}`" in done.stderr
