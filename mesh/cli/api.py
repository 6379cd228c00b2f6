"""`mesh api`: the agent's API as an OpenAPI document."""

import json

import click


@click.command()
def api() -> None:
    """Print the OpenAPI document of what a daemon answers on its socket. Needs no daemon."""
    from mesh.api.openapi import document

    click.echo(json.dumps(document(), indent=2))
