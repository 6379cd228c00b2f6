"""A data set's tree by numbers, as a file system shows it. No I/O.

The top is number 1, and the entries below it follow, a directory before what it holds. Links say how many entries lie behind
them, so a number leads to its entry without a table, and stays the same on every node. What is not here yet is asked for by
raising `Lacking`; the caller brings it and asks again.
"""

import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ckptstore.dataset import (
    MAX_LEVELS,
    ChunkList,
    Entry,
    Link,
    Page,
    check_place,
    check_root,
    decode_list,
    decode_page,
)
from ckptstore.encoding import Bytes
from ckptstore.errors import BadManifest, CorruptChunk, NotFound
from ckptstore.pack import ID_BYTES

TOP = 1
MAX_OPENED = 128  # pages, and as many lists, that are kept decoded: 30 MB (own choice)

Give = Callable[[bytes, int], Bytes]  # returns a verified chunk by its id and length, or raises Lacking


class Lacking(Exception):
    """A chunk is needed first."""

    def __init__(self, identity: bytes, length: int) -> None:
        super().__init__(identity.hex())
        self.id, self.length = identity, length


class Found(NamedTuple):
    """An entry. `after`: the number that follows all that is below it. `parts`: the directories above it, and its own name."""

    number: int
    after: int
    entry: Entry
    page: Page
    parts: tuple[bytes, ...]


class Opened(NamedTuple):
    """A page, with the number of each entry or child relative to the page's first."""

    page: Page
    starts: list[int]
    names: list[bytes]


class DataView:
    """Raises Lacking, NotFound, and BadManifest, BadPath or CorruptChunk if the data set is not valid."""

    def __init__(self, root: Link, give: Give) -> None:
        check_root(root)
        self._root, self._give = root, give
        # What raises, such as Lacking, is not kept.
        self._opened: Callable[[Link], Opened] = lru_cache(MAX_OPENED)(self._open)
        self._list: Callable[[Link], tuple[ChunkList, list[int]]] = lru_cache(MAX_OPENED)(self._open_list)

    def at(self, number: int) -> Found:
        """Return the entry with a number other than that of the top."""
        link, first, parts = self._root, TOP + 1, tuple[bytes, ...]()
        while True:
            found = self._first_from(link, first, number, parts)
            if found.number == number:
                return found
            if not found.number < number < found.after:
                raise NotFound(f"this data set has no entry {number}")
            link, first, parts = found.entry.lists[0], found.number + 1, found.parts

    def lookup(self, directory: int, name: bytes) -> Found:
        link, first, parts = self._directory(directory)
        for _ in range(MAX_LEVELS + 1):
            opened = self._opened(link)
            place = bisect_right(opened.names, name) - 1
            if opened.page.children:
                place = max(0, place)
                link, first = opened.page.children[place].link, first + opened.starts[place]
                continue
            if place < 0 or opened.names[place] != name:
                raise NotFound(f"{name!r} is not in this directory")
            return self._found(opened, place, first, parts)
        raise _too_deep()

    def listing(self, directory: int, at: int) -> Iterator[Found]:
        """Yield the entries of a directory from number `at` on; from its first if that is 0."""
        link, first, parts = self._directory(directory)
        at, end = max(at, first), first + link.entries
        while at < end:
            found = self._first_from(link, first, at, parts)
            if found.number != at:
                raise NotFound(f"{at} is not in this directory")
            yield found
            at = found.after

    def parts(self, found: Found, offset: int, size: int) -> Iterator[tuple[bytes, int, int, int]]:
        """Yield what holds these bytes of a file: a chunk's id and length, and the offset and length in it."""
        end = min(offset + size, found.entry.size)
        for at, identity, chunk_length, start, length in self._stored(found, offset, end):
            low, high = max(offset, at), min(end, at + length)
            if low < high:
                yield identity, chunk_length, start + low - at, high - low

    def content(self, found: Found, offset: int, size: int) -> list[Bytes]:
        """Return these bytes of a file; fewer at its end."""
        pieces: list[Bytes] = []
        for identity, chunk_length, start, length in self.parts(found, offset, size):
            data = memoryview(self._give(identity, chunk_length))
            if len(data) != chunk_length:
                raise CorruptChunk("a chunk does not have the length that its page says")
            pieces.append(data[start : start + length])
        return pieces

    def _stored(self, found: Found, offset: int, end: int) -> Iterator[tuple[int, bytes, int, int, int]]:
        at = 0
        for ref in found.entry.refs:
            yield at, found.page.chunk(ref.number), found.page.lengths[ref.number], ref.offset, ref.length
            at += ref.length
        for link in found.entry.lists:
            if at < end and offset < at + link.size:
                known, starts = self._list(link)
                place = max(0, bisect_right(starts, offset - at) - 1)
                while place < len(starts) and at + starts[place] < end:
                    length = known.lengths[place]
                    yield at + starts[place], known.ids[place * ID_BYTES : (place + 1) * ID_BYTES], length, 0, length
                    place += 1
            at += link.size

    def _directory(self, number: int) -> tuple[Link, int, tuple[bytes, ...]]:
        """Return the page of a directory, the number of its first entry, and its path."""
        if number == TOP:
            return self._root, TOP + 1, ()
        found = self.at(number)
        if not stat.S_ISDIR(found.entry.mode):
            raise NotFound(f"{number} is no directory")
        return found.entry.lists[0], number + 1, found.parts

    def _first_from(self, link: Link, first: int, number: int, parts: tuple[bytes, ...]) -> Found:
        """Return the last entry of a directory that has no higher number than this."""
        for _ in range(MAX_LEVELS + 1):
            opened = self._opened(link)
            place = bisect_right(opened.starts, number - first) - 1
            if place < 0:
                raise NotFound(f"this data set has no entry {number}")
            if not opened.page.children:
                return self._found(opened, place, first, parts)
            link, first = opened.page.children[place].link, first + opened.starts[place]
        raise _too_deep()

    def _found(self, opened: Opened, place: int, first: int, parts: tuple[bytes, ...]) -> Found:
        entry, number = opened.page.entries[place], first + opened.starts[place]
        check_place(parts, entry)
        return Found(number, number + 1 + _below(entry), entry, opened.page, (*parts, entry.name))

    def _open(self, link: Link) -> Opened:
        page = decode_page(self._give(link.id, link.length), link)
        if page.children:
            counts, names = [one.link.entries for one in page.children], [one.name for one in page.children]
        else:
            counts, names = [1 + _below(one) for one in page.entries], [one.name for one in page.entries]
        return Opened(page, _starts(counts), names)

    def _open_list(self, link: Link) -> tuple[ChunkList, list[int]]:
        """Return a list of chunks, and where in the list's bytes each of them begins."""
        chunks = decode_list(self._give(link.id, link.length), link)
        return chunks, _starts(chunks.lengths)


def _starts(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))[:-1]


def _below(entry: Entry) -> int:
    return entry.lists[0].entries if stat.S_ISDIR(entry.mode) else 0


def _too_deep() -> BadManifest:
    return BadManifest("a directory of a data set has too many levels of index pages")
