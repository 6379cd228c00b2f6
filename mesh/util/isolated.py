"""Commands that run one module in a bare interpreter, for helpers that must survive the daemon's failures."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def isolated(package: str, module: str, run: str = "", packages: bool = False) -> list[str]:
    """Return the command that runs `main` of a module, or `run`, in a bare interpreter. `packages`: with site-packages."""
    load = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {package} import {module}; "
    return [sys.executable, "-I", *([] if packages else ["-S"]), "-c", load + (run or f"{module}.main()")]
