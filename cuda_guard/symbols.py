"""Symbols: the functions a CUDA driver exports, compared with those the guard knows.

`python -m cuda_guard.symbols [LIBRARY|HEADER ...]` lists the functions of a driver or header that the guard lacks, and fails if
there are any, or one that it forwards for no known reason; with
`--write` it adds them to `native/exports.def`, whose functions are forwarded to the driver.
"""

import mmap
import re
import struct
import sys
from pathlib import Path

from cuda_guard.build import NATIVE

EXPORTS = NATIVE / "exports.def"
HOOKS = NATIVE / "hooks.def"
# ruff: noqa: E501 (patterns)
# Why a call is only forwarded, by its name. A call of exports.def that fits nothing here, or looks like work or memory, is unclassified.
FORWARDED = {
    "reads or sets an attribute": r"cu\w*(Get|Set|Query|Info|Attribute|CanAccess|IsCapturing|Advise|Flush|Peer)\w*",
    "loads code, which is charged as overhead": r"cu(Module|Library|Link|Kernel|Func|Param|Launch)\w*(?<!Kernel)",
    "makes or changes a handle of the driver": r"cu(Init|Ctx|Device|Dev|Stream|Event|Green|User|Thread|Tex|Surf|Tensor|Occupancy)\w*",
    "builds a graph, which is charged when launched": r"cuGraph[A-Z]\w*",
    "frees, shares or reserves without memory behind it": r"cu(Mem(Address|Free|Export|Map|Pool)|Multicast|Ipc|LogicalEndpoint)\w*",
    "debugging and profiling": r"cu(Profiler|Coredump|Logs|Logical)\w*",
    "memory and events of graphics or other processes": r"cu(Graphics|GL|VDPAU|EGL|Import|Destroy|External|Signal|Wait)\w*",
    "asks for a process's state, or ends what its owner began": r"cuCheckpoint(ProcessGetState|ProcessGetRestoreThreadId|OperationComplete)",
}
LIKE_WORK = (
    r"cu(Launch(?!HostFunc)|Memcpy|Memset|MemAlloc|MemCreate|MemHostAlloc|ArrayCreate|Array3DCreate|GraphLaunch)\w*"
)
SHT_DYNSYM = 11
STB_LOCAL = 0
STT_FUNC = 2


def known() -> set[str]:
    """Return all functions that the guard exports."""
    found = re.compile(r"^(?:EXPORT|HOOK|COPY|PAUSE|DENY)\((\w+)", re.MULTILINE)
    return {name for path in (EXPORTS, HOOKS) for name in found.findall(path.read_text())}


def unclassified(forwarded: set[str] | None = None) -> list[str]:
    """Return the forwarded calls for which no reason is known, or that look like work or memory."""
    names = set(re.findall(r"^EXPORT\((\w+)", EXPORTS.read_text(), re.MULTILINE)) if forwarded is None else forwarded
    reasons = list(FORWARDED.values())
    return sorted(n for n in names if re.fullmatch(LIKE_WORK, n) or not any(re.fullmatch(why, n) for why in reasons))


def missing_in_guard(library: Path) -> list[str]:
    """Return the functions that the driver exports and the guard does not, so that a program cannot find them by name.

    Debugger functions are left out. ValueError unless it is a 64-bit ELF library.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return sorted(name for name in exported(data) - known() if not name.startswith("cudbg"))


def exported(library: bytes | mmap.mmap) -> set[str]:
    """Return the functions `cu*` that an ELF library exports. ValueError if it cannot be parsed."""
    try:
        return set(_functions(library))
    except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
        raise ValueError(f"not an ELF library: {error}") from error


def _functions(data: bytes | mmap.mmap) -> list[str]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF library")
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + size * number) for number in range(count)]
    names = []
    for section in sections:
        if section[1] != SHT_DYNSYM:
            continue
        strings = sections[section[6]]
        text = data[strings[4] : strings[4] + strings[5]]
        for at in range(section[4], section[4] + section[5], 24):
            name, info, _, index, _, _ = struct.unpack_from("<IBBHQQ", data, at)
            if index and info >> 4 != STB_LOCAL and info & 15 == STT_FUNC:
                names.append(text[name : text.index(b"\0", name)].decode("ascii"))
    return [name for name in names if name.startswith("cu")]


def declared(header: str) -> set[str]:
    """Return the functions that NVIDIA's header declares, with the variants for per-thread default streams."""
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", header))
    names |= {versioned for _, versioned in re.findall(r"#define\s+(cu[A-Z]\w+)\s+(cu[A-Z]\w+_v\d+)\b", header)}
    names |= {f"{name}_ptds" for name in re.findall(r"__CUDA_API_PTDS\((cu\w+)\)", header)}
    names |= {f"{name}_ptsz" for name in re.findall(r"__CUDA_API_PTSZ\((cu\w+)\)", header)}
    return names


def main(arguments: list[str]) -> int:
    write = "--write" in arguments
    missing: set[str] = set()
    for path in (Path(argument) for argument in arguments if argument != "--write"):
        data = path.read_bytes()
        names = exported(data) if data.startswith(b"\x7fELF") else declared(data.decode(errors="replace"))
        unknown = {name for name in names - known() if not name.startswith("cudbg")}
        print(f"{path}: {len(names)} functions, {len(unknown)} of them unknown to the guard")
        missing |= unknown
    for name in sorted(missing):
        print(f"  {name}")
    if write and missing:
        text = EXPORTS.read_text()
        comment, lines = text[: text.index("EXPORT(")], text[text.index("EXPORT(") :].splitlines()
        EXPORTS.write_text(comment + "\n".join(sorted({*lines, *(f"EXPORT({name})" for name in missing)})) + "\n")
    for name in unclassified():
        print(f"  {name}: why is it only forwarded?")
    return int(bool(unclassified()) or (bool(missing) and not write))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
