"""docs/platforms.md, from the results of `make test-machines`."""

from typing import Any

from tests.machines.checks import CORE

UNTRIED = ("skipped", "did not run", "no test ran")  # how an answer begins that says nothing about the engine
HEAD = """# Platforms

<!-- Made by `make test-machines` (tests/machines); do not edit by hand. -->

What ran on whole machines of today's Debian, with the wheel installed by `pipx`. The machines are emulated
(QEMU), so nothing here is a measurement of speed. Written on {date} at commit {commit}; each row names the commit that it
tried.

## Engines
The core of the contract that every engine keeps ([engines](explanation/engines.md)). "yes": its tests passed; "no": one
failed; "not tried": one did not run. The number leads to the reason below.

"""
LIMITS = """
## Limits of the process engine
How a daemon was started, and what limits a guest of its process engine as a whole. "yes" means that a guest had its `memory.max`
and that one over it was ended.

"""
SYSTEM = """
## System checkpoints
A Python program that saves nothing moved between two nodes with a Podman each, with notice and without, and its result was that
of an undisturbed run, byte for byte.

| system | kernel | by | | commit |
|---|---|---|---|---|
"""
MESH = """
## Two machines
"""


def page(results: dict[str, Any], date: str, commit: str) -> str:
    """Return the page."""
    reasons: list[str] = []

    def cell(answer: str) -> str:
        if answer == "ok":
            return "yes"
        if answer not in reasons:
            reasons.append(answer)
        tried = not answer.startswith(UNTRIED)
        return f"{'no' if tried else 'not tried'} ({reasons.index(answer) + 1})"

    lines = [HEAD.format(date=date, commit=commit)]
    lines.append(f"| system | kernel | engine | {' | '.join(CORE)} | commit |\n|{'---|' * (4 + len(CORE))}\n")
    for row in _by_system(results["engines"]):
        told = [cell(row["contract"].get(aspect, "did not run")) for aspect in CORE]
        lines.append(
            f"| {row['system']} | {row['kernel']} | {row['engine']} | {' | '.join(told)} | {row['commit']} |\n"
        )
    if results["system"]:
        lines.append(SYSTEM)
    for row in _by_system(results["system"]):
        lines.append(f"| {row['system']} | {row['kernel']} | {row['by']} | {cell(row['saved'])} | {row['commit']} |\n")
    lines += [
        LIMITS,
        f"| system | the daemon was started | limited | not limited | its group | commit |\n|{'---|' * 6}\n",
    ]
    for row in _by_system(results["limits"]):
        missing = ", ".join(row["unlimited"]) or "nothing"
        bound = "yes" if row["bound"] else "no"
        lines.append(f"| {row['system']} | {row['how']} | {bound} | {missing} | `{row['group']}` | {row['commit']} |\n")
    remedies = {f"{row['how']}: {row['limits_by']}" for row in results["limits"] if row["limits_by"]}
    if remedies:
        lines += [
            "\nWhat `mesh doctor` says about what is not limited:\n\n",
            *(f"- {text}\n" for text in sorted(remedies)),
        ]
    lines += [MESH, *(f"- {text}\n" for text in results["mesh"] or ["nothing yet"])]
    if results["failed"]:
        lines += [
            "\n## What failed or did not end\n",
            *(f"- {what}: {_plain(why)}\n" for what, why in results["failed"].items()),
        ]
    if reasons:
        lines.append("\n## Reasons\n")
        lines += [f"{number}. {_plain(reason)}\n" for number, reason in enumerate(reasons, 1)]
    return "".join(lines)


def _by_system(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: str(row["system"]))


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
