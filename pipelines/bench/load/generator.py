"""A plan of requests -> when each was due, asked and answered: a client in a process of its own.

Open loop: requests are sent at the times of a Poisson process whatever the answers do, and a latency counts
from the time its request was due. A server that stalls is charged for all who wait: without that, the very
requests that would have met the stall are not sent ("coordinated omission", Tene, How NOT to Measure Latency,
2013). Every sample is kept, so that percentiles are exact.

    with load_generator() as generator:
        load = generator.run(Plan(url, generator.bodies(bodies), seconds=5, rate=200))
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import orjson

if TYPE_CHECKING:
    from serving.client.client import AsyncClient

PERCENTILES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "p99_9": 99.9, "p99_99": 99.99}
OK, REFUSED, UNANSWERED = 200, (429, 503), 0
WARM_UP_CONNECTIONS = 16  # opened before anything is measured
WARM_UP_S = 60.0  # a server that is slower is not worth waiting for
PAUSE_S = 0.05  # from the warm-up to the first request that counts
# How our answers say that they are less than they should be: V1 and V2 JSON, and V2's protobuf.
_DEGRADED = (b'"degraded":true', b'"degraded": true', b"degraded\x12\x02\x08\x01")
_SHED = b"overloaded"  # the reason in any of them
_PREFETCH, _PREFETCH_CALL = b"X-Priority: prefetch\r\n", (("x-priority", "prefetch"),)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to ask one server."""

    # http://HOST:PORT/PATH, grpc://HOST:PORT/SERVICE/METHOD, or client+http://HOST:PORT, the project's own
    # client: its bodies are request lines, and its answers are kept as the JSON of a response.
    url: str
    bodies: str  # a file of `LoadGenerator.bodies`; they are asked in turn
    seconds: float
    rate: float = 0.0  # requests per second; 0: closed loop, a connection asks again once it was answered
    connections: int = 64  # at most; to wait for a free one is part of the latency
    requests: int = 0  # the closed loop ends after so many; 0: by the clock alone
    warm_up: int = 50  # requests asked before, and not counted: the bodies that come before the first
    start: int = 0  # number of the first body that counts
    seed: int = 0  # of the times
    patience_s: float = 2.0  # how long to wait for what is missing after the last request was due
    keep: bool = False  # return the answers, too
    # Of an open loop's requests, so many say that nobody waits yet. Which ones is drawn by the seed, so that
    # each kind comes at the times of a Poisson process of its own.
    prefetch_ratio: float = 0.0
    stop: str = ""  # a file: once it is there, nothing more of an open loop is due
    best_sellers: str = ""  # of the client: the file that `write_best_sellers` wrote
    deadline_ms: float = 50.0  # of the client's calls


def _none() -> np.ndarray:
    return np.zeros(0, bool)


@dataclass(frozen=True)
class Load:
    """What became of each request, in the order in which they were due."""

    due_s: np.ndarray  # (n,) after the first moment of the run
    client_ms: np.ndarray  # (n,) from due to the answer's last byte; until the end for one never answered
    late_ms: np.ndarray  # (n,) how much later than due the generator turned to it; part of `client_ms`
    status: np.ndarray  # (n,) HTTP's, gRPC's translated; UNANSWERED
    degraded: np.ndarray  # (n,) the answer says that it is less than it should be
    answer_bytes: np.ndarray  # (n,) of its body
    generator_cpu_s: float  # processor time of the generator itself
    answers: list[bytes] = field(default_factory=list)  # with `Plan.keep`
    prefetch: np.ndarray = field(default_factory=_none)  # (n,) it said that nobody waits yet
    shed: np.ndarray = field(default_factory=_none)  # (n,) the answer says that too much was asked
    began_s: float = 0.0  # the first moment, by the machine's monotonic clock

    @property
    def answered(self) -> np.ndarray:
        """Which requests got an answer with status 200, (n,) bool."""
        found: np.ndarray = self.status == OK
        return found

    def only(self, which: np.ndarray) -> Load:
        """Return some of the requests, (n,) bool, as if the others had not been counted."""
        arrays: dict[str, Any] = {
            name: value[which] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        answers = list(itertools.compress(self.answers, which.tolist()))
        return replace(self, **arrays, answers=answers)

    def summary(self, deadline_ms: float) -> dict[str, Any]:
        """Return counts, rates and percentiles.

        An answer is good if it came within the deadline and is no less than it should be; those that came in
        time but are less are `degraded_in_time`. Rates are over the time in which requests were due: how long
        somebody waited for the last answers says nothing of how many came. One request has no rate.

        Percentiles are of requests that were answered, and of those that never were with the time until
        the end; refused and failed ones are answered fast and would flatter them: they are counted alone.
        """
        waited = self.client_ms[self.answered | (self.status == UNANSWERED)]
        in_time = self.answered & (self.client_ms <= deadline_ms)
        good, less = int((in_time & ~self.degraded).sum()), int((in_time & self.degraded).sum())
        span_s = float(np.ptp(self.due_s)) if len(self.due_s) else 0.0
        refused = np.isin(self.status, REFUSED)
        return {
            "requests": len(self.status),
            "answered": int(self.answered.sum()),
            "unanswered": int((self.status == UNANSWERED).sum()),
            "refused": int(refused.sum()),
            "failed": int((~self.answered & ~refused & (self.status != UNANSWERED)).sum()),
            "degraded": int(self.degraded.sum()),
            "late": int((self.answered & (self.client_ms > deadline_ms)).sum()),
            "good": good,
            "degraded_in_time": less,
            "good_per_s": good / span_s if span_s else None,
            "degraded_in_time_per_s": less / span_s if span_s else None,
            "ms": percentiles(waited),
            "generator": {"late_ms": percentiles(self.late_ms), "cpu_s": self.generator_cpu_s},
        }


def percentiles(ms: np.ndarray) -> dict[str, float | None]:
    """Return mean, maximum and each percentile, which is one of the values themselves.

    A percentile that so few values cannot tell from the maximum is None.
    """
    if len(ms) == 0:
        return {**dict.fromkeys(PERCENTILES), "mean": None, "max": None}
    found = np.percentile(ms, list(PERCENTILES.values()), method="higher").tolist()
    known = {
        name: value if len(ms) * (100 - percent) >= 99.99 else None
        for (name, percent), value in zip(PERCENTILES.items(), found, strict=True)
    }
    return {**known, "p50": found[0], "mean": float(ms.mean()), "max": float(ms.max())}


class LoadGenerator:
    """The generator's process, as whoever measures sees it."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        """Take the process, and the folder that plans and results go through."""
        self._process, self._folder = process, folder
        self._numbers = itertools.count()

    def bodies(self, bodies: Sequence[bytes]) -> str:
        """Write request bodies where the generator finds them; return the file's name.

        Raises:
            ValueError: there are none.
        """
        if not bodies:
            raise ValueError("no requests to ask: give at least one request line")
        file = self._folder / f"bodies-{next(self._numbers)}.npz"
        np.savez(file, **_packed(bodies))
        return str(file)

    def run(self, plan: Plan) -> Load:
        """Carry a plan out.

        Raises:
            RuntimeError: the generator died; the message holds what it said.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        file = self._folder / f"load-{next(self._numbers)}.npz"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(orjson.dumps({"plan": asdict(plan), "out": str(file)}) + b"\n")
            self._process.stdin.flush()
        if not self._process.stdout.readline():
            said = (self._folder / "generator.log").read_text().strip()
            raise RuntimeError(f"the load generator died: {said[-2_000:] or 'it said nothing'}")
        load = _read(file)
        file.unlink()
        return load


@contextlib.contextmanager
def load_generator() -> Iterator[LoadGenerator]:
    """Start a generator; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="reco-load-") as scratch:
        folder = Path(scratch)
        with (folder / "generator.log").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.bench.load.generator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
            )
        with process:
            try:
                yield LoadGenerator(process, folder)
            finally:
                process.kill()


def carry_out(plan: Plan, bodies: Sequence[bytes], runner: asyncio.Runner) -> Load:
    """Ask everything in this process; what a plan's own process does."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        return runner.run(_carry_out(plan, bodies))
    finally:
        gc.unfreeze()
        gc.enable()


def open_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop with exact timers: `select` waits microseconds, `epoll` whole milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


class _Asked:
    """One request on its way."""

    __slots__ = ("answer", "body", "done", "due", "prefetch", "size", "status", "turned_to")

    def __init__(self, body: bytes, due: float, turned_to: float, prefetch: bool = False) -> None:
        self.body, self.due, self.turned_to, self.prefetch = body, due, turned_to, prefetch
        self.done, self.status, self.size, self.answer = 0.0, UNANSWERED, 0, b""


async def _carry_out(plan: Plan, bodies: Sequence[bytes]) -> Load:
    pool = _Pool(plan)
    turn = _turn(bodies, plan.start)
    try:
        if plan.warm_up:
            at_once = min(plan.connections, WARM_UP_CONNECTIONS)
            await _closed(pool, _turn(bodies, plan.start - plan.warm_up), at_once, WARM_UP_S, plan.warm_up)
        await asyncio.sleep(PAUSE_S)
        cpu, began = time.process_time(), pool.now()
        if plan.rate > 0:
            asked = await _open(pool, turn, plan)
        else:
            asked = await _closed(pool, turn, plan.connections, plan.seconds, plan.requests, plan.patience_s)
        return _load(asked, began, pool.now(), time.process_time() - cpu, plan.keep)
    finally:
        await pool.close()


def _turn(bodies: Sequence[bytes], start: int) -> Iterator[bytes]:
    """Yield the bodies in a cycle, beginning with the one of a number."""
    first = start % len(bodies)
    return itertools.cycle([*bodies[first:], *bodies[:first]])


async def _open(pool: _Pool, turn: Iterator[bytes], plan: Plan) -> list[_Asked]:
    rng = np.random.default_rng(plan.seed)
    gaps = rng.exponential(1 / plan.rate, max(int(plan.seconds * plan.rate), 1))
    prefetch = iter((rng.random(len(gaps)) < plan.prefetch_ratio).tolist())
    first = pool.now() + PAUSE_S
    dues = deque((first + np.cumsum(gaps)).tolist())
    end, loop = dues[-1] + plan.patience_s, asyncio.get_running_loop()
    asked: list[_Asked] = []

    def send() -> None:
        while dues and dues[0] <= (now := pool.now()):
            one = _Asked(next(turn), dues.popleft(), now, next(prefetch))
            asked.append(one)
            pool.ask(one)
        if dues:
            loop.call_at(dues[0], send)

    loop.call_at(dues[0], send)
    while pool.now() < end and (dues or pool.busy):
        await asyncio.sleep(0.01)
        if dues and plan.stop and os.path.exists(plan.stop):
            dues.clear()
            end = pool.now() + plan.patience_s
    return asked


async def _closed(
    pool: _Pool,
    turn: Iterator[bytes],
    connections: int,
    seconds: float,
    requests: int = 0,
    patience_s: float = 0.0,
) -> list[_Asked]:
    asked: list[_Asked] = []
    end = pool.now() + seconds

    def again() -> None:
        now = pool.now()
        if now < end and (not requests or len(asked) < requests):
            one = _Asked(next(turn), now, now)
            asked.append(one)
            pool.ask(one)

    pool.on_answer = again
    for _ in range(connections):
        again()
    while pool.busy and pool.now() < end + patience_s:
        await asyncio.sleep(0.01)
    pool.on_answer = None
    return asked


def _load(asked: Sequence[_Asked], began: float, ended: float, cpu_s: float, keep: bool) -> Load:
    done = np.array([one.done or ended for one in asked])
    due = np.array([one.due for one in asked])
    return Load(
        due_s=due - began,
        client_ms=(done - due) * 1e3,
        late_ms=np.array([one.turned_to - one.due for one in asked]) * 1e3,
        status=np.array([one.status for one in asked], np.int16),
        degraded=np.array([any(mark in one.answer for mark in _DEGRADED) for one in asked], bool),
        answer_bytes=np.array([one.size for one in asked], np.int64),
        generator_cpu_s=cpu_s,
        answers=[one.answer for one in asked] if keep else [],
        shed=np.array([_SHED in one.answer for one in asked], bool),
        prefetch=np.array([one.prefetch for one in asked], bool),
        began_s=began,
    )


class _Pool:
    """Connections to one server, opened as needed; what finds none free waits its turn."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._loop = plan, asyncio.get_running_loop()
        self._url = urlsplit(plan.url)
        self._host, self._port = self._url.hostname or "", self._url.port or 80
        self._opened: set[_Connection] = set()
        self._client: AsyncClient | None = None
        # The one that rested longest is next: each process of a server gets its share of the requests.
        self._idle: deque[_Connection] = deque()
        self._waiting: deque[_Asked] = deque()
        self._opening: set[asyncio.Task[None]] = set()
        self.now = self._loop.time
        self.busy = 0  # requests without an answer
        self.on_answer: Any = None  # called after each; the closed loop asks again

    def ask(self, asked: _Asked) -> None:
        """Send a request over a connection of its own, now or when one is free."""
        self.busy += 1
        self._send(asked)

    def done(self, asked: _Asked, status: int, answer: bytes) -> None:
        """Take an answer."""
        asked.done, asked.status, asked.size, asked.answer = self.now(), status, len(answer), answer
        self.busy -= 1
        if self.on_answer is not None:
            self._loop.call_soon(self.on_answer)

    def free(self, connection: _Connection) -> None:
        """Use a connection again."""
        if self._waiting:
            connection.ask(self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Forget a connection that was closed."""
        self._opened.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)
        if self._waiting:
            self._send(self._waiting.popleft())

    async def close(self) -> None:
        """Close all connections; what is still under way stays unanswered."""
        self.on_answer = None
        self._waiting.clear()
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._opened):
            await connection.close()
        if self._client is not None:
            await self._client.close()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn

    def _send(self, asked: _Asked) -> None:
        if self._idle:
            self._idle.popleft().ask(asked)
        elif len(self._opened) + len(self._opening) < self._plan.connections:
            task = self._loop.create_task(self._open(asked))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        else:
            self._waiting.append(asked)

    async def _open(self, asked: _Asked) -> None:
        connection: _Connection
        if self._url.scheme == "grpc":
            connection = _GrpcConnection(self, self._url.netloc, self._url.path)
        elif self._url.scheme == "client+http":
            connection = _ClientConnection(self, self._shared_client())
        else:
            connection = _HttpConnection(self, self._url.path)
            try:
                await self._loop.create_connection(lambda: connection, self._host, self._port)
            except OSError:
                self.done(asked, UNANSWERED, b"")
                return
        self._opened.add(connection)
        connection.ask(asked)

    def _shared_client(self) -> AsyncClient:
        """Return the one client of all who ask through it."""
        if self._client is None:
            from serving.client.client import AsyncClient, read_best_sellers

            best_sellers, url = read_best_sellers(self._plan.best_sellers), f"http://{self._url.netloc}"
            self._client = AsyncClient(url, best_sellers, deadline_ms=self._plan.deadline_ms)
        return self._client


class _HttpConnection(asyncio.Protocol):
    """A keep-alive HTTP/1.1 connection with one request at a time: bare, so that its own time is small."""

    def __init__(self, pool: _Pool, path: str) -> None:
        self._pool = pool
        self._head = f"POST {path} HTTP/1.1\r\nHost: load\r\nContent-Type: application/json\r\n".encode()
        self._asked: _Asked | None = None
        self._came = bytearray()
        self._length = 0  # of the whole answer once its head is here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self, asked: _Asked) -> None:
        """Send one request."""
        self._asked = asked
        head = self._head + _PREFETCH if asked.prefetch else self._head
        self._transport.write(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(asked.body), asked.body))

    def data_received(self, data: bytes) -> None:
        """Collect the answer."""
        self._came += data
        if not self._length:
            end = self._came.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._came[:end]).lower() + b"\r\n"
            length = head.partition(b"content-length:")[2].partition(b"\r\n")[0].strip()
            if not length.isdigit():  # chunks: no server that is measured here sends any
                self._transport.abort()
                return
            self._closing = b"connection: close" in head
            self._status, self._body_at = int(head[9:12]), end + 4
            self._length = self._body_at + int(length)
        if len(self._came) >= self._length:
            self._answer()

    def _answer(self) -> None:
        asked, body = self._asked, bytes(self._came[self._body_at : self._length])
        self._asked, self._length = None, 0
        self._came.clear()
        if asked is not None:
            self._pool.done(asked, self._status, body)
        if self._closing:
            self._transport.close()
        else:
            self._pool.free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the request that was under way as never answered."""
        if self._asked is not None:
            self._pool.done(self._asked, UNANSWERED, b"")
            self._asked = None
        self._pool.lost(self)

    async def close(self) -> None:
        """Close the connection."""
        self._asked = None
        self._transport.abort()


class _GrpcConnection:
    """A gRPC channel with one call at a time; bodies are messages as they travel."""

    def __init__(self, pool: _Pool, address: str, method: str) -> None:
        import grpc

        self._pool, self._error = pool, grpc.aio.AioRpcError
        # Channels to one address share a connection if not told otherwise.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._call = self._channel.unary_unary(method)
        self._task: asyncio.Task[None] | None = None

    def ask(self, asked: _Asked) -> None:
        """Send one request."""
        self._task = asyncio.get_running_loop().create_task(self._ask(asked))

    async def _ask(self, asked: _Asked) -> None:
        try:
            metadata = _PREFETCH_CALL if asked.prefetch else None
            status, answer = OK, await self._call(asked.body, metadata=metadata)
        except self._error as error:
            name = error.code().name
            status, answer = {"RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}.get(name, 500), b""
        self._pool.done(asked, status, answer)
        self._pool.free(self)

    async def close(self) -> None:
        """Close the channel."""
        if self._task is not None:
            self._task.cancel()
        await self._channel.close()


class _ClientConnection:
    """One who asks through the project's own client: a call at a time; connections are the client's own."""

    def __init__(self, pool: _Pool, client: AsyncClient) -> None:
        self._pool, self._client = pool, client
        self._task: asyncio.Task[None] | None = None

    def ask(self, asked: _Asked) -> None:
        """Call the client with one request."""
        self._task = asyncio.get_running_loop().create_task(self._ask(asked))

    async def _ask(self, asked: _Asked) -> None:
        try:
            response = await self._client.recommend(**orjson.loads(asked.body))
            status, answer = OK, orjson.dumps(response)  # a dataclass
        except Exception:  # noqa: BLE001 - it promises to raise nothing: what it raises is what is counted
            status, answer = 500, b""
        self._pool.done(asked, status, answer)
        self._pool.free(self)

    async def close(self) -> None:
        """End the call under way."""
        if self._task is not None:
            self._task.cancel()


_Connection = _HttpConnection | _GrpcConnection | _ClientConnection


def _packed(texts: Sequence[bytes]) -> dict[str, Any]:
    lengths = np.array([len(text) for text in texts], np.int64)
    return {"lengths": lengths, "data": np.frombuffer(b"".join(texts), np.uint8)}


def _unpacked(lengths: np.ndarray, data: np.ndarray) -> list[bytes]:
    ends = np.cumsum(lengths).tolist()
    whole = data.tobytes()
    return [whole[start:end] for start, end in itertools.pairwise([0, *ends])]


def _write(file: Path, load: Load) -> None:
    arrays: dict[str, Any] = {name: value for name, value in vars(load).items() if name != "answers"}
    np.savez(file, **arrays, **_packed(load.answers))


def _read(file: Path) -> Load:
    with np.load(file, allow_pickle=False) as stored:
        arrays: dict[str, Any] = {name: stored[name] for name in stored.files}
    answers = _unpacked(arrays.pop("lengths"), arrays.pop("data"))
    cpu_s, began_s = (float(arrays.pop(name)) for name in ("generator_cpu_s", "began_s"))
    return Load(**arrays, generator_cpu_s=cpu_s, began_s=began_s, answers=answers)


def main() -> None:
    """Carry out the plans that come on stdin, a line each; say on stdout when one is done."""
    bodies: dict[str, list[bytes]] = {}
    with asyncio.Runner(loop_factory=open_loop) as runner:
        for line in sys.stdin.buffer:
            given = orjson.loads(line)
            plan = Plan(**given["plan"])
            if plan.bodies not in bodies:
                with np.load(plan.bodies, allow_pickle=False) as stored:
                    bodies[plan.bodies] = _unpacked(stored["lengths"], stored["data"])
            _write(Path(given["out"]), carry_out(plan, bodies[plan.bodies], runner))
            sys.stdout.write("done\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
