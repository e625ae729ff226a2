"""The null server burns the requested time, and answers."""

import asyncio
import time
from typing import Any

from pipelines.bench.load.arm_null import ANSWER, app, burn


def test_the_null_server_burns_processor_time_not_wall_time() -> None:
    before = time.thread_time()
    burn(20.0)
    assert time.thread_time() - before >= 0.02


def test_it_answers_a_body_that_arrives_in_pieces() -> None:
    sent: list[dict[str, Any]] = []
    came = [{"body": b"0.", "more_body": True}, {"body": b"5", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return came.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    before = time.thread_time()
    asyncio.run(app({}, receive, send))
    assert time.thread_time() - before >= 0.0005
    assert sent[0]["status"] == 200
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(ANSWER)).encode()
    assert sent[1]["body"] == ANSWER
