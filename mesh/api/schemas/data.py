"""Data sets."""

import msgspec


class DataSet(msgspec.Struct, frozen=True, kw_only=True):
    """The newest known version of a data set.

    `name`: `USER/NAME`; `readers`: users besides the owner, and groups as `group:USER/NAME`; `mine`: it is of this node's user;
    `readable`: its jobs may read it. `cache`: its owner's jobs add to it. `encrypted`: on the disks of the nodes that have it.
    `here`: this node has it whole; `path`: the directory that the owner of this node offers for it; `fetching`: progress.
    `nodes`: those that say they have it whole.
    """

    name: str
    id: str
    bytes: int
    files: int
    created_unix: int
    readers: list[str]
    everybody: bool
    cache: bool
    encrypted: bool
    mine: bool
    readable: bool
    here: bool
    pinned: bool
    path: str | None
    fetching: str
    nodes: list[str]


class DataSets(msgspec.Struct, frozen=True, kw_only=True):
    """`paths`: directories that the owner of this node offers under a name of their own."""

    data: list[DataSet]
    paths: dict[str, str]
    used_bytes: int
    quota_bytes: int | None


class DataFile(msgspec.Struct, frozen=True, kw_only=True):
    """`kind`: file, directory or link; `files`: below a directory."""

    name: str
    kind: str
    bytes: int
    files: int = 0
    target: str = ""


class ShownData(DataSet, frozen=True, kw_only=True):
    """`entries`: of the directory that was asked for, at most a thousand (`more`: it has more); None if it is not here,
    or this node does not have its key.
    """

    entries: list[DataFile] | None
    more: bool


class DataWork(msgspec.Struct, frozen=True, kw_only=True):
    """Something in the background: `words` is its progress, `problem` why it failed. The counts are known when it is over."""

    kind: str
    name: str
    over: bool
    words: str = ""
    problem: str = ""
    id: str = ""
    bytes: int = 0
    files: int = 0
    read_bytes: int = 0
    new_bytes: int = 0
    seconds: float = 0.0
    chunks: int = 0
    damaged: int = 0
    fetched_again: int = 0


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group of users. `name`: `USER/NAME`; `changed_on`: the node that signed its newest version; `mine`: it is of this node's
    user; `data`: the data sets that name it.
    """

    name: str
    members: list[str]
    changed_unix: int
    changed_on: str
    mine: bool
    data: list[str]


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    groups: list[Group]


class RemovedData(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    here: bool
