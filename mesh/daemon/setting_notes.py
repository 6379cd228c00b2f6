"""Descriptions of the settings, for `mesh config` and the documentation: the comments of `Settings`."""

import ast
import io
import tokenize
from pathlib import Path

from mesh.daemon import config

UNITS = {"_gib": "GiB", "_mib_s": "MiB/s", "_s": "seconds", "_days": "days", "_mbps": "megabits per second"}
DEFAULT = "default: "  # begins the words for what holds without a value


def setting_notes() -> dict[str, str]:
    """Return the comment of each setting: on its lines, else on the line above."""
    source = Path(config.__file__).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    owner = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Settings")
    notes = {}
    for field in owner.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            own = range(field.lineno, (field.end_lineno or field.lineno) + 1)
            lines = [line for line in own if line in comments] or [field.lineno - 1]
            notes[field.target.id] = " ".join(comments.get(line, "") for line in lines).rstrip(".")
    return notes


def unset_words(note: str) -> str:
    """Return what holds where a setting has no value."""
    return note.partition(DEFAULT)[2] or "-"


def unit_of(key: str) -> str:
    return next((unit for ending, unit in UNITS.items() if key.endswith(ending)), "")
