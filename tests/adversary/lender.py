"""A hostile lender: what it sends instead of a job's files, log and names."""

import io
import os
import stat
import tarfile
from collections.abc import Iterator

from mesh.api.file_stream import Data, End, Entry, frame

# Names that move the cursor, set the window's title, write the clipboard, reverse or hide text, or fake a line of output.
HOSTILE_NAMES = (
    "\x1b[2J\x1b[Hcleared",
    "\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07",
    "\x9b31mred\x90q\x9c",
    "one\r\nSPOOFED two\nSPOOFED three",
    "\u202eleft\u202c\u2066isolated\u2069",
    "zero\u200bwidth\u2060\ufeff\u00ad",
    "e" + "\u0301" * 500,
    "\u6f22\u5b57\uff21\U0001f600",
    "\u2028SPOOFED separator\x85SPOOFED next line",
    "bell\a back\b\b\b del\x7f tab\t",
    "x" * 10_000,
)
HOSTILE_NAME = " ".join(HOSTILE_NAMES)


def stream(*frames: bytes) -> Iterator[bytes]:
    yield from frames
    yield frame(End())


def file(path: str | bytes, content: bytes = b"hostile\n", mode: int = 0o644) -> bytes:
    name = os.fsencode(path)
    entry = frame(Entry(name, stat.S_IFREG | mode, size=len(content)))
    return entry + (frame(Data(0, len(content)), content) if content else b"")


def directory(path: str, mode: int = 0o755) -> bytes:
    return frame(Entry(os.fsencode(path), stat.S_IFDIR | mode))


def link(path: str, target: str) -> bytes:
    return frame(Entry(os.fsencode(path), stat.S_IFLNK | 0o777, target=os.fsencode(target)))


def device(path: str, kind: int) -> bytes:
    return frame(Entry(os.fsencode(path), kind | 0o666))


def escaping_tar() -> bytes:
    """Return the archive of CVE-2025-4517: links whose resolved path is longer than PATH_MAX, which `filter="data"` misreads."""
    long, steps = "d" * 247, "abcdefghijklmnop"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, kind: bytes, target: str = "", content: bytes = b"") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size, info.mode = kind, target, len(content), 0o755
            tar.addfile(info, io.BytesIO(content))

        path = ""
        for step in steps:
            add(f"{path}{long}", tarfile.DIRTYPE)
            add(f"{path}{step}", tarfile.SYMTYPE, long)
            path += f"{long}/"
        chain = f"{'/'.join(steps)}/{'l' * 254}"
        add(chain, tarfile.SYMTYPE, "../" * len(steps))
        add("escape", tarfile.SYMTYPE, f"{chain}/../outside")
        add("escape/newfile", tarfile.REGTYPE, content=b"written outside\n")
    return buffer.getvalue()


def as_stream(archive: bytes, top: str = "out") -> Iterator[bytes]:
    """Yield the members of a tar archive as the frames that this lender would send."""
    yield directory(top)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = f"{top}/{member.name}"
            if member.issym():
                yield link(name, member.linkname)
            elif member.isdir():
                yield directory(name, member.mode)
            else:
                opened = tar.extractfile(member)
                yield file(name, opened.read() if opened is not None else b"", member.mode)
    yield frame(End())
