"""The decorator that compiles, and the rule that keeps numba's cache fresh."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numba import njit
from numba.core import caching, event

from feature_repo.kernels import compiled as compiled_module
from feature_repo.kernels.compiled import compiled


def test_without_a_cache_folder_a_loop_is_compiled_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses to define a function whose code it cannot cache."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def twice(number: int) -> int:
        return 2 * number

    with pytest.raises(RuntimeError, match="no locator"):
        njit(cache=True)(twice)
    assert compiled(twice)(21) == 42


def test_a_terminal_is_told_of_the_first_compilation_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def thrice(number: float) -> float:
        return 3 * number

    loop: Any = njit(thrice)
    assert loop(True) == 3  # the listener of the module is silent from here on
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with event.install_listener("numba:compile", compiled_module._FirstCompilation()):
        assert [loop(number) for number in (True, 2, 2.5, 2)] == [3, 6, 7.5, 6]
    assert capsys.readouterr().err == "compiling inner loops: up to a minute\n"
    with event.install_listener("numba:compile", compiled_module._FirstCompilation()):
        assert [loop(number) for number in (True, 2, 2.5)] == [3, 6, 7.5]
    assert capsys.readouterr().err == "", "they are compiled already"
    registered = [type(one) for one in event._registered["numba:compile"]]
    assert registered.count(compiled_module._FirstCompilation) == 1


def test_a_terminal_is_told_nothing_where_the_disk_holds_the_loop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def four_times(number: float) -> float:
        return 4 * number

    first: Any = njit(four_times)
    assert first(True) == 4  # the listener of the module is silent from here on
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for said in ("compiling inner loops: up to a minute\n", ""):
        with event.install_listener("numba:compile", compiled_module._FirstCompilation()):
            loop: Any = njit(cache=True)(four_times)  # a dispatcher that has compiled nothing yet
            assert loop(2.5) == 10
        assert capsys.readouterr().err == said
    assert sum(loop.stats.cache_hits.values()) == 1


def test_a_loop_calls_only_loops_of_its_own_file() -> None:
    """numba caches a loop until its own file changes: a change in another file would have no effect."""
    folder = Path(compiled_module.__file__).parent
    for file in folder.glob("*.py"):
        imported = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if (node.module or "").startswith("feature_repo")
        }
        assert imported <= {"feature_repo.kernels.compiled.compiled"}, file.name


@pytest.mark.slow
def test_a_second_process_takes_the_compiled_loops_from_disk(tmp_path: Path) -> None:
    program = """
import numpy as np
from feature_repo.kernels import pairs
marks, codes = np.zeros(9, np.int32), np.array([1, 2])
pairs.find(codes, codes, marks)
print(sum(pairs.find.stats.cache_hits.values()))
"""
    before_a_call = """
from feature_repo.kernels import compiled, pairs
print(compiled.load_loops(), len(pairs.find.overloads))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for text in (before_a_call, program, program, before_a_call)
    ]
    assert said == ["0 0", "0", "1", "1 1"]
