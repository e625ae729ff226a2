"""Callers that ask an endpoint without a break, and note every answer and every failure."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

V1 = "/v1/models/checkout:predict"


@dataclass
class Callers:
    """The outcome of the callers; a connection refused after shutdown ends a caller and is no failure."""

    http: str
    answers: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    shutting: bool = False  # set at shutdown: from then on a reset of a new connection is expected

    def bundles(self, since: int = 0) -> set[str]:
        """The bundles that gave the answers from the given one on."""
        return {answer["bundle_id"] for answer in self.answers[since:]}

    def callers(self, bundle_id: str) -> set[str]:
        """The callers that a bundle has answered."""
        answers = (answer for answer in self.answers if answer["bundle_id"] == bundle_id)
        return {answer["request_id"].partition("-")[0] for answer in answers}

    def ask_on(self, number: int) -> None:
        """Ask one request after the other, on one connection as long as the endpoint keeps it."""
        host, port = self.http.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        turn, known = 0, False  # whether the connection has brought an answer
        while not self.stop.is_set():
            turn += 1
            basket = [str(1_000_000 + (number * 31 + turn) % 240)]  # of the toy bundle
            request = {"basket": basket, "request_id": f"{number}-{turn}"}
            try:
                connection.request("POST", V1, json.dumps({"instances": [request]}))
                answer = connection.getresponse()
                body = answer.read()
                if answer.status != 200:
                    raise ConnectionError(f"status {answer.status}")
                (prediction,) = json.loads(body)["predictions"]
                assert prediction["request_id"] == request["request_id"]
                assert prediction["items"]
                self.answers.append(prediction)
                known = not answer.will_close
            except ConnectionRefusedError:
                return
            except (OSError, http.client.HTTPException) as error:
                if self.shutting and not known and isinstance(error, ConnectionResetError):
                    return
                self.failures.append(f"{request['request_id']}: {error!r}")
                connection.close()
                known = False
        connection.close()


@contextmanager
def calling(http_address: str, callers: int = 4) -> Iterator[Callers]:
    """Let some callers ask until the end of the block."""
    seen = Callers(http_address)
    threads = [threading.Thread(target=seen.ask_on, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        seen.stop.set()
        for thread in threads:
            thread.join()
