"""What makes a fake device less convenient, each switchable: `plain` has none of it, `harsh` has all.

The figures of `harsh` are at the far end of what is published for real devices, so what holds on it should hold on them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """`struct world_traits`; 0 disables a trait. Parts are in millionths."""

    seed: int = 1
    load_least_ns: int = 0  # a kernel's first launch in a process takes the host this long, at the least
    load_most_ns: int = 0  # and at the most
    record_ns: int = 0  # an event takes its stream this long
    call_ns: int = 0  # to record or query an event or to query a stream takes the host this long
    clock_ns: int = 0  # time until the device's clock changes
    slot_ns: int = 0  # NVML counts slots of this length in which anything ran, and tells of them one period late
    copy_ns: int = 0  # the least time of a copy
    link_bps: int = 0  # bytes/s between the host and the device, each way, for all copies together
    memory_bps: int = 0  # bytes/s of copies within the device and of fills
    spread_ppm: int = 0  # sigma of the log-normal duration of a kernel
    slow_one_in: int = 0  # one in so many launches is slow
    slow_times: int = 1  # by this factor
    width_least_ppm: int = (
        0  # the least part of the device that a kernel fills; kernels that want more than all slow down
    )
    clock_least_ppm: int = 1_000_000  # the lowest clock
    aliases: int = 0  # cuGetProcAddress gives addresses that no export has


HARSH = Traits(
    # Loading at first use: CUDA Programming Guide, "Lazy Loading"; from 0.3 ms to load a kernel to 200 ms to compile its PTX.
    load_least_ns=300_000,
    load_most_ns=200_000_000,
    # An event's timestamps have a resolution of 0.5 us (CUDA Driver API, cuEventElapsedTime); on an H100 a marker takes its
    # stream ten times that (measured: median 5 us, 14 us in one of 100).
    record_ns=5_000,
    call_ns=1_000,
    # Boost clocks follow power and temperature: kernels of one GPU differ by 8 % on average, up to 22 % (Sinha et al., "Not All
    # GPUs Are Created Equal", SC 2022). An H200 may fall from 1980 MHz to its base clock of 1365 MHz (NVIDIA's data sheet).
    clock_ns=100_000_000,
    clock_least_ppm=690_000,
    # "Percent of time over the past sample period during which one or more kernels was executing", each period 1/6 to 1 s
    # (NVML API Reference, nvmlUtilization_t).
    slot_ns=1_000_000,
    # PCIe 5.0 x16 has 63 GB/s each way before its protocol; an H200 has 4.8 TB/s of memory, which a copy reads and writes.
    copy_ns=2_000,
    link_bps=50_000_000_000,
    memory_bps=2_000_000_000_000,
    # Data-dependent work: durations of one kernel have several modes and long tails (Sinha et al.; Gujarati et al., "Serving
    # DNNs like Clockwork", OSDI 2020, chose inference because it has neither).
    spread_ppm=300_000,
    slow_one_in=50,
    slow_times=4,
    # Few kernels fill a device alone, and those that do not slow each other down (Strati et al., "Orion", EuroSys 2024).
    width_least_ppm=300_000,
    aliases=1,
)

PROFILES = {"plain": Traits(), "harsh": HARSH}
