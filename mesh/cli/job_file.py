"""Job files: YAML with the long names of `mesh submit`'s options, and `command`. Every error names its line.

The option of a key parses its value as text, so YAML's own meaning of `on`, `1:30` and `0x10` does not apply.
"""

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

MOST_BYTES = 1 << 20  # own choice
OF_THE_CALL = {"help", "job_file", "print_file", "as_json", "raw"}  # options that are not about the job
PATHS = {"workdir", "out", "env_file"}  # relative to the file


def job_file(function: Any) -> Any:
    """Add `-f` and `--print-file` to a command that takes a job. Options win over the file."""
    function = click.option(
        "--print-file", is_flag=True, help="Print these options and COMMAND as a job file; submit nothing."
    )(function)
    return click.option(
        "-f",
        "--file",
        "job_file",
        metavar="JOB.yaml",
        is_eager=True,
        expose_value=False,
        callback=_load,
        help="Read options that are not given here from a job file; - is standard input.",
    )(function)


class JobCommand(click.Command):
    """A command that keeps its arguments for `--print-file`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["mesh.cli.arguments"] = list(args)
        return super().parse_args(ctx, args)


def printed_file(ctx: click.Context) -> str:
    """Return the job of a command, from its file and its options, as a job file."""
    import yaml

    given, _, _ = ctx.command.make_parser(ctx).parse_args(list(ctx.meta["mesh.cli.arguments"]))
    chosen = {
        name: value for name, value in given.items() if isinstance(value, str | bool | list | tuple) and value != ()
    }
    values = {**(ctx.default_map or {}), **chosen}
    content: dict[str, Any] = {}
    for parameter in ctx.command.params:
        if parameter.name in values and parameter.name not in OF_THE_CALL:
            content[_key(parameter)] = _plain(parameter, values[parameter.name])
    legible = not re.search(
        "[\x85\u2028\u2029\ufeff]", json.dumps(content, ensure_ascii=False)
    )  # YAML's line breaks too
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=legible, width=100))


def _load(ctx: click.Context, parameter: click.Parameter, path: str | None) -> None:
    if path is None:
        return
    try:
        if path == "-":
            text = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                text = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"cannot read the job file {path}: {getattr(error, 'strerror', error)}", ctx) from error
    base = Path.cwd() if path == "-" else Path(path).resolve().parent
    ctx.default_map = {**(ctx.default_map or {}), **read_job(ctx, text, path, base)}


def wrong_at(name: str, node: Any, words: str, ctx: click.Context | None = None) -> click.UsageError:
    """Return the error of a place in a YAML file."""
    return click.UsageError(f"{name}:{node.start_mark.line + 1}: {words}", ctx)


def read_mapping(text: bytes, name: str, shape: str, ctx: click.Context | None = None) -> Any:
    """Return the mapping that a YAML file is, as nodes: nothing is expanded. UsageError names the line; `shape`: what it has."""
    import yaml

    if len(text) > MOST_BYTES:
        raise click.UsageError(f"{name}: it has more than 1 MiB", ctx)
    try:
        root = yaml.compose(text.decode(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name}:{text[: error.start].count(10) + 1}: it is not UTF-8", ctx) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or "it is not YAML"
        raise click.UsageError(f"{name}{line}: {reason}", ctx) from error
    except RecursionError as error:
        raise click.UsageError(f"{name}: it is nested too deeply", ctx) from error
    if not isinstance(root, yaml.MappingNode):
        raise click.UsageError(f"{name}: {shape}", ctx)
    return root


def read_job(ctx: click.Context, text: bytes, name: str, base: Path) -> dict[str, Any]:
    """Return the file's values by the names of the command's parameters. UsageError names the line."""
    from difflib import get_close_matches

    import yaml

    wrong = partial(wrong_at, name, ctx=ctx)
    root = read_mapping(text, name, "a job file has lines such as `gpus: 1` and `command: python3 train.py`", ctx)
    known = {_key(option): option for option in ctx.command.params if option.name not in OF_THE_CALL}
    found: dict[str, Any] = {}
    for key, node in root.value:
        option = known.get(key.value) if isinstance(key, yaml.ScalarNode) else None
        if option is None:
            near = get_close_matches(str(key.value), known, 1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"`mesh {ctx.info_name} --help` lists them, without their dashes"
            )
            raise wrong(
                key, f"there is no key {key.value!r}: {hint}" if isinstance(key, yaml.ScalarNode) else "this is no key"
            )
        assert option.name is not None
        if option.name in found:
            raise wrong(key, f"{key.value} is set twice")
        try:
            value = _value(option, node)
            if option.name in PATHS:
                value = str(base / value)
            option.type_cast_value(ctx, value)
        except click.BadParameter as error:
            raise wrong(node, f"{key.value}: {error.message}") from error
        except ValueError as error:
            raise wrong(node, f"{key.value} {error}") from error
        found[option.name] = value
    return found


def _key(option: click.Parameter) -> str:
    return max(option.opts, key=len).lstrip("-") if isinstance(option, click.Option) else str(option.name)


def _value(option: click.Parameter, node: Any) -> Any:
    """Return a value as the command line has it; ValueError for a shape that the option does not take."""
    import yaml

    if isinstance(option, click.Argument):
        return (
            ["sh", "-c", _word(node)]
            if isinstance(node, yaml.ScalarNode)
            else _each(node, "must be a line or a list of words")
        )
    if isinstance(option, click.Option) and option.is_flag:
        if not isinstance(node, yaml.ScalarNode) or node.value not in ("true", "false"):
            raise ValueError("must be true or false")
        return node.value == "true"
    if option.name == "env" and isinstance(node, yaml.MappingNode):
        pairs = [(_word(key), _word(value)) for key, value in node.value]
        if len(dict(pairs)) < len(pairs) or any("=" in key for key, _ in pairs):
            raise ValueError("has a name twice, or a name with a =")
        return [f"{key}={value}" for key, value in pairs]
    if option.multiple:
        return [_word(node)] if isinstance(node, yaml.ScalarNode) else _each(node, "must be one value or a list")
    if option.name == "ckpt_to" and isinstance(node, yaml.SequenceNode):
        return ",".join(_each(node, "must be a list of nodes"))
    return _word(node)


def _each(node: Any, shape: str) -> list[str]:
    import yaml

    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise ValueError(shape)
    return [_word(item) for item in node.value]


def _word(node: Any) -> str:
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        raise ValueError("must be one value, not a list or a mapping")
    if node.tag == "tag:yaml.org,2002:null":
        raise ValueError("has no value: leave the line out, or write '' for an empty one")
    return str(node.value)


def _plain(option: click.Parameter, value: Any) -> Any:
    """Return a value as people write it in a file."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and str(int(value)) == value else value
    if isinstance(value, bool):
        return value
    words: Sequence[str] = [str(word) for word in value]
    if option.name == "env":
        pairs = [word.partition("=") for word in words]
        named = {key: text for key, equals, text in pairs if equals and key}
        if len(named) == len(words):
            return named
    return list(words)
