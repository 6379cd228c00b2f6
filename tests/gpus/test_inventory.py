"""The inventory: a node admits exactly what its advert offers."""

import os

from hypothesis import given
from hypothesis import strategies as st

from mesh.gpus.inventory import Inventory, Lending, Presence, machine_mib
from placement.advert import Gpu, Portion, decode_advert, encode_advert
from placement.allocation import all_free
from placement.filters import refusals
from placement.request import Request

NODE = b"n" * 32
GPUS = (Gpu("a", "A100", 80_000), Gpu("b", "T4", 16_000))


def lender(guards: bool = True, gpu_sharing: bool = True) -> Inventory:
    inventory = Inventory(NODE, "n", "owner", b"o" * 32, "", GPUS, 1, ("*",), (), Lending(lending=True), 0, gpu_sharing)
    inventory.engines, inventory.guards = ("process",), guards
    return inventory


def request(job: str, **needs: object) -> Request:
    return Request(job=job.encode(), attempt=0, user="ada", **{"gpus": 1, **needs})  # type: ignore[arg-type]


def test_shares_fill_one_gpu_first() -> None:
    inventory, half = lender(), {"gpu_share": 50, "vram_mib": 8_000}
    before = inventory.advert()
    assert inventory.admit(request("one", **half)) is None and inventory.admit(request("two", **half)) is None
    assert inventory.portions_of(b"one") == inventory.portions_of(b"two") == (Portion("b", 50, 8_000),)
    assert inventory.advert().free_portions == all_free(GPUS[:1]) and inventory.advert().version > before.version
    assert inventory.admit(request("whole")) is None and inventory.portions_of(b"whole") == all_free(GPUS[:1])
    assert inventory.admit(request("three", **half)) == "0 of 2 fitting GPUs have 50 % and 8000 MiB left, 1 asked"
    for job in (b"one", b"two", b"whole", b"unknown"):
        inventory.release(job)
    assert inventory.advert().free_portions == all_free(GPUS) and inventory.portions_of(b"one") == ()


def test_one_job_may_have_the_whole_machine_by_default() -> None:
    advert = lender().advert()
    assert advert.cpus == os.cpu_count() and advert.memory_mib == machine_mib() > 0


def test_repeated_admission_is_idempotent() -> None:
    inventory = lender()
    for _ in range(2):
        assert inventory.admit(request("one", gpu_share=60, vram_mib=1)) is None
    assert inventory.advert().free_portions == (*all_free(GPUS[:1]), Portion("b", 40, 15_999))


def test_owner_pause_beats_pending_removal() -> None:
    inventory = lender()
    assert inventory.admit(request("one")) is None
    inventory.lending = Lending(lending=True, paused=True)
    assert "paused" in (inventory.admit(request("one")) or "")
    inventory.lending, inventory.presence = Lending(lending=True), Presence(held_by="owner")
    assert inventory.admit(request("one")) is not None
    inventory.presence = Presence()
    assert inventory.admit(request("one")) is None
    inventory.draining = True
    assert inventory.admit(request("one")) == "it is leaving the mesh" and not inventory.lends


def test_time_of_the_next_lending_is_told_if_all_reasons_have_an_end() -> None:
    inventory = lender()
    for lending, presence, back_unix in (
        (Lending(True), Presence(), 0),
        (Lending(True, paused=True, until_unix=50), Presence(), 50),
        (Lending(True, paused=True, until_unix=50), Presence("hours", 70), 70),
        (Lending(True, paused=True, until_unix=90), Presence("hours", 70), 90),
        (Lending(True, paused=True), Presence("hours", 70), 0),
        (Lending(True, paused=True, until_unix=50), Presence("owner"), 0),
        (Lending(True, until_unix=50), Presence(back_unix=70), 0),
    ):
        inventory.lending, inventory.presence = lending, presence
        assert inventory.advert().back_unix == back_unix, (lending, presence)
    inventory.lending, inventory.presence = Lending(True, paused=True, until_unix=50), Presence()
    inventory.draining = True
    assert inventory.advert().back_unix == 0, "it does not come back by itself"
    inventory.lending = Lending(True)
    assert inventory.advert().paused


def test_unguarded_node_takes_whole_gpus_only() -> None:
    share = request("share", gpu_share=50, vram_mib=1)
    assert lender(guards=False).admit(share) == "cannot keep a job to a share of a GPU"
    assert lender(gpu_sharing=False).admit(share) == "its owner lends whole GPUs only"
    assert lender(guards=False, gpu_sharing=False).admit(request("whole")) is None


def test_advert_changes_when_guard_is_ready() -> None:
    inventory = lender(guards=False)
    before = inventory.advert()
    inventory.guards = True
    after = inventory.advert()
    assert (before.guards, after.guards) == (False, True) and after.version > before.version
    assert inventory.admit(request("share", gpu_share=50, vram_mib=1)) is None


def test_job_that_could_leave_makes_room_for_what_fits_then() -> None:
    inventory = lender()
    for job in ("one", "two"):
        assert inventory.admit(request(job)) is None
    assert inventory.admit(request("slot", gpus=0)) is None
    large, slot = request("mine", vram_mib=40_000), request("mine", gpus=0)
    assert [inventory.fits_without(job, large) for job in (b"one", b"two", b"slot")] == [False, True, False]
    assert [inventory.fits_without(job, slot) for job in (b"one", b"two", b"slot")] == [False, False, True]
    assert not inventory.fits_without(b"two", request("mine", zone="atlantis"))
    version = inventory.advert().version
    inventory.lending = Lending(lending=True, withheld=("a",))
    assert not inventory.fits_without(b"two", large), "its owner has taken the GPU back"
    assert inventory.advert().version == version and inventory.portions_of(b"two") == all_free(GPUS[:1])


def test_share_change_is_bounded_by_others() -> None:
    inventory = lender()
    for job in ("one", "two"):
        assert inventory.admit(request(job, gpu_share=30, vram_mib=4_000)) is None
    before = inventory.advert().version
    assert inventory.change(b"one", 70, 12_000) is None and inventory.portions_of(b"one") == (Portion("b", 70, 12_000),)
    assert inventory.advert().free_portions == all_free(GPUS[:1]) and inventory.advert().version > before
    assert inventory.change(b"two", 31, 4_000) == "b has 30 % and 4000 MiB beside its other jobs"
    assert inventory.change(b"two", 30, 4_001) is not None and inventory.portions_of(b"two") == (
        Portion("b", 30, 4_000),
    )
    assert inventory.change(b"one", 10, 1_000) is None and inventory.change(b"two", 90, 15_000) is None


NEEDS = st.fixed_dictionaries(
    {
        "gpus": st.integers(0, 3),
        "gpu_share": st.integers(1, 100),
        "vram_mib": st.integers(1, 90_000),
        "capability": st.sampled_from([(0, 0), (8, 0)]),
    }
)
STEPS = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | NEEDS), max_size=30)


@given(STEPS)
def test_filters_agree_with_inventory(steps: list[tuple[str, dict[str, object] | None]]) -> None:
    inventory, here = lender(), set()
    for job, needs in steps:
        if needs is None:
            inventory.release(job.encode())
            here.discard(job)
            continue
        advert = inventory.advert()
        assert decode_advert(NODE, encode_advert(advert)) == advert
        wanted = request(job, **needs)
        reasons, refusal = refusals(wanted, advert), inventory.admit(wanted)
        if job not in here:
            assert (refusal is None) == (not reasons) and refusal in {None, "; ".join(reasons)}
        if refusal is None:
            here.add(job)
    for gpu in GPUS:
        held = [portion for job in here for portion in inventory.portions_of(job.encode()) if portion.uuid == gpu.uuid]
        assert sum(portion.share for portion in held) <= 100
        assert sum(portion.vram_mib for portion in held) <= gpu.vram_mib
