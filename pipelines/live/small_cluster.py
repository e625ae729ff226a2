"""A home's champion -> a small cluster of this machine: API, gateway and two slots, until SIGTERM.

`python -m pipelines.live.small_cluster API_PORT`; the gateway listens on RECO_HTTP_PORT.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipelines.live.cluster_api import ApiServer, Objects
from pipelines.live.gateway import Gateway
from pipelines.live.slots import Launch, Slots, new_cluster, shipped
from pipelines.run.stopping import on_stop
from serving.release.champion import read_champion
from serving.settings import Settings


@dataclass(frozen=True)
class SmallCluster:
    """The parts of a cluster that runs."""

    objects: Objects
    api: ApiServer
    gateway: Gateway


@contextlib.contextmanager
def small_cluster(
    bundle: Path, settings: Settings, logs: Path, api_port: int = 0, launch: Launch = shipped
) -> Iterator[SmallCluster]:
    """Start a cluster whose first slot serves a bundle; it ends with the block."""
    objects = new_cluster(bundle.absolute().as_uri(), settings.prediction_log_dir.absolute())
    with ApiServer(objects, api_port) as api, Gateway(objects, settings.http_port) as gateway:
        servers = [threading.Thread(target=one.serve_forever, daemon=True) for one in (api, gateway)]
        slots = Slots(objects, settings, logs, launch)
        for server in servers:
            server.start()
        try:
            yield SmallCluster(objects, api, gateway)
        finally:
            slots.close()
            for one in (gateway, api):
                one.shutdown()


def main() -> int:
    """Run until SIGTERM or SIGINT."""
    os.umask(0o077)  # the prediction log names shoppers
    over = threading.Event()
    settings = Settings.from_env()
    champion = read_champion(settings.home)
    logs = settings.home / "up" / "slots"
    with on_stop(over.set), small_cluster(champion.bundle(settings.home), settings, logs, int(sys.argv[1])):
        over.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
