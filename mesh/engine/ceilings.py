"""What an owner lets one guest have of his machine at most. A job cannot raise it: it asks for less, or goes elsewhere."""

import msgspec

from mesh.config import Settings
from mesh.engine.engine import Launch

GIB = 1024  # MiB
KEPT_SHARE, KEPT_MIB = (
    8,
    GIB,
)  # of the memory, one part in so many, at least that, stays the owner's if he says nothing; ours
SHM_SHARE = 2  # of a guest's memory, one part in so many may be shared memory: what Linux gives a tmpfs (tmpfs(5))
PIDS = 4096  # processes and threads; a PyTorch loader has a hundred; ours
LOG_MIB = GIB  # of what an attempt prints: as much as is kept of all that have ended (`joblogs.py`); ours


class Ceilings(msgspec.Struct, frozen=True):
    """`cpus` and `disk_mib` None: no ceiling is set. `disk_mib` is of its directories and its log together, `log_mib` of that."""

    memory_mib: int
    pids: int = PIDS
    cpus: float | None = None
    shm_mib: int | None = None
    disk_mib: int | None = None
    log_mib: int = LOG_MIB

    def refusal(self, memory_mib: int | None, cpus: float | None) -> str:
        """Why a job that asks for this cannot have it here; empty if it can."""
        if memory_mib is not None and memory_mib > self.memory_mib:
            return f"its owner lends {self.memory_mib} MiB of memory to a job, {memory_mib} asked"
        if cpus is not None and self.cpus is not None and cpus > self.cpus:
            return f"its owner lends {self.cpus:g} CPUs to a job, {cpus:g} asked"
        return ""

    def applied(self, launch: Launch) -> Launch:
        """The launch within them; what it does not ask for is theirs."""
        memory = self.memory_mib if launch.memory_mib is None else launch.memory_mib
        shm = memory // SHM_SHARE if self.shm_mib is None else min(memory, self.shm_mib)
        cpus = self.cpus if launch.cpus is None else launch.cpus
        return msgspec.structs.replace(launch, memory_mib=memory, cpus=cpus, pids=self.pids, shm_mib=max(1, shm))


def ceilings_of(machine_mib: int, settings: Settings) -> Ceilings:
    """As the owner has set them, on a machine with so much memory."""
    kept, most = max(KEPT_MIB, machine_mib // KEPT_SHARE), settings.max_memory_gib
    memory = max(1, machine_mib - kept) if most is None else min(machine_mib, int(most * GIB))
    shm, disk = (None if gib is None else int(gib * GIB) for gib in (settings.shm_gib, settings.max_disk_gib))
    return Ceilings(memory, settings.max_pids, settings.max_cpus, shm, disk, int(settings.max_log_gib * GIB))
