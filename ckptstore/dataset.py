"""The bytes of a data set's tree: pages of directory entries, and lists of chunks. No I/O.

docs/reference/dataset-format.md shows the format. A directory is a page, or an index page over several: pages are cut by the
names in them, so that a change touches one page of each directory above it. Every link says how many bytes and entries lie behind
it, and every page is compared with its link. So the totals in a signed manifest bound what a walk can meet.

Small files share chunks, their *bundles*: an entry says where in a chunk its content lies.
"""

import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated
from zlib import crc32

import msgspec
from blake3 import blake3

from ckptstore.chunker import CHUNK_BYTES
from ckptstore.encoding import Bytes
from ckptstore.errors import BadManifest, BadPath
from ckptstore.manifest import MAX_DEPTH, MAX_PART_BYTES, MAX_PATH_BYTES, check_link
from ckptstore.pack import ID_BYTES
from membership.malformed import MALFORMED

MAX_ENTRIES = 20_000_000  # of a data set; ImageNet has 1.3 million (own choice)
MAX_BYTES = 1 << 46  # of a data set: 64 TiB (own choice)
PAGE_BYTES = 1 << 20  # of an encoded page or list
PAGE_ENTRIES = 1024  # of a page
PAGE_FULL_BYTES = PAGE_BYTES // 4  # a page is cut here at the latest, so that one more entry fits (own choice)
CUT = 256  # a page ends at a name whose CRC-32 is a multiple of this, so it has about as many entries (own choice)
MAX_LEVELS = 4  # of index pages: 1024 ** 4 entries
OWN_REFS = 16  # chunks of a file in its entry; more are in lists (own choice)
LIST_CHUNKS = 4096  # of one list: 16 GiB of a file (own choice)
MAX_LISTS = 4096  # of a file: MAX_BYTES

Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Put = Callable[[bytes], bytes]  # stores an encoded page or list; returns the id of its chunk


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A page or list: its chunk and that chunk's length; behind it are `entries` entries that hold `size` bytes of files."""

    id: bytes
    length: Natural
    size: Natural
    entries: Natural


class Ref(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of a file: `length` bytes at `offset` of the page's chunk at position `number`."""

    number: Natural
    offset: Natural
    length: Natural


class Entry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A file, directory or symbolic link. A file has `refs`, or `lists` if it has many chunks; a directory has one list, its
    page."""

    name: bytes
    mode: Natural
    size: Natural
    refs: tuple[Ref, ...] = ()
    lists: tuple[Link, ...] = ()
    target: bytes = b""


class Child(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A page of an index page; `name` is its first name."""

    name: bytes
    link: Link


class Page(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a directory: `entries` by name; or an index page with `children`. `ids` and `lengths`: chunks of the entries."""

    ids: bytes = b""
    lengths: tuple[Natural, ...] = ()
    entries: tuple[Entry, ...] = ()
    children: tuple[Child, ...] = ()

    def chunk(self, number: int) -> bytes:
        return self.ids[number * ID_BYTES : (number + 1) * ID_BYTES]

    @property
    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the id and the length of each chunk."""
        return ((self.chunk(number), length) for number, length in enumerate(self.lengths))


class ChunkList(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks of a large file, in order."""

    ids: bytes
    lengths: tuple[Natural, ...]

    @property
    def chunks(self) -> Iterator[tuple[bytes, int]]:
        return ((self.ids[at * ID_BYTES : (at + 1) * ID_BYTES], length) for at, length in enumerate(self.lengths))


class Part(msgspec.Struct, frozen=True, gc=False):
    """A part of a file before it is in a page: `length` bytes at `offset` of a chunk of `chunk_length` bytes."""

    id: bytes
    chunk_length: int
    offset: int
    length: int


_page_decoder, _list_decoder = msgspec.msgpack.Decoder(Page), msgspec.msgpack.Decoder(ChunkList)
encode = msgspec.msgpack.encode


# --- reading


def decode_page(data: Bytes, link: Link) -> Page:
    """Decode the page behind a link. Raises BadManifest or BadPath if it is invalid or is not what the link says."""
    if len(data) != link.length or len(data) > PAGE_BYTES:
        raise BadManifest("a page of a data set does not have the length that its link says")
    try:
        page = _page_decoder.decode(data)
    except MALFORMED as error:
        raise BadManifest(f"not a page of a data set: {error}") from error
    if len(page.ids) != ID_BYTES * len(page.lengths) or not all(0 < n <= CHUNK_BYTES for n in page.lengths):
        raise BadManifest("the chunks of a page are invalid")
    if page.children:
        _check_children(page)
    for entry in page.entries:
        check_name(entry.name)
        _check_entry(entry, page.lengths)
    names = [entry.name for entry in page.entries]
    if len(names) > PAGE_ENTRIES or any(a >= b for a, b in pairwise(names)):
        raise BadManifest("the names of a page are not in order, or one occurs twice")
    links = [child.link for child in page.children]
    size = sum([entry.size for entry in page.entries]) + sum([one.size for one in links])
    entries = len(page.entries) + sum([_below(entry) for entry in page.entries]) + sum([one.entries for one in links])
    if (size, entries) != (link.size, link.entries):
        raise BadManifest("a page of a data set does not hold what its link says")
    return page


def decode_list(data: Bytes, link: Link) -> ChunkList:
    """Decode the list of chunks behind a link. BadManifest if it is invalid or is not what the link says."""
    if len(data) != link.length or len(data) > PAGE_BYTES:
        raise BadManifest("a list of chunks does not have the length that its link says")
    try:
        found = _list_decoder.decode(data)
    except MALFORMED as error:
        raise BadManifest(f"not a list of chunks: {error}") from error
    fits = len(found.ids) == ID_BYTES * len(found.lengths) and 0 < len(found.lengths) <= LIST_CHUNKS
    if not fits or not all(0 < n <= CHUNK_BYTES for n in found.lengths) or sum(found.lengths) != link.size:
        raise BadManifest("a list of chunks does not hold what its link says")
    return found


def check_root(link: Link) -> None:
    """Raise BadManifest if a data set is larger than this version takes."""
    check_link_bounds(link)
    if link.size > MAX_BYTES or link.entries > MAX_ENTRIES:
        raise BadManifest(f"a data set holds at most {MAX_ENTRIES} entries and {MAX_BYTES >> 40} TiB")


def check_link_bounds(link: Link) -> None:
    if len(link.id) != ID_BYTES or not 0 < link.length <= PAGE_BYTES:
        raise BadManifest("a link in a data set is invalid")


def check_name(name: bytes) -> None:
    """Raise BadPath unless this is the name of one entry of a directory."""
    if not name or name in {b".", b".."} or b"/" in name or b"\0" in name or len(name) > MAX_PART_BYTES:
        raise BadPath(f"{name[:80]!r} is not the name of a file")


def key_of(root: Link) -> bytes:
    """Return what stands for a tree that no manifest names yet."""
    return blake3(encode(root)).digest()


def check_path(parts: Sequence[bytes], name: bytes) -> bytes:
    """Return the path of an entry below these directories. BadPath if it is nested too deep."""
    path = b"/".join((*parts, name))
    if len(path) > MAX_PATH_BYTES or len(parts) >= MAX_DEPTH:
        raise BadPath(f"{path[:80]!r} is nested too deep")
    return path


def check_place(parts: Sequence[bytes], entry: Entry) -> None:
    """Raise BadPath if an entry cannot be written below these directories: too deep, or a link that leads out of the set."""
    path = check_path(parts, entry.name)
    if stat.S_ISLNK(entry.mode):
        check_target(path, entry.target)


def check_target(path: bytes, target: bytes) -> None:
    """Raise BadPath unless a symbolic link stays inside its data set."""
    check_link("data/" + path.decode(errors="surrogateescape"), target.decode(errors="surrogateescape"))


def _below(entry: Entry) -> int:
    return sum([link.entries for link in entry.lists]) if entry.lists else 0  # most entries have none


def _check_children(page: Page) -> None:
    if page.entries or page.lengths or not 2 <= len(page.children) <= PAGE_ENTRIES:
        raise BadManifest("an index page has 2 or more pages and nothing else")
    for child in page.children:
        check_name(child.name)
        check_link_bounds(child.link)
    if not all(child.link.entries for child in page.children):  # pages without entries could unfold without end
        raise BadManifest("a page below an index page is empty")
    if any(a.name >= b.name for a, b in pairwise(page.children)):
        raise BadManifest("the pages of an index page are not in order")


def _check_entry(entry: Entry, lengths: Sequence[int]) -> None:
    for link in entry.lists:
        check_link_bounds(link)
    held = [link.size for link in entry.lists] + [ref.length for ref in entry.refs]
    if sum(held) != entry.size:
        raise BadManifest(f"{entry.name!r}: its size is not that of its content")
    if stat.S_ISREG(entry.mode):
        for ref in entry.refs:
            if not ref.length or ref.number >= len(lengths) or ref.offset + ref.length > lengths[ref.number]:
                raise BadManifest(f"{entry.name!r}: a part of it is invalid")
            # Only a small file is a part of a chunk. Else few bytes could have gigabytes decoded, a chunk for each byte.
            if len(entry.refs) > 1 and ref.length != lengths[ref.number]:
                raise BadManifest(f"{entry.name!r}: it has several chunks, and not all of one of them")
        many = len(entry.refs) > OWN_REFS or len(entry.lists) > MAX_LISTS
        if entry.target or (entry.refs and entry.lists) or many or _below(entry):
            raise BadManifest(f"{entry.name!r}: not a valid file")
    elif stat.S_ISDIR(entry.mode):
        if entry.refs or len(entry.lists) != 1 or entry.target:
            raise BadManifest(f"{entry.name!r}: not a valid directory")
    elif not stat.S_ISLNK(entry.mode) or entry.refs or entry.lists or not entry.target:
        raise BadManifest(f"{entry.name!r} is neither a file, a directory nor a link")


# --- writing


def cut_after(name: bytes) -> bool:
    """Tell whether a page ends with this name."""
    return crc32(name) % CUT == 0


class PageMaker:
    """Makes the pages of one directory from its entries in the order of their names. `put` stores a page and returns its id."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._entries: list[Entry] = []
        self._numbers: dict[bytes, int] = {}
        self._lengths: list[int] = []
        self._bytes = 0
        self._children: list[Child] = []

    def file(self, name: bytes, mode: int, size: int, parts: Sequence[Part]) -> None:
        if len(parts) > OWN_REFS:
            lists = tuple(
                put_list(self._put, parts[start : start + LIST_CHUNKS]) for start in range(0, len(parts), LIST_CHUNKS)
            )
            self.add(Entry(name, mode, size, (), lists))
            return
        self.add(Entry(name, mode, size, tuple([Ref(self._number(one), one.offset, one.length) for one in parts])))

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._bytes += len(entry.name) + len(entry.target) + 24 * len(entry.refs) + 64 * len(entry.lists) + 48
        full = len(self._entries) >= PAGE_ENTRIES or self._bytes + ID_BYTES * len(self._lengths) >= PAGE_FULL_BYTES
        if full or cut_after(entry.name):
            self._end_page()

    def finish(self) -> Link:
        """Return the link to the whole directory."""
        if self._entries or not self._children:
            self._end_page()
        children = self._children
        while len(children) > 1:
            children = list(self._index(children))
        return children[0].link

    def _number(self, part: Part) -> int:
        number = self._numbers.setdefault(part.id, len(self._lengths))
        if number == len(self._lengths):
            self._lengths.append(part.chunk_length)
        return number

    def _end_page(self) -> None:
        page = Page(b"".join(self._numbers), tuple(self._lengths), tuple(self._entries))
        size, entries = sum(e.size for e in page.entries), sum(1 + _below(e) for e in page.entries)
        name = page.entries[0].name if page.entries else b""
        self._children.append(Child(name, put_page(self._put, page, size, entries)))
        self._entries, self._numbers, self._lengths, self._bytes = [], {}, [], 0

    def _index(self, children: Sequence[Child]) -> Iterator[Child]:
        """Cut a level of children into index pages, by their names as entries are; each has two children or more."""
        some: list[Child] = []
        for place, child in enumerate(children):
            some.append(child)
            # Level by level other names must cut, or a level would not be smaller than the one below it.
            cut = crc32(b"index" + child.name) % (CUT // 4) == 0
            rest = len(children) - place - 1
            if len(some) >= 2 and rest != 1 and (cut or len(some) >= PAGE_ENTRIES - 1 or not rest):
                size, entries = sum(c.link.size for c in some), sum(c.link.entries for c in some)
                yield Child(some[0].name, put_page(self._put, Page(children=tuple(some)), size, entries))
                some = []


def put_page(put: Put, page: Page, size: int, entries: int) -> Link:
    data = encode(page)
    return Link(put(data), len(data), size, entries)


def put_list(put: Put, parts: Sequence[Part]) -> Link:
    data = encode(ChunkList(b"".join(part.id for part in parts), tuple(part.chunk_length for part in parts)))
    return Link(put(data), len(data), sum(part.length for part in parts), 0)


def links_of(page: Page) -> Iterable[tuple[Link, bool]]:
    """Yield the links of a page; True with those that lead to a page, False with those to a list of chunks."""
    for child in page.children:
        yield child.link, True
    for entry in page.entries:
        for link in entry.lists:
            yield link, stat.S_ISDIR(entry.mode)


def fresh(links: Iterable[tuple[Link, bool]], seen: set[Link]) -> Iterator[tuple[Link, bool]]:
    """Yield the links that were not seen, and note them as seen."""
    for link, is_page in links:
        if link not in seen:
            seen.add(link)
            yield link, is_page
