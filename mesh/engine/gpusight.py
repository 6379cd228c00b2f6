"""Whether a container sees the GPUs that it was given. An engine may drop a request for devices without a word (Podman 4.3), and
a reload of systemd takes devices from containers that run (NVIDIA's container toolkit, issues 48 and 1227); only a look from
inside tells. A GPU that is lost is its node's fault: the job goes on elsewhere from its checkpoint.
"""

import asyncio
from pathlib import Path

import aiohttp

from mesh.engine.enginesocket import EngineSocket

PROBE = ("nvidia-smi", "-L")  # which the toolkit brings along with the capability `utility`
PATH = "/usr/bin:/bin:/usr/local/nvidia/bin"  # not the job's own, which could blame the node for what it has put there
PROBE_S = 30.0  # it takes a second where the driver has to wake up; ours
EVERY_S = 30.0  # dstack's shim looks as often
CANNOT_RUN = {126, 127}


def missing(told: str, uuids: tuple[str, ...]) -> tuple[str, ...]:
    """Of these GPUs, those that the probe did not tell of."""
    return tuple(uuid for uuid in uuids if uuid not in told)


async def look(engine: EngineSocket, container: str, pid: int, uuids: tuple[str, ...]) -> str:
    """What is wrong with what it sees; empty if nothing is, or nobody could look (it is paused or has ended)."""
    try:
        async with asyncio.timeout(PROBE_S):
            code, told = await engine.execute(container, PROBE, PATH)
    except (TimeoutError, OSError, aiohttp.ClientError):
        return ""
    if code in CANNOT_RUN:
        seen = await asyncio.to_thread(_device_files, pid)
        if seen is None or seen >= len(uuids):
            return ""
        return f"its container has {seen} of {len(uuids)} GPUs: its engine does not pass GPUs on"
    if code != 0:
        return f"its container lost its GPUs: {told.strip()[:200]}"
    lost = missing(told, uuids)
    return f"its container does not see {', '.join(lost)}" if lost else ""


def _device_files(pid: int) -> int | None:
    """How many GPUs' device files are in its file system; None if that cannot be looked at."""
    try:
        return sum(path.name[6:].isdigit() for path in Path(f"/proc/{pid}/root/dev").glob("nvidia*"))
    except OSError:
        return None
