import fcntl
import json
import os
import threading
from pathlib import Path

import pytest

from components.home import (
    Conflict,
    Running,
    announced,
    command,
    locked,
    pasteable,
    read_running,
    write_json,
)


def test_a_failed_write_leaves_the_old_document(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert json.loads(file.read_text()) == {"a": 1}


def test_a_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(tmp_path / "my shop", "run") == f"reco --home '{tmp_path}/my shop' run"
    monkeypatch.setenv("RECO_HOME", str(tmp_path / "my shop"))
    assert command(tmp_path / "my shop", "run") == "reco run"
    monkeypatch.setattr("sys.argv", [".venv/bin/reco", "doctor"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command(tmp_path / "my shop", "run") == ".venv/bin/reco run", "no environment is active"


def test_the_commands_of_a_message_can_be_pasted(tmp_path: Path) -> None:
    home = tmp_path / "my reco shop"
    text = pasteable(home, f"{home} is damaged: `reco promote champion`, or `reco run`")
    assert text == f"{home} is damaged: `{command(home, 'promote champion')}`, or `{command(home, 'run')}`"
    assert pasteable(home, text) == text, "a command that names its home stays as it is"


def test_the_conflict_names_the_holder_of_the_lock(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "a.lock", "promoting 3"),
        pytest.raises(Conflict, match=f"process {os.getpid()} is promoting 3"),
        locked(tmp_path / "a.lock", "promoting 4"),
    ):
        pass
    with (
        locked(tmp_path / "a.lock", "promoting 5"),
        pytest.raises(Conflict, match=r"a\.lock\): stop it with Ctrl-C; nothing was changed"),
        locked(tmp_path / "a.lock", "promoting 6", "stop it with Ctrl-C"),
    ):
        pass


def test_a_running_process_is_known_only_while_it_runs(tmp_path: Path) -> None:
    running = Running("redis://127.0.0.1:16379/0", "127.0.0.1:19092", True)
    assert read_running(tmp_path) is None
    with locked(tmp_path / "up.lock", "running `reco up`"):
        assert read_running(tmp_path) is None, "it is just starting"
        with announced(tmp_path, running):
            assert read_running(tmp_path) == running
            left = (tmp_path / "up.json").read_bytes()
            assert (tmp_path / "up.json").stat().st_mode & 0o777 == 0o600
        assert read_running(tmp_path) is None
    (tmp_path / "up.json").write_bytes(left)  # as when it is killed
    assert read_running(tmp_path) is None


def test_looking_for_a_running_process_blocks_no_other(tmp_path: Path) -> None:
    lock = tmp_path / "up.lock"
    lock.touch()
    with lock.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.02, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        with locked(lock, "running `reco up`"):
            pass
