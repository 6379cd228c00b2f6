"""Which nodes can go on from a system checkpoint, the memory of a whole container, that was made on another.

CRIU puts registers, memory and descriptors back as they were, so whatever they depend on must be equal. A node says in one line
what it is in that respect; a checkpoint keeps the line of its maker, and only nodes with an equal one can take it.
"""

import msgspec

MAX_WORDS = 300  # characters; adverts travel in sections of 16 KiB; ours


class SystemCheckpoints(msgspec.Struct, frozen=True):
    """`like`: what a node must be equal to, to go on from one of this node's; empty where none can be made. `problem`: why, in
    words. `gpu_like` and `gpu_problem`: the same for jobs that have GPUs."""

    like: str = ""
    problem: str = "it does not offer them"
    gpu_like: str = ""
    gpu_problem: str = "it does not offer them"

    @property
    def possible(self) -> bool:
        """Whether they could be offered at all, on these terms."""
        lines = (self.like, self.problem, self.gpu_like, self.gpu_problem)
        return all(len(line) <= MAX_WORDS and line.isprintable() for line in lines)

    def refusal(self, gpus: bool, like: str) -> str | None:
        """Why a job that is saved so, with or without GPUs, cannot be here; None if it can. `like`: what the maker of its last
        checkpoint was, empty if it has none."""
        own, problem = (self.gpu_like, self.gpu_problem) if gpus else (self.like, self.problem)
        if not own:
            return f"makes no system checkpoints{' of jobs with GPUs' if gpus else ''}: {problem}"
        if like and own != like:
            return f"is too unlike the node that made its system checkpoint: that was {like}; this is {own}"
        return None
