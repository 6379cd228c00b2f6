"""What an owner lets a job have: ceilings, addresses, and what becomes of one that writes too much."""

import asyncio
import contextlib
import mmap
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mesh.api.errors import ConfigError
from mesh.config import Settings, load_settings
from mesh.engine import bounded, cgroups, room
from mesh.engine.bounded import BoundedEngine
from mesh.engine.ceilings import Ceilings, ceilings_of
from mesh.engine.egress import CAMPUS, chain_of, policy_of, rules
from mesh.engine.engine import EngineError, Launch
from mesh.engine.gpusight import missing
from mesh.engine.hardening import cdi_devices
from mesh.engine.process import ProcessEngine
from mesh.engine.room import NoRoom, Room, Writers
from mesh.engine.wrapped import WrappedGuest
from tests.engine.bench import LOOP, WAIT_S, Bench

MIB = 1 << 20
LAUNCH = Launch("j", 0, ("true",), {}, "w", "c", "o", "t", "l", "n", 1.0)


def test_an_eighth_of_the_memory_stays_its_owners_unless_he_says_more() -> None:
    assert ceilings_of(64 << 10, Settings()) == Ceilings(56 << 10, 4096, log_mib=1024)
    assert ceilings_of(2 << 10, Settings()).memory_mib == 1 << 10
    assert ceilings_of(512, Settings()).memory_mib == 1
    assert ceilings_of(64 << 10, Settings(max_memory_gib=128.0)).memory_mib == 64 << 10
    said = Settings(max_memory_gib=1.5, max_cpus=2.5, max_pids=100, shm_gib=0.25, max_disk_gib=3.0, max_log_gib=0.01)
    assert ceilings_of(64 << 10, said) == Ceilings(1536, 100, 2.5, 256, 3072, 10)


numbers = some.none() | some.integers(1, 1 << 20)


@given(memory=numbers, cpus=numbers, most=some.integers(1, 1 << 20), most_cpus=numbers, shm=numbers)
def test_nothing_that_is_let_in_is_above_a_ceiling(
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
        ('egress = "list"\negress_allow = ["10.0.0.1/8"]', "is no IPv4 network"),
        ('egress = "list"\negress_allow = ["fe80::/10"]', "is no IPv4 network"),
        ('egress = "list"\negress_allow = ["-j ACCEPT"]', "is no IPv4 network"),
        ('egress_allow = ["10.0.0.0/8"]', "is for egress"),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "config.toml").write_text(line)
    with pytest.raises(ConfigError, match=words):
        load_settings(tmp_path / "config.toml", {})


def test_rules_end_with_no_and_only_return_what_they_let_through() -> None:
    """A verdict of ACCEPT would go past the rules by which Docker keeps bridges apart."""
    policy = policy_of("list", ("10.1.0.0/16", "192.0.2.7/32"))
    made = rules("mabc", policy)
    assert [rule[2] for rule in made if rule[0] == chain_of("mabc") and rule[1] == "-d"] == list(policy.allowed)
    assert "REJECT" in made[-3] and made[-3][0] == chain_of("mabc") and not any("ACCEPT" in rule for rule in made)
    assert [rule[0] for rule in made[-2:]] == ["DOCKER-USER", "INPUT"]
    assert policy_of("campus", ()).allowed == CAMPUS and policy_of("none", ()).allowed == ()
    assert len(chain_of("m" + "0" * 14)) <= 28, "iptables takes no longer name"


def test_devices_by_cdi_are_found_where_the_engine_lists_them() -> None:
    listed = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=GPU-1"}, {"Source": "else", "ID": "x"}]}
    assert cdi_devices(listed) == {"nvidia.com/gpu=GPU-1"} and cdi_devices({}) == frozenset()
    assert cdi_devices({"DiscoveredDevices": None}) == frozenset()


def test_a_gpu_that_is_not_told_of_is_missing() -> None:
    told = "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n  MIG 1g.18gb Device 0: (UUID: MIG-bb)\n"
    assert missing(told, ("GPU-aa", "MIG-bb")) == () and missing(told, ("GPU-aa", "GPU-cc")) == ("GPU-cc",)


async def test_more_than_its_owner_lends_is_refused_in_words(tmp_path: Path) -> None:
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, cpus=2.0)), tmp_path, None)
    with pytest.raises(EngineError, match="lends 1024 MiB of memory to a job, 2048 asked"):
        await bench.shell("true", memory_mib=2048)
    with pytest.raises(EngineError, match="lends 2 CPUs to a job, 3 asked"):
        await bench.shell("true", cpus=3.0)


@pytest.mark.parametrize("where", ["> $MESH_OUT_DIR/big", ""])
async def test_one_that_writes_too_much_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("mesh.engine.bounded.LOOK_S", 0.05)
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, disk_mib=8)), tmp_path, None)
    guest = await bench.shell(f"dd if=/dev/zero bs=1M count=4 {where}; echo fits; {LOOP}")
    await bench.until_logged("fits")
    await asyncio.sleep(0.3)
    assert (await guest.pids()) != frozenset(), "what fits is left alone"
    await guest.kill()
    guest = await bench.shell(f"dd if=/dev/zero bs=1M count=40 {where}; {LOOP}")
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.code == 137 and "and may have 8.0 MiB on this node" in end.detail
    async with asyncio.timeout(WAIT_S):
        while b"mesh: ended: it wrote" not in (tmp_path / "log").read_bytes()[-300:]:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("inodes", "script", "words"),
    [
        (
            None,
            "exec 3>$MESH_OUT_DIR/x; rm $MESH_OUT_DIR/x; dd if=/dev/zero bs=1M count=40 >&3",
            "and may have 8.0 MiB",
        ),
        (
            None,
            'python3 -c \'import os\nfor _ in range(300): os.mkdir("d"), os.chdir("d")\'',
            "directories in each other",
        ),
        (
            22,
            "for n in 1 2 3 4 5 6 7 8 9; do mkdir $n; : > $n/file; done",
            "files and directories, and may have 11",
        ),
    ],
)
async def test_nor_does_it_hide_what_it_writes_or_take_all_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inodes: int | None, script: str, words: str
) -> None:
    monkeypatch.setattr("mesh.engine.bounded.LOOK_S", 0.05)
    monkeypatch.setattr(bounded, "free_inodes", lambda place: inodes)
    bench = Bench(BoundedEngine(ProcessEngine(), Ceilings(1024, disk_mib=8)), tmp_path, None)
    guest = await bench.shell(f"{script}; {LOOP}")
    async with asyncio.timeout(WAIT_S):
        end = await guest.wait()
    assert end.code == 137 and words in end.detail


async def test_a_mapped_file_without_a_name_counts(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(bytes(MIB))
        file.flush()
        mapped = mmap.mmap(file.fileno(), MIB)
        (tmp_path / "file").unlink()
        assert bounded.nameless_bytes([os.getpid()], tmp_path) == MIB
    assert bounded.nameless_bytes([os.getpid()], tmp_path) == MIB
    mapped.close()
    assert bounded.nameless_bytes([os.getpid()], tmp_path) == 0


async def test_a_log_that_is_too_long_is_cut_and_told_once_and_its_guest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.engine.bounded.LOOK_S", 0.05)
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
    words = "log cut at 1.0 MiB: what it prints from here on is not kept"
    assert (end.code, end.detail) == (3, "") and said == [(words, "log cut")]
    assert (tmp_path / "log").read_bytes() == bytes(MIB) + f"\nmesh: {words}\n".encode()


async def test_of_guests_that_together_fill_a_disk_the_one_that_wrote_most_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk that had 16 MiB free, and has less than 2 then. Each wrote less than the 8 that it may have."""
    monkeypatch.setattr("mesh.engine.bounded.LOOK_S", 0.05)
    writers, looks = Writers(), 0
    benches: list[Bench] = []

    def usage(path: object) -> SimpleNamespace:
        nonlocal looks
        looks += 1
        return SimpleNamespace(free=16 * MIB - sum(room.tree_bytes(bench.root) for bench in benches))

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
    assert await less.pids(), "the other goes on, also before what that one wrote is cleared away"
    shutil.rmtree(second.root)
    seen = looks
    await until(lambda: looks > seen + 3)
    assert await less.pids()
    await less.kill()


class Saves(WrappedGuest):
    """A real process, and a fake dump of it: `size` bytes."""

    size = 0

    async def dump(self, directory: Path) -> str:
        directory.mkdir()
        (directory / "images").write_bytes(b"\1" * self.size)
        return "alike"


async def test_a_system_checkpoint_that_would_not_fit_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that has written 2 MiB, and may write 16: its files count twice, its memory once."""
    monkeypatch.setattr(cgroups, "memory_of", lambda pid: None)  # the group that all tests are in
    bench = Bench(ProcessEngine(), tmp_path, None)
    inner = await bench.shell(f"dd if=/dev/zero bs=1M count=2 of=$MESH_OUT_DIR/big; echo written; {LOOP}")
    await bench.until_logged("written")
    saves, where = Saves(inner), tmp_path / "dumps" / "0" / "dump"
    where.parent.mkdir(parents=True)
    assert bounded._resident(await inner.pids()) > 0
    monkeypatch.setattr(bounded, "_resident", lambda pids: MIB)
    guest = bounded.BoundedGuest(saves, bench.launch(), bounded.Bounds(0, 16 * MIB, 16 * MIB), Writers(), Room())
    assert await guest.dump(where) == "alike"
    shutil.rmtree(where)
    saves.size = 13 * MIB
    with pytest.raises(EngineError, match=re.escape("takes about 15.0 MiB: 14.0 MiB of 16.0 MiB are left")):
        await guest.dump(where)
    shutil.rmtree(where)
    monkeypatch.setattr(bounded, "_resident", lambda pids: 13 * MIB)
    with pytest.raises(EngineError, match=r"takes about 15\.0 MiB"):
        await guest.dump(where)
    monkeypatch.setattr(bounded, "_resident", lambda pids: MIB)
    with (tmp_path / "out" / "holes").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(EngineError, match=r"takes about 1024\.0 GiB|takes about 1\.0 TiB"):
        await guest.dump(where)
    assert not where.exists(), "it is not even begun"
    await guest.kill()


def test_several_checkpoints_at_once_are_not_promised_the_same_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a disk with 10 MiB."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    monkeypatch.setattr(room, "blocks", lambda path: path.stat().st_size)  # whatever this disk makes of them
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10 * MIB - room.tree_bytes(tmp_path)))
    disk = Room()
    disk.promise(one, 6 * MIB)
    with pytest.raises(NoRoom, match=r"10\.0 MiB of the disk are free, 6\.0 MiB of them for other checkpoints"):
        disk.promise(other, 5 * MIB)
    disk.promise(other, 4 * MIB)
    (one / "images").write_bytes(bytes(2 * MIB))
    disk.promise(one, 4 * MIB)  # what is written of it is not kept free besides
    with pytest.raises(NoRoom):
        disk.promise(one, 5 * MIB)
    disk.promise(other, 8 * MIB)  # nothing is kept any more for the one that was refused
    shutil.rmtree(other)
    disk.promise(one, 8 * MIB)


@settings(max_examples=40)
@given(orders=some.lists(some.tuples(some.integers(0, 3), some.integers(0, 12), some.integers(0, 12)), max_size=12))
def test_promises_together_never_exceed_the_disk(orders: list[tuple[int, int, int]]) -> None:
    """`written` of each, in MiB; what was refused writes nothing."""
    written: dict[Path, int] = {}
    most = 16

    def tree(path: Path) -> int:
        return written[path] * MIB

    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        places = [Path(root, str(number)) for number in range(4)]
        for place in places:
            place.mkdir()
            written[place] = 0
        patch.setattr(room, "tree_bytes", tree)
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
def test_a_groups_memory_is_what_is_not_on_disk(tmp_path: Path) -> None:
    def grown() -> int:
        before = cgroups.memory_of(os.getpid())
        kept = mmap.mmap(-1, 512 * MIB)
        for place in range(0, len(kept), 4096):
            kept[place] = 1
        after = cgroups.memory_of(os.getpid())
        kept.close()
        assert before is not None and after is not None
        return after - before

    assert any(grown() > 256 * MIB for _ in range(5)), "others run beside us, and some may end just then"
    assert cgroups.memory_of(2**22 + 1) is None
