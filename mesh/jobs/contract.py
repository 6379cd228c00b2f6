"""What a guest says to the mesh (docs/job-contract.md): its exit, by the exit table as one pure function, and its progress.

After HTCondor's self-checkpointing exit code (85), sysexits' EX_TEMPFAIL (75) and the shell's 128+signal. A departure is
never an error of the job: only `Failed` spends its error budget.
"""

from typing import Annotated, Literal

import msgspec

from mesh.jobs.messages import Post

EXIT_CHECKPOINTED = 85  # HTCondor's ERESTART: state is saved, run me again
EXIT_TEMPFAIL = 75  # sysexits.h EX_TEMPFAIL: this node is no good, try another
EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127  # POSIX shells
_TERMINATED = frozenset({143, 137})  # 128 + SIGTERM, 128 + SIGKILL

MAX_PROGRESS_BYTES = 4096  # a step and a total; a guest that writes more says nothing

VACATED = "vacated: "  # as the reason of an attempt that had to leave begins

Verdict = Literal["done", "vacated", "checkpointed", "elsewhere", "failed"]


class ExitFacts(msgspec.Struct, frozen=True):
    """What is known when a guest has ended. `code` is the exit status, or 128 + signal."""

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
    if facts.vacating and facts.code in _TERMINATED:
        return "vacated"
    return "failed"


class Progress(msgspec.Struct, frozen=True):
    """`$MESH_CTL_DIR/progress.json`: how far the guest is, `of` being 0 when it does not know the total."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    of: Annotated[int, msgspec.Meta(ge=0, lt=2**53)] = 0


_progress_decoder = msgspec.json.Decoder(Progress)


def decode_progress(data: bytes) -> Progress | None:
    """What the guest wrote, or None if that says nothing."""
    if len(data) > MAX_PROGRESS_BYTES:
        return None
    try:
        return _progress_decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def gang_env(post: Post) -> dict[str, str]:
    """The environment of one guest of a gang: ours, that of `torch.distributed` for one process a node, and torchrun's own
    (`PET_*` are the defaults of its options)."""
    rank, size, port = str(post.rank), str(post.size), str(post.port)
    ours = {"MESH_NODE_RANK": rank, "MESH_NODES": size}
    process = {"MASTER_ADDR": post.host, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    torchrun = {"NODE_RANK": rank, "NNODES": size, "MASTER_ADDR": post.host, "MASTER_PORT": port}
    return ours | process | {f"PET_{name}": value for name, value in torchrun.items()}


def describe_exit(code: int, oom: bool) -> str:
    """An exit in words, with what to do about it where that is known."""
    if oom:
        return "killed for memory: ask for more with --memory, or use less"
    if code == EXIT_NOT_FOUND:
        return "exit 127: command not found (is it in the working directory or the image?)"
    if code == EXIT_NOT_EXECUTABLE:
        return "exit 126: found but not executable (chmod +x, or name its interpreter)"
    if code > 128:
        return f"ended by signal {code - 128}"
    return f"exit {code}"
