"""The machine with the fake GPUs: a file that all processes given its name share, made and watched from here."""

import ctypes
import dataclasses
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.fake.build import Fakes
from tests.fake.profiles import PROFILES, Traits

DEVICES = 16
PROFILE_ENV = "FAKE_GPU_PROFILE"  # for worlds that name no profile
MIB = 1 << 20


class _Traits(ctypes.Structure):
    """`struct world_traits`."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        *(
            (field.name, ctypes.c_int64 if field.name.endswith(("_ns", "_bps")) else ctypes.c_uint32)
            for field in dataclasses.fields(Traits)
            if field.name != "seed"
        ),
    )


class _Config(ctypes.Structure):
    """`struct world_config`."""

    _fields_ = (
        ("traits", _Traits),
        *((name, ctypes.c_uint64) for name in ("memory", "granule", "pool_chunk", "context_bytes")),
        *((name, ctypes.c_int64) for name in ("slice_ns", "tick_ns", "sample_ns", "virtual_ns")),
        *((name, ctypes.c_uint32) for name in ("devices", "driver_version", "capability", "queue_depth")),
        ("name", ctypes.c_char * 96),
        ("uuids", ctypes.c_ubyte * 16 * DEVICES),
    )


class World:
    """Devices of one model, each with `memory` bytes. Times are in nanoseconds of CLOCK_MONOTONIC, or of a clock that only
    moves by `advance` and when a process waits (`virtual`). `profile` names what makes the devices less convenient, see
    profiles.py; further arguments change single traits of it."""

    def __init__(
        self,
        path: Path,
        fakes: Fakes,
        *,
        devices: int = 1,
        memory: int = 16384 * MIB,
        name: str = "Fake H200",
        uuids: Sequence[uuid.UUID] = (),
        capability: int = 90,
        driver_version: int = 13000,
        virtual: bool = False,
        slice_ns: int = 2_500_000,
        granule: int = 2 * MIB,
        pool_chunk: int = 32 * MIB,
        context_bytes: int = 300 * MIB,
        queue_depth: int = 1024,
        tick_ns: int = 500,
        sample_ns: int = 166_666_667,
        profile: str | None = None,
        **traits: int,
    ) -> None:
        self.path = path
        self.fakes = fakes
        self.devices = devices
        self.device_memory = memory
        self.uuids = [*uuids, *(uuid.uuid4() for _ in range(devices - len(uuids)))]
        self._library = ctypes.CDLL(str(fakes.world))
        chosen = PROFILES[profile or os.environ.get(PROFILE_ENV, "plain")]
        self.traits = dataclasses.replace(chosen, **traits)
        config = _Config(
            _Traits(*dataclasses.astuple(self.traits)),
            memory, granule, pool_chunk, context_bytes, slice_ns, tick_ns, sample_ns, int(virtual),
            devices, driver_version, capability, queue_depth, name.encode(),
        )  # fmt: skip
        for row, number in zip(config.uuids, self.uuids, strict=False):
            row[:] = number.bytes
        self._library.python_config_size.restype = ctypes.c_size_t
        assert self._library.python_config_size() == ctypes.sizeof(config)
        self._library.python_open.restype = ctypes.c_void_p
        error = self._library.python_create(os.fsencode(path), ctypes.byref(config))
        if error:
            raise OSError(error, os.strerror(error), str(path))
        self._world = ctypes.c_void_p(self._library.python_open(os.fsencode(path)))
        if not self._world:
            raise OSError(f"{path} cannot be mapped: too many worlds are open")

    def close(self) -> None:
        """Nothing of it can be asked any more."""
        world, self._world = self._world, None
        if world:
            self._library.python_close(world)

    def _ask(self, name: str, *words: object) -> int:
        call = getattr(self._library, f"python_{name}")
        call.restype = ctypes.c_int64
        return int(call(self._world, *words))

    def environment(self, *, fail: str = "") -> dict[str, str]:
        """Return the variables by which a process finds this world; `fail` as "cuMemAlloc_v2:3=2,cuLaunchKernel:1=719"."""
        return {"FAKE_GPU_WORLD": str(self.path), **({"FAKE_FAIL": fail} if fail else {})}

    def calls(self, name: str) -> int:
        """Return how often all processes called an export of the driver."""
        count = self._ask("calls", name.encode())
        if count < 0:
            raise KeyError(name)
        return count

    def executed_ns(self, pid: int, device: int = 0) -> int:
        """Return the device time of a process, also of an ended one: the measure of shares."""
        return self._ask("executed_ns", pid, device)

    def last_ns(self, pid: int, device: int = 0) -> int:
        """Return when the device last worked for a process: now, if it does; 0 if it never did."""
        return self._ask("last_ns", pid, device)

    def busy_ns(self, device: int = 0) -> int:
        return self._ask("busy_ns", device)

    def copied_ns(self, device: int = 0) -> int:
        """Time in which anything was copied between the host and the device."""
        return self._ask("copied_ns", device)

    def pending(self, pid: int) -> int:
        """Kernels and other pieces of work that the process has submitted and that are not done."""
        return self._ask("pending", pid)

    def memory(self, pid: int, device: int = 0) -> int:
        """Bytes of the device that the process has, with those of its context."""
        return self._ask("memory", pid, device)

    def used(self, device: int = 0) -> int:
        """Bytes of the device that all processes have."""
        return self._ask("used", device)

    def now_ns(self) -> int:
        return self._ask("now_ns")

    def advance(self, ns: int) -> None:
        """Lets virtual time pass."""
        if self._ask("advance", ctypes.c_int64(ns)):
            raise ValueError("this world's time is real")
