"""Names that the daemon knows: of jobs, nodes and images. They complete themselves in a shell, if it answers at once."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

ANSWER_S = 0.1  # for which a shell waits at most for each read: the time that people take for at once (Nielsen, 1993)


class Name(click.ParamType[str]):
    """`names` makes pairs of a name and words on it of what the daemon answers at `path`; `parted`: several, with commas."""

    def __init__(
        self, name: str, path: str, names: Callable[[Any], Iterable[tuple[str, str]]], parted: bool = False
    ) -> None:
        self.name = name
        self._path, self._names, self._parted = path, names, parted

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        """What fits; nothing where no daemon answers in time: a shell is no place for its errors."""
        from click.shell_completion import CompletionItem

        from mesh.api.errors import MeshError
        from mesh.client import Client
        from mesh.layout import Layout, state_directory

        head, comma, last = incomplete.rpartition(",") if self._parted else ("", "", incomplete)
        state = ctx.find_root().params.get("state")
        try:
            answer = Client(Layout(state_directory(state)).socket).get(self._path, timeout_s=ANSWER_S)
            found = dict(self._names(answer))
        except (MeshError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return []
        return [
            CompletionItem(f"{head}{comma}{name}", help=words) for name, words in found.items() if name.startswith(last)
        ]


def _jobs(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["jobs"]:
        words = f"{row['state']}: {row['command']}"[:60]
        yield row["job"][:8], words
        if row["name"]:
            yield row["name"], words


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


def _waiting(answer: Any) -> Iterable[tuple[str, str]]:
    for row in answer["pending"]:
        yield row["nick"], f"{row['user']}, {row['node'][:7]}"


JOB = Name("job", "/v1/jobs", _jobs)
NODE = Name("node", "/v1/nodes", _nodes)
NODE_LIST = Name("node", "/v1/nodes", _nodes, parted=True)
ZONE = Name("zone", "/v1/zones", _zones)
IMAGE = Name("image", "/v1/images", _images)
WAITING = Name("node", "/v1/pending", _waiting)
