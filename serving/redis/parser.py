"""Bytes of a Redis server -> replies: the two parsers of redis-py, with limits on the size of a reply."""

from __future__ import annotations

import asyncio
from typing import Any

from redis._parsers import _AsyncRESP2Parser, _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.exceptions import ConnectionError, InvalidResponse

MAX_ITEMS = 1 << 16  # of an array; a page of facts has 4,000
MAX_BYTES = 1 << 28  # of one value
MAX_LINE = 1 << 16  # bytes; a value is no line
LINES_AT_ONCE = 256  # of a reply; then other tasks run, and the deadline may end the call
_CLOSED = "the server closed the connection"


class BoundedParser(_AsyncRESP2Parser):
    """The library's parser in Python, with limits on the announced size of a reply.

    It waits only for bytes that have not arrived yet. The library's waits for each line and each value.
    """

    _stream: Any  # a StreamReader while connected
    _lines = 0

    async def read_response(self, disable_decoding: bool = False) -> Any:
        """Return the next reply; the bytes behind it stay."""
        if not self._connected:
            raise ConnectionError(_CLOSED)
        reply = await self._read_response(disable_decoding=disable_decoding)
        self._append(b"")
        return reply

    async def can_read_destructive(self) -> bool:
        """Report bytes that belong to no command, or the end or loss of the connection."""
        return bool(self._buffer or self._stream._buffer or self._stream.at_eof() or self._stream.exception())

    async def _readline(self) -> bytes:
        while (end := self._buffer.find(b"\r\n", self._pos)) < 0:
            if len(self._buffer) - self._pos > MAX_LINE:
                raise _too_long()
            if not (data := await self._stream.read(self._read_size)):
                raise ConnectionError(_CLOSED)
            self._append(data)
        line: bytes = self._buffer[self._pos : end]
        self._pos = end + 2
        _check_announced(line)
        self._lines += 1
        if not self._lines % LINES_AT_ONCE:
            await asyncio.sleep(0)
        return line

    async def _read(self, length: int) -> bytes:
        if (missing := self._pos + length + 2 - len(self._buffer)) > 0:
            try:
                self._append(await self._stream.readexactly(missing))
            except asyncio.IncompleteReadError:
                raise ConnectionError(_CLOSED) from None
        start, self._pos = self._pos, self._pos + length + 2
        value: bytes = self._buffer[start : start + length]
        return value

    def _append(self, data: bytes) -> None:
        """Drop the parsed bytes, and add new ones."""
        self._buffer, self._pos = self._buffer[self._pos :] + data, 0

    def _clear(self) -> None:
        self._buffer, self._pos = b"", 0


class BoundedReplies(_RESP2Parser):
    """The same for the plain client, whose calls block: hiredis would reserve the announced size."""

    def on_connect(self, connection: Any) -> None:
        """Read from a new connection."""
        super().on_connect(connection)
        self._buffer = _BoundedLines(connection._sock, self.socket_read_size, connection.socket_timeout)


class _BoundedLines(SocketBuffer):
    def readline(self) -> bytes:
        line: bytes = self._buffer.readline()
        while not line.endswith(b"\r\n"):
            if len(line) > MAX_LINE:
                raise _too_long()
            self._read_from_socket()
            line += self._buffer.readline()
        _check_announced(line[:-2])
        return line[:-2]


def _too_long() -> InvalidResponse:
    return InvalidResponse("a line of the reply is too long")


def _check_announced(line: bytes) -> None:
    kind = line[:1]
    if kind in (b"*", b"$") and not -1 <= int(line[1:]) <= (MAX_ITEMS if kind == b"*" else MAX_BYTES):
        raise InvalidResponse("the reply announces too much")
