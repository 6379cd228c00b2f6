"""HTML and SVG as text. Whatever is not `Markup` already is escaped: names of jobs, of nodes and in a world's file may be
anything."""

import re

# What no document may hold, and what would turn the text beside it around (Unicode Bidirectional Algorithm).
_UNFIT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
VOID = {"meta", "br", "hr", "link", "input"}
Value = str | float | None


class Markup(str):
    """Text that is safe in a document as it stands."""

    __slots__ = ()


def plain(text: str) -> str:
    """Without characters that a document cannot hold."""
    return _UNFIT.sub("\ufffd", text)


def escape(text: str) -> Markup:
    if isinstance(text, Markup):
        return text
    return Markup(plain(text).translate(_ENTITIES))


def number(value: float) -> str:
    """As short as two decimals allow: a pixel needs no more."""
    written = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def element(name: str, /, *inside: str, **attributes: Value) -> Markup:
    """`class_` and `aria_label` are `class` and `aria-label`; an attribute that is None is left out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            written = value if isinstance(value, str) else number(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(plain(written))}"')
    opening = " ".join(words)
    if name in VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(*inside)}</{name}>")


def join(*parts: str) -> Markup:
    return Markup("".join(escape(part) for part in parts))


def cut(text: str, most: int) -> str:
    """At most so many characters, with a sign that there were more."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
