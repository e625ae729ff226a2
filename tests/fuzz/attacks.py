"""Tables of attacks -> one endpoint that must answer as before each of them.

    python -m tests.fuzz.attacks --cases 1000

The tables are products of hostile parts: HTTP bytes, gRPC bytes and frames, replies of the store, and files
that the endpoint follows. After each case the endpoint answers a known request as at first, holds no more
memory, and has not computed for over a second. That is processor time: a busy machine does not lengthen it.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil

CPU_S, MEGABYTES = 1.0, 50.0  # of one case, at most
QUIET_S, TRY_S = 0.3, 30.0  # an answer has ended; a look at the endpoint's health
FOLLOWED_S = 1.0  # a changed file was looked at
ACCEPTED = {100, 200, 400, 404, 405, 408, 411, 413, 414, 415, 417, 422, 429, 431, 501, 505}
GRPC_ACCEPTED = {
    *(grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED),
    *(grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED),
}
KNOWN = {"basket": ["1000005", "1000031"], "at": "2017-12-05T18:30:00Z", "k": 5}
OURS, V1, V2 = "/v1/recommendations", "/v1/models/checkout:predict", "/v2/models/checkout/infer"
RECOMMEND = "/reco.v1.Recommendations/Recommend"
INFER = "/inference.GRPCInferenceService/ModelInfer"
MEBI = 1 << 20


@dataclass
class Target:
    """The endpoint under attack, and the store that it asks."""

    http: str
    grpc: str
    pid: int
    home: Path
    reply: dict[bytes, bytes]  # of the store, by the name of the command; no entry: an honest one


@dataclass(frozen=True)
class Attack:
    """One case: `act` returns the fault, or an empty text."""

    family: str
    name: str
    act: Callable[[Target], str]


# ------------------------------------------------------------------------------------------- HTTP bytes


def exchange(address: str, pieces: Iterable[bytes]) -> bytes:
    """Send bytes and return the answer: up to the end, or until nothing more comes."""
    host, port = address.rpartition("/")[2].rsplit(":", 1)
    received = b""
    with socket.create_connection((host, int(port)), timeout=QUIET_S) as client:
        with contextlib.suppress(OSError):
            for piece in pieces:
                client.sendall(piece)
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                received += data
    return received


def statuses_of(answer: bytes) -> list[int]:
    """Return the statuses of the answers on one connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def http(pieces: Sequence[bytes], most: int = 1) -> Callable[[Target], str]:
    """Return an attack with HTTP bytes, which may get so many answers."""

    def act(target: Target) -> str:
        statuses = statuses_of(exchange(target.http, pieces))
        bad = set(statuses) - ACCEPTED
        return f"statuses {statuses}" if bad or len(statuses) > most else ""

    return act


def head(*lines: bytes, path: str = OURS) -> bytes:
    """Return the head of a POST request without its end."""
    first = b"POST %b HTTP/1.1\r\nHost: shop\r\nContent-Type: application/json\r\n" % path.encode()
    return first + b"".join(line + b"\r\n" for line in lines)


def request(body: bytes, path: str = OURS) -> bytes:
    """Return a whole POST request."""
    return head(b"Content-Length: %d" % len(body), path=path) + b"\r\n" + body


BODY = json.dumps(KNOWN).encode()
CHUNKED = head(b"Transfer-Encoding: chunked") + b"\r\n"
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)


def trailers() -> Iterator[Attack]:
    """Yield chunked requests with hostile trailers."""
    lines = {
        "ten": b"X: y\r\n" * 10,
        "a hundred and one": b"X: y\r\n" * 101,
        "300,000": b"X: y\r\n" * 300_000,
        "a long one": b"X: " + b"y" * 20_000 + b"\r\n",
        "8 MiB": b"X: " + b"y" * 8 * MEBI + b"\r\n",
        "a length": b"Content-Length: 5\r\n",
        "an encoding": b"Transfer-Encoding: chunked\r\n",
        "zero bytes": b"\0\0: \0\r\n",
        "no name": b": x\r\n",
        "no colon": b"x\r\n",
        "bytes": b"X: \x80\xff\r\n",
        "folded": b"X: y\r\n z\r\n",
    }
    for (name, content), (end, rest) in itertools.product(
        lines.items(), (("", b"\r\n"), (" without end", b""))
    ):
        pieces = [
            CHUNKED,
            CHUNK,
            b"0\r\n",
            *(content[at : at + MEBI] for at in range(0, len(content), MEBI)),
            rest,
        ]
        yield Attack("trailers", name + end, http(pieces))


def chunks() -> Iterator[Attack]:
    """Yield chunked requests with hostile sizes and extensions."""
    sizes = (
        b";a=b",
        b";" + b"x" * 20_000,
        b";" + b"x" * 2 * MEBI,
        *(b";\0", b';a="\r\n"', b" ", b"\t", b"\n", b"G", b";" * 5_000, b";a=\xff"),
    )
    extended = [(f"{len(BODY):x}".encode() + size) for size in sizes]
    other = [b"+5", b"-5", b"0x5", b"", b"F" * 17, b"7" + b"F" * 15, b"0" * 5_000 + b"5", b"5_0"]
    for (number, size), (end, rest) in itertools.product(
        enumerate([*extended, *other]), (("", b"\r\n" + BODY + b"\r\n0\r\n\r\n"), (" cut", b""))
    ):
        yield Attack("chunks", f"{number}: {size[:12]!r}{end}", http([CHUNKED, size, rest], most=2))


def pipelines() -> Iterator[Attack]:
    """Yield good requests with something bad behind them, in one packet."""
    tails = {
        "garbage": b"\x16\x03\x01\0\0garbage\r\n\r\n",
        "half a head": b"POST / HT",
        "bad JSON": request(b"{"),
        "health": b"GET /healthz HTTP/1.1\r\nHost: shop\r\n\r\n",
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "too long": head(b"Content-Length: 99999999") + b"\r\n{",
    }
    for count, (name, tail) in itertools.product((1, 5, 40, 300), tails.items()):
        yield Attack("pipelines", f"{count} and {name}", http([request(BODY) * count + tail], count + 1))


def heads() -> Iterator[Attack]:
    """Yield floods of headers, and headers that contradict each other."""
    shapes: dict[str, Callable[[int], bytes]] = {
        "different": lambda n: b"X-%d: y\r\n" % n,
        "the same": lambda n: b"X: y\r\n",
        "long": lambda n: b"X-%d: %b\r\n" % (n, b"y" * 300),
        "empty": lambda n: b"X-%d:\r\n" % n,
    }
    for count, (name, line) in itertools.product((50, 101, 5_000, 60_000), shapes.items()):
        flood = b"".join(line(number) for number in range(count))
        end = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        yield Attack("headers", f"{count} {name}", http([head(), flood, end], most=2))
    lengths = (
        *(b"Content-Length: 5\r\nContent-Length: 6", b"Content-Length: +5", b"Content-Length: -1"),
        *(b"Content-Length: 5, 5", b"Content-Length: 99999999999999999999", b"Content-Length: 0x10"),
        *(b"Content-Length:", b"Content-Length: 5\r\nTransfer-Encoding: chunked"),
        *(b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: chunked, chunked"),
        *(b"Transfer-Encoding: xchunked", b"Transfer-Encoding:\x0bchunked", b"Expect: 100-continue"),
        *(b"Upgrade: h2c\r\nConnection: upgrade", b"Content-Encoding: gzip\r\nContent-Length: 5"),
    )
    for given in lengths:
        yield Attack("headers", repr(given), http([head(given), b"\r\n", BODY], most=3))


def slow_heads() -> Iterator[Attack]:
    """Yield connections that send a part of a request and wait while the endpoint is looked at."""
    starts = (
        b"",
        b"P",
        b"POST / HTTP/1.1\r\n",
        head(),
        head(b"Content-Length: 50") + b"\r\n{",
        CHUNKED + b"1\r\n{",
    )
    for start, count in itertools.product(starts, (1, 100)):

        def act(target: Target, start: bytes = start, count: int = count) -> str:
            host, port = target.http.rpartition("/")[2].rsplit(":", 1)
            with contextlib.ExitStack() as stack:
                for _ in range(count):
                    one = stack.enter_context(socket.create_connection((host, int(port)), timeout=TRY_S))
                    one.sendall(start)
                return "" if is_healthy(target) else "no health beside slow callers"

        yield Attack("slow heads", f"{count} of {start[-20:]!r}", act)


def bodies() -> Iterator[Attack]:
    """Yield bodies that are no request, to each route."""
    contents = {
        "deep arrays": b"[" * 100_000,
        "deep objects": b'{"a":' * 50_000,
        "deep basket": b'{"basket":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        "a long number": b'{"basket":[],"k":' + b"9" * 200_000 + b"}",
        "a large exponent": b'{"basket":[],"k":1e999999999}',
        "NaN": b'{"basket":[],"k":NaN}',
        "many keys": b"{" + b",".join(b'"%d":1' % n for n in range(20_000)) + b',"basket":[]}',
        "the same key": b"{" + b'"basket":["1"],' * 10_000 + b'"basket":[]}',
        "bad UTF-8": b'{"basket":["\xff\xfe"]}',
        "lone surrogate": b'{"basket":["\\ud800"]}',
        "zero bytes": b"\0" * 1_000,
        "a byte order mark": b"\xef\xbb\xbf" + BODY,
        "a long basket": json.dumps({"basket": ["1000005"] * 60_000}).encode(),
        "long ids": json.dumps({"basket": ["x" * 60_000]}).encode(),
        "no object": b'"basket"',
        "far away": b'{"basket":["1000005"],"at":"9999-12-31T23:59:59.999999999Z"}',
    }
    for path, (name, content) in itertools.product((OURS, V1, V2), contents.items()):
        wrapped = {OURS: b"%b", V1: b'{"instances":[%b]}', V2: b'{"inputs":[%b]}'}[path] % content
        yield Attack("bodies", f"{name} to {path}", http([request(wrapped, path)]))


# --------------------------------------------------------------------------------------------- gRPC bytes


def grpc_messages() -> Iterator[Attack]:
    """Yield messages of arbitrary bytes to methods of both services."""
    messages = {
        "0xff": b"\xff" * 10,
        "an unfinished number": b"\x08" + b"\xff" * 9,
        "another wire type": b"\x0d\x01\x02\x03\x04" * 100,
        "a huge length": b"\x0a\xff\xff\xff\xff\x0f",
        "deep groups": b"\x0b" * 50_000,
        "bad UTF-8": b"\x0a\x02\xff\xfe",
        "many fields": b"\x0a\x01a" * 200_000,
        "3 MiB": b"\x0a\x80\x80\xc0\x01" + b"a" * 3 * MEBI,
        "8 MiB": b"\x0a\x80\x80\x80\x04" + b"a" * 8 * MEBI,
    }
    for method, (name, content) in itertools.product(
        (RECOMMEND, INFER, "/no.Service/Method"), messages.items()
    ):

        def act(target: Target, method: str = method, content: bytes = content) -> str:
            with grpc.insecure_channel(target.grpc) as channel:
                call = channel.unary_unary(method)
                try:
                    call(content, timeout=TRY_S)
                except grpc.RpcError as error:
                    return "" if error.code() in GRPC_ACCEPTED else f"{error.code()}"
            return ""

        yield Attack("gRPC messages", f"{name} to {method}", act)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def grpc_frames() -> Iterator[Attack]:
    """Yield bytes that are no gRPC, and frames that cost more than they bring."""
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
    streams = {
        "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: shop\r\n\r\n",
        "garbage": os.urandom(100_000),
        "settings": start + frame(4, 0, 0) * 20_000,
        "pings": start + frame(6, 0, 0, b"12345678") * 20_000,
        "resets": start
        + b"".join(frame(1, 4, 2 * n + 1) + frame(3, 0, 2 * n + 1, b"\0\0\0\x08") for n in range(5_000)),
        "endless headers": start + frame(1, 0, 1) + frame(9, 0, 1, b"\0\x01a\x01b" * 3_000) * 300,
        "a window": start + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 2,
        "a frame too long": start + b"\xff\xff\xff\0\0\0\0\0\x01" + b"x" * 100_000,
    }
    for name, content in streams.items():

        def act(target: Target, content: bytes = content) -> str:
            exchange(target.grpc, [content])
            return ""

        yield Attack("gRPC frames", name, act)


# ----------------------------------------------------------------------------------- the store and files


REPLIES = (
    *(b"*2000000000\r\n", b"$2000000000\r\n", b"*-5\r\n", b"$-5\r\n", b"%5\r\n"),
    b"*70000\r\n" + b":1\r\n" * 70_000,
    *(b"*1\r\n" * 5_000, b"$5\r\nabc\r\n", b"x" * 500_000, b"\0" * 1_000, b"+\r\n"),
    b":" + b"9" * 5_000 + b"\r\n",
    *(b"*2\r\n$-1\r\n", b"*0\r\n", b"*3\r\n:1\r\n:2\r\n:3\r\n", b"-ERR\r\n", b""),
    *(b"-MOVED 1 127.0.0.1:1\r\n", b"*2\r\n$3\r\nabc\r\n$3\r\nabc\r\n", b"_\r\n"),
    b"HTTP/1.1 200 OK\r\n\r\n",
)


def replies() -> Iterator[Attack]:
    """Yield replies of a hostile store to reads of a row and of facts, while a shopper asks."""
    for command, reply in itertools.product((b"HMGET", b"ZRANGEBYSCORE"), REPLIES):

        def act(target: Target, command: bytes = command, reply: bytes = reply) -> str:
            target.reply[command] = reply
            try:
                answers = [exchange(target.http, [request(json.dumps({**KNOWN, "user_id": "u1"}).encode())])]
                time.sleep(FOLLOWED_S / 2)  # facts are polled
            finally:
                target.reply.pop(command)
            statuses = [statuses_of(answer) for answer in answers]
            return "" if statuses == [[200]] else f"statuses {statuses}"

        yield Attack("replies", f"{reply[:16]!r} to {command.decode()}", act)


def make_large(file: Path) -> None:
    """Make a file of 400 MiB that takes no space."""
    file.touch()
    os.truncate(file, 400 * MEBI)


def files() -> Iterator[Attack]:
    """Yield files that the endpoint follows and cannot use: it stays with its last valid ones."""
    contents: dict[str, Callable[[Path], object]] = {
        "nothing": lambda file: file.write_bytes(b""),
        "bytes": lambda file: file.write_bytes(os.urandom(1_000)),
        "deep": lambda file: file.write_bytes(b"[" * 100_000),
        "a number": lambda file: file.write_bytes(b"1e999"),
        "400 MB": make_large,
        "a FIFO": os.mkfifo,
        "a link": lambda file: file.symlink_to("/dev/zero"),
        "a folder": Path.mkdir,
        "a loop": lambda file: file.symlink_to(file),
    }
    for name, (kind, put) in itertools.product(("champion.json", "rules.yaml"), contents.items()):

        def act(target: Target, name: str = name, put: Callable[[Path], object] = put) -> str:
            file = target.home / name
            before = file.read_bytes() if file.exists() else None
            file.unlink(missing_ok=True)
            try:
                put(file)
                time.sleep(FOLLOWED_S)
                return "" if is_healthy(target) else "no health while it is there"
            finally:
                file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
                if before is not None:
                    file.write_bytes(before)

        yield Attack("files", f"{name}: {kind}", act)


TABLES = (
    *(trailers, chunks, pipelines, heads, slow_heads, bodies),
    *(grpc_messages, grpc_frames, replies, files),
)


def attacks() -> list[Attack]:
    """Return all cases."""
    return [attack for table in TABLES for attack in table()]


# -------------------------------------------------------------------------------------------- judgement


def is_healthy(target: Target) -> bool:
    """Say whether the endpoint answers that it is ready."""
    return httpx.get(f"{target.http}/healthz", timeout=TRY_S).status_code == 200


def items_of(target: Target) -> Any:
    """Return the list for the known request, and whether it is degraded."""
    answer = httpx.post(f"{target.http}{OURS}", json=KNOWN, timeout=TRY_S).json()
    return answer.get("items"), answer.get("degraded")


def carry_out(attack: Attack, target: Target, known: Any) -> dict[str, Any]:
    """Attack, and look at the endpoint; return the effect."""
    process = psutil.Process(target.pid)

    def used() -> tuple[float, float]:
        times = process.cpu_times()
        return times.user + times.system, process.memory_info().rss / MEBI

    before = used()
    try:
        wrong = attack.act(target)
        if not wrong and not is_healthy(target):
            wrong = "no health"
        if not wrong and (found := items_of(target)) != known:
            wrong = f"another answer: {found!r:.200}"
    except (OSError, httpx.HTTPError) as error:
        wrong = f"{type(error).__name__}: {error}"
    after = used() if process.is_running() else before
    spent = {"cpu_s": round(after[0] - before[0], 2), "megabytes": round(after[1] - before[1], 1)}
    return {"family": attack.family, "name": attack.name, "wrong": wrong, **spent}


@contextlib.contextmanager
def hostile_store() -> Iterator[tuple[str, dict[bytes, bytes]]]:
    """Run a store that knows no shopper; yield its address and its other replies, by command."""
    from tests.chaos.listening import listening

    hostile: dict[bytes, bytes] = {}
    honest = {b"HMGET": b"*2\r\n$-1\r\n$-1\r\n", b"ZRANGEBYSCORE": b"*0\r\n", b"HGETALL": b"*0\r\n"}

    def serve(client: socket.socket) -> None:
        while sent := client.recv(1 << 16):
            words = re.findall(rb"\$\d+\r\n([^\r]*)\r\n", sent)
            for word in words:
                if word.upper() in honest:
                    client.sendall(hostile.get(word.upper(), honest[word.upper()]))
                elif word in (b"PING", b"CLIENT", b"SELECT", b"AUTH"):
                    client.sendall(b"+OK\r\n")

    with listening(serve) as (host, port):
        yield f"redis://{host}:{port}", hostile


@contextlib.contextmanager
def endpoint(folder: Path) -> Iterator[Target]:
    """Start an endpoint that follows a home with the toy bundle and asks the hostile store."""
    from serving.release.champion import Champion, write_champion
    from serving.release.manifest import read_manifest
    from serving.settings import Settings
    from tests.serving.conftest import build_bundle, start

    bundle = build_bundle(folder / "toy")
    bundle_id = read_manifest(bundle)["bundle_id"]
    home = folder / "home"
    shutil.copytree(bundle, home / "bundles" / bundle_id)
    write_champion(home, Champion(bundle_id, "1", "checkout", f"bundles/{bundle_id}", "", ""))
    with hostile_store() as (url, hostile):
        settings = Settings(home=home, store_url=url, log=False, request_log=False, deadline_ms=10_000.0)
        running = start(None, settings)
        # Its lines are read until its end: a full pipe would block it.
        try:
            yield Target(running.http, running.grpc, running.process.pid, home, hostile)
        finally:
            running.process.terminate()
            running.process.wait()


def attack_all(chosen: Sequence[Attack], folder: Path) -> dict[str, Any]:
    """Carry the attacks out on one endpoint; return the counts, the largest effects and every wrong one."""
    with endpoint(folder) as target:
        for _ in range(20):
            known = items_of(target)
        assert known[0], known
        first_mb = psutil.Process(target.pid).memory_info().rss / MEBI
        effects = [carry_out(attack, target, known) for attack in chosen]
        grown_mb = psutil.Process(target.pid).memory_info().rss / MEBI - first_mb
    wrong = [one for one in effects if one["wrong"] or one["cpu_s"] > CPU_S or one["megabytes"] > MEGABYTES]
    return {
        "cases": len(effects),
        "families": Counter(one["family"] for one in effects),
        "longest_cpu_s": max(one["cpu_s"] for one in effects),
        "largest_mb": max(one["megabytes"] for one in effects),
        "grown_mb": round(grown_mb, 1),
        "wrong": wrong,
    }


def main() -> int:
    """Attack an endpoint with the toy bundle and print the summary; return 1 if a case went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.attacks")
    parser.add_argument("--cases", type=int, default=1_000, help="at most; spread over all tables")
    given = parser.parse_args()
    every = attacks()
    step = max(-(-len(every) // given.cases), 1)
    with tempfile.TemporaryDirectory(prefix="reco-fuzz-") as scratch:
        found = attack_all(every[::step], Path(scratch))
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["wrong"] or found["grown_mb"] > MEGABYTES else 0


if __name__ == "__main__":
    sys.exit(main())
