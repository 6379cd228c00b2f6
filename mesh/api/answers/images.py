"""Container images that may be run."""

from typing import TypedDict


class Digests(TypedDict):
    """`id`: of the engine, `manifest`: of registries; empty where none is meant or known."""

    id: str
    manifest: str
    bytes: int


class Listed(Digests):
    """On the mesh's list, by the word of `by`; `here`, `fetching`, `problem`: how this node stands with it; `nodes`: who has
    it."""

    alias: str
    allowed: bool
    by: str
    counter: int
    denied_here: bool
    here: bool
    fetching: str
    problem: str
    nodes: list[str]


class OwnRules(TypedDict):
    """This node's owner's."""

    allowed: dict[str, Digests]
    denied: list[str]


class Named(TypedDict):
    alias: str
    id: str
    bytes: int


class FetchedImage(Named):
    unused_s: int


class FetchedImages(TypedDict):
    """And what its owner lets stay of them."""

    images: list[FetchedImage]
    most_bytes: int
    most_unused_s: float


class ByName(TypedDict):
    name: str
    nodes: list[str]


class Images(TypedDict):
    """`listed`: the mesh has a list; `anything`: which lets every image run; `signers`: who may change it; `by_name`: what
    nodes allow by its name alone."""

    listed: bool
    anything: bool
    may_sign: bool
    signers: list[str]
    images: list[Listed]
    own: OwnRules
    fetched: FetchedImages
    by_name: list[ByName]


class Allowed(Digests):
    """`first`: it begins the mesh's list; `by_list`: that decides here again, what the owner denied; `on_engine`: it is
    here."""

    alias: str
    here: bool
    first: bool
    by_list: bool
    listed: bool
    denied_here: bool
    on_engine: bool


class Denied(TypedDict):
    alias: str
    mesh: bool
    still_allowed_here: bool


class Pruned(FetchedImage):
    """`words`: why it goes, or why it could not."""

    gone: bool
    words: str


class AllPruned(TypedDict):
    dry_run: bool
    images: list[Pruned]


class ImagePulled(Digests):
    """`here`: it is; else `words` say how far."""

    alias: str
    here: bool
    words: str


class Fetching(TypedDict):
    node: str
    here: bool
    words: str
    failed: bool


class Pushed(TypedDict):
    alias: str
    nodes: list[Fetching]
