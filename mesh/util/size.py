"""Amounts of memory as people write them: `6g`, `512m`, `1.5g`, or a plain number of MiB."""

UNITS = {"m": 1, "g": 1024, "t": 1024 * 1024}


class SizeError(ValueError):
    """A text is not an amount of memory."""


def parse_size(text: str) -> int:
    """Return MiB. SizeError says what is wrong."""
    plain = text.lower().removesuffix("ib").removesuffix("b")
    number, unit = (plain[:-1], UNITS[plain[-1]]) if plain and plain[-1] in UNITS else (plain, 1)
    try:
        mebibytes = int(float(number) * unit)
    except (ValueError, OverflowError):
        mebibytes = -1
    if not 0 <= mebibytes < 2**31:
        raise SizeError(f"{text!r} is not a size: write 6g, 512m or a number of MiB")
    return mebibytes
