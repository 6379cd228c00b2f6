"""Orders of the owner: pauses, hours, one GPU of several, and what a reclaim does in which order."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.api.handlers import lending as module
from mesh.api.handlers.lending import LendingHandlers
from mesh.api.requests import LendOrder, ReclaimOrder
from mesh.execution.killswitch import BY_OWNER
from mesh.gpus.inventory import Inventory, Lending, load_lending
from mesh.network.switch import MIGRATION
from mesh.provider.reclaim import Leave
from mesh.util.errors import ExitCode, MeshError
from placement.advert import Portion
from tests.provider.test_owner import GPUS, lender, lending_of

JOB, OTHER = b"j" * 16, b"k" * 16


class Machine:
    """Handlers whose parts note what they are asked for."""

    def __init__(self, directory: Path, inventory: Inventory | None = None) -> None:
        self.inventory = inventory or lender()
        self.steps: list[Any] = []
        self.handlers = lending_of(self.inventory, directory, self.steps.append)
        parts: Any = self.handlers
        parts._owner = SimpleNamespace(notice_s=30.0, policy=SimpleNamespace(pause=5.0), look=self._look)
        parts._reclaimer = SimpleNamespace(leave=self._leave, kill=self._kill, departed={})
        parts._switch.kill_all = lambda: self.steps.append("kill-switch")
        parts._edge.restore = lambda *what: self.steps.append(("restore", *what))
        parts._jobs.participant.hosted = [JOB, OTHER]
        parts._advert_changed = lambda: self.steps.append(f"advert, paused {self.inventory.lending.paused}")

    async def _look(self) -> None:
        self.steps.append("look")

    async def _leave(self, jobs: list[bytes], leave: Leave) -> list[bytes]:
        self.steps.append(("leave", list(jobs), leave))
        return jobs

    async def _kill(self, jobs: list[bytes] | None, reason: str, why: str) -> list[bytes]:
        self.steps.append(("kill", jobs, reason))
        return jobs or []


@pytest.mark.parametrize(
    ("text", "uuid"), [("0", "GPU-aaaa"), ("1", "GPU-bbbb"), ("GPU-b", "GPU-bbbb"), ("aa", "GPU-aaaa")]
)
def test_gpu_is_named_by_its_number_or_the_beginning_of_its_uuid(tmp_path: Path, text: str, uuid: str) -> None:
    assert lending_of(lender(), tmp_path).find_gpu(text) == uuid


@pytest.mark.parametrize(
    ("text", "found"), [("2", "no"), ("", "no"), ("GPU-", "2"), ("٠", "no"), ("c", "no"), ("0000", "no"), ("-1", "no")]
)
def test_gpu_that_is_not_meant_alone_is_refused(tmp_path: Path, text: str, found: str) -> None:
    with pytest.raises(MeshError, match=f"{found} GPUs of this machine fit .*it has 0: GPU-aaaa, 1: GPU-bbbb") as told:
        lending_of(lender(), tmp_path).find_gpu(text)
    assert told.value.code == ExitCode.NOT_FOUND


def test_machine_without_gpus_says_so(tmp_path: Path) -> None:
    inventory = Inventory(b"n" * 32, "n", "o", b"o" * 32, "", (), 1, ("*",), (), Lending(lending=True), 0)
    with pytest.raises(MeshError, match="it has none"):
        lending_of(inventory, tmp_path).find_gpu("0")


async def test_one_gpu_is_paused_and_resumed_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    pause = machine.handlers.set_paused
    assert (await pause(True, "1")).withheld == ["GPU-bbbb"]
    assert (await pause(True, "0")).withheld == ["GPU-bbbb", "GPU-aaaa"]
    assert (await pause(True, "1")).withheld == ["GPU-aaaa", "GPU-bbbb"], "once is enough"
    told = await pause(False, "1")
    assert told.withheld == ["GPU-aaaa"] and not told.paused and told.lending
    assert (await pause(False)).withheld == [], "the machine with every GPU"
    assert load_lending(tmp_path / "lending.json", False) == Lending(lending=True)


async def test_pause_ends_by_itself_and_lends_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, now, said = Machine(tmp_path), 1000.0, list[str]()
    monkeypatch.setattr(module.time, "time", lambda: now)

    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        raise Enough

    async def look() -> None:
        with monkeypatch.context() as here:
            here.setattr(module.asyncio, "sleep", sleep)
            with pytest.raises(Enough):
                await machine.handlers.end_pauses(said.append)

    told = await machine.handlers.set_paused(True, for_s=60)
    assert (told.paused, told.until_unix) == (True, 1060)
    now = 1059.0
    await look()
    assert machine.inventory.lending.paused and not said
    now = 1060.0
    machine.steps.clear()
    await look()
    assert machine.inventory.lending == Lending(lending=True) and said == ["its owner's pause is over"]
    assert machine.steps == ["guests", ("restore",), "advert, paused False"], "first what was cut off comes back"
    assert (await machine.handlers.set_paused(True)).until_unix == 0
    now += 10**6
    await look()
    assert machine.inventory.lending.paused, "this one has no end"
    assert time.time() == now


async def test_only_a_pause_of_the_machine_has_an_end(tmp_path: Path) -> None:
    handlers = lending_of(lender(), tmp_path)
    for paused, gpu in ((False, None), (True, "0")):
        with pytest.raises(MeshError, match="only a pause of the machine") as told:
            await handlers.set_paused(paused, gpu, for_s=60)
        assert told.value.code == ExitCode.USAGE


async def test_pause_keeps_what_is_cut_off(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.handlers.set_paused(True)
    assert machine.steps == ["advert, paused True"]


async def test_node_without_the_role_pauses_but_does_not_lend(tmp_path: Path) -> None:
    handlers = lending_of(lender(), tmp_path, roles=("user",))
    assert (await handlers.set_paused(True)).paused
    for order in (handlers.set_paused(False), handlers.lend(LendOrder(on=True))):
        with pytest.raises(MeshError, match="no role provider") as told:
            await order
        assert told.value.code == ExitCode.REFUSED
    assert handlers._inventory.lending.paused and handlers.barred


async def test_hours_are_written_into_the_policy_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, policy = Machine(tmp_path), tmp_path / "policy.toml"
    monkeypatch.setattr(LendingHandlers, "lend_state", lambda self: None)
    policy.write_text("# mine\n")
    await machine.handlers.lend(LendOrder(hours=["Sat"]))
    assert "# mine" in policy.read_text() and "Sat" in policy.read_text() and machine.steps == ["look"]
    assert not machine.inventory.lending.paused
    for hours, words in ((["Caturday"], "^hours:"), (["Sat"], "policy.toml: ")):
        if words != "^hours:":
            policy.write_text("= =")
        before = policy.read_text()
        with pytest.raises(MeshError, match=words) as told:
            await machine.handlers.lend(LendOrder(hours=hours))
        assert told.value.code == ExitCode.USAGE and policy.read_text() == before


async def test_reclaim_pauses_before_it_asks_guests_to_leave(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    told = await machine.handlers.reclaim(ReclaimOrder(grace_s=12.0))
    advert, (name, jobs, leave) = machine.steps
    assert advert == "advert, paused True", "no guest comes while others leave"
    assert (name, jobs, leave.by_hand) == ("leave", [JOB, OTHER], True) and leave.notice == 12.0
    assert len(told.reclaimed) == 2 and told.gpu is None
    machine.steps.clear()
    await machine.handlers.reclaim(ReclaimOrder())
    assert machine.steps[1][2].notice == 30.0, "the owner's policy says how long"


@pytest.mark.parametrize("now", [False, True])
async def test_reclaim_of_a_gpu_leaves_other_guests_alone(tmp_path: Path, now: bool) -> None:
    machine = Machine(tmp_path)
    machine.inventory._given = {JOB: (Portion("GPU-bbbb", 100, 80_000),), OTHER: (Portion("GPU-aaaa", 100, 80_000),)}
    told = await machine.handlers.reclaim(ReclaimOrder(gpu="1", now=now))
    assert told.gpu == "GPU-bbbb" and machine.steps[1][:2] == ("kill" if now else "leave", [JOB])
    assert "kill-switch" not in machine.steps and machine.inventory.lending.withheld == ("GPU-bbbb",)
    assert not machine.inventory.lending.paused


async def test_reclaim_at_once_kills_first_and_gives_checkpoints_their_way_back(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.handlers.reclaim(ReclaimOrder(now=True))
    assert machine.steps[0] == "kill-switch" and ("kill", None, BY_OWNER) in machine.steps
    assert "advert, paused True" in machine.steps and machine.steps[-1] == ("restore", MIGRATION)
    assert ("restore",) not in machine.steps, "guests stay cut off"


async def test_reclaim_tells_what_guests_lost(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    gone = SimpleNamespace(user="ada", name="train", reason="by hand", stages_ms={"left": 3.0})
    gone.lost = SimpleNamespace(seconds=1.23456, steps=7)
    parts: Any = machine.handlers
    parts._reclaimer.departed = {JOB: gone}
    told = await machine.handlers.reclaim(ReclaimOrder())
    (guest,) = told.guests
    assert (guest.user, guest.lost_s, guest.lost_steps, guest.stages_ms) == ("ada", 1.235, 7, {"left": 3.0})


@pytest.mark.parametrize(
    ("order", "asked"),
    [
        (ReclaimOrder(dry_run=True), (None, 30.0)),
        (ReclaimOrder(dry_run=True, grace_s=0.0), (None, 0.0)),
        (ReclaimOrder(dry_run=True, grace_s=7.0, gpu="0"), ("GPU-aaaa", 7.0)),
        (ReclaimOrder(dry_run=True, grace_s=7.0, now=True), (None, 0.0)),
    ],
)
def test_rehearsed_reclaim_changes_nothing(
    tmp_path: Path, order: ReclaimOrder, asked: tuple[str | None, float]
) -> None:
    machine, costs = Machine(tmp_path), list[Any]()
    parts: Any = machine.handlers
    parts._costs = lambda *what: costs.append(what) or []
    told = machine.handlers.rehearsed(order)
    assert told.dry_run and told.gpu == asked[0] and costs == [asked] and not machine.steps


def test_state_says_what_is_lent_now(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def told(handlers: LendingHandlers) -> dict[str, Any]:
        parts: Any = handlers
        stand = SimpleNamespace(level="lend", causes=(), pressing=False, next_s=None, why="")
        policy = SimpleNamespace(hours="always")
        parts._owner = SimpleNamespace(
            stands={module.MACHINE: stand} | {gpu.uuid: stand for gpu in GPUS},
            programs={"GPU-aaaa": [(7, "python")]},
            policy=policy,
            opens_at=lambda: 5.0,
            typed_s=1.0,
            console=SimpleNamespace(sources=("USB",)),
            load=0.5,
            memory_wait=2.0,
            warnings=lambda: ["never"],
        )
        with pytest.MonkeyPatch.context() as here:
            here.setattr(module, "copy_as", lambda kind, source, **given: given)
            here.setattr(module.schemas.owner, "Lend", lambda **fields: seen.append(fields))
            handlers.lend_state()
        return seen.pop()

    for changes, now in (({}, True), ({"paused": True, "until_unix": 9}, False)):
        state = told(lending_of(lender(**changes), tmp_path))
        assert (state["now"], state["lending"], state["paused"]) == (now, True, not now)
        assert state["paused_until_unix"] == (0 if now else 9)
    assert told(lending_of(lender(until_unix=9), tmp_path))["paused_until_unix"] == 0, "it is over"
    assert not told(lending_of(lender(), tmp_path, roles=("user",)))["now"]
    state = told(lending_of(lender(withheld=("GPU-bbbb",)), tmp_path))
    assert [gpu["withheld"] for gpu in state["gpus"]] == [False, True] and [gpu["index"] for gpu in state["gpus"]] == [
        0,
        1,
    ]
    assert [program.pid for program in state["gpus"][0]["programs"]] == [7]
    held = lender()
    held.presence = SimpleNamespace(held_by="owner")  # type: ignore[assignment]
    assert not told(lending_of(held, tmp_path))["now"]
