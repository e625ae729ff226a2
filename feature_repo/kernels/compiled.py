"""`compiled`: a loop that numpy cannot express -> machine code, cached on disk.

A loop is compiled at its first call and cached in `__pycache__`, or in NUMBA_CACHE_DIR if that is not
writable. numba compiles it again only when the loop's own file changes: so a loop calls only loops of its own
file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.event import Event, Listener, register

Loop = TypeVar("Loop", bound=Callable[..., Any])
_LOOPS: list[Any] = []


class _FirstCompilation(Listener):
    """Says on a terminal why the first call takes so long; numba broadcasts no event for a cached loop."""

    said = False

    def on_start(self, event: Event) -> None:
        """Print one line, once."""
        if not self.said and sys.stderr.isatty():
            sys.stderr.write("compiling inner loops: up to a minute\n")
        self.said = True

    def on_end(self, event: Event) -> None:
        """Print nothing."""


register("numba:compile", _FirstCompilation())


def compiled(loop: Loop) -> Loop:
    """Compile a function at its first call; it releases the interpreter lock while it runs.

    A division by 0 gives the same as in numpy: one invalid price must not raise for a whole request.
    """
    try:
        made: Any = njit(cache=True, nogil=True, error_model="numpy")(loop)
    except RuntimeError:  # a read-only image without NUMBA_CACHE_DIR: compile at each start
        made = njit(nogil=True, error_model="numpy")(loop)
    _LOOPS.append(made)
    return cast(Loop, made)


def load_loops() -> int:
    """Load all loops that the disk holds for this processor, before their first call; return their number.

    numba has no public way: a cache knows for which types of arguments it holds a loop.
    """
    for loop in _LOOPS:
        cache, codegen = loop._cache, loop.targetctx.codegen()
        if hasattr(cache, "_cache_file"):
            for key in cache._cache_file._load_index():
                if key == cache._index_key(key[0], codegen):
                    loop.compile(key[0])
    return sum(len(loop.overloads) for loop in _LOOPS)
