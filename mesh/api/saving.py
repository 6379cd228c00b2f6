"""How a job that is submitted is to be saved, from what its user said."""

from mesh.api.errors import ExitCode, MeshError
from mesh.api.orders import SubmitOrder
from mesh.jobs.spec import Checkpointing


def checkpointing_of(order: SubmitOrder, chosen: tuple[bytes, ...]) -> Checkpointing | None:
    """None for a job without checkpoints; `chosen`: the nodes that are to hold them."""
    if order.ckpt_mode == "system":
        if order.ckpt is not None:
            words = "--ckpt-mode system saves the whole container, whatever it writes: leave out --ckpt"
            raise MeshError(words, ExitCode.USAGE)
        every = "auto" if order.ckpt_every is None else order.ckpt_every
        return Checkpointing(mode="system", every=every, replicas=order.replicas, to=chosen)
    if order.ckpt is None:
        if chosen or order.ckpt_every is not None:
            raise MeshError("--ckpt-to and --ckpt-every need --ckpt DIR: which holds checkpoints?", ExitCode.USAGE)
        return None
    return Checkpointing(
        directory=order.ckpt.rstrip("/").removeprefix("./"),
        mode=order.ckpt_mode,
        keep=order.keep,
        replicas=order.replicas,
        to=chosen,
        every=order.ckpt_every,
    )
