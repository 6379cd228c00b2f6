"""The owner's limits on a job: ceilings, addresses and disk use."""

import asyncio
import contextlib
import mmap
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mesh.daemon.config import Settings, ceilings_of, load_settings
from mesh.execution import disk_usage, limits
from mesh.execution.ceilings import Ceilings
from mesh.execution.disk_usage import NoRoom, Room, Writers
from mesh.execution.docker.gpu_visibility import missing
from mesh.execution.docker.hardening import CDI_KIND, Traits, arguments, cdi_devices
from mesh.execution.engine import EngineError, Launch
from mesh.execution.limits import BoundedEngine
from mesh.execution.process.engine import ProcessEngine
from mesh.execution.wrapped import WrappedGuest
from mesh.network.egress import CAMPUS, chain_of, policy_of, rules
from mesh.util import cgroups
from mesh.util.budget import Budget, OverBudget
from mesh.util.errors import ConfigError
from mesh.util.processes import core_limit
from placement.advert import Portion
from tests.execution.bench import LOOP, WAIT_S, Bench

MIB = 1 << 20
LAUNCH = Launch("j", 0, ("true",), {}, "w", "c", "o", "t", "l", "n", 1.0)


def test_caches_of_a_guest_count_for_its_disk_limit(tmp_path: Path) -> None:
    places = {name: str(tmp_path / name) for name in ("work_dir", "ckpt_dir", "out_dir", "ctl_dir", "cache_dir")}
    for place in places.values():
        Path(place, "inner").mkdir(parents=True)
    launch = msgspec.structs.replace(LAUNCH, **places, log_path=str(tmp_path / "log"))
    before, inodes = limits.used(launch)
    Path(places["cache_dir"], "inner", "file").write_bytes(os.urandom(MIB))
    assert limits.used(launch)[0] >= before + MIB and limits.used(launch)[1] == inodes + 1


def test_launch_gets_the_ceilings_that_it_does_not_ask_for() -> None:
    most = Ceilings(1000, cpus=3.0, disk_bps=5)
    launch = most.applied(LAUNCH)
    assert (launch.memory_mib, launch.cpus, launch.pids, launch.shm_mib, launch.disk_bps) == (1000, 3.0, 4096, 500, 5)
    less = most.applied(msgspec.structs.replace(LAUNCH, memory_mib=100, cpus=0.5))
    assert (less.memory_mib, less.cpus, less.shm_mib) == (100, 0.5, 50)
    assert [Ceilings(1000, shm_mib=shm).applied(LAUNCH).shm_mib for shm in (0, 300, 3000)] == [1, 300, 1000]
    unset = most.applied(msgspec.structs.replace(LAUNCH, pids=7), sets=False)
    assert (unset.memory_mib, unset.cpus, unset.pids, unset.shm_mib, unset.disk_bps) == (None, None, 7, 500, 5)
    assert Ceilings(1).applied(LAUNCH).shm_mib == Ceilings(1).applied(LAUNCH, sets=False).shm_mib == 1


def test_owner_keeps_eighth_of_memory_by_default() -> None:
    assert ceilings_of(64 << 10, Settings()) == Ceilings(56 << 10, 4096, log_mib=1024)
    assert ceilings_of(2 << 10, Settings()).memory_mib == 1 << 10
    assert ceilings_of(512, Settings()).memory_mib == 1
    assert ceilings_of(64 << 10, Settings(max_memory_gib=128.0)).memory_mib == 64 << 10
    said = Settings(max_memory_gib=1.5, max_cpus=2.5, max_pids=100, shm_gib=0.25, max_disk_gib=3.0, max_log_gib=0.01)
    assert ceilings_of(64 << 10, said) == Ceilings(1536, 100, 2.5, 256, 3072, 10)


numbers = some.none() | some.integers(1, 1 << 20)


@given(memory=numbers, cpus=numbers, most=some.integers(1, 1 << 20), most_cpus=numbers, shm=numbers)
def test_launch_never_exceeds_ceiling(
    memory: int | None, cpus: int | None, most: int, most_cpus: int | None, shm: int | None
) -> None:
    ceilings = Ceilings(most, 64, most_cpus, shm)
    bounded = ceilings.applied(msgspec.structs.replace(LAUNCH, memory_mib=memory, cpus=cpus))
    beyond = (memory or 0) > most or (most_cpus is not None and (cpus or 0) > most_cpus)
    assert bool(ceilings.refusal(memory, cpus)) == beyond
    if not beyond:
        assert bounded.memory_mib is not None and bounded.memory_mib <= most and bounded.pids == 64
        assert bounded.shm_mib <= max(1, bounded.memory_mib) and (shm is None or bounded.shm_mib <= shm)
        assert most_cpus is None or (bounded.cpus is not None and bounded.cpus <= most_cpus)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_memory_gib = 0", "max_memory_gib must be a number from 0.01"),
        ("max_cpus = nan", "max_cpus must be a number"),
        ("shm_gib = -1", "shm_gib must be"),
        ("max_disk_gib = inf", "max_disk_gib must be"),
        ("max_log_gib = 0", "max_log_gib must be"),
        ("max_pids = 1", "max_pids must be 16"),
        ('egress = "all"', "egress"),
        ('egress = "list"', "needs egress_allow"),
        ('egress = "list"\negress_allow = ["10.0.0.1/8"]', "is not an IPv4 network"),
        ('egress = "list"\negress_allow = ["fe80::/10"]', "is not an IPv4 network"),
        ('egress = "list"\negress_allow = ["-j ACCEPT"]', "is not an IPv4 network"),
        ('egress_allow = ["10.0.0.0/8"]', "is for egress"),
    ],
)
def test_invalid_setting_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "config.toml").write_text(line)
    with pytest.raises(ConfigError, match=words):
        load_settings(tmp_path / "config.toml", {})


def test_firewall_rules_reject_by_default() -> None:
    """Check the rules; a verdict of ACCEPT would bypass Docker's isolation between bridges."""
    policy = policy_of("list", ("10.1.0.0/16", "192.0.2.7/32"))
    made = rules("mabc", policy)
    assert [rule[2] for rule in made if rule[0] == chain_of("mabc") and rule[1] == "-d"] == list(policy.allowed)
    assert "REJECT" in made[-3] and made[-3][0] == chain_of("mabc") and not any("ACCEPT" in rule for rule in made)
    assert [rule[0] for rule in made[-2:]] == ["DOCKER-USER", "INPUT"]
    assert policy_of("campus", ()).allowed == CAMPUS and policy_of("none", ()).allowed == ()
    assert len(chain_of("m" + "0" * 14)) <= 28, "iptables accepts no longer name"


def test_cdi_devices_are_found() -> None:
    listed = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=GPU-1"}, {"Source": "else", "ID": "x"}]}
    assert cdi_devices(listed) == {"nvidia.com/gpu=GPU-1"} and cdi_devices({}) == frozenset()
    assert cdi_devices({"DiscoveredDevices": None}) == frozenset()


@pytest.mark.parametrize(("listed", "visible"), [((), "GPU-aa,GPU-bb"), (("GPU-aa", "GPU-bb"), "void")])
def test_nvidia_runtime_learns_of_gpus_once(tmp_path: Path, listed: tuple[str, ...], visible: str) -> None:
    gpus = (Portion("GPU-aa", 100, 1024), Portion("GPU-bb", 100, 1024))
    launch = Bench(ProcessEngine(), tmp_path, "image").launch("true", env={"NVIDIA_VISIBLE_DEVICES": "all"}, gpus=gpus)
    chosen = arguments(launch, {}, "none", Traits(cdi=frozenset(CDI_KIND + uuid for uuid in listed)))
    assert chosen["environment"]["NVIDIA_VISIBLE_DEVICES"] == visible
    (request,) = chosen["device_requests"]
    assert [name.removeprefix(CDI_KIND) for name in request["DeviceIDs"]] == ["GPU-aa", "GPU-bb"]


def test_podman_gets_gpus_by_cdi(tmp_path: Path) -> None:
    """Podman 5.8 lists no devices, takes them by CDI, and ignores other requests."""
    launch = Bench(ProcessEngine(), tmp_path, "image").launch("true", gpus=(Portion("GPU-aa", 100, 1024),))
    (request,) = arguments(launch, {}, "none", Traits("Podman"))["device_requests"]
    assert request["Driver"] == "cdi" and request["DeviceIDs"] == ["nvidia.com/gpu=GPU-aa"]


def test_container_has_the_fewest_rights() -> None:
    launch = msgspec.structs.replace(LAUNCH, memory_mib=64, cpus=0.5, pids=7, shm_mib=3)
    chosen = arguments(launch, {"mine": "yes"}, "none", Traits(init=True), {"Volumes": {"/data": {}, "/mesh/out/": {}}})
    rights = {
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "privileged": False,
        "read_only": True,
        "network_mode": "none",
        "ipc_mode": "private",
        "pids_limit": 7,
        "mem_limit": 64 * MIB,
        "memswap_limit": 64 * MIB,
        "nano_cpus": 500_000_000,
        "shm_size": 3 * MIB,
        "healthcheck": {"test": ["NONE"]},
        "device_requests": [],
        "log_config": {"Type": "none", "Config": {}},
        "labels": {"mine": "yes", "campus-mesh.job": "j"},
        "tmpfs": dict.fromkeys(("/tmp", "/data"), "rw,nosuid,nodev,mode=1777,size=1g"),
        "init": True,
    }
    assert {name: chosen[name] for name in rights} == rights
    assert not chosen.keys() & {"cap_add", "devices", "pid_mode", "userns_mode", "uts_mode", "cgroupns", "volumes_from"}
    assert {volume["bind"] for volume in chosen["volumes"].values()} == {
        "/mesh/work",
        "/mesh/ckpt",
        "/mesh/out",
        "/mesh/ctl",
    }
    assert not arguments(msgspec.structs.replace(launch, system=True), {}, "none", Traits(init=True))["init"]
    for user, expected in ((0, "65532:65532"), (1000, "1000:1000")):
        with pytest.MonkeyPatch.context() as here:
            here.setattr(os, "getuid", lambda user=user: user)
            here.setattr(os, "getgid", lambda user=user: user)
            assert arguments(launch, {}, "none", Traits())["user"] == expected


def test_container_makes_no_core_dumps() -> None:
    limit, *_ = arguments(LAUNCH, {}, "none", Traits())["ulimits"]
    assert limit == {"Name": "core", "Soft": core_limit(), "Hard": core_limit()}
    assert "ulimits" not in arguments(LAUNCH, {}, "none", Traits("Podman"))


def test_container_has_its_environment_first_and_cannot_write_it(tmp_path: Path) -> None:
    launch = Bench(ProcessEngine(), tmp_path, "image").launch("python", environment="/made/env")
    bare = arguments(LAUNCH, {}, "none", Traits())
    assert bare["mounts"] == [] and not {"PATH", "PYTHONPATH", "VIRTUAL_ENV"} & set(bare["environment"])
    chosen = arguments(launch, {}, "none", Traits(), {"Env": ["LANG=C", "PATH=/opt/bin:/bin"]})
    (mount,) = chosen["mounts"]
    assert (mount["Source"], mount["Target"], mount["ReadOnly"]) == ("/made/env", "/mesh/env", True)
    assert chosen["environment"]["PATH"] == "/mesh/env/bin:/opt/bin:/bin"
    assert chosen["environment"]["VIRTUAL_ENV"] == "/mesh/env"
    assert chosen["environment"]["PYTHONPATH"] == chosen["environment"]["PYTHONHOME"] == "", "not those of the image"
    own = msgspec.structs.replace(launch, env={"PATH": "/mine", "PYTHONPATH": "src"})
    environment = arguments(own, {}, "none", Traits())["environment"]
    assert environment["PATH"] == "/mesh/env/bin:/mine" and environment["PYTHONPATH"] == "src"


def test_unlisted_gpu_is_missing() -> None:
    told = "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n  MIG 1g.18gb Device 0: (UUID: MIG-bb)\n"
    assert missing(told, ("GPU-aa", "MIG-bb")) == () and missing(told, ("GPU-aa", "GPU-cc")) == ("GPU-cc",)


async def test_request_above_ceiling_is_refused(tmp_path: Path) -> None:
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, cpus=2.0)), tmp_path, None)
    with pytest.raises(EngineError, match="lends at most 1024 MiB of memory to a job, and it asks for 2048"):
        await bench.shell("true", memory_mib=2048)
    with pytest.raises(EngineError, match="lends at most 2 CPUs to a job, and it asks for 3"):
        await bench.shell("true", cpus=3.0)


@pytest.mark.parametrize("where", ["> $MESH_OUT_DIR/big", ""])
async def test_guest_over_disk_limit_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr("mesh.execution.limits.LOOK_S", 0.05)
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, disk_mib=8)), tmp_path, None)
    guest = await bench.shell(f"dd if=/dev/zero bs=1M count=4 {where}; echo fits; {LOOP}")
    await bench.until_logged("fits")
    await asyncio.sleep(0.3)
    assert (await guest.pids()) != frozenset(), "a guest within its limit keeps running"
    await guest.kill()
    guest = await bench.shell(f"dd if=/dev/zero bs=1M count=40 {where}; {LOOP}")
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.code == 137 and "and its limit on this node is 8.0 MiB" in end.detail
    async with asyncio.timeout(WAIT_S):
        while b"mesh: ended: it wrote" not in (tmp_path / "log").read_bytes()[-300:]:
            await asyncio.sleep(0.02)


async def test_guest_that_is_looked_at_rarely_is_looked_at_when_space_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest can make looks dear, and so rare, with many files."""
    monkeypatch.setattr("mesh.execution.limits.LOOK_S", 0.05)
    monkeypatch.setattr("mesh.execution.limits.LOOK_SHARE", 10**9)
    monkeypatch.setattr("mesh.execution.limits.FALL_BYTES", MIB)
    looks, use = threading.Event(), limits.used
    monkeypatch.setattr(limits, "used", lambda *asked: (use(*asked), looks.set())[0])
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, disk_mib=8)), tmp_path, None)
    guest = await bench.shell(
        f"until [ -e $MESH_CTL_DIR/go ]; do sleep 0.02; done; dd if=/dev/zero bs=1M count=40 of=x; {LOOP}"
    )
    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(looks.wait)
        (tmp_path / "ctl" / "go").touch()
        assert "its limit on this node is 8.0 MiB" in (await guest.wait()).detail


def test_directories_take_space(tmp_path: Path) -> None:
    """A directory that had many long names keeps its megabytes on some file systems."""
    (tmp_path / "directory" / "below").mkdir(parents=True)
    (tmp_path / "directory" / "file").touch()
    assert disk_usage.tree_use([tmp_path], of=lambda entry: 1) == (3, 3)


def test_count_ends_where_the_limit_is(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / str(number)).touch()
    roots = [tmp_path] * 5
    assert disk_usage.tree_use(roots, most_bytes=20, of=lambda entry: 2) == (22, 11)
    assert disk_usage.tree_use(roots, most_inodes=20, of=lambda entry: 2) == (42, 21)


@pytest.mark.parametrize(
    ("inodes", "script", "words"),
    [
        (
            None,
            "exec 3>$MESH_OUT_DIR/x; rm $MESH_OUT_DIR/x; dd if=/dev/zero bs=1M count=40 >&3",
            "its limit on this node is 8.0 MiB",
        ),
        (
            None,
            'python3 -c \'import os\nfor _ in range(300): os.mkdir("d"), os.chdir("d")\'',
            "directories in each othe",
        ),
        (
            None,
            'python3 -c \'import os\nfor _ in range(20): os.mkdir("d" * 250), os.chdir("d" * 250)\'',
            "cannot be read (File name too long)",
        ),
        (
            None,
            "seq 200 | xargs touch",
            "it made 101 files and directories, and its limit on this node is 100",
        ),
        (
            22,
            "for n in 1 2 3 4 5 6 7 8 9; do mkdir $n; : > $n/file; done",
            "files and directories, and its limit on this node is 11",
        ),
    ],
)
async def test_guest_cannot_hide_files_or_use_all_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int | None, script: str, words: str
) -> None:
    monkeypatch.setattr("mesh.execution.limits.LOOK_S", 0.05)
    monkeypatch.setattr(limits, "free_inodes", lambda place: inodes)
    monkeypatch.setattr(limits, "MOST_FILES", 100 if "seq" in script else 1000)
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, disk_mib=8)), tmp_path, None)
    guest = await bench.shell(f"{script}; {LOOP}")
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.code == 137 and words in end.detail


async def test_deleted_mapped_file_counts(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\x0bfile")  # a name that is no UTF-8, with a byte at which Python ends lines
    with path.open("w+b") as file:
        file.write(bytes(MIB))
        file.flush()
        mapped = mmap.mmap(file.fileno(), MIB)
        path.unlink()
        assert limits.nameless_bytes([os.getpid()], tmp_path) == MIB
    assert limits.nameless_bytes([os.getpid()], tmp_path) == MIB
    mapped.close()
    assert limits.nameless_bytes([os.getpid()], tmp_path) == 0


def test_links_of_processes_are_counted_to_a_limit(tmp_path: Path) -> None:
    """Every process has more than five open files and mappings, and each is read before the next one counts."""
    with pytest.raises(OverBudget):
        limits.nameless_bytes([os.getpid()], tmp_path, Budget(WAIT_S, entries=5).spend)
    with pytest.raises(OverBudget):
        limits.nameless_bytes([os.getpid()], tmp_path, Budget(0.0).spend)


async def test_guest_that_takes_too_long_to_measure_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOOK_S", 0.05)
    monkeypatch.setattr(limits, "MOST_LINKS", 100)
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024)), tmp_path, None)
    opens = 'n=10; while [ $n -lt 100 ]; do eval "exec $n</dev/null"; n=$((n + 1)); done'
    guest = await bench.start("bash", "-c", f"{opens}; {LOOP}")
    async with asyncio.timeout(WAIT_S):
        assert "too many processes, files or mappings" in (await guest.wait()).detail


async def test_disk_and_log_are_watched_while_a_guest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest chooses how long it takes to measure it: here, until the test is over."""
    monkeypatch.setattr(limits, "LOOK_S", 0.05)
    monkeypatch.setattr(limits, "FALL_BYTES", MIB)
    over, begun, free = threading.Event(), threading.Event(), 1 << 40
    monkeypatch.setattr(limits, "nameless_bytes", lambda *asked: (begun.set(), over.wait(), 0)[2])
    monkeypatch.setattr(limits, "_free_bytes", lambda place: free)
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, disk_mib=8, log_mib=1)), tmp_path, None)
    cut: list[str] = []
    guest = await bench.shell(f"head -c 3000000 /dev/zero; {LOOP}", say=lambda words, about: cut.append(about))
    try:
        async with asyncio.timeout(WAIT_S):
            while not cut or not begun.is_set():
                await asyncio.sleep(0.02)
            free -= 9 * MIB
            assert "its node's disk fills" in (await guest.wait()).fault
    finally:
        over.set()


async def test_long_log_is_cut_and_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.execution.limits.LOOK_S", 0.05)
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, log_mib=1)), tmp_path, None)
    said: list[tuple[str, str]] = []
    prints = "head -c 3000000 /dev/zero"
    guest = await bench.shell(
        f"{prints}; until [ -e $MESH_CTL_DIR/go ]; do sleep 0.02; done; {prints}; echo last; exit 3",
        say=lambda words, about: said.append((words, about)),
    )
    async with asyncio.timeout(WAIT_S):
        while not said:
            await asyncio.sleep(0.02)
        (tmp_path / "ctl" / "go").touch()
        end = await guest.wait()
    words = "log cut at 1.0 MiB: later output is not kept"
    assert (end.code, end.detail) == (3, "") and said == [(words, "log cut")]
    assert (tmp_path / "log").read_bytes() == bytes(MIB) + f"\nmesh: {words}\n".encode()


async def test_largest_writer_ends_when_disk_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill a disk of 16 MiB to less than 2 MiB free, with two guests below their limits of 8 MiB."""
    monkeypatch.setattr("mesh.execution.limits.LOOK_S", 0.05)
    writers, looks = Writers(), 0
    benches: list[Bench] = []

    def usage(path: object) -> SimpleNamespace:
        nonlocal looks
        looks += 1
        return SimpleNamespace(free=16 * MIB - sum(disk_usage.tree_bytes(bench.root) for bench in benches))

    async def until(ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                await asyncio.sleep(0.02)

    monkeypatch.setattr("shutil.disk_usage", usage)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        benches.append(Bench(BoundedEngine(ProcessEngine(), Ceilings(1024), writers=writers), tmp_path / name, None))
    first, second = benches
    writes = "until [ -e $MESH_CTL_DIR/go ]; do sleep 0.02; done; dd if=/dev/zero bs=1K count={} of=$MESH_OUT_DIR/big"
    less = await first.shell(f"{writes.format(7000)}; echo wrote; {LOOP}")
    most = await second.shell(f"{writes.format(7700)}; echo wrote; {LOOP}")
    (second.root / "ctl" / "go").touch()
    await second.until_logged("wrote")
    (first.root / "ctl" / "go").touch()
    async with asyncio.timeout(WAIT_S):
        end = await most.wait()
    assert end.code == 137 and end.detail == "" and "disk is nearly full, and no guest there wrote more" in end.fault
    assert "mesh: ended: its node's disk is nearly full" in second.log
    seen = looks
    await until(lambda: looks > seen + 3)
    assert await less.pids(), "the other guest continues, even before the files are removed"
    shutil.rmtree(second.root)
    seen = looks
    await until(lambda: looks > seen + 3)
    assert await less.pids()
    await less.kill()


class Saves(WrappedGuest):
    """A real guest whose dump is a file of `size` bytes."""

    size = 0

    async def dump(self, directory: Path) -> str:
        directory.mkdir()
        (directory / "images").write_bytes(b"\1" * self.size)
        return "alike"


async def test_system_checkpoint_over_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dump a guest with 2 MiB of 16 written: its files count twice, its memory once."""
    monkeypatch.setattr(cgroups, "memory_of", lambda pid: None)  # else the group of all tests counts
    bench = Bench(ProcessEngine(), tmp_path, None)
    inner = await bench.shell(f"dd if=/dev/zero bs=1M count=2 of=$MESH_OUT_DIR/big; echo written; {LOOP}")
    await bench.until_logged("written")
    saves, where = Saves(inner), tmp_path / "dumps" / "0" / "dump"
    where.parent.mkdir(parents=True)
    assert limits._resident(await inner.pids()) > 0
    monkeypatch.setattr(limits, "_resident", lambda pids: MIB)
    guest = limits.BoundedGuest(saves, bench.launch(), limits.Bounds(0, 16 * MIB, 16 * MIB), Writers(), Room())
    assert await guest.dump(where) == "alike"
    shutil.rmtree(where)
    saves.size = 13 * MIB
    with pytest.raises(EngineError, match=re.escape("takes about 15.0 MiB: it has 14.0 MiB of 16.0 MiB left")):
        await guest.dump(where)
    shutil.rmtree(where)
    monkeypatch.setattr(limits, "_resident", lambda pids: 13 * MIB)
    with pytest.raises(EngineError, match=r"takes about 15\.0 MiB"):
        await guest.dump(where)
    monkeypatch.setattr(limits, "_resident", lambda pids: MIB)
    with (tmp_path / "out" / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(EngineError, match=r"takes about 1024\.0 GiB|takes about 1\.0 TiB"):
        await guest.dump(where)
    assert not where.exists(), "the dump is not started"
    await guest.kill()


async def test_gpu_memory_counts_for_a_system_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver copies it to main memory before a dump."""
    monkeypatch.setattr(cgroups, "memory_of", lambda pid: 0)
    bench = Bench(ProcessEngine(), tmp_path, None)
    saves, where = Saves(await bench.shell(LOOP)), tmp_path / "dumps" / "0" / "dump"
    where.parent.mkdir(parents=True)
    launch = bench.launch(gpus=(Portion("GPU-1", 50, 9), Portion("GPU-2", 50, 8)))
    guest = limits.BoundedGuest(saves, launch, limits.Bounds(0, 16 * MIB, 16 * MIB), Writers(), Room())
    with pytest.raises(EngineError, match=r"takes about 17\.0 MiB"):
        await guest.dump(where)
    await guest.kill()


def test_reservations_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve space for two checkpoints on a disk with 10 MiB."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    # Whatever this disk takes for a file or directory.
    monkeypatch.setattr(disk_usage, "blocks", lambda path: path.stat().st_size if path.is_file() else 0)
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(free=10 * MIB - disk_usage.tree_bytes(tmp_path))
    )
    disk = Room()
    disk.promise(one, 6 * MIB)
    with pytest.raises(NoRoom, match=r"10\.0 MiB of disk space is free, 6\.0 MiB of it reserved for other checkpoints"):
        disk.promise(other, 5 * MIB)
    disk.promise(other, 4 * MIB)
    (one / "images").write_bytes(bytes(2 * MIB))
    disk.promise(one, 4 * MIB)  # written bytes need no reservation
    with pytest.raises(NoRoom):
        disk.promise(one, 5 * MIB)
    disk.promise(other, 8 * MIB)  # the refused request holds no reservation
    shutil.rmtree(other)
    disk.promise(one, 8 * MIB)


@settings(max_examples=40)
@given(orders=some.lists(some.tuples(some.integers(0, 3), some.integers(0, 12), some.integers(0, 12)), max_size=12))
def test_reservations_never_exceed_disk(orders: list[tuple[int, int, int]]) -> None:
    """Reserve and write at random, in MiB; a refused reservation writes nothing."""
    written: dict[Path, int] = {}
    most = 16

    def tree(path: Path) -> int:
        return written[path] * MIB

    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        places = [Path(root, str(number)) for number in range(4)]
        for place in places:
            place.mkdir()
            written[place] = 0
        patch.setattr(disk_usage, "tree_bytes", tree)
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=(most - sum(written.values())) * MIB))
        disk, kept = Room(), dict.fromkeys(places, 0)
        for number, more, writes in orders:
            place = places[number]
            with contextlib.suppress(NoRoom):
                disk.promise(place, more * MIB)
                kept[place] = written[place] + more
                written[place] += min(writes, more)
                assert sum(max(kept[one], written[one]) for one in places) <= most
                continue
            kept[place] = written[place]


@pytest.mark.skipif(cgroups.memory_of(os.getpid()) is None, reason="no control group of memory is to be seen here")
def test_group_memory_excludes_page_cache(tmp_path: Path) -> None:
    def grown() -> int:
        before = cgroups.memory_of(os.getpid())
        kept = mmap.mmap(-1, 512 * MIB)
        for place in range(0, len(kept), 4096):
            kept[place] = 1
        after = cgroups.memory_of(os.getpid())
        kept.close()
        assert before is not None and after is not None
        return after - before

    assert any(grown() > 256 * MIB for _ in range(5)), (
        "in at least one of five tries, as other processes may end meanwhile"
    )
    assert cgroups.memory_of(2**22 + 1) is None
