"""A check that a container sees its GPUs.

An engine may silently drop a device request (Podman 4.3), and a reload of systemd takes devices from running containers (NVIDIA's
container toolkit, issues 48 and 1227); only a check from inside finds out. A lost GPU is the node's fault: the job resumes
elsewhere from its checkpoint. The guest can kill the probe, or have no memory left for it: only words of the probe count.
"""

import asyncio
from pathlib import Path

import aiohttp

from membership.malformed import MALFORMED
from mesh.execution.docker.socket import EngineSocket

PROBE = ("nvidia-smi", "-L")  # added to the container by the toolkit's capability `utility`
PATH = "/usr/bin:/bin:/usr/local/nvidia/bin"  # not the job's: a program of its own could blame the node
PROBE_S = 30.0  # it takes a second if the driver has to wake up (own choice)
EVERY_S = 30.0  # dstack's shim looks as often
CANNOT_RUN = {126, 127}
SIGNALS = range(129, 193)  # codes of a program that a signal ended
# What nvidia-smi says of a lost GPU or driver (its source is closed: messages that its users report).
LOSSES = ("NVML", "NVIDIA-SMI", "No devices were found", "Unable to determine the device handle")
TIMES = 2  # that the probe must say it (own choice)


def missing(told: str, uuids: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of these GPUs that the probe did not list."""
    return tuple(uuid for uuid in uuids if uuid not in told)


async def look(engine: EngineSocket, container: str, pid: int, uuids: tuple[str, ...]) -> str:
    """Return what is wrong with its GPUs, if the probe says so each time; empty if nothing is, or it is paused or has ended."""
    wrong = ""
    for _ in range(TIMES):
        wrong = await _look_once(engine, container, pid, uuids)
        if not wrong:
            break
    return wrong


async def _look_once(engine: EngineSocket, container: str, pid: int, uuids: tuple[str, ...]) -> str:
    try:
        async with asyncio.timeout(PROBE_S):
            code, told = await engine.execute(container, PROBE, PATH)
    except (TimeoutError, OSError, aiohttp.ClientError, *MALFORMED):
        return ""
    if code in CANNOT_RUN:
        seen = await asyncio.to_thread(_device_files, pid)
        if seen is None or seen >= len(uuids):
            return ""
        return f"its container has {seen} of {len(uuids)} GPUs: its engine does not pass GPUs on"
    if code != 0:
        if code in SIGNALS or not any(words in told for words in LOSSES):
            return ""
        return f"its container lost its GPUs: {told.strip()[:200]}"
    lost = missing(told, uuids)
    return f"its container does not see {', '.join(lost)}" if lost else ""


def _device_files(pid: int) -> int | None:
    """Count the GPU device files in its file system; None if it cannot be read."""
    try:
        return sum(path.name[6:].isdigit() for path in Path(f"/proc/{pid}/root/dev").glob("nvidia*"))
    except OSError:
        return None
