"""Our Kubernetes API on a port of its own, for a test."""

import contextlib
import threading
from collections.abc import Iterator

from pipelines.live.cluster_api import ApiServer, Objects


@contextlib.contextmanager
def kubernetes_api(objects: Objects) -> Iterator[ApiServer]:
    """Serve these objects; the server ends with the block."""
    with ApiServer(objects) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
