"""`mesh devstack`: a whole mesh on one machine, for trying and for developing."""

import signal
import time
from types import FrameType

import click

from mesh.stack import Stack


@click.command()
@click.option("-n", "--nodes", type=click.IntRange(1, 60), default=3, show_default=True, help="How many daemons.")
@click.option("--slots", type=click.IntRange(0, 64), default=1, show_default=True, help="Job slots each lends.")
@click.option("--engine", "engines", multiple=True, type=click.Choice(["process", "docker"]), help="Engines to offer.")
def devstack(nodes: int, slots: int, engines: tuple[str, ...]) -> None:
    """Run N real daemons here until Ctrl-C. They find each other by mDNS on loopback."""
    overrides = {"slots": slots, "engines": list(engines or ("process",))}

    def on_term(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, on_term)
    with Stack(nodes, overrides=overrides) as stack:
        click.echo(f"starting {nodes} daemons ...", err=True)
        try:
            stack.start_all()
            for node in stack.nodes:
                click.echo(f"{node.nick}  export MESH_STATE={node.where.root}")
            click.echo("use any of them from another terminal; Ctrl-C here ends them all", err=True)
            while any(node.running for node in stack.nodes):
                time.sleep(0.5)
        except KeyboardInterrupt:
            click.echo("\nending them ...", err=True)
