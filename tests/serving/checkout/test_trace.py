"""The path of one request, from socket to answer: the modules of ours that it enters, and how often."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from serving.api.endpoint import Endpoint
from serving.settings import Settings
from serving.stores.circuit_breaker import LATEST
from serving.wiring import run, wire

MODULES, CHECKOUT_ENTRIES = 24, 3  # limits
PACKAGES = ("feature_repo", "serving", "components", "monitoring", "pipelines")
CHECKOUT = "serving.checkout.checkout"
REQUEST = {"user_id": "u1", "basket": ["1000005"], "store_id": "store-1", "at": "2017-12-05T18:30:00Z"}


class Way:
    """A profile hook: the modules that a request enters, in order.

    A module is entered when one of its functions is called, or a coroutine of it goes on, and the nearest
    caller of ours is in another module. Compiled kernels have no Python frames: they are not seen.
    """

    def __init__(self) -> None:
        self.entered: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (module := _ours(frame)) and module != _caller(frame):
            self.entered.append(module)


def _ours(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "")
    return module if module.partition(".")[0] in PACKAGES else ""


def _caller(frame: FrameType) -> str:
    caller = frame.f_back
    while caller is not None and not _ours(caller):
        caller = caller.f_back
    return "" if caller is None else _ours(caller)


def way_of_one_request(bundle: Path, settings: Settings) -> tuple[list[str], dict[str, Any]]:
    """Return the modules that one `POST /v1/recommendations` enters, in order, and its answer."""
    way, answers = Way(), list[dict[str, Any]]()
    doors: list[Endpoint] = []

    def door(given: Settings, http_socket: socket.socket) -> Endpoint:
        doors.append(Endpoint(given, http_socket))
        return doors[0]

    def ask(http: str) -> None:
        with httpx.Client(base_url=http, trust_env=False, timeout=60) as client:

            def post() -> None:
                answers.append(client.post("/v1/recommendations", json=REQUEST).json())

            # First uses are over then, and a first read that came too late is no longer among the latest.
            for _ in range(2 * LATEST):
                post()
            # On a busy machine a read may come too late: its request takes another way. Or another task of
            # the loop steps in between: then one of three requests passes without it.
            ways: list[list[str]] = []
            for _ in range(20):
                way.entered.clear()
                hook(way)
                post()
                hook(None)
                if not answers[-1]["degraded"]:
                    ways.append([*way.entered])
                if len(ways) == 3:
                    break
            way.entered[:] = min(ways, key=lambda one: len(set(one)))
        os.kill(os.getpid(), signal.SIGTERM)

    def hook(profile: Callable[..., None] | None) -> None:
        doors[0].on_loop(lambda: sys.setprofile(profile))

    def tell(event: dict[str, Any]) -> None:
        threading.Thread(target=ask, args=(event["http"],)).start()

    with socket.socket() as http_socket:
        http_socket.bind(("127.0.0.1", 0))
        run(replace(wire(settings), door=door), bundle, None, http_socket, tell)
    return way.entered, answers[-1]


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_a_request_passes_few_functions(
    toy_bundle: Path,
    toy_store: str,
    valkey: tuple[str, object],
    tmp_path: Path,
    store: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = toy_store if store == "sqlite" else valkey[0]
    settings = Settings(
        home=tmp_path, store_url=url, http_port=0, grpc_port=0, deadline_ms=30_000.0, drain_s=0.0
    )
    entered, answer = way_of_one_request(toy_bundle, settings)
    assert answer["rung"] == "full"
    counts = Counter(entered)
    with capsys.disabled():
        sys.stdout.write(f"\n{store}: {len(counts)} modules, {CHECKOUT} entered {counts[CHECKOUT]} times\n")
        sys.stdout.write(" > ".join(entered) + "\n")
    assert len(counts) <= MODULES
    assert counts[CHECKOUT] <= CHECKOUT_ENTRIES
