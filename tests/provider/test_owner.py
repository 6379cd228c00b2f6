"""What the owner's daemon makes of what it sees, and what it keeps on disk."""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_guard.auditor import Seen
from mesh.api.errors import MeshError
from mesh.api.lending import end_pauses, find_gpu, set_paused
from mesh.provider.inventory import Inventory, Lending, Presence, load_lending
from mesh.provider.memory import Moment, load_memories, save_memories
from mesh.provider.owner import Owner, works
from mesh.provider.policy import Policy
from mesh.provider.presence import Memory, Stand
from mesh.provider.whereabouts import Whereabouts
from placement.advert import Gpu, Portion, decode_advert, encode_advert
from placement.filters import refusals
from placement.request import Request

NODE = b"n" * 32
GPUS = (Gpu("GPU-aaaa", "A100", 80_000), Gpu("GPU-bbbb", "A100", 80_000))


def lender(**changes: Any) -> Inventory:
    lending = Lending(lending=True, **changes)
    inventory = Inventory(NODE, "n", "owner", "", GPUS, 1, ("*",), (), lending, 0)
    inventory.engines = ("process",)
    return inventory


def request(gpus: int) -> Request:
    return Request(job=b"job", attempt=0, user="ada", gpus=gpus)


def test_a_gpu_that_is_held_is_not_offered_and_not_given() -> None:
    inventory = lender(withheld=("GPU-aaaa",))
    assert [left.uuid for left in inventory.advert().room] == ["GPU-bbbb"]
    assert decode_advert(NODE, encode_advert(inventory.advert())) == inventory.advert()
    assert inventory.admit(request(2)) == "1 of 2 fitting GPUs are free, 2 asked"
    assert inventory.admit(request(1)) is None and inventory.portions_of(b"job")[0].uuid == "GPU-bbbb"
    inventory.presence = Presence(gpus=frozenset({"GPU-bbbb"}))
    assert inventory.withheld == {"GPU-aaaa", "GPU-bbbb"} and inventory.advert().room == ()
    inventory.release(b"job")
    inventory.lending, inventory.presence = Lending(lending=True), Presence()
    assert inventory.advert().room == tuple(Portion(gpu.uuid, 100, gpu.vram_mib) for gpu in GPUS)


@pytest.mark.parametrize(
    ("held", "words"),
    [(Presence("owner"), "its owner uses it now"), (Presence("hours", 1_800_000_000), "at other hours")],
)
def test_others_are_told_why_it_is_not_lent(held: Presence, words: str) -> None:
    inventory = lender()
    inventory.presence = held
    advert = decode_advert(NODE, encode_advert(inventory.advert()))
    assert advert.paused and advert.back_unix == held.back_unix
    assert words in refusals(request(0), advert)[0]


def test_what_the_owner_said_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "lending.json"
    assert load_lending(path, lends=True) == Lending(True) and load_lending(path, lends=False) == Lending(False)
    path.write_bytes(msgspec.json.encode(Lending(True, paused=True, withheld=("GPU-a",))))
    assert load_lending(path, lends=False) == Lending(True, paused=True, withheld=("GPU-a",))
    path.write_bytes(msgspec.json.encode(Lending(False, paused=True)))
    assert load_lending(path, lends=True) == Lending(True, paused=True)


@given(st.binary(max_size=60) | st.text(alphabet='{}":lendigtrufas,[] ', max_size=60).map(str.encode))
def test_a_damaged_word_is_an_error_and_no_leave_to_lend(data: bytes) -> None:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with suppress(ValueError):  # the daemon lends nothing then, and says so
            assert isinstance(load_lending(Path(file.name), lends=True), Lending)


@pytest.mark.parametrize(("text", "found"), [("0", 0), ("1", 1), ("GPU-b", 1), ("aaaa", 0)])
def test_a_gpu_goes_by_its_number_or_the_beginning_of_its_name(text: str, found: int) -> None:
    assert find_gpu(SimpleNamespace(inventory=lender()), text) == GPUS[found].uuid  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["2", "", "GPU-", "c", "-1", "٠", "0001"])
def test_no_gpu_is_guessed(text: str) -> None:
    with pytest.raises(MeshError, match="0: GPU-aaaa, 1: GPU-bbbb"):
        find_gpu(SimpleNamespace(inventory=lender()), text)  # type: ignore[arg-type]


class Node:
    """As much of a daemon as the owner's word needs."""

    def __init__(self, directory: Path) -> None:
        self.inventory, self.layout = lender(), SimpleNamespace(lending=directory / "lending.json")
        self.membership = SimpleNamespace(problems={})
        self.jobs = SimpleNamespace(participant=SimpleNamespace(hosted={}))
        self.opened: list[str] = []
        self.switch = SimpleNamespace(release=lambda: self.opened.append("guests"))
        self.edge = SimpleNamespace(restore=lambda: self.opened.append("packets"))

    def refresh_advert(self, force: bool) -> None:
        pass


async def test_a_pause_ends_by_itself_at_its_time_and_after_a_restart(tmp_path: Path) -> None:
    node, said = Node(tmp_path), list[str]()
    daemon: Any = node
    node.inventory.lending = Lending(lending=True, withheld=("GPU-aaaa",))
    told = await set_paused(daemon, True, for_s=3600.0)
    until, advert = told["until_unix"], node.inventory.advert()
    assert advert.paused and advert.back_unix == until == pytest.approx(time.time() + 3600, abs=30)
    assert load_lending(node.layout.lending, True) == node.inventory.lending and not node.opened
    for presence, back in ((Presence("hours", until + 60), until + 60), (Presence("owner"), 0), (Presence(), until)):
        node.inventory.presence = presence
        assert (node.inventory.advert().back_unix, node.inventory.advert().held_by) == (back, "")
    node.inventory.lending = msgspec.structs.replace(load_lending(node.layout.lending, True), until_unix=1)
    ending = asyncio.create_task(end_pauses(daemon, said.append))
    while node.inventory.lending.paused or load_lending(node.layout.lending, True).paused:
        await asyncio.sleep(0)
    ending.cancel()
    assert node.inventory.lending == Lending(lending=True, withheld=("GPU-aaaa",)), "a GPU is not given back with it"
    assert node.opened == ["guests", "packets"] and said == ["its owner's pause is over"]
    await set_paused(daemon, True, for_s=60.0)
    await set_paused(daemon, True)
    assert node.inventory.lending.until_unix == 0, "the last word counts"
    with pytest.raises(MeshError, match="of the machine"):
        await set_paused(daemon, True, "0", 60.0)


def test_who_only_draws_a_little_is_not_at_work() -> None:
    assert works(Seen(1, 100)) and works(Seen(1, 100, 0.0))
    assert not works(Seen(1, 100, 3.0, computes=False)) and not works(Seen(1, 100, None, computes=False))
    assert works(Seen(1, 100, 80.0, computes=False)), "a game"


class Watched:
    """An owner's watch, on a state directory; guests and the guard are not there."""

    def __init__(self, directory: Path, inventory: Inventory) -> None:
        self.said: list[str] = []
        self.problems: dict[str, str] = {}
        self.path, self.inventory = directory / "policy.toml", inventory
        memory = directory / "presence.json"
        guard: Any = SimpleNamespace(looked=None, audit_problem="")
        ladder: Any = SimpleNamespace(look=lambda stand_of, leave: None)
        jobs: Any = SimpleNamespace(attempts={})
        self.changes: list[Presence] = []
        self.owner = Owner(
            self.path,
            memory,
            jobs,
            guard,
            inventory,
            ladder,
            30.0,
            self.said.append,
            self._changed,
            self.problems,
        )

    def _changed(self) -> None:
        self.changes.append(self.inventory.presence)


async def test_the_policy_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    await watched.owner.look()
    assert watched.owner.policy == Policy() and watched.problems == {} and watched.owner.notice_s == 30.0
    watched.path.write_text("[ladder]\nnotice = 7\n")
    await watched.owner.look()
    assert watched.owner.notice_s == 7.0 and "has changed" in watched.said[-1]
    for broken in (b"[ladder]\nnotice = 'x'\n", b"\xff\xfe", b"["):
        watched.path.write_bytes(broken)
        await watched.owner.look()
        assert watched.owner.notice_s == 7.0 and "what it said before goes on" in watched.problems["policy"]
    count = len(watched.said)
    await watched.owner.look()
    assert len(watched.said) == count, "said once"
    watched.path.unlink()
    await watched.owner.look()
    assert watched.owner.policy == Policy() and watched.problems == {}
    watched.path.mkdir()
    await watched.owner.look()
    assert "Is a directory" in watched.problems["policy"]


async def test_a_policy_that_was_never_good_is_no_leave_to_lend(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    watched.path.write_text("hours = 'Someday'")
    await watched.owner.look()
    assert "nothing is lent until it is right" in watched.problems["policy"]
    assert watched.inventory.advert().paused and watched.changes == [Presence("owner")]
    watched.path.write_text("hours = 'always'")
    await watched.owner.look()
    assert not watched.inventory.advert().paused and watched.changes[-1] == Presence()


async def test_an_owner_who_was_here_a_moment_ago_is_known_to_the_next_run(tmp_path: Path) -> None:
    me = os.getpid()
    first = Watched(tmp_path, lender())
    await first.owner.look()
    assert not (tmp_path / "presence.json").exists(), "there is nothing to remember"
    await first.owner._saw_gpus({"GPU-aaaa": (Seen(me, 1),)})
    await first.owner._saw_gpus({"GPU-aaaa": ()})
    assert first.owner.stands["GPU-aaaa"].level == "suspend"

    second = Watched(tmp_path, lender())
    await second.owner.look()
    assert second.inventory.presence == Presence(gpus=frozenset({"GPU-aaaa"}))
    (one,), (other,) = first.owner._presence.memories(), second.owner._presence.memories()
    assert one == other and one.quiet_since is not None

    written = (tmp_path / "presence.json").stat().st_mtime_ns
    await second.owner.look()
    assert (tmp_path / "presence.json").stat().st_mtime_ns == written, "only what is new is written"
    (tmp_path / "presence.json").write_bytes(b"{")
    third = Watched(tmp_path, lender())
    await third.owner.look()
    assert third.inventory.presence == Presence() and "not known" in third.said[0]


@given(data=st.binary(max_size=80) | st.text(alphabet='{}":[]memoriatbus,0.1 ', max_size=80).map(str.encode))
def test_a_damaged_memory_is_an_error(data: bytes) -> None:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(ValueError, match=r"JSON|Expected|truncated|malformed|utf|Invalid|missing"):
            load_memories(Path(file.name), Moment("boot", 0.0, 0.0))


def test_after_another_boot_its_times_are_of_the_wall_clock(tmp_path: Path) -> None:
    path, now = tmp_path / "presence.json", Moment("first", 1000.0, 50_000.0)
    memory = Memory("", "keyboard", True, True, False, 990.0, None, 995.0)
    save_memories(path, (memory,), now)
    assert load_memories(path, Moment("first", 1100.0, 49_000.0)) == (memory,)
    (moved,) = load_memories(path, Moment("second", 20.0, 50_060.0))
    assert (moved.pressed_at, moved.active_since, moved.quiet_since) == (-50.0, None, -45.0), "5 and 60 s before it"
    assert load_memories(path, Moment("second", 20.0, 40_000.0))[0].quiet_since == 15.0, "a clock that was put back"


async def test_hours_hold_the_machine_and_say_when_it_is_back(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    watched.path.write_text("hours = 'never'")
    await watched.owner.look()
    assert watched.inventory.presence == Presence("hours", 0)
    assert any("never lends" in warning for warning in watched.owner.warnings())
    assert watched.owner.stands[""] == Stand("vacate", ("calendar",), True, None)


async def test_programs_on_a_gpu_by_who_they_are(tmp_path: Path) -> None:
    watched = Watched(tmp_path, lender())
    await watched.owner.look()
    me, name = os.getpid(), Path("/proc/self/comm").read_text().strip()
    await watched.owner._saw_gpus({"GPU-aaaa": (Seen(me, 1),), "GPU-bbbb": (Seen(me, 1, 0.0, computes=False),)})
    assert watched.owner.programs == {"GPU-aaaa": [(me, name)], "GPU-bbbb": []}
    assert watched.inventory.presence == Presence(gpus=frozenset({"GPU-aaaa"}))
    watched.path.write_text(f"[gpu]\nignore = ['{name}']\nidle = 0\n")
    await watched.owner.look()
    await watched.owner._saw_gpus({"GPU-aaaa": (Seen(me, 1),)})
    assert watched.inventory.presence == Presence() and watched.said[-1] == "GPU-aaaa is lent again"


def test_what_keeps_a_machine_from_being_lent_is_said(tmp_path: Path) -> None:
    bare = Inventory(NODE, "n", "owner", "", (), 0, ("*",), (), Lending(lending=True), 0)
    assert "slots is 0" in Watched(tmp_path, bare).owner.warnings()[0]
    none = Inventory(NODE, "n", "o", "", GPUS, 0, ("*",), (), Lending(True, withheld=("GPU-aaaa", "GPU-bbbb")), 0)
    assert "all its GPUs are taken back" in Watched(tmp_path, none).owner.warnings()[0]
    assert Watched(tmp_path, lender()).owner.warnings() == []


async def test_an_engine_that_hangs_keeps_nobody_waiting_and_is_asked_once() -> None:
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


async def test_an_engine_that_fails_says_nothing_new() -> None:
    async def fail() -> frozenset[int]:
        raise OSError("it is gone")

    assert await Whereabouts(fail).pids() == frozenset()


async def test_two_who_wait_for_one_answer_both_have_it() -> None:
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
