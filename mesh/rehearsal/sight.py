"""Why does no checkpoint come? Told from what lies in its directory, and beside it."""

from mesh.rehearsal.facts import Sight

TOLD = 4
STABLE_S = 2.0  # the quiet that `--ckpt-mode stable` waits for (mesh/jobs/spec.py)
KEPT = "docs/job-contract.md, Checkpoints"


def diagnose(sight: Sight, directory: str, mode: str, ended: bool) -> tuple[str, str]:
    """Why, and what to do."""
    if sight.trouble:
        return (
            f"it could not be stored: {sight.trouble}",
            "see whether the disk of the temporary directory has room ($TMPDIR)",
        )
    if not sight.entries:
        return _nothing_there(sight, directory, ended)
    names = _names([entry.name for entry in sight.entries])
    unfinished = [entry.name for entry in sight.entries if not entry.final]
    if len(unfinished) == len(sight.entries) or (mode == "stable" and unfinished):
        return (
            f"in {directory} there is {_names(unfinished)}, a name of something unfinished",
            f"rename it once it is written: no dot at its beginning, no .tmp .part .partial .incomplete at its end ({KEPT})",
        )
    if mode == "marker":
        return (
            f"none of {names} in {directory} holds a file COMMITTED, which --ckpt-mode marker waits for",
            "write an empty file COMMITTED into it, last of all; or rehearse with --ckpt-mode rename or stable",
        )
    if mode == "stable":
        return _never_quiet(sight, directory)
    return f"{names} in {directory} came too late to be stored", "raise --limit, or give it more to do"


def _nothing_there(sight: Sight, directory: str, ended: bool) -> tuple[str, str]:
    if sight.strays:
        files = _names([f"{path} ({size} bytes)" for path, size in sight.strays])
        parent = sight.strays[0][0].rpartition("/")[0]
        other = f"rehearse with --ckpt {parent}, or let it write" if parent else "let it write"
        return (
            f"{directory} stays empty, but it wrote {files} in its working directory",
            f"if that is the checkpoint: {other} to $MESH_CKPT_DIR",
        )
    later = "if its first checkpoint would have come later, " + ("give it more to do" if ended else "raise --limit")
    return (
        f"{directory} stays empty, and it wrote nothing else below its working directory",
        f"if it writes to an absolute path, let it write to $MESH_CKPT_DIR; {later}",
    )


def _never_quiet(sight: Sight, directory: str) -> tuple[str, str]:
    names = _names([entry.name for entry in sight.entries])
    if sight.open:
        return (
            f"a file in {directory} ({names}) stays open for writing",
            f"close it when it is written; or write new files and rename them, with --ckpt-mode rename ({KEPT})",
        )
    newest = min(entry.age_s for entry in sight.entries)
    if newest < STABLE_S:
        return (
            f"something in {directory} ({names}) changes more often than every {STABLE_S:g} s, "
            "and --ckpt-mode stable waits for that long a quiet",
            f"write new files under a temporary name and rename them, with --ckpt-mode rename ({KEPT})",
        )
    return f"{names} in {directory} came too late to be stored", "raise --limit"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
    return ", ".join(names[:TOLD]) + more
