"""A proxy doubles, swaps, delays and cuts the store's replies: no shopper gets the row of another."""

import asyncio
import contextlib
import os
import random
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from pipelines.drills.fault_proxy import Proxy
from serving.errors import FeaturesUnavailable, RowInvalid
from serving.stores.online_features import RedisStore
from tests.chaos.procs import valkey_server
from tests.chaos.rows import put_row, row_of

READS = int(os.environ.get("SCRAMBLED_READS", "600"))
AT_ONCE, FAULTY = 8, 0.15
PATIENT_MS = 60_000.0  # no read times out: the proxy delays for 60 ms at most
KNOWN = [f"shopper {number}" for number in range(12)]
ABSENT = ["nobody", "nobody else"]
FAULTS = ("double", "double the row", "swap", "swap the row", "delay", "cut")


class Scrambler(Proxy):
    """Spoils some of the replies. One piece is an exchange: the reply to HMGET and to the PING behind it.

    A swap gives one connection the reply for another. The swap of a row alone takes no empty reply: that
    would only hide a history, and nothing in an empty reply could show it.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.random, self.spoilt = random.Random(seed), Counter[str]()
        self._exchange = self._row = b""  # the latest, of any connection
        super().__init__(("127.0.0.1", port))

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                sent = self._spoil(data)
                client.sendall(sent)
                if len(sent) < len(data):
                    break
        self._part(client, server)

    def _spoil(self, data: bytes) -> bytes:
        row, mark, number = data.rpartition(b"$")  # the reply to PING is the last bulk string
        fault = self.random.choice(FAULTS) if self.random.random() < FAULTY else ""
        before, self._exchange = self._exchange, data
        row_before, self._row = self._row, row if len(row) > 30 else self._row
        self.spoilt[fault] += 1
        match fault:
            case "double":
                return data + data
            case "double the row":
                return row + data
            case "swap":
                return before or data
            case "swap the row":
                return row_before + mark + number if len(row) > 30 else data
            case "delay":
                time.sleep(self.random.choice((0.005, 0.03, 0.06)))
            case "cut":
                return data[: self.random.randrange(len(data))]
        return data


async def wrong_rows(store: RedisStore, reads: int, seed: int) -> tuple[list[str], Counter[str]]:
    """Read random shoppers, some at once; return the wrong rows, and the count of each outcome."""
    chosen, wrong, outcomes = random.Random(seed), list[str](), Counter[str]()

    async def read() -> None:
        for _ in range(reads // AT_ONCE):
            user = chosen.choice(KNOWN + ABSENT)
            try:
                row = await store.fetch(user)
            except (FeaturesUnavailable, RowInvalid) as error:
                outcomes[type(error).__name__] += 1
                continue
            outcomes["row" if row else "no row"] += 1
            if row != (row_of(user) if user in KNOWN else None):
                wrong.append(f"{user}: {row}")

    await asyncio.gather(*(read() for _ in range(AT_ONCE)))
    await store.aclose()
    return wrong, outcomes


@pytest.mark.slow
def test_no_shopper_gets_the_row_of_another(tmp_path: Path) -> None:
    with valkey_server(tmp_path, "--save", "") as server:
        with server.client() as client:
            for user in KNOWN:
                put_row(client, user)
        with Scrambler(server.port, seed=0) as proxy:
            store = RedisStore(f"redis://127.0.0.1:{proxy.port}", timeout_ms=PATIENT_MS)
            wrong, outcomes = asyncio.run(wrong_rows(store, READS, seed=1))
        assert not wrong
        assert set(FAULTS) <= set(proxy.spoilt)
        assert outcomes["row"] > READS / 4
        assert outcomes["RowInvalid"] > 0, "a row alone was swapped"
