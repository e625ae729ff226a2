import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import ConnectionError, InvalidResponse

from serving.redis.parser import MAX_BYTES, MAX_ITEMS, MAX_LINE, BoundedParser

REPLIES: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", b"OK"),
    (b":-7\r\n", -7),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (b"$4\r\n\r\n\r\n\r\n", b"\r\n\r\n"),
    (b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", [b"a", [1]]),
    (b"*2\r\n$9000\r\n%b\r\n$-1\r\n" % (b"x" * 9_000), [b"x" * 9_000, None]),
    (b"*600\r\n" + b":1\r\n" * 600, [1] * 600),
]


def parser_of(stream: asyncio.StreamReader) -> BoundedParser:
    parser = BoundedParser(1 << 16)
    parser.on_connect(SimpleNamespace(_reader=stream, encoder=None))
    return parser


async def read(pieces: list[bytes], replies: int) -> list[Any]:
    """Read replies from a stream, to which a piece is added in each step of the loop."""
    stream = asyncio.StreamReader()
    parser = parser_of(stream)

    async def feed() -> None:
        for piece in pieces:
            stream.feed_data(piece)
            await asyncio.sleep(0)
        stream.feed_eof()

    feeding = asyncio.ensure_future(feed())
    values = [await parser.read_response(disable_decoding=True) for _ in range(replies)]
    await feeding
    assert await parser.can_read_destructive(), "the stream has ended, or bytes are left"
    return values


@pytest.mark.parametrize("seed", range(20))
def test_replies_are_the_same_however_their_bytes_arrive(seed: int) -> None:
    sent = b"".join(data for data, _ in REPLIES)
    cuts = sorted(random.Random(seed).choices(range(len(sent)), k=40))
    pieces = [sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)], strict=True) if a < b]
    assert asyncio.run(read(pieces, len(REPLIES))) == [value for _, value in REPLIES]
    assert asyncio.run(read([sent], len(REPLIES))) == [value for _, value in REPLIES]


def test_bytes_behind_a_reply_are_seen_before_the_next_command() -> None:
    async def left(data: bytes) -> bool:
        stream = asyncio.StreamReader()
        parser = parser_of(stream)
        stream.feed_data(data)
        assert await parser.read_response(disable_decoding=True) == b"OK"
        return await parser.can_read_destructive()

    assert not asyncio.run(left(b"+OK\r\n"))
    assert asyncio.run(left(b"+OK\r\n+"))


@pytest.mark.parametrize(
    "data",
    [
        b"*%d\r\n" % (MAX_ITEMS + 1),
        b"*1\r\n$%d\r\n" % (MAX_BYTES + 1),
        b"$-2\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"+" + b"x" * (MAX_LINE + 1),
        b"?\r\n",
    ],
)
def test_an_invalid_or_too_large_reply_is_refused_before_its_bytes_arrive(data: bytes) -> None:
    with pytest.raises(InvalidResponse):
        asyncio.run(read([data, b""], 1))


@pytest.mark.parametrize("data", [b"", b"+OK", b"$9\r\nhalf"])
def test_an_end_in_the_middle_of_a_reply_is_a_lost_connection(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        asyncio.run(read([data], 1))
