"""Commands that serve answers: serve, up."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import click

from pipelines.cli.options import FOLDER, PORT, Context, FiniteRange, common_options
from pipelines.run.launch import absolute, check_data, data_to_replay
from pipelines.run.runs import champions_run
from serving.release.champion import read_champion
from serving.settings import Settings, unknown_variables, without_effect


@click.command()
@click.option("--host", help="Address to listen on.")
@click.option("--http-port", type=PORT, help="REST; 0 is any free port.")
@click.option("--grpc-port", type=PORT, help="gRPC; 0 is any free port.")
@click.option("--bundle", type=FOLDER, help="Serve this bundle instead of the champion.")
@common_options
def serve(
    context: Context, host: str | None, http_port: int | None, grpc_port: int | None, bundle: Path | None
) -> None:
    """Serve the current champion: KServe REST and gRPC."""
    settings = context.settings(host=host, http_port=http_port, grpc_port=grpc_port)
    if bundle is None:
        read_champion(context.home)  # its error says how to get one
    served = ["--home", str(context.home)] if bundle is None else ["--bundle", str(bundle)]
    # The endpoint reads no `.env`. It names the unknown variables of its environment itself.
    environment = settings.to_env()
    if names := [name for name in unknown_variables() if name not in environment]:
        context.say(f".env: {without_effect(names)}")
    sys.stderr.flush()
    # The endpoint replaces this process: signals reach it, and this command leaves nothing in memory.
    arguments = [sys.executable, "-P", "-m", "serving.server", *served]
    os.execve(sys.executable, arguments, environment)


@click.command()
@click.option("--port", type=PORT, default=8080, show_default=True, help="REST; 0 is any free port.")
@click.option("--grpc-port", type=PORT, default=8081, show_default=True, help="gRPC; 0 is any free port.")
@click.option(
    "--store-port", type=PORT, default=16379, show_default=True, help="Online store; 0 is any free port."
)
@click.option(
    "--broker-port", type=PORT, default=19092, show_default=True, help="Broker; 0 is any free port."
)
@click.option(
    "--bootstrap",
    default="",
    envvar="RECO_KAFKA_BOOTSTRAP",
    metavar="HOST:PORT",
    help="Use this broker, start none.",
)
@click.option("--replay", "data", default="", metavar="DATA", help="Replay this data set's shoppers.")
@click.option(
    "--speed", type=FiniteRange(0), default=600.0, show_default=True, help="Seconds of data per second."
)
@click.option("--from", "since", default="", help="Where the replay begins.  [default: the champion's cut]")
@click.option("--slots", is_flag=True, help="Two slots behind a gateway, for `reco release`.")
@click.option("--release", default="", metavar="VERSION", help="With two slots; release this version now.")
@common_options
def up(
    context: Context,
    port: int,
    grpc_port: int,
    store_port: int,
    broker_port: int,
    bootstrap: str,
    data: str,
    speed: float,
    since: str,
    slots: bool,
    release: str,
) -> None:
    """Start store, broker, stream and endpoint, until Ctrl-C."""
    from components.home import announced, locked
    from feature_repo.stream.kafka import KafkaSettings, create_topics
    from feature_repo.stream.replay_events import moment
    from pipelines.live.monitors import monitor_programs
    from pipelines.live.screen import Screen
    from pipelines.live.supervisor import Supervisor
    from pipelines.live.up import Wanted, apart, parts_of, used_by

    if data:  # else the replay would fail only after store and broker have started
        check_data(data)
        if since:
            moment("from", since)
    champion = read_champion(context.home)
    origin = champions_run(context.home)
    features = origin.artifacts("materialize-features") / "features" if origin else None
    if features is not None and not features.is_dir():
        features = None
    data = absolute(data)
    wanted = Wanted(
        *(port, grpc_port, store_port, broker_port, bootstrap, data, speed, since),
        slots=slots or bool(release),
        release=release,
        programs=monitor_programs(),
    )
    settings, kafka = replace(Settings.from_env(), home=context.home), KafkaSettings.from_env()
    # A gateway shows the counters on its own port.
    metrics = "" if wanted.slots else settings.metrics_address
    screen = Screen(context.home, context.output == "json", metrics=metrics)
    if names := unknown_variables():  # the endpoint's own warning stands in a file
        screen.say(without_effect(names))
    way_out = "use its endpoint, or stop it with Ctrl-C in its terminal"  # it has no end of its own
    with locked(context.home / "up.lock", "running `reco up`", way_out):
        (context.home / "up.json").unlink(missing_ok=True)  # left by a killed `reco up`
        if data:
            apart(data_to_replay, context.home, data, "--replay")
        if bootstrap:
            create_topics(replace(kafka, bootstrap=bootstrap))
        parts = parts_of(settings, kafka, champion, features, wanted, screen.say)
        logs = context.home / "up"
        screen.say(f"logs of the parts: {logs}")
        with announced(context.home, used_by(parts)), screen:
            Supervisor(parts, logs, screen.show, screen.say).run()


COMMANDS = (serve, up)
