"""`compiled`: a loop that numpy cannot express -> machine code, cached on disk.

A loop is compiled at its first call and cached in `__pycache__`, or in NUMBA_CACHE_DIR if that is not
writable. numba compiles it again only when the loop's own file changes: so a loop calls only loops of its own
file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(loop: Loop) -> Loop:
    """Compile a function at its first call; it releases the interpreter lock while it runs.

    A division by 0 gives the same as in numpy: one invalid price must not raise for a whole request.
    """
    try:
        made: Any = njit(cache=True, nogil=True, error_model="numpy")(loop)
    except RuntimeError:  # a read-only image without NUMBA_CACHE_DIR: compile at each start
        made = njit(nogil=True, error_model="numpy")(loop)
    return cast(Loop, made)
