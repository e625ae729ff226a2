"""The parts of a long step -> a line every ten seconds: how many are done, and how long the rest takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Part = TypeVar("Part")
log = logging.getLogger(__name__)

EVERY_S = 10.0


def with_progress(parts: Iterable[Part], total: int, what: str) -> Iterator[Part]:
    """Yield the parts as they come, and log how far they are.

    Args:
        parts: each takes about as long as the others.
        total: how many there are.
        what: their name, in the plural.
    """
    began = said = time.monotonic()
    for done, part in enumerate(parts, start=1):
        yield part
        if (now := time.monotonic()) - said >= EVERY_S and done < total:
            said = now
            log.info(
                "%d of %d %s, about %.0f s to go", done, total, what, (now - began) / done * (total - done)
            )
