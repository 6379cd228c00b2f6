"""Text from other users made safe for one line of a terminal.

It cannot move the cursor, colour, hide, reorder or stack characters.
"""

import re
import unicodedata

LONGEST = 200  # characters; no column is wider (own choice)
MARKS = 2  # combining marks per letter: Vietnamese has two, and many would cover other lines
REPLACED = "�"
# Controls, bidirectional overrides and other invisible characters, surrogates, private use, unassigned, line separators.
HOSTILE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


# Of these, no text of several lines may have any: controls but tab, line feed and carriage return, separators of lines,
# bidirectional overrides, surrogates, and what no document may hold.
_UNFIT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


def fit(text: str) -> str:
    """Replace what no text of several lines may have: it could move the cursor, or turn text around."""
    return _UNFIT.sub(REPLACED, text)


def sanitize(text: str, most: int = LONGEST) -> str:
    """Return one line of printable characters, `most` at most; others are replaced by a visible sign."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = 0
    for sign in unicodedata.normalize("NFC", text):
        category = unicodedata.category(sign)
        if category in {"Mn", "Me"}:
            marks += 1
            if shown and marks <= MARKS and category == "Mn":
                shown.append(sign)
            continue
        marks = 0
        if sign in "\t\n\r" or category == "Zs":
            shown.append(" ")
        else:
            shown.append(REPLACED if category in HOSTILE else sign)
    return "".join(shown)


def width_of(text: str) -> int:
    """Return the width of sanitized text in terminal cells.

    Terminals differ about some signs: skin tones, vowels of some scripts, what another version of Unicode has made wide.
    """
    if text.isascii():
        return len(text)
    return sum(map(_cells, text))


def _cells(sign: str) -> int:
    if unicodedata.category(sign) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(sign) in {"W", "F"} else 1


def cut(text: str, width: int, right: bool = False) -> str:
    """Return exactly `width` cells: padded with spaces, or cut with an ellipsis."""
    wide = width_of(text)
    if wide > width:
        kept, room = "", width - 1
        for sign in text:
            room -= _cells(sign)
            if room < 0:
                break
            kept += sign
        return cut(kept, width - 1) + "…" if width > 0 else ""
    return " " * (width - wide) + text if right else text + " " * (width - wide)
