"""The errors and messages for "no daemon answers", shared by the command line and `import mesh`."""

from pathlib import Path

from mesh.util.errors import ExitCode, MeshError


class NoDaemon(MeshError):
    """No daemon answers on a node's socket. `runs`: there is one, which hangs or is too busy."""

    def __init__(self, why: str, next_step: str, runs: bool = False) -> None:
        super().__init__(f"no daemon answers: {why}. {next_step}", ExitCode.NO_DAEMON)
        self.runs = runs


def none_runs(root: Path) -> NoDaemon:
    if not (root / "genesis").exists():  # it would refuse to start
        return NoDaemon(f"{root} belongs to no mesh yet", "`mesh join INVITE` joins one, `mesh init NAME` founds one")
    return NoDaemon(f"none runs with {root}", "Start one with `mesh up`")


def no_state(root: Path) -> NoDaemon:
    return NoDaemon(f"{root} does not exist", "Name the node's state directory with --state")


def of_another_user(path: Path) -> NoDaemon:
    return NoDaemon(f"{path} belongs to another user", "Run this as that user")


def hangs(pid: int | None) -> NoDaemon:
    which = f"that with pid {pid}" if pid is not None else "the one here"
    return NoDaemon(
        f"{which} hangs, or is too busy",
        "`mesh status --log` shows its log; `mesh killall` ends all guests without it",
        runs=True,
    )


def stopped() -> NoDaemon:
    return NoDaemon("it stopped while it answered", "`mesh status --log` shows its last messages, `mesh up` starts it")


def unusable_socket(path: Path, error: OSError) -> NoDaemon:
    return NoDaemon(f"{path} cannot be used ({error})", "Choose another state directory with --state")
