"""Colours of the pages and of the simulator's report, light and dark. Near Okabe and Ito's (2008), moved until each stands out
from the ground by 3 to 1, and any two differ, also for who sees no red, no green or no blue. `tests/sim/test_report.py` works
both out."""

import msgspec

LEVELS = 8  # of the heat map


class Palette(msgspec.Struct, frozen=True):
    ground: str
    raised: str
    text: str
    muted: str
    grid: str
    link: str
    series: tuple[str, ...]
    heat: tuple[str, ...]  # from nothing to all
    heat_text: tuple[str, ...]


LIGHT = Palette(
    ground="#ffffff",
    raised="#f4f6f8",
    text="#1a1a1a",
    muted="#565f68",
    grid="#dde2e7",
    link="#00599c",
    series=("#00599c", "#e46c14", "#008d5e", "#a24a7e", "#1a1a1a", "#755800", "#1097fd"),
    heat=("#f7fbff", "#e1edf8", "#c8ddf0", "#a3cce3", "#73b2d8", "#4191c6", "#1f6cb0", "#084488"),
    heat_text=("#1a1a1a",) * 5 + ("#000000",) + ("#ffffff",) * 2,
)
DARK = Palette(
    ground="#15181c",
    raised="#1e2329",
    text="#e8e6e3",
    muted="#a8b0b8",
    grid="#363d45",
    link="#7cb8f0",
    series=("#4293df", "#efa919", "#2eca9d", "#d46aaa", "#f5f5f5", "#ffe16c", "#d55e00"),
    heat=("#1a2430", "#16334d", "#134668", "#125c86", "#2477a8", "#4a97c4", "#83bbdc", "#c5e0f2"),
    heat_text=("#e8e6e3",) * 4 + ("#ffffff",) + ("#000000",) * 3,
)


def luminance(colour: str) -> float:
    """Relative, of `#rrggbb` (WCAG 2.2)."""
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, from 1 to 21 (WCAG 2.2)."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def linear(colour: str) -> tuple[float, float, float]:
    """Red, green and blue as light, each from 0 to 1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def style(palette: Palette) -> str:
    """Return the palette as custom properties of a style sheet."""
    named = {name: getattr(palette, name) for name in ("ground", "raised", "text", "muted", "grid", "link")}
    for kind in ("series", "heat", "heat_text"):
        named |= {f"{kind.replace('_', '-')}-{place}": colour for place, colour in enumerate(getattr(palette, kind))}
    return "".join(f"--{name}:{colour};" for name, colour in named.items())
