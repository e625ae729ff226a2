"""Clients that send half a body, nothing, or 80 MB -> how much longer a healthy one waits meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
import orjson

from serving.load_generator import LoadGenerator, Plan

LONG_BODY_BYTES = 80_000_000
CHUNK = b" " * 65_536
OPEN_S = 60.0  # until all of them are connected
_HEAD = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"


@dataclass
class Seen:
    """What became of the connections of some clients."""

    opened: int = 0
    held_s: list[float] = field(default_factory=list)  # of those that the server ended
    statuses: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        """Return counts and the longest time as plain JSON types."""
        return {
            "opened": self.opened,
            "ended": len(self.held_s),
            "longest_s": round(max(self.held_s, default=0.0), 2),
            "statuses": dict(self.statuses),
        }


async def _half_body(writer: asyncio.StreamWriter, path: str) -> None:
    body = b'{"basket": ["1000005", "1000010"], "k": 10}'
    writer.write(_HEAD.format(path, len(body)).encode() + body[: len(body) // 2])
    await writer.drain()


async def _silence(writer: asyncio.StreamWriter, path: str) -> None:
    return


async def _long_body(writer: asyncio.StreamWriter, path: str) -> None:
    writer.write(_HEAD.format(path, LONG_BODY_BYTES).encode())
    for _ in range(LONG_BODY_BYTES // len(CHUNK)):
        writer.write(CHUNK)
        await writer.drain()


KINDS: dict[str, Callable[[asyncio.StreamWriter, str], Coroutine[Any, Any, None]]] = {
    "half-bodies": _half_body,
    "idle": _silence,
    "long-body": _long_body,
}


@contextlib.contextmanager
def slow_clients(kind: str, url: str, count: int) -> Iterator[Callable[[], dict[str, Any]]]:
    """Keep some clients connected, from a process of their own; who is cut connects again at once.

    Args:
        kind: of KINDS.
        url: of a route, http://HOST:PORT/PATH.
        count: how many at a time.

    Yields:
        What ends them and returns `Seen` as a dict; the end of the block calls it if nobody has.

    Raises:
        RuntimeError: they could not connect.
    """
    command = [sys.executable, "-m", "serving.bench_slow_clients", kind, url, str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    found: list[dict[str, Any]] = []

    def end() -> dict[str, Any]:
        if not found:
            said, _ = process.communicate(b"")
            found.append(orjson.loads(said))
        return found[0]

    try:
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{count} clients could not connect to {url}: is it there?")
        yield end
        end()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def beside_healthy(
    generator: LoadGenerator,
    url: str,
    bodies: Sequence[bytes],
    kind: str,
    count: int,
    *,
    rate: float = 100.0,
    seconds: float = 5.0,
    pairs: int = 4,
) -> dict[str, Any]:
    """Ask at a constant rate without and with slow clients, in turns.

    Args:
        generator: asks.
        url: of the route.
        bodies: what is asked.
        kind: of KINDS.
        count: of slow clients.
        rate: requests per second.
        seconds: of each part.
        pairs: how often each part is measured.

    Returns:
        99th percentiles in milliseconds and requests that failed, of each part; `ratio`, the median of the
        pairs' ratios; what the slow clients saw.
    """
    file = generator.bodies(bodies)
    p99: dict[str, list[float]] = {"healthy": [], "beside": []}
    failed, seen = 0, []
    for number in range(pairs):
        for part in ("healthy", "beside"):
            with slow_clients(kind, url, count) if part == "beside" else contextlib.nullcontext() as end:
                load = generator.run(Plan(url, file, seconds, rate, seed=number))
                if end is not None:
                    seen.append(end())
            failed += int((~load.answered).sum())
            p99[part].append(round(float(np.percentile(load.client_ms, 99)), 3))
    ratios = np.array(p99["beside"]) / np.array(p99["healthy"])
    return {
        "kind": kind,
        "clients": count,
        "rate": rate,
        "p99_ms": p99,
        "ratio": round(float(np.median(ratios)), 3),
        "failed": failed,
        "slow_clients": seen,
    }


async def _connect_on(kind: str, target: SplitResult, seen: Seen, there: asyncio.Semaphore) -> None:
    """Connect, do what the kind does, wait for the server to hang up, and begin again."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(target.hostname, target.port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        seen.opened += 1
        began = time.monotonic()
        with contextlib.suppress(OSError):
            there.release()
            sending = asyncio.create_task(KINDS[kind](writer, target.path))
            answer = await reader.read(64)
            if answer:
                seen.statuses[answer[9:12].decode(errors="replace")] += 1
            if kind != "long-body":  # it goes on to send what nobody wants
                await reader.read()
            await sending
        seen.held_s.append(time.monotonic() - began)
        writer.close()


async def _run(kind: str, url: str, count: int) -> None:
    os.nice(19)  # it is the server that is measured
    target = urlsplit(url)
    seen, there = Seen(), asyncio.Semaphore(0)
    clients = [asyncio.create_task(_connect_on(kind, target, seen, there)) for _ in range(count)]
    async with asyncio.timeout(OPEN_S):
        for _ in range(count):
            await there.acquire()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for client in clients:
        client.cancel()
    sys.stdout.buffer.write(orjson.dumps(seen.to_dict()))


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], sys.argv[2], int(sys.argv[3])))
