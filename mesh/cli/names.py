"""Arguments that name a job, node, zone or image. A shell completes them if the daemon answers at once."""

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PLAIN = re.compile(r"[\w@%+=:,./-]+")  # a shell puts a name into the command line as it is, `$(...)` too
ANSWER_S = 0.1  # timeout of a completion: people perceive it as instantaneous (Nielsen, 1993)


class Name(click.ParamType[str]):
    """A name that the daemon lists at `path`. `names` returns (name, help) pairs of its answer; `parted`: a list with commas."""

    def __init__(
        self, name: str, path: str, names: Callable[[Any], Iterable[tuple[str, str]]], parted: bool = False
    ) -> None:
        self.name = name
        self._path, self._names, self._parted = path, names, parted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        """Return the names that fit; none if no daemon answers in time, since a shell must not show its errors."""
        from click.shell_completion import CompletionItem

        from mesh.api.client import Client
        from mesh.daemon.layout import node_layout
        from mesh.util.errors import MeshError

        head, comma, last = incomplete.rpartition(",") if self._parted else ("", "", incomplete)
        state = ctx.find_root().params.get("state")
        try:
            answer = Client(node_layout(state).socket).get(self._path, timeout_s=ANSWER_S)
            found = dict(self._names(answer))
        except (MeshError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
        from mesh.util.sanitize import sanitize

        return [
            CompletionItem(f"{head}{comma}{name}", help=sanitize(text))
            for name, text in found.items()
            if name.startswith(last) and PLAIN.fullmatch(name)
        ]


def _jobs(answer: Any) -> Iterable[tuple[str, str]]:
    from mesh.util.text import short_id

    for row in answer["jobs"]:
        text = f"{row['state']}: {row['command']}"[:60]
        yield short_id(row), text
        if row["name"]:
            yield row["name"], text


def _nodes(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["nodes"]:
        yield row["nick"], f"{row['state']}, {row['user']}"


def _zones(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["zones"]:
        if row["zone"]:
            yield row["zone"], f"{len(row['nodes'])} nodes"


def _images(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["images"]:
        yield row["alias"], f"by {row['by']}"
    for row in answer["by_name"]:
        yield row["name"], ", ".join(row["nodes"])


def _data(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["data"]:
        yield row["name"], "here" if row["here"] else ", ".join(row["nodes"])


def _groups(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["groups"]:
        yield row["name"], ", ".join(row["members"])


def _waiting(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["pending"]:
        yield row["nick"], f"{row['user']}, {row['node'][:7]}"


def _secrets(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["secrets"]:
        yield row["name"], "a secret"


JOB = Name("job", "/v1/jobs", _jobs)
JOB_LIST = Name("job", "/v1/jobs", _jobs, parted=True)
NODE = Name("node", "/v1/nodes", _nodes)
NODE_LIST = Name("node", "/v1/nodes", _nodes, parted=True)
ZONE = Name("zone", "/v1/zones", _zones)
DATA = Name("data set", "/v1/data", _data)
GROUP = Name("group", "/v1/data/groups", _groups)
IMAGE = Name("image", "/v1/images", _images)
SECRET = Name("name", "/v1/secrets", _secrets)
WAITING = Name("node", "/v1/pending", _waiting)
