"""`mesh web`: the address of this node's page, for one visit."""

import click

from mesh.cli.terminal import client, json_option, print_json


@click.command()
@click.option("--open", "open_", is_flag=True, help="Open it in the browser, too.")
@json_option
@click.pass_context
def web(ctx: click.Context, open_: bool, as_json: bool) -> None:
    """Print the address of this node's page: nodes, jobs, and the button that takes this machine back.

    It is served on this machine only, and the address is good for one visit within ten minutes; what it opens stays open. From
    elsewhere: `ssh -L PORT:127.0.0.1:PORT this-machine`, with `web_port = PORT` in config.toml.
    """
    answer = client(ctx).post("/v1/web")
    if as_json:
        print_json(answer)
    else:
        click.echo(answer["url"])
    if open_:
        import webbrowser

        if not webbrowser.open(answer["url"]):
            click.echo("mesh: no browser could be started here; open the address yourself", err=True)
