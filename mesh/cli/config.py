"""`mesh config`: the settings of this node in config.toml."""

from typing import Any

import click

from mesh.cli.listing import listing, show
from mesh.cli.output import print_json, say, table
from mesh.cli.terminal import client, json_option, layout
from mesh.daemon.layout import Layout
from mesh.util.errors import ConfigError, ExitCode, MeshError


class Key(click.ParamType[str]):
    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from mesh.daemon.config import Settings, no_setting

        if value not in Settings.__struct_fields__:
            self.fail(no_setting(str(value)))
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from mesh.daemon.config import Settings

        return [CompletionItem(key) for key in Settings.__struct_fields__ if key.startswith(incomplete)]


KEY = Key()


@click.group()
def config() -> None:
    """Read and change this node's settings in config.toml. The daemon reads them when it starts."""


@config.command("ls")
@listing
@click.pass_context
def list_(ctx: click.Context, /, **form: bool) -> None:
    """List all settings, and which of them the file has."""
    where = layout(ctx)
    show(form, lambda: _all(where), lambda answer: [row["key"] for row in answer["settings"] if row["written"]], _draw)


def _draw(answer: dict[str, Any]) -> None:
    from mesh.daemon.setting_notes import DEFAULT

    rows = [
        [
            row["key"],
            _value(row),
            "file" if row["written"] else "default",
            row["means"].partition(f"; {DEFAULT}")[0],
        ]
        for row in answer["settings"]
    ]
    table(["KEY", "VALUE", "FROM", "MEANS"], rows)


@config.command()
@click.argument("key", type=KEY)
@json_option
@click.pass_context
def get(ctx: click.Context, key: str, as_json: bool) -> None:
    """Print one setting, and on standard error what it means, its unit and its default."""
    from mesh.daemon.setting_notes import DEFAULT, unit_of

    (row,) = [row for row in _all(layout(ctx))["settings"] if row["key"] == key]
    if as_json:
        print_json(row)
        return
    say(_value(row))
    unit, default = unit_of(key), "" if DEFAULT in row["means"] else f"; {DEFAULT}{_text(row['default'])}"
    say(f"{key}{f', in {unit}' if unit else ''}: {row['means']}{default}", err=True)


@config.command("set", context_settings={"ignore_unknown_options": True})  # -1 is a value
@click.argument("key", type=KEY)
@click.argument("values", metavar="VALUE...", nargs=-1, required=True)
@json_option
@click.pass_context
def set_(ctx: click.Context, key: str, values: tuple[str, ...], as_json: bool) -> None:
    """Write a setting into the file, and keep its comments. A list takes several values; '' is the empty list."""
    from mesh.daemon.config import parsed_setting

    where = layout(ctx)
    try:
        value = parsed_setting(key, values)
    except ConfigError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    _print_row(ctx, _write(where, key, value), as_json)


@config.command()
@click.argument("key", type=KEY)
@json_option
@click.pass_context
def unset(ctx: click.Context, key: str, as_json: bool) -> None:
    """Remove a setting from the file, so that its default applies."""
    where = layout(ctx)
    _print_row(ctx, _write(where, key, None), as_json)


def _all(where: Layout) -> dict[str, Any]:
    import msgspec

    from mesh.daemon.config import Settings, load_settings, written_settings
    from mesh.daemon.setting_notes import setting_notes

    try:
        settings, written = load_settings(where.config, {}), written_settings(where.config)
    except ConfigError as error:
        raise MeshError(str(error)) from error
    values, defaults, notes = msgspec.to_builtins(settings), msgspec.to_builtins(Settings()), setting_notes()
    rows = [
        {"key": key, "value": value, "written": key in written, "default": defaults[key], "means": notes[key]}
        for key, value in values.items()
    ]
    return {"file": str(where.config), "settings": rows}


def _write(where: Layout, key: str, value: Any) -> dict[str, Any]:
    """Change the file as a whole or not at all. Refuse what the daemon would refuse."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    from membership.durable import write_durably
    from mesh.daemon.config import check_settings
    from mesh.daemon.setting_notes import setting_notes

    path = where.config.resolve()  # it may be a link
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8") if path.exists() else "")
        if value is None:
            document.pop(key, None)
        else:
            document[key] = list(value) if isinstance(value, tuple) else value
        settings = check_settings(document.unwrap(), where.config)
        where.make()
        write_durably(path, tomlkit.dumps(document).encode())
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise MeshError(f"{where.config}: {error}") from error
    except ConfigError as error:
        raise MeshError(str(error), ExitCode.USAGE) from error
    except OSError as error:
        raise MeshError(f"cannot write {where.config}: {error.strerror}") from error
    return {
        "key": key,
        "value": getattr(settings, key),
        "written": value is not None,
        "file": str(where.config),
        "means": setting_notes()[key],
    }


def _print_row(ctx: click.Context, row: dict[str, Any], as_json: bool) -> None:
    restart = client(ctx).alive()
    if as_json:
        print_json({**row, "restart": restart})
        return
    say(f"{row['key']} = {_value(row)}" + ("" if row["written"] else " (the default)"))
    if restart:
        say("this takes effect after a restart: `mesh down && mesh up`", err=True)


def _value(row: dict[str, Any]) -> str:
    """Return a setting's value; without one, what holds then."""
    from mesh.daemon.setting_notes import unset_words

    return unset_words(row["means"]) if row["value"] is None else _text(row["value"])


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return " ".join(value) or "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={path}" for name, path in value.items()) or "-"
    return "-" if value in (None, "") else str(value)
