"""A reader of BPF object files from clang: the instructions of each section, and where map addresses belong.

It reads only the parts of ELF that such objects have (elf(5); the BPF instruction set is RFC 9669). No I/O. Other bytes raise
ObjectError.
"""

import struct

import msgspec

MACHINE = 247  # EM_BPF
SYMBOLS, STRINGS_OF_CODE, RELOCATIONS = 2, 1, 9  # SHT_SYMTAB, SHT_PROGBITS, SHT_REL
IN_CODE = 0x4  # SHF_EXECINSTR
MAP_ADDRESS = 1  # R_BPF_64_64
LOAD_64, FROM_MAP = 0x18, 1  # BPF_LD | BPF_DW | BPF_IMM; BPF_PSEUDO_MAP_FD
INSTRUCTION_BYTES = 8


class ObjectError(ValueError):
    """Not a BPF object from clang, or one that needs features not supported here."""


class Code(msgspec.Struct, frozen=True):
    """One program. `maps`: the byte offsets in its instructions that need a map's address, with the map's name."""

    instructions: bytes
    maps: tuple[tuple[int, str], ...]

    def with_maps(self, descriptors: dict[str, int]) -> bytes:
        """Return the instructions with map descriptors filled in; the kernel replaces them by addresses."""
        made = bytearray(self.instructions)
        for at, name in self.maps:
            if name not in descriptors:
                raise ObjectError(f"the program names {name!r}, which is not a map")
            made[at + 1] = (made[at + 1] & 0x0F) | FROM_MAP << 4
            struct.pack_into("<i", made, at + 4, descriptors[name])
        return bytes(made)


class Object(msgspec.Struct, frozen=True):
    programs: dict[str, Code]
    terms: str


class _Section(msgspec.Struct, frozen=True):
    name: str
    kind: int
    flags: int
    data: bytes
    link: int
    info: int


def read_object(data: bytes) -> Object:
    try:
        return _read(data)
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError) as error:
        raise ObjectError(f"a damaged object: {error}") from error


def _read(data: bytes) -> Object:
    if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<H", data, 18)[0] != MACHINE:
        raise ObjectError("not an object for BPF")
    sections = _sections(data)
    terms = next((section.data for section in sections if section.name == "license"), b"").split(b"\0")[0].decode()
    programs = {}
    for number, section in enumerate(sections):
        if section.kind != STRINGS_OF_CODE or not section.flags & IN_CODE or not section.data:
            continue
        if len(section.data) % INSTRUCTION_BYTES:
            raise ObjectError(f"section {section.name} ends within an instruction")
        programs[section.name] = Code(section.data, tuple(_maps(sections, number)))
    if not programs:
        raise ObjectError("an object without a program")
    return Object(programs, terms)


def _sections(data: bytes) -> list[_Section]:
    start, size, count, names_at = (
        struct.unpack_from("<Q", data, 40)[0],
        *struct.unpack_from("<HHH", data, 58),
    )
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    names = data[heads[names_at][4] : heads[names_at][4] + heads[names_at][5]]
    return [
        _Section(_text(names, name), kind, flags, data[offset : offset + length], link, info)
        for name, kind, flags, _, offset, length, link, info, _, _ in heads
    ]


def _maps(sections: list[_Section], number: int) -> list[tuple[int, str]]:
    found = []
    for section in sections:
        if section.kind != RELOCATIONS or section.info != number:
            continue
        symbols = sections[section.link]
        names = sections[symbols.link].data
        for at, info in struct.iter_unpack("<QQ", section.data):
            kind, symbol = info & 0xFFFFFFFF, info >> 32
            name = _text(names, struct.unpack_from("<I", symbols.data, symbol * 24)[0])
            code = sections[number].data
            if kind != MAP_ADDRESS or at % INSTRUCTION_BYTES or code[at : at + 1] != bytes([LOAD_64]):
                raise ObjectError(f"the program needs {name!r} at byte {at}, which is not a map address")
            if at + 2 * INSTRUCTION_BYTES > len(code):
                raise ObjectError(f"an address of {name!r} past the end")
            found.append((at, name))
    return found


def _text(table: bytes, at: int) -> str:
    if at >= len(table):
        raise ObjectError("a name outside the table of names")
    return table[at : table.index(b"\0", at)].decode() if b"\0" in table[at:] else table[at:].decode()
