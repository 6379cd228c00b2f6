"""Which version this is: its number, and the commit that it was made from."""

from pathlib import Path

from mesh import __version__

COMMIT = "COMMIT"  # beside this file, in what is installed
GIT_S = 2.0  # ours; a version is told in any case


def release() -> str:
    """As `0.1.0 (6ec0e09b1c2d)`; without the commit where nobody knows it."""
    commit = built_from(Path(__file__).parents[1])
    return f"{__version__} ({commit})" if commit else __version__


def built_from(root: Path) -> str:
    """The commit of the code under `root`: as the build has noted it, or as git says; empty if neither does."""
    noted = root / "mesh" / COMMIT
    if noted.is_file():
        return noted.read_text(encoding="utf-8", errors="replace").strip()
    if not (root / ".git").exists():
        return ""
    import subprocess

    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
