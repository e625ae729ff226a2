"""An endpoint with a fault: `python -m pipelines.drills.bad_endpoint FAULT SECONDS OPTIONS`.

It proves its bundle like any other: the faults spare golden requests, so that only traffic can show them.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

from serving.checkout.checkout import Checkout, Turn
from serving.schemas import Response

FAILING, LESS = 0.02, 0.1


def spoil(fault: str, slow_s: float) -> None:
    """Make each endpoint of this process worse: `slow`, `failing`, `less`, `all-less` or `hanging`."""
    if fault == "hanging":
        time.sleep(3_600)
    score = Checkout._score

    async def complete(self: Checkout, turn: Turn) -> Response:
        is_real = _is_shoppers(self, turn)
        await self.prepare(turn)
        await self.rank(turn)
        if is_real and fault == "slow":
            await asyncio.sleep(slow_s)
        if is_real and fault == "failing" and random.random() < FAILING:
            raise RuntimeError("a drill's fault")
        return self.finish(turn)

    async def scored(self: Checkout, turn: Turn, *rest: Any) -> Any:
        share = {"less": LESS, "all-less": 1.0}.get(fault, 0.0)
        if random.random() < share and _is_shoppers(self, turn):
            raise RuntimeError("a drill's fault")
        return await score(self, turn, *rest)

    Checkout.complete = complete  # type: ignore[method-assign]
    Checkout._score = scored  # type: ignore[method-assign]


def _is_shoppers(checkout: Checkout, turn: Turn) -> bool:
    """Say whether a request is neither of the rehearsal nor a golden one."""
    return bool(checkout.service.observers) and not turn.request.request_id.startswith("golden-")


if __name__ == "__main__":
    spoil(sys.argv[1], float(sys.argv[2]))
    from serving.server import main

    sys.exit(main(sys.argv[3:]))
