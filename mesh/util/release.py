"""The version of this installation, with the commit that it was built from."""

from pathlib import Path

from mesh.util.version import VERSION

COMMIT = "COMMIT"  # a file in an installed mesh package
GIT_S = 2.0  # timeout of git; without an answer the version has no commit (own choice)


def release() -> str:
    """Return the version, as `0.1.0 (6ec0e09b1c2d)`; without the commit if it is unknown."""
    commit = built_from(Path(__file__).parents[2])
    return f"{VERSION} ({commit})" if commit else VERSION


def built_from(root: Path) -> str:
    """Return the commit of the code under `root`, from the build or from git; empty if unknown."""
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
