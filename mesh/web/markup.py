"""HTML and SVG as text. Whatever is not `Markup` already is escaped: names of jobs, of nodes and in a world's file may be
anything."""

from mesh.util.sanitize import fit

_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;"})
VOID = {"meta", "br", "hr", "link", "input"}
Value = str | float | None


class Markup(str):
    """Text that is safe in a document as it stands."""

    __slots__ = ()


def escape(text: str) -> Markup:
    if isinstance(text, Markup):
        return text
    return Markup(fit(text).translate(_ENTITIES))


def number(value: float) -> str:
    """Format with at most two decimals: a pixel needs no more."""
    written = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def element(name: str, /, *inside: str, **attributes: Value) -> Markup:
    """`class_` and `aria_label` are `class` and `aria-label`; an attribute that is None is left out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            written = value if isinstance(value, str) else number(value)
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(fit(written))}"')
    opening = " ".join(words)
    if name in VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{join(*inside)}</{name}>")


def join(*parts: str) -> Markup:
    return Markup("".join(escape(part) for part in parts))


def cut(text: str, most: int) -> str:
    """Shorten to at most `most` characters, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
