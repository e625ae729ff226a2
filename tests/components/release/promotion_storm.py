"""A home and its registry -> promotions that are killed, or that compete.

Arguments: HOME, `kill` or `compete`, ROUNDS.

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

import mlflow.tracking  # noqa: F401 - imported once, before the forks

from components.home import Conflict
from components.release.promote_bundle import promote_bundle, rollback, verified_history
from components.release.registry import CHAMPION, Registry, default_tracking_uri
from feature_repo.errors import RecoError
from serving.release.bundle import read_manifest, verify_files
from serving.release.champion import read_champion
from tests.components.conftest import as_planned

NAME = "recommender"


def fork(act: Callable[[], object]) -> int:
    if child := os.fork():
        return child
    code = 99
    try:
        act()
        code = 0
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


def promote(home: Path, version: str) -> None:
    uri = default_tracking_uri(home)
    promote_bundle(version, [home / "dataset"], uri, NAME, str(home), examine=as_planned)


def look(home: Path) -> None:
    """Write the state to a file, after checking that it is whole."""
    registry = Registry(default_tracking_uri(home), NAME)
    history, champion = verified_history(registry, home), read_champion(home)
    bundle = champion.bundle(home)
    verify_files(bundle, read_manifest(bundle))
    state = {"alias": registry.alias(CHAMPION), "pointer": champion.version, "lines": len(history)}
    (home / "state.json").write_text(json.dumps({**state, "last": history[-1].version}))


def state(home: Path) -> dict[str, Any]:
    assert end(fork(lambda: look(home))) == 0
    found: dict[str, Any] = json.loads((home / "state.json").read_text())
    return found


def kill(home: Path, rounds: int) -> None:
    """Kill a promotion at a random point, look, and complete it."""
    began = time.monotonic()
    assert end(fork(lambda: promote(home, "2"))) == 0
    took, killed = time.monotonic() - began, 0
    for number in range(rounds):
        target, other = ("1", "2") if number % 2 == 0 else ("2", "1")
        child = fork(partial(promote, home, target))
        time.sleep(random.uniform(0, took))
        os.kill(child, signal.SIGKILL)
        killed += end(child) < 0
        found = state(home)
        assert found["alias"] == found["last"], found
        assert {found["alias"], found["pointer"]} <= {target, other}, found
        assert (found["alias"], found["pointer"]) != (other, target), found
        assert end(fork(partial(promote, home, target))) == 0
        after = state(home)
        assert after["alias"] == after["pointer"] == after["last"] == target, after
        assert after["lines"] == number + 3, after  # the two before, and one of each round
    sys.stdout.write(json.dumps({"rounds": rounds, "killed": killed}) + "\n")


def compete(home: Path, rounds: int) -> None:
    """Let eight promotions and a rollback begin at once."""
    wins = []
    for _ in range(rounds):
        before = state(home)["lines"]
        children = [fork(partial(promote, home, str(n))) for n in range(1, 9)]
        children.append(fork(lambda: rollback(default_tracking_uri(home), NAME, str(home))))
        codes = [end(child) for child in children]
        assert set(codes[:-1]) <= {0, 4}, codes
        assert codes[-1] in {0, 2, 4}, codes  # 2: there is nothing to go back to
        after = state(home)
        assert after["alias"] == after["pointer"] == after["last"], after
        # The champion, promoted again, is a success without a line.
        assert codes.count(0) - 1 <= after["lines"] - before <= codes.count(0), (codes, before, after)
        assert 0 in codes or codes[-1] == 2, codes
        wins.append(codes.count(0))
    sys.stdout.write(json.dumps({"rounds": rounds, "wins": sum(wins)}) + "\n")


if __name__ == "__main__":
    {"kill": kill, "compete": compete}[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3]))
