"""The calls of bpf(2) that the edge needs, and the file system for pinned objects.

Standard library only: the kill path must load where nothing else does. Every error is an OSError that says what failed. Needs
Linux 5.11 or newer (earlier, RLIMIT_MEMLOCK limits maps) and 64 bits.
"""

import ctypes
import os
import platform
import struct
from pathlib import Path

# asm/unistd.h; machines that are not listed share the generic table.
CALL = {"x86_64": 321, "ppc64le": 361, "s390x": 351}.get(platform.machine(), 280)
MAP_CREATE, MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, PROG_LOAD, OBJ_PIN, OBJ_GET = 0, 1, 2, 3, 5, 6, 7  # enum bpf_cmd
HASH, ARRAY = 1, 2  # enum bpf_map_type
SCHED_CLS = 3  # enum bpf_prog_type
ATTR_BYTES = 128  # of union bpf_attr, the part used here; the rest is zero
NAME_BYTES = 15
LOG_BYTES = 1 << 20
MAGIC = 0xCAFE4A11  # BPF_FS_MAGIC in linux/magic.h
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Rejected(OSError):
    """The kernel rejected a program; `log` is the verifier's log."""

    def __init__(self, number: int, text: str, log: str) -> None:
        super().__init__(number, text)
        self.log = log


class Map:
    """An open map from u32 to u32."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def make(cls, kind: int, name: str, entries: int) -> "Map":
        body = struct.pack("=IIIII II 16s", kind, 4, 4, entries, 0, 0, 0, _name(name))
        return cls(_bpf(MAP_CREATE, body, f"make the map {name}"))

    @classmethod
    def pinned(cls, path: Path) -> "Map":
        return cls(open_pinned(path))

    def get(self, key: int) -> int | None:
        where, value = ctypes.c_uint32(key), ctypes.c_uint32()
        try:
            _bpf(MAP_LOOKUP, _element(self.fd, where, value), "read a map")
        except FileNotFoundError:
            return None
        return value.value

    def put(self, key: int, value: int) -> None:
        where, what = ctypes.c_uint32(key), ctypes.c_uint32(value)
        _bpf(MAP_UPDATE, _element(self.fd, where, what), "write a map")

    def drop(self, key: int) -> None:
        """Remove a key; no error if it is missing."""
        where = ctypes.c_uint32(key)
        try:
            _bpf(MAP_DELETE, _element(self.fd, where, None), "remove from a map")
        except FileNotFoundError:
            return

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


class Store:
    """One value for one key, prepared so that writing it takes one system call and no allocation, from any thread."""

    def __init__(self, target: Map, key: int, value: int) -> None:
        self._key, self._value = ctypes.c_uint32(key), ctypes.c_uint32(value)
        self._attr = ctypes.create_string_buffer(_element(target.fd, self._key, self._value), ATTR_BYTES)

    def __call__(self) -> None:
        _call(MAP_UPDATE, self._attr, "write a map")


def load_program(name: str, instructions: bytes, terms: str) -> int:
    """Load a program; return its descriptor. Rejected if the kernel's verifier refuses it."""
    code, licence = ctypes.create_string_buffer(instructions), ctypes.create_string_buffer(terms.encode())

    def body(log: ctypes.Array[ctypes.c_char] | None) -> bytes:
        level, size, where = (1, len(log), ctypes.addressof(log)) if log is not None else (0, 0, 0)
        start = struct.pack(
            "=IIQQ", SCHED_CLS, len(instructions) // 8, ctypes.addressof(code), ctypes.addressof(licence)
        )
        return start + struct.pack("=IIQII 16s", level, size, where, 0, 0, _name(name))

    try:
        return _bpf(PROG_LOAD, body(None), f"load the program {name}")
    except OSError as error:
        log = ctypes.create_string_buffer(LOG_BYTES)
        try:
            return _bpf(PROG_LOAD, body(log), f"load the program {name}")
        except OSError:
            verifier_log = log.value.decode(errors="replace")
            raise Rejected(error.errno or 0, f"cannot load the program {name}", verifier_log) from error


def pin(fd: int, path: Path) -> None:
    """Pin an object under a name in a mounted bpf file system."""
    text = ctypes.create_string_buffer(os.fsencode(path))
    _bpf(OBJ_PIN, struct.pack("=QII", ctypes.addressof(text), fd, 0), f"pin {path}")


def open_pinned(path: Path) -> int:
    text = ctypes.create_string_buffer(os.fsencode(path))
    return _bpf(OBJ_GET, struct.pack("=QII", ctypes.addressof(text), 0, 0), f"open {path}")


def is_mounted(directory: Path) -> bool:
    """Return whether a bpf file system is mounted there."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs begins with f_type, a long
    if _libc.statfs(os.fsencode(directory), buffer) != 0:
        return False
    return bool(struct.unpack_from("@l", buffer.raw)[0] & 0xFFFFFFFF == MAGIC)


def mount(directory: Path) -> None:
    done = _libc.mount(b"bpf", os.fsencode(directory), b"bpf", ctypes.c_ulong(0), b"mode=0700")
    _check(done, f"mount a bpf file system on {directory}")


def unmount(directory: Path) -> None:
    """Unmount a bpf file system. Attached programs keep running; only their names are gone."""
    _check(_libc.umount2(os.fsencode(directory), MNT_DETACH), f"unmount {directory}")


def _element(fd: int, key: ctypes.c_uint32, value: ctypes.c_uint32 | None) -> bytes:
    """Return the attributes of an element call. They hold the addresses of `key` and `value`, which must outlive them."""
    where = ctypes.addressof(value) if value is not None else 0
    return struct.pack("=I4xQQQ", fd, ctypes.addressof(key), where, 0)


def _bpf(command: int, body: bytes, what: str) -> int:
    return _call(command, ctypes.create_string_buffer(body, ATTR_BYTES), what)


def _call(command: int, attr: ctypes.Array[ctypes.c_char], what: str) -> int:
    return _check(_libc.syscall(CALL, command, attr, ATTR_BYTES), what)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {what}: {os.strerror(number)}")
    return int(result)


def _name(text: str) -> bytes:
    return text.encode()[:NAME_BYTES]
