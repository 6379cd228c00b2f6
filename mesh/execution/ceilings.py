"""The owner's ceilings: the most that one guest may use. A job cannot raise them; it asks for less or runs elsewhere."""

import msgspec

from mesh.execution.engine import Launch

GIB = 1024  # MiB
# By default the owner keeps an eighth of the memory, and at least 1 GiB (own choice).
KEPT_SHARE, KEPT_MIB = 8, GIB
SHM_SHARE = 2  # half of a guest's memory may be shared memory: Linux's default for a tmpfs (tmpfs(5))
PIDS = 4096  # processes and threads; a PyTorch data loader has about a hundred (own choice)
LOG_MIB = GIB  # output of one attempt: as much as is kept of all ended attempts (mesh/jobs/logs.py)


class Ceilings(msgspec.Struct, frozen=True):
    """Limits of one guest. None: no limit.

    `disk_mib` covers its directories and its log together, `log_mib` the log alone; `disk_bps` is a rate (`Launch`).
    """

    memory_mib: int
    pids: int = PIDS
    cpus: float | None = None
    shm_mib: int | None = None
    disk_mib: int | None = None
    log_mib: int = LOG_MIB
    disk_bps: int | None = None

    def refusal(self, memory_mib: int | None, cpus: float | None) -> str:
        """Return why a job that asks for this cannot run here; empty if it can."""
        if memory_mib is not None and memory_mib > self.memory_mib:
            return f"its owner lends at most {self.memory_mib} MiB of memory to a job, and it asks for {memory_mib}"
        if cpus is not None and self.cpus is not None and cpus > self.cpus:
            return f"its owner lends at most {self.cpus:g} CPUs to a job, and it asks for {cpus:g}"
        return ""

    def applied(self, launch: Launch, sets: bool = True) -> Launch:
        """Return the launch within these limits; what it does not ask for is set to the limit if the engine `sets` it."""
        memory = self.memory_mib if launch.memory_mib is None else launch.memory_mib
        shm = memory // SHM_SHARE if self.shm_mib is None else min(memory, self.shm_mib)
        launch = msgspec.structs.replace(launch, disk_bps=self.disk_bps)
        if not sets:
            return msgspec.structs.replace(launch, shm_mib=max(1, shm))
        cpus = self.cpus if launch.cpus is None else launch.cpus
        return msgspec.structs.replace(launch, memory_mib=memory, cpus=cpus, pids=self.pids, shm_mib=max(1, shm))
