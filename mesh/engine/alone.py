"""How helpers that must outlast the daemon's troubles are started: a bare interpreter, the standard library, one module."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def alone(module: str, run: str = "") -> list[str]:
    """The command that runs `main` of this module of `mesh.engine`, or `run`, in an interpreter without site-packages."""
    load = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from mesh.engine import {module}; "
    return [sys.executable, "-I", "-S", "-c", load + (run or f"{module}.main()")]
