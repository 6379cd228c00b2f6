"""Container images that may be run."""

import msgspec


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """`id`: digest in the engine, `manifest`: digest in registries; empty if not known."""

    id: str
    manifest: str
    bytes: int


class Listed(Digests, frozen=True, kw_only=True):
    """An image on the mesh's list, signed by `by`; `here`, `fetching`, `problem`: its state on this node; `nodes`: those
    that have it."""

    alias: str
    allowed: bool
    by: str
    counter: int
    denied_here: bool
    here: bool
    fetching: str
    problem: str
    nodes: list[str]


class OwnRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of this node's owner."""

    allowed: dict[str, Digests]
    denied: list[str]


class Named(msgspec.Struct, frozen=True, kw_only=True):
    alias: str
    id: str
    bytes: int


class FetchedImage(Named, frozen=True, kw_only=True):
    unused_s: int


class FetchedImages(msgspec.Struct, frozen=True, kw_only=True):
    """Fetched images, and the owner's limits for them."""

    images: list[FetchedImage]
    most_bytes: int
    most_unused_s: float


class ByName(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    nodes: list[str]


class Images(msgspec.Struct, frozen=True, kw_only=True):
    """`listed`: the mesh has a list; `anything`: it allows every image; `signers`: members who may change it; `by_name`: what
    nodes allow by its name alone."""

    listed: bool
    anything: bool
    may_sign: bool
    signers: list[str]
    images: list[Listed]
    own: OwnRules
    fetched: FetchedImages
    by_name: list[ByName]


class Allowed(Digests, frozen=True, kw_only=True):
    """`first`: it begins the mesh's list; `by_list`: it decides again about an image that the owner had denied; `on_engine`:
    this node has the image."""

    alias: str
    here: bool
    first: bool
    by_list: bool
    listed: bool
    denied_here: bool
    on_engine: bool


class Denied(msgspec.Struct, frozen=True, kw_only=True):
    alias: str
    mesh: bool
    still_allowed_here: bool


class Pruned(FetchedImage, frozen=True, kw_only=True):
    """`words`: why it is removed, or why it could not be."""

    gone: bool
    words: str


class AllPruned(msgspec.Struct, frozen=True, kw_only=True):
    dry_run: bool
    images: list[Pruned]


class ImagePulled(Digests, frozen=True, kw_only=True):
    """`here`: the image is on this node; otherwise `words` has the progress."""

    alias: str
    here: bool
    words: str


class Registry(msgspec.Struct, frozen=True, kw_only=True):
    """The node's registry: its address on this machine, and the user name and password for pushes until the daemon ends."""

    address: str
    user: str
    password: str


class Fetching(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    here: bool
    words: str
    failed: bool


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest`: the digest in this node's registry, if the image was pushed into it."""

    alias: str
    manifest: str
    nodes: list[Fetching]
