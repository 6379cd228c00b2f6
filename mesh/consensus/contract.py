"""Contract with guests (docs/reference/job-contract.md): the meaning of exit codes as one pure function, progress, gang
environment.

After HTCondor's self-checkpointing exit code (85), EX_TEMPFAIL (75) of sysexits.h, and 128 + signal of shells. A departure is
never an error of the job: only the verdict `failed` spends the error budget.
"""

import signal
from typing import Annotated, Literal

import msgspec

from membership.malformed import MALFORMED
from mesh.consensus.messages import GangPlace

EXIT_CHECKPOINTED = 85  # HTCondor's convention: state is saved, run the job again
EXIT_TEMPFAIL = 75  # sysexits.h EX_TEMPFAIL: try another node
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127  # POSIX shells
EXIT_KILLED = 128 + signal.SIGKILL
TERMINATED = frozenset({128 + signal.SIGTERM, EXIT_KILLED})

MAX_PROGRESS_BYTES = 4096  # a step and a total; a larger file is ignored

VACATED = "vacated: "  # prefix of the reason of an attempt that had to leave

Verdict = Literal["done", "vacated", "checkpointed", "elsewhere", "failed"]


class ExitFacts(msgspec.Struct, frozen=True):
    """The facts known when a guest has ended. `code` is the exit status, or 128 + signal."""

    code: int
    oom: bool
    vacating: bool
    has_checkpoints: bool
    forced_done: bool
    on_exit_0: Literal["resume", "done"]


def judge(facts: ExitFacts) -> Verdict:
    if facts.forced_done and facts.code == 0:
        return "done"
    if facts.code == 0:
        resumes = facts.vacating and facts.has_checkpoints and facts.on_exit_0 == "resume"
        return "vacated" if resumes else "done"
    if facts.code == EXIT_CHECKPOINTED:
        return "vacated" if facts.vacating else "checkpointed"
    if facts.code == EXIT_TEMPFAIL:
        return "elsewhere"
    if facts.vacating and facts.code in TERMINATED:
        return "vacated"
    return "failed"


class Progress(msgspec.Struct, frozen=True):
    """Content of `$MESH_CTL_DIR/progress.json`: steps done, and the total in `of`, 0 if unknown."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    of: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0


_progress_decoder = msgspec.json.Decoder(Progress)


def decode_progress(data: bytes) -> Progress | None:
    """Decode a progress file; None if it is malformed."""
    if len(data) > MAX_PROGRESS_BYTES:
        return None
    try:
        return _progress_decoder.decode(data)
    except MALFORMED:
        return None


def gang_env(place: GangPlace) -> dict[str, str]:
    """Return the environment of one guest of a gang.

    It holds this project's variables, those of `torch.distributed` for one process per node, and torchrun's (`PET_*` are the
    defaults of its options).
    """
    rank, size, port = str(place.rank), str(place.size), str(place.port)
    mesh = {"MESH_NODE_RANK": rank, "MESH_NODES": size}
    process = {"MASTER_ADDR": place.host, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    torchrun = {"NODE_RANK": rank, "NNODES": size, "MASTER_ADDR": place.host, "MASTER_PORT": port}
    return mesh | process | {f"PET_{name}": value for name, value in torchrun.items()}


def describe_exit(code: int, oom: bool) -> str:
    """Describe an exit, and what to do about it where that is known. `oom`: its node saw the kernel kill for memory.

    A program may choose any code, and a shell passes on how its command ended: without a fact the text says what the code is
    used for, not what happened.
    """
    if oom:
        killed = "killed for memory" if code == EXIT_KILLED else "one of its processes was killed for memory"
        return f"exit {code}, {killed}: ask for more with --memory, or use less"
    if code == EXIT_NOT_FOUND:
        return "exit 127, as of a shell that does not find a command: its log may name it"
    if code == EXIT_NOT_EXECUTABLE:
        return "exit 126, as of a shell that cannot execute a file: its log may name it"
    if code == EXIT_KILLED:
        return "exit 137, as after SIGKILL; its node saw no kill for memory"
    name = _signal_name(code - 128)
    return f"exit {code}, as after {name}" if name else f"exit {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
