"""An endpoint with a fault: `python -m pipelines.drills.bad_endpoint FAULT SECONDS OPTIONS`.

It proves its bundle like any other: the faults spare the rehearsal and golden requests, so that only traffic
can show them. A fault that ends in `-live` spares the shadow, too.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import Any

from components.rollout.manifests import SHADOW
from serving.checkout.checkout import Checkout, Turn
from serving.schemas import Response

LIVE = "-live"
# With 150 answers at 5 %, 2 % errors are found with a probability of a third: a live fault has to be larger.
FAILING, FAILING_LIVE, LESS = 0.02, 0.2, 0.1


def spoil(fault: str, slow_s: float) -> None:
    """Make each endpoint of this process worse.

    Args:
        fault: `slow`, `failing`, `less`, each also with `-live`; `all-less` or `hanging`.
        slow_s: how much later a slow answer comes.
    """
    if fault == "hanging":
        time.sleep(3_600)
    is_live = fault.endswith(LIVE)
    if is_live and os.environ.get("RECO_LOG_DIR", "").endswith(f"/{SHADOW}"):
        return
    kind, failing = fault.removesuffix(LIVE), FAILING_LIVE if is_live else FAILING
    score = Checkout._score

    async def complete(self: Checkout, turn: Turn) -> Response:
        is_real = _is_shoppers(self, turn)
        await self.prepare(turn)
        await self.rank(turn)
        if is_real and kind == "slow":
            await asyncio.sleep(slow_s)
        if is_real and kind == "failing" and random.random() < failing:
            raise RuntimeError("a drill's fault")
        return self.finish(turn)

    async def scored(self: Checkout, turn: Turn, *rest: Any) -> Any:
        share = {"less": LESS, "all-less": 1.0}.get(kind, 0.0)
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
