"""Lookup of a node or job by name, id, or a prefix of either. No I/O."""

from collections.abc import Mapping

from mesh.util.errors import ExitCode, MeshError


def node_meant(text: str, nicks: Mapping[str, str], users: Mapping[str, str], *, whole: bool = False) -> str:
    """Return the id of the node that `text` names. `nicks`, `users`: by id; `whole`: prefixes of names do not count.

    A full name beats a full id, and that beats prefixes. MeshError if no node or several nodes match.
    """
    fits = [node for node, nick in nicks.items() if nick == text] or [node for node in nicks if node == text.lower()]
    if not fits and text:
        begins = [node for node, nick in nicks.items() if nick.startswith(text) and not whole]
        fits = begins + [node for node in nicks if node.startswith(text.lower()) and node not in begins]
    if not fits:
        theirs = [f"{nicks[node]} ({node[:7]})" for node, user in users.items() if text and user == text]
        if theirs:
            raise MeshError(f"{text!r} is a user, not a node: name one of {', '.join(theirs)}", ExitCode.NOT_FOUND)
        known = ", ".join(nicks.values())
        raise MeshError(f"no node called {text!r} (known: {known})", ExitCode.NOT_FOUND)
    if len(fits) > 1:
        raise MeshError(
            f"{text!r} is ambiguous: {', '.join(f'{nicks[node]} ({node[:7]})' for node in fits)}", ExitCode.USAGE
        )
    return fits[0]


def job_name_meant(text: str, names: set[str], own: set[str]) -> str | None:
    """Return the job name that equals `text`, or starts with it; None if there is none. `own`: names of the user's own jobs.

    A full name beats prefixes, and of these one's own beat the others. MeshError if several are left.
    """
    begins = [{name for name in some if text and name.startswith(text)} for some in (own, names)]
    fits = sorted({text} & names or begins[0] or begins[1])
    if len(fits) > 1:
        raise MeshError(f"{text!r} is ambiguous: {', '.join(fits)}", ExitCode.USAGE)
    return fits[0] if fits else None
