"""The owner's presence: observations, the policy and the files on disk."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.auditor import GpuProcess
from mesh.api.handlers.lending import LendingHandlers
from mesh.api.requests import LendOrder, ReclaimOrder
from mesh.gpus.guest_processes import Whereabouts
from mesh.gpus.inventory import Inventory, Lending, Presence, keep_lending, load_lending
from mesh.provider import owner as owner_module
from mesh.provider.owner import STALE_S, Owner, works
from mesh.provider.policy import MOST_BYTES, Policy
from mesh.provider.presence import Memory, Seen, Stand
from mesh.provider.presence_file import Moment, load_memories, save_memories
from mesh.provider.reclaim import Leave
from mesh.util.errors import ExitCode, MeshError
from placement.advert import Gpu, Portion, decode_advert, encode_advert
from placement.filters import refusals
from placement.request import Request

NODE = b"n" * 32
GPUS = (Gpu("GPU-aaaa", "A100", 80_000), Gpu("GPU-bbbb", "A100", 80_000))


def lender(**changes: Any) -> Inventory:
    lending = Lending(lending=True, **changes)
    inventory = Inventory(NODE, "n", "owner", b"o" * 32, "", GPUS, 1, ("*",), (), lending, 0)
    inventory.engines = ("process",)
    return inventory


def request(gpus: int) -> Request:
    return Request(job=b"job", attempt=0, user="ada", gpus=gpus)


def test_held_gpu_is_not_lent() -> None:
    inventory = lender(withheld=("GPU-aaaa",))
    assert [left.uuid for left in inventory.advert().free_portions] == ["GPU-bbbb"]
    assert decode_advert(NODE, encode_advert(inventory.advert())) == inventory.advert()
    assert inventory.admit(request(2)) == "1 of 2 fitting GPUs are free, 2 asked"
    assert inventory.admit(request(1)) is None and inventory.portions_of(b"job")[0].uuid == "GPU-bbbb"
    inventory.presence = Presence(gpus=frozenset({"GPU-bbbb"}))
    assert inventory.withheld == {"GPU-aaaa", "GPU-bbbb"} and inventory.advert().free_portions == ()
    inventory.release(b"job")
    inventory.lending, inventory.presence = Lending(lending=True), Presence()
    assert inventory.advert().free_portions == tuple(Portion(gpu.uuid, 100, gpu.vram_mib) for gpu in GPUS)


@pytest.mark.parametrize(
    ("held", "words"),
    [(Presence("owner"), "its owner uses it now"), (Presence("hours", 1_800_000_000), "at other hours")],
)
def test_advert_gives_reason_for_not_lending(held: Presence, words: str) -> None:
    inventory = lender()
    inventory.presence = held
    advert = decode_advert(NODE, encode_advert(inventory.advert()))
    assert advert.paused and advert.back_unix == held.back_unix
    assert words in refusals(request(0), advert)[0]


def test_owner_decision_survives_restart(tmp_path: Path) -> None:
    path = tmp_path / "lending.json"
    assert load_lending(path, lends=True) == Lending(True) and load_lending(path, lends=False) == Lending(False)
    path.write_bytes(msgspec.json.encode(Lending(True, paused=True, withheld=("GPU-a",))))
    assert load_lending(path, lends=False) == Lending(True, paused=True, withheld=("GPU-a",))
    path.write_bytes(msgspec.json.encode(Lending(False, paused=True)))
    assert load_lending(path, lends=True) == Lending(True, paused=True)


def test_choice_at_a_start_is_kept_and_ends_no_pause(tmp_path: Path) -> None:
    path = tmp_path / "lending.json"
    keep_lending(path)
    assert load_lending(path, lends=False) == Lending(True)
    held = Lending(False, paused=True, withheld=("GPU-a",), until_unix=7)
    path.write_bytes(msgspec.json.encode(held))
    keep_lending(path)
    assert load_lending(path, lends=False) == msgspec.structs.replace(held, lending=True)
    path.write_bytes(b' {"lending": true, "paused": true}')
    keep_lending(path)
    assert path.read_bytes()[:1] == b" ", "what says so already is not written again"


@given(st.binary(max_size=60) | st.text(alphabet='{}":lendigtrufas,[] ', max_size=60).map(str.encode))
def test_damaged_lending_file_lends_nothing(data: bytes) -> None:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with suppress(ValueError):  # the daemon then lends nothing and reports it
            assert isinstance(load_lending(Path(file.name), lends=True), Lending)


def lending_of(
    inventory: Inventory,
    directory: Path,
    opened: Callable[[str], None] = print,
    roles: tuple[str, ...] = ("provider", "user"),
) -> LendingHandlers:
    membership: Any = SimpleNamespace(problems={}, credentials=SimpleNamespace(roles=roles))
    jobs: Any = SimpleNamespace(participant=SimpleNamespace(hosted={}))
    switch: Any = SimpleNamespace(release=lambda: opened("guests"))
    edge: Any = SimpleNamespace(restore=lambda: opened("packets"))
    absent: Any = None
    file = directory / "lending.json"
    return LendingHandlers(
        membership, inventory, jobs, absent, absent, switch, edge, directory / "policy.toml", file, lambda: None
    )


async def test_order_that_cannot_be_written_takes_effect_and_is_reported(tmp_path: Path) -> None:
    inventory, place = lender(), tmp_path / "state"
    place.touch()  # a file in place of the directory fails for root, too
    lending = lending_of(inventory, place)
    told = await lending.set_paused(True)
    assert told.paused and inventory.advert().paused
    assert "a restart forgets" in told.problem == lending._problems["lending"]
    place.unlink()
    place.mkdir()
    assert (await lending.set_paused(True)).problem == ""
    assert "lending" not in lending._problems and load_lending(place / "lending.json", True).paused


async def test_reclaim_goes_on_when_its_client_stops_waiting(tmp_path: Path) -> None:
    """Ctrl-C while the order is written, too: else lending would be paused, and no guest asked to leave."""
    lending, left = lending_of(lender(), tmp_path), list[bytes]()
    parts: Any = lending

    async def leave(jobs: Sequence[bytes], leave: Leave) -> list[bytes]:
        left.extend(jobs)
        return []

    parts._reclaimer = SimpleNamespace(leave=leave, departed={})
    parts._owner = SimpleNamespace(notice_s=30.0, policy=SimpleNamespace(pause=0.0))
    parts._jobs.participant.hosted = [b"j" * 16]
    client = asyncio.create_task(lending.reclaim(ReclaimOrder()))
    await asyncio.sleep(0)
    client.cancel()
    async with asyncio.timeout(20):
        while not left:
            await asyncio.sleep(0.01)
    assert left == [b"j" * 16] and client.cancelled()


async def test_node_without_the_role_does_not_lend(tmp_path: Path) -> None:
    inventory = lender()
    lending = lending_of(inventory, tmp_path, roles=("user",))
    await lending.set_paused(True)
    for order in (lending.lend(LendOrder(on=True, hours=["always"])), lending.set_paused(False)):
        with pytest.raises(MeshError, match="not lending: your certificate has no role provider") as caught:
            await order
        assert caught.value.code == ExitCode.REFUSED
    assert inventory.lending.paused and not (tmp_path / "policy.toml").exists()


@pytest.mark.parametrize(("text", "found"), [("0", 0), ("1", 1), ("GPU-b", 1), ("aaaa", 0)])
def test_gpu_is_found_by_index_or_prefix(text: str, found: int) -> None:
    assert lending_of(lender(), Path()).find_gpu(text) == GPUS[found].uuid


@pytest.mark.parametrize("text", ["2", "", "GPU-", "c", "-1", "٠", "0001"])
def test_ambiguous_gpu_is_refused(text: str) -> None:
    with pytest.raises(MeshError, match="0: GPU-aaaa, 1: GPU-bbbb"):
        lending_of(lender(), Path()).find_gpu(text)


async def test_timed_pause_ends_after_restart_too(tmp_path: Path) -> None:
    inventory, said, opened = lender(), list[str](), list[str]()
    lending, file = lending_of(inventory, tmp_path, opened.append), tmp_path / "lending.json"
    inventory.lending = Lending(lending=True, withheld=("GPU-aaaa",))
    told = await lending.set_paused(True, for_s=3600.0)
    until, advert = told.until_unix, inventory.advert()
    assert advert.paused and advert.back_unix == until == pytest.approx(time.time() + 3600, abs=30)
    assert load_lending(file, True) == inventory.lending and not opened
    for presence, back in ((Presence("hours", until + 60), until + 60), (Presence("owner"), 0), (Presence(), until)):
        inventory.presence = presence
        assert (inventory.advert().back_unix, inventory.advert().held_by) == (back, "")
    inventory.lending = msgspec.structs.replace(load_lending(file, True), until_unix=1)
    ending = asyncio.create_task(lending.end_pauses(said.append))
    while inventory.lending.paused or load_lending(file, True).paused:
        await asyncio.sleep(0)
    ending.cancel()
    assert inventory.lending == Lending(lending=True, withheld=("GPU-aaaa",)), "the withheld GPU stays withheld"
    assert opened == ["guests", "packets"] and said == ["its owner's pause is over"]
    await lending.set_paused(True, for_s=60.0)
    await lending.set_paused(True)
    assert inventory.lending.until_unix == 0, "a later pause replaces the earlier one"
    with pytest.raises(MeshError, match="of the machine"):
        await lending.set_paused(True, "0", 60.0)


@pytest.mark.parametrize("until_unix", [0, 2**40])
async def test_pause_without_an_end_or_before_it_goes_on(until_unix: int, tmp_path: Path) -> None:
    inventory, said = lender(), list[str]()
    inventory.lending = Lending(lending=True, paused=True, until_unix=until_unix)
    looking = asyncio.create_task(lending_of(inventory, tmp_path).end_pauses(said.append))
    await asyncio.sleep(0)  # its first look
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    assert inventory.lending.paused and not said


def test_light_graphics_is_not_presence() -> None:
    assert works(GpuProcess(1, 100)) and works(GpuProcess(1, 100, 0.0))
    assert not works(GpuProcess(1, 100, 3.0, computes=False)) and not works(GpuProcess(1, 100, None, computes=False))
    assert works(GpuProcess(1, 100, 80.0, computes=False)), "a game counts as presence"


class Watched:
    """An `Owner` with its state in a directory, without guests or a guard."""

    def __init__(self, directory: Path, inventory: Inventory) -> None:
        self.said: list[str] = []
        self.problems: dict[str, str] = {}
        self.path, self.inventory = directory / "policy.toml", inventory
        memory = directory / "presence.json"
        guard: Any = SimpleNamespace(audit_problem="")
        reclaimer: Any = SimpleNamespace(look=lambda stand_of, leave: None)
        jobs: Any = SimpleNamespace(attempts={})
        self.changes: list[Presence] = []
        self.owner = Owner(
            self.path,
            memory,
            jobs,
            guard,
            inventory,
            reclaimer,
            30.0,
            self.said.append,
            self._changed,
            self.problems,
        )

    def _changed(self) -> None:
        self.changes.append(self.inventory.presence)


async def test_invalid_policy_keeps_previous(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    await watched.owner.look()
    assert watched.owner.policy == Policy() and watched.problems == {} and watched.owner.notice_s == 30.0
    watched.path.write_text("[reclaim]\nnotice = 7\n")
    await watched.owner.look()
    assert watched.owner.notice_s == 7.0 and "has changed" in watched.said[-1]
    for broken in (b"[reclaim]\nnotice = 'x'\n", b"\xff\xfe", b"["):
        watched.path.write_bytes(broken)
        await watched.owner.look()
        assert watched.owner.notice_s == 7.0 and "the previous policy stays in force" in watched.problems["policy"]
    count = len(watched.said)
    await watched.owner.look()
    assert len(watched.said) == count, "the problem is reported once"
    watched.path.unlink()
    await watched.owner.look()
    assert watched.owner.policy == Policy() and watched.problems == {}
    watched.path.mkdir()
    await watched.owner.look()
    assert "Is a directory" in watched.problems["policy"]


async def test_never_valid_policy_lends_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    watched.path.write_text("hours = 'Someday'")
    await watched.owner.look()
    assert "nothing is lent until it is corrected" in watched.problems["policy"]
    assert watched.inventory.advert().paused and watched.changes == [Presence("owner")]
    watched.path.write_text("hours = 'always'")
    await watched.owner.look()
    assert not watched.inventory.advert().paused and watched.changes[-1] == Presence()


async def test_presence_survives_restart(tmp_path: Path) -> None:
    me = os.getpid()
    first = Watched(tmp_path, lender())
    await first.owner.look()
    assert not (tmp_path / "presence.json").exists(), "without presence, no file is written"
    await first.owner.on_gpus_seen({"GPU-aaaa": (GpuProcess(me, 1),)})
    await first.owner.on_gpus_seen({"GPU-aaaa": ()})
    assert first.owner.stands["GPU-aaaa"].level == "suspend"

    second = Watched(tmp_path, lender())
    await second.owner.look()
    assert second.inventory.presence == Presence(gpus=frozenset({"GPU-aaaa"}))
    (one,), (other,) = first.owner._presence.memories(), second.owner._presence.memories()
    assert one == other and one.quiet_since is not None

    written = (tmp_path / "presence.json").stat().st_mtime_ns
    await second.owner.look()
    assert (tmp_path / "presence.json").stat().st_mtime_ns == written, "an unchanged state is not written"
    (tmp_path / "presence.json").write_bytes(b"{")
    third = Watched(tmp_path, lender())
    await third.owner.look()
    assert third.inventory.presence == Presence() and "it is unknown whether" in third.said[0]


@given(data=st.binary(max_size=80) | st.text(alphabet='{}":[]memoriatbus,0.1 ', max_size=80).map(str.encode))
def test_damaged_presence_file_is_an_error(data: bytes) -> None:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(ValueError, match=r"JSON|Expected|truncated|malformed|utf|Invalid|missing"):
            load_memories(Path(file.name), Moment("boot", 0.0, 0.0))


def test_presence_times_shift_after_reboot(tmp_path: Path) -> None:
    path, now = tmp_path / "presence.json", Moment("first", 1000.0, 50_000.0)
    memory = Memory("", "keyboard", True, True, False, 990.0, None, 995.0)
    save_memories(path, (memory,), now)
    assert load_memories(path, Moment("first", 1100.0, 49_000.0)) == (memory,)
    (moved,) = load_memories(path, Moment("second", 20.0, 50_060.0))
    assert (moved.pressed_at, moved.active_since, moved.quiet_since) == (-50.0, None, -45.0), (
        "10 and 5 s before the save, 60 s ago"
    )
    assert load_memories(path, Moment("second", 20.0, 40_000.0))[0].quiet_since == 15.0, (
        "a wall clock set back shifts by 0 s"
    )


async def test_hours_hold_machine_with_return_time(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    watched.path.write_text("hours = 'never'")
    await watched.owner.look()
    assert watched.inventory.presence == Presence("hours", 0)
    assert any("never lends" in warning for warning in watched.owner.warnings())
    assert watched.owner.stands[""] == Stand("vacate", ("calendar",), True, None)


async def test_foreign_programs_are_identified(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    await watched.owner.look()
    me, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    await watched.owner.on_gpus_seen(
        {"GPU-aaaa": (GpuProcess(me, 1),), "GPU-bbbb": (GpuProcess(me, 1, 0.0, computes=False),)}
    )
    assert watched.owner.programs == {"GPU-aaaa": [(me, name)], "GPU-bbbb": []}
    assert watched.inventory.presence == Presence(gpus=frozenset({"GPU-aaaa"}))
    watched.path.write_text(f"[gpu]\nignore = ['{name}']\nidle = 0\n")
    await watched.owner.look()
    await watched.owner.on_gpus_seen({"GPU-aaaa": (GpuProcess(me, 1),)})
    assert watched.inventory.presence == Presence() and watched.said[-1] == "GPU-aaaa is lent again"


async def test_guest_that_is_no_descendant_of_the_daemon_is_not_the_owner(tmp_path: Path) -> None:
    """A plain process whose fork server has died is not; neither is a container."""
    watched, other = Watched(tmp_path, lender()), os.getppid()

    class Attempt:
        async def pids(self) -> frozenset[int]:
            return frozenset({other})

    attempt: Any = Attempt()
    watched.owner._jobs.attempts[b"j" * 16] = attempt
    watched.path.write_text("[keyboard]\nwatch = 'all'\n[load]\nabove = 2\n")
    given: list[frozenset[int]] = []
    watched.owner.console.look = lambda *asked: given.append(asked[3])  # type: ignore[assignment,misc,return-value]
    watched.owner._load.look = lambda *asked: given.append(asked[1])  # type: ignore[assignment,misc,return-value]
    await watched.owner.look()
    await watched.owner.on_gpus_seen({"GPU-aaaa": (GpuProcess(other, 1),)})
    assert watched.owner.programs == {"GPU-aaaa": []} and [other in ours for ours in given] == [True, True]


async def test_gpus_that_nobody_looks_at_any_more_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, seen = Watched(tmp_path, lender()), list[Seen]()
    step = watched.owner._presence.step

    def noted(what: Seen, now: float) -> dict[str, Stand]:
        seen.append(what)
        return step(what, now)

    monkeypatch.setattr(watched.owner._presence, "step", noted)
    await watched.owner.on_gpus_seen({"GPU-aaaa": (GpuProcess(os.getpid(), 1),), "GPU-bbbb": ()})
    await watched.owner.look()
    at, foreign = watched.owner._gpus_seen
    assert seen[-1].foreign == foreign == {"GPU-aaaa": True, "GPU-bbbb": False}
    watched.owner._gpus_seen = (at - STALE_S, foreign)
    await watched.owner.look()
    assert seen[-1].foreign == {}


async def test_only_what_the_policy_asks_for_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, looks = Watched(tmp_path, lender()), list[str]()
    monkeypatch.setattr(watched.owner.console, "look", lambda *given: looks.append("keyboard"))
    monkeypatch.setattr(watched.owner._load, "look", lambda *given: looks.append("load"))
    await watched.owner.look()
    assert looks == []
    watched.path.write_text("[keyboard]\nwatch = 'all'\n[load]\nabove = 2\n")
    await watched.owner.look()
    assert looks == ["keyboard", "load"], watched.problems


def test_warnings_name_what_prevents_lending(tmp_path: Path) -> None:
    bare = Inventory(NODE, "n", "owner", b"o" * 32, "", (), 0, ("*",), (), Lending(lending=True), 0)
    assert "slots is 0" in Watched(tmp_path, bare).owner.warnings()[0]
    none = Inventory(
        NODE, "n", "o", b"o" * 32, "", GPUS, 0, ("*",), (), Lending(True, withheld=("GPU-aaaa", "GPU-bbbb")), 0
    )
    assert "all its GPUs are taken back" in Watched(tmp_path, none).owner.warnings()[0]
    assert Watched(tmp_path, lender()).owner.warnings() == []


async def test_hanging_engine_is_asked_once() -> None:
    answers: asyncio.Queue[frozenset[int]] = asyncio.Queue()
    asked: list[int] = []

    async def ask() -> frozenset[int]:
        asked.append(1)
        return await answers.get()

    where = Whereabouts(ask)
    answers.put_nowait(frozenset({7}))
    assert await where.pids() == {7}
    for _ in range(3):
        assert await where.pids() == {7} and len(asked) == 2
    answers.put_nowait(frozenset({8}))
    assert await where.pids() == {8} and len(asked) == 2


async def test_failing_engine_keeps_last_answer() -> None:
    async def fail() -> frozenset[int]:
        raise OSError("it is gone")

    assert await Whereabouts(fail).pids() == frozenset()


async def test_concurrent_callers_share_answer() -> None:
    asked: list[asyncio.Future[frozenset[int]]] = []

    async def ask() -> frozenset[int]:
        asked.append(asyncio.get_running_loop().create_future())
        return await asked[-1]

    where = Whereabouts(ask)
    both = [asyncio.ensure_future(where.pids()) for _ in range(2)]
    while not asked:
        await asyncio.sleep(0)
    asked[0].set_result(frozenset({7}))
    assert await asyncio.gather(*both) == [frozenset({7})] * 2 and len(asked) == 1


async def test_policy_may_leave_guests_no_notice(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    watched.path.write_text("[reclaim]\nnotice = 0\npause = 20\n")
    await watched.owner.look()
    assert watched.owner.notice_s == 0.0 and watched.said == [], "a policy found at the start is no change"
    leave = watched.owner._leave(Stand("vacate", ("keyboard",)))
    assert (leave.notice, leave.pause) == (0.0, 20.0) and leave.reason.endswith(leave.why) and not leave.by_hand


async def test_hours_are_those_of_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monday = 1_800_000_000 - 1_800_000_000 % (7 * 86_400) + 4 * 86_400 + 12 * 3600
    wall = SimpleNamespace(time=lambda: monday, localtime=time.gmtime, tzset=lambda: None)
    monkeypatch.setattr(owner_module, "time", wall)
    watched = Watched(tmp_path, lender())
    watched.path.write_text("hours = 'Mon 11:00-12:30'")
    await watched.owner.look()
    assert watched.owner.stands[""].level == "lend" and watched.owner.opens_at() == monday + 1800
    watched.path.write_text("hours = 'Mon 11:00-12:00'")
    await watched.owner.look()
    assert watched.inventory.presence == Presence("hours", monday + 7 * 86_400 - 3600)
    assert (tmp_path / "presence.json").exists(), "a restart must know that guests were asked to leave"


async def test_time_zone_that_changes_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as there:
        there.setenv("TZ", "Test-5")
        await Watched(tmp_path, lender()).owner.look()
        assert owner_module.local_minute(3 * 86_400 + 61) - owner_module.local_minute(3 * 86_400) == 1
        assert time.localtime(0).tm_hour == 5
    time.tzset()


async def test_look_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "LOOK_S", 0.0)
    owner, looks = Watched(tmp_path, lender()).owner, asyncio.Queue[int]()

    async def look() -> None:
        looks.put_nowait(1)
        raise OSError("no descriptor is free")

    monkeypatch.setattr(owner, "look", look)
    running = asyncio.create_task(owner.run())
    async with asyncio.timeout(20):
        for _ in range(2):
            await looks.get()
    running.cancel()


async def test_owner_at_the_keyboard_is_remembered_over_a_restart(tmp_path: Path) -> None:
    for typed_s in (0.0, None):  # the second run sees no keyboard yet
        watched = Watched(tmp_path, lender())
        watched.path.write_text("[keyboard]\nwatch = 'all'\n")
        watched.owner.console.look = lambda *asked, typed=typed_s: typed  # type: ignore[assignment,misc,return-value]
        await watched.owner.look()
        assert watched.owner.stands[""].causes == ("keyboard",) and watched.inventory.presence == Presence("owner")


@pytest.mark.parametrize("section", ["[keyboard]", "[keyboard]\nwatch = 'console'", "[load]"])
async def test_what_a_policy_watches_is_seen_without_what_belongs_to_guests(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, asked, seen = Watched(tmp_path, lender()), list[tuple[Any, ...]](), list[Seen]()
    owner, step = watched.owner, watched.owner._presence.step
    monkeypatch.setattr(owner.console, "look", lambda *given: asked.append(given) or 3.0)
    monkeypatch.setattr(owner._load, "look", lambda *given: asked.append(given) or 0.5)
    monkeypatch.setattr(owner_module, "memory_wait", lambda *given: asked.append(given) or 7.0)
    monkeypatch.setattr(owner_module, "descendants_of", lambda pid: {4711})
    monkeypatch.setattr(owner._presence, "step", lambda what, now: seen.append(what) or step(what, now))
    watched.path.write_text(section)
    await owner.look()
    if section == "[load]":
        assert seen == [Seen({}, None, 0.5, 7.0, True)] and len(asked) == 2
    else:
        (given,) = asked
        assert seen == [Seen({}, 3.0, None, None, True)] and given[0] == owner.policy.keyboard
        assert given[1:3] == (pytest.approx(owner_module.boot_s(), abs=60), pytest.approx(time.time(), abs=60))
    assert all((4711 in given[-1]) == ("console" not in section) for given in asked)
    watched.path.write_text("")
    await owner.look()
    assert seen[1:] == [Seen({}, None, None, None, True)], "what is watched no more is not what was seen last"


async def test_gpus_are_seen_for_less_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, seen = Watched(tmp_path, lender()), list[Seen]()
    step = watched.owner._presence.step
    monkeypatch.setattr(owner_module, "boot_s", lambda: 1000.0)
    monkeypatch.setattr(watched.owner._presence, "step", lambda what, now: seen.append(what) or step(what, now))
    for ago_s in (STALE_S, STALE_S - 1):
        watched.owner._gpus_seen = (1000.0 - ago_s, {"GPU-aaaa": False})
        await watched.owner.look()
    assert [what.foreign for what in seen] == [{}, {"GPU-aaaa": False}]


async def test_program_with_a_long_name_is_ignored_by_what_the_kernel_keeps_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(tmp_path, lender())
    await watched.owner.look()
    monkeypatch.setattr(owner_module, "name_of", lambda pid: "nvidia-persiste")
    await watched.owner.on_gpus_seen({"GPU-aaaa": (GpuProcess(os.getpid(), 1),)})
    assert watched.owner.programs == {"GPU-aaaa": []}
    ended = GpuProcess(2**22 + 1, 1)
    monkeypatch.undo()
    await watched.owner.on_gpus_seen({"GPU-aaaa": (ended,)})
    assert watched.owner.programs == {"GPU-aaaa": [(ended.pid, "?")]}


async def test_memory_that_cannot_be_read_or_written_is_reported(tmp_path: Path) -> None:
    place = tmp_path / "presence.json"
    place.mkdir()
    watched = Watched(tmp_path, lender())
    await watched.owner.look()
    assert "it is unknown whether the owner was present" in watched.said[0] and watched.owner._kept == ()
    await watched.owner.on_gpus_seen({"GPU-aaaa": (GpuProcess(os.getpid(), 1),)})
    assert "after a restart, the owner's presence is forgotten" in watched.problems["presence"]
    place.rmdir()
    await watched.owner.on_gpus_seen({"GPU-aaaa": ()})
    assert place.is_file() and watched.problems == {}


async def test_memory_is_written_once_for_each_change_of_a_second_or_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, saved = Watched(tmp_path, lender()).owner, list[tuple[Memory, ...]]()
    await owner.look()
    monkeypatch.setattr(owner_module, "save_memories", lambda path, memories, moment: saved.append(memories))
    memory = Memory("", "keyboard", True, True, False, 990.0, None, 995.0)
    for quiet_since, count in ((995.0, 1), (995.3, 1), (996.0, 2), (996.2, 2), (None, 3)):
        now = (msgspec.structs.replace(memory, quiet_since=quiet_since),)
        monkeypatch.setattr(owner._presence, "memories", lambda now=now: now)
        await owner._keep()
        assert len(saved) == count


async def test_newer_memory_is_written_after_the_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, begun, gate = Watched(tmp_path, lender()).owner, list[Memory](), asyncio.Event()
    await owner.look()

    async def slow(save: object, path: Path, memories: tuple[Memory, ...], moment: Moment) -> None:
        begun.extend(memories)
        await gate.wait()

    monkeypatch.setattr(asyncio, "to_thread", slow)
    old = Memory("", "keyboard", True, True, False, 990.0, None, 995.0)
    new = msgspec.structs.replace(old, vacating=True)
    keeping = []
    for memory in (old, new):
        monkeypatch.setattr(owner._presence, "memories", lambda memory=memory: (memory,))
        keeping.append(asyncio.create_task(owner._keep()))
        for _ in range(5):
            await asyncio.sleep(0)
    assert begun == [old], "the newer one waits"
    gate.set()
    await asyncio.gather(*keeping)
    assert begun == [old, new]


async def test_whereabouts_of_a_guest_are_kept_as_long_as_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Watched(tmp_path, lender()).owner

    class Attempt:
        async def pids(self) -> frozenset[int]:
            return frozenset({7})

    attempt: Any = Attempt()
    owner._jobs.attempts[b"j" * 16] = attempt
    monkeypatch.setattr(owner_module, "descendants_of", lambda pid: {8})
    assert await owner._ours() == {7, 8}
    where = owner._whereabouts[attempt]

    def fail(pid: int) -> set[int]:
        raise OSError("no descriptor is free")

    monkeypatch.setattr(owner_module, "descendants_of", fail)
    assert await owner._ours() == {7, 8} and owner._whereabouts[attempt] is where
    owner._jobs.attempts.clear()
    assert await owner._ours() == {8} and not owner._whereabouts


async def test_change_of_the_owners_presence_reaches_guests_then_events_then_the_advert(tmp_path: Path) -> None:
    watched, looks = Watched(tmp_path, lender()), list[str]()
    reclaimer: Any = SimpleNamespace(look=lambda stand_of, leave: looks.append(stand_of(("GPU-aaaa",)).level))
    watched.owner._reclaimer = reclaimer
    watched.path.write_text("[gpu]\nsuspend = '1h'\n")
    await watched.owner.look()
    me = {"GPU-aaaa": (GpuProcess(os.getpid(), 1),), "GPU-bbbb": ()}
    await watched.owner.on_gpus_seen(me)
    (said,) = watched.said
    assert said.startswith("GPU-aaaa is not lent: ") and watched.changes == [Presence(gpus=frozenset({"GPU-aaaa"}))]
    await watched.owner.on_gpus_seen(me)
    watched.path.write_text("[gpu]\nsuspend = 0\n")
    await watched.owner.look()
    assert looks == ["lend", "suspend", "suspend", "vacate"]
    assert [text for text in watched.said if "lent" in text] == [said], "it was said already"
    assert len(watched.changes) == 1, "the advert says the same"


async def test_owner_at_work_outside_the_hours_holds_the_machine(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    watched.path.write_text("hours = 'never'\n[keyboard]\n")
    watched.owner.console.look = lambda *asked: None  # type: ignore[assignment,misc,return-value]
    await watched.owner.look()
    await watched.owner.on_gpus_seen({"GPU-aaaa": (GpuProcess(os.getpid(), 1),)})
    assert watched.inventory.presence == Presence("hours", 0, frozenset({"GPU-aaaa"}))
    assert any("nothing on this machine shows keyboard use" in text for text in watched.owner.warnings())
    watched.owner.console.look = lambda *asked: 0.0  # type: ignore[assignment,misc,return-value]
    await watched.owner.look()
    assert watched.inventory.presence == Presence("owner", 0, frozenset({"GPU-aaaa"}))
    assert not any("keyboard" in text for text in watched.owner.warnings())


async def test_warnings_hold_for_this_machine_and_policy_alone(tmp_path: Path) -> None:
    def inventory(gpus: tuple[Gpu, ...], slots: int, **lending: Any) -> Inventory:
        return Inventory(
            NODE, "n", "o", b"o" * 32, "", gpus, slots, ("*",), (), Lending(**{"lending": True, **lending}), 0
        )

    assert Watched(tmp_path, inventory(GPUS, 0, withheld=("GPU-aaaa",))).owner.warnings() == []
    assert Watched(tmp_path, inventory(GPUS, 1, withheld=("GPU-aaaa", "GPU-bbbb"))).owner.warnings() == []
    for gpus, warned in ((GPUS, True), ((), False)):
        watched = Watched(tmp_path, inventory(gpus, 1))
        watched.owner._guard.audit_problem = "no driver"  # type: ignore[misc]
        assert watched.owner.warnings() == ["the owner's programs on a GPU are not seen: no driver"] * warned
    watched = Watched(tmp_path, inventory(GPUS, 1, lending=False))
    watched.owner._guard.audit_problem = "no driver"  # type: ignore[misc]
    watched.path.write_text("hours = '20-08'\n[gpu]\nwatch = false\n")
    await watched.owner.read()
    assert watched.owner.warnings() == ["hours are set, and nothing is lent in them: `mesh lend`"]


async def test_policy_is_read_again_for_another_file_alone(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    watched.path.write_text("[reclaim]\nnotice = 7\n")
    await watched.owner.read()
    seen = watched.path.stat()
    (tmp_path / "new").write_text("[reclaim]\nnotice = 8\n")
    os.utime(tmp_path / "new", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    (tmp_path / "new").rename(watched.path)
    await watched.owner.read()
    assert watched.owner.notice_s == 8.0, "a copy may have the same size and time"
    watched.path.write_text("[reclaim]\nnotice = 9\n" + "#" * MOST_BYTES)
    await watched.owner.read()
    assert "more than" in watched.problems["policy"] and watched.owner.notice_s == 8.0


def test_graphics_at_the_limit_is_work() -> None:
    assert works(GpuProcess(1, 100, owner_module.DRAWS_BUSY, computes=False))
