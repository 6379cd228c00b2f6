"""Byte counts as text, in binary units."""

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def amount(count: float) -> str:
    """Format a byte count, as `1.2 GiB`."""
    unit = _unit(count)
    return f"{count / 1024**unit:.1f} {UNITS[unit]}" if unit else f"{count:.0f} {UNITS[0]}"


def part(done: float, total: float) -> str:
    """Format progress in bytes, as `1.2 of 3.0 GiB`."""
    unit = _unit(total)
    return f"{min(done, total) / 1024**unit:.{min(unit, 1)}f} of {amount(total)}"


def _unit(count: float) -> int:
    return next((unit for unit in range(len(UNITS) - 1, 0, -1) if count >= 1024**unit), 0)
