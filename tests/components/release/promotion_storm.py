"""Two homes and their registries -> promotions that are killed, and some that compete.

Arguments: HOME and how many kills, HOME and how many rounds.

Each act runs in a fork of this process, which has imported everything and opened nothing.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# What the forks would import late, each again: imported once, before them.
import mlflow.store.db.utils
import mlflow.store.model_registry.sqlalchemy_workspace_store
import mlflow.store.tracking.sqlalchemy_workspace_store
import mlflow.tracking
import sqlalchemy.dialects.sqlite  # noqa: F401

from components.home import Conflict, default_tracking_uri
from components.release.promote_bundle import promote_bundle, rollback, verified_history
from components.release.registry import CHAMPION, Registry
from feature_repo.errors import RecoError
from serving.release.bundle import verify_files
from serving.release.champion import read_champion
from serving.release.manifest import read_manifest
from tests.components.conftest import as_planned

NAME = "recommender"
NO_LINE = 50  # exit code of an act that succeeded without a line of the history


def fork(act: Callable[[], bool]) -> int:
    """Run an act that returns whether it wrote a line of the history."""
    if child := os.fork():
        return child
    code = 99
    try:
        code = 0 if act() else NO_LINE
    except Conflict as error:
        code = error.exit_code
    except RecoError as error:
        code = error.exit_code
        traceback.print_exc()
    except BaseException:  # noqa: BLE001 - the edge of a forked process
        traceback.print_exc()
    os._exit(code)


def end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def promote(home: Path, version: str) -> bool:
    uri = default_tracking_uri(home)
    done = promote_bundle(version, [home / "dataset"], uri, NAME, str(home), examine=as_planned)
    return bool(done["changed"])


def go_back(home: Path) -> bool:
    return bool(rollback(default_tracking_uri(home), NAME, str(home))["changed"])


def look(home: Path) -> bool:
    """Write the state to a file, after checking that it is whole."""
    registry = Registry(default_tracking_uri(home), NAME)
    history, champion = verified_history(registry, home), read_champion(home)
    bundle = champion.bundle(home)
    verify_files(bundle, read_manifest(bundle))
    state = {"alias": registry.alias(CHAMPION), "pointer": champion.version, "lines": len(history)}
    (home / "state.json").write_text(json.dumps({**state, "last": history[-1].version}))
    return True


def state(home: Path) -> dict[str, Any]:
    assert end(fork(lambda: look(home))) == 0
    found: dict[str, Any] = json.loads((home / "state.json").read_text())
    return found


def kill(home: Path, kills: int) -> None:
    """Kill a promotion at a random point, look, and complete it; repeat what ended before its kill."""
    began = time.monotonic()
    assert end(fork(lambda: promote(home, "2"))) == 0
    took, killed, rounds = time.monotonic() - began, 0, 0
    while killed < kills and rounds < 10 * kills:
        target, other = ("1", "2") if rounds % 2 == 0 else ("2", "1")
        child, delay = fork(partial(promote, home, target)), random.uniform(0, took)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        if end(child) < 0:
            killed += 1
        else:
            took = delay  # or less: it had ended
        found = state(home)
        assert found["alias"] == found["last"], found
        assert {found["alias"], found["pointer"]} <= {target, other}, found
        assert (found["alias"], found["pointer"]) != (other, target), found
        began = time.monotonic()
        code = end(fork(partial(promote, home, target)))
        assert code in {0, NO_LINE}
        if code == 0:
            took = time.monotonic() - began
        after = state(home)
        assert after["alias"] == after["pointer"] == after["last"] == target, after
        rounds += 1
        assert after["lines"] == rounds + 2, after  # the two before, and one of each round
    sys.stdout.write(json.dumps({"rounds": rounds, "killed": killed}) + "\n")


def compete(home: Path, rounds: int) -> None:
    """Let eight promotions, of every version but the champion, and a rollback begin at once."""
    assert end(fork(partial(promote, home, "2"))) == 0  # so that there is something to go back to
    after = first = state(home)
    wins = 0
    for _ in range(rounds):
        before = after
        others = [str(number) for number in range(1, 10) if str(number) != before["alias"]]
        acts = [partial(go_back, home), *(partial(promote, home, version) for version in others)]
        random.shuffle(acts)
        codes = [end(child) for child in [fork(act) for act in acts]]
        assert set(codes) <= {0, NO_LINE, 2, 4}, codes  # 2: there is nothing to go back to
        after = state(home)
        assert after["alias"] == after["pointer"] == after["last"], after
        assert after["lines"] - before["lines"] == codes.count(0), (codes, before, after)
        assert {0, 2} & set(codes), codes
        wins += codes.count(0)
    lines = after["lines"] - first["lines"]
    sys.stdout.write(json.dumps({"rounds": rounds, "wins": wins, "lines": lines}) + "\n")


if __name__ == "__main__":
    newest = mlflow.store.db.utils._get_latest_schema_revision()  # each fork would look it up again
    mlflow.store.db.utils._get_latest_schema_revision = lambda: newest
    kill(Path(sys.argv[1]), int(sys.argv[2]))
    compete(Path(sys.argv[3]), int(sys.argv[4]))
