"""Suggest existing commands for one that does not exist."""

from collections.abc import Iterator
from difflib import get_close_matches

import click

MOST = 3  # suggestions (own choice)
ALIKE = 0.7  # difflib's ratio: with its default, `user` is like `pause` (own choice)
ELSEWHERE = {  # Slurm's, PBS's and Docker's names, and words for the same
    "sbatch": "submit",
    "srun": "run",
    "squeue": "ps",
    "sacct": "ps -a",
    "scancel": "cancel",
    "sinfo": "nodes",
    "scontrol": "describe",
    "qsub": "submit",
    "qstat": "ps",
    "qdel": "cancel",
    "jobs": "ps",
    "ls": "ps",
    "list": "ps",
    "inspect": "describe",
    "kill": "cancel",
    "rm": "cancel",
    "shell": "exec",
    "ssh": "exec",
    "start": "up",
    "stop": "down",
    "resume": "lend",
    "unpause": "lend",
    "admit": "member approve",
    "user": "member ls",
    "users": "member ls",
}


def meant(word: str, root: click.Group, within: str) -> list[str]:
    """Return commands of `root` that `word` may stand for, given in the group `within` ('' for `root`)."""
    if word in ELSEWHERE:
        return [ELSEWHERE[word]]
    paths = list(_paths(root))
    if same := [path for path in paths if path.split()[-1] == word]:
        return same[:MOST]
    for group in (within, None):
        words = {path.split()[-1]: path for path in reversed(paths) if group in (None, path.rpartition(" ")[0])}
        if near := get_close_matches(word, words, 1, ALIKE):
            return [words[near[0]]]
    return []


def _paths(root: click.Group) -> Iterator[str]:
    context = click.Context(root)
    for name in root.list_commands(context):
        yield name
        command = root.get_command(context, name)
        if isinstance(command, click.Group):
            yield from (f"{name} {inner}" for inner in command.list_commands(context))
