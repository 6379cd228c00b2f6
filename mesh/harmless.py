"""Names and words of others, made fit for one line of a terminal: nothing in them moves the cursor, colours, hides, reorders or
stacks; and as wide as there is room."""

import unicodedata

from rich.cells import cell_len, set_cell_size

LONGEST = 200  # characters looked at; no column is as wide; ours
MARKS = 2  # combining marks on one letter: Vietnamese has two, and a pile of them covers other lines
REPLACED = "�"
# Controls, bidirectional overrides and other invisible signs, half surrogates, private use, not assigned, line separators.
HOSTILE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def harmless(text: str) -> str:
    """One line of printable signs; what is not is replaced, so that it is seen that something was there."""
    text = text[:LONGEST]
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = 0
    for sign in unicodedata.normalize("NFC", text):
        category = unicodedata.category(sign)
        if category in {"Mn", "Me"}:
            marks += 1
            if shown and marks <= MARKS and category == "Mn" and cell_len(sign) == 0:
                shown.append(sign)
            continue
        marks = 0
        if sign in "\t\n\r" or category == "Zs":
            shown.append(" ")
        else:
            shown.append(REPLACED if category in HOSTILE else sign)
    return "".join(shown)


def width_of(text: str) -> int:
    """In cells of a terminal; `text` is harmless."""
    return len(text) if text.isascii() else cell_len(text)


def cut(text: str, width: int, right: bool = False) -> str:
    """Exactly `width` cells: filled up with spaces, or cut with an ellipsis at its end."""
    wide = width_of(text)
    if wide > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return " " * (width - wide) + text if right else text + " " * (width - wide)
