"""A pipe without a reader, for writers that must not wait for one."""

import io
import threading


class Stuck(io.BytesIO):
    """A stream that blocks each write until `read` is set."""

    def __init__(self, read: threading.Event) -> None:
        super().__init__()
        self._read = read

    def write(self, data: object) -> int:
        self._read.wait()
        return super().write(data)  # type: ignore[arg-type]
