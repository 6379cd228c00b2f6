"""The owner's presence: for any observations, the levels of guests follow the clocks of the policy."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.provider.hours import parse_hours
from mesh.provider.policy import Clocks, Policy, Source
from mesh.provider.presence import MACHINE, TYPING_S, Presence, Seen, Stand

GPU, OTHER = "GPU-a", "GPU-b"
CLOCKS = Clocks(after=2.0, suspend=10.0, resume=4.0, idle=20.0)


def policy(**changes: Any) -> Policy:
    watched: dict[str, Any] = {f"{name}_clocks": CLOCKS for name in ("gpu", "keyboard", "load", "calendar")}
    return Policy(**{**watched, "keyboard": "all", "load": 1.0, **changes})


def seen(source: Source | None, active: bool = True) -> Seen:
    """Return an observation in which at most this source is active."""
    there = source if active else None
    return Seen(
        foreign={GPU: there == "gpu", OTHER: False},
        typed_s=0.0 if there == "keyboard" else 1e6,
        load=3.0 if there == "load" else 0.0,
        open=there != "calendar",
    )


def scope(source: Source) -> str:
    return GPU if source == "gpu" else MACHINE


SOURCES: list[Source] = ["gpu", "keyboard", "load", "calendar"]


@pytest.mark.parametrize("source", SOURCES)
def test_cause_passes_all_levels(source: Source) -> None:
    presence, now = Presence(policy(), (GPU, OTHER)), 100.0

    def levels(active: bool, seconds: int) -> list[str]:
        nonlocal now
        found: list[str] = []
        for _ in range(seconds):
            stands = presence.step(seen(source, active), now)
            found.append(stands[scope(source)].level)
            assert all(stand.level == "lend" for name, stand in stands.items() if name != scope(source))
            now += 1.0
        return found

    assert levels(False, 3) == ["lend"] * 3
    assert levels(True, 2) == ["lend"] * 2, "activity is shorter than `after`"
    assert levels(True, 3) == ["suspend"] * 3
    late = 0 if source == "keyboard" else 1  # the time of the last key is known
    assert levels(False, 4) == ["suspend"] * 4 if late else ["calm"] * 4
    assert set(levels(False, 15 if late else 1)) <= {"calm", "lend"}
    assert levels(False, 10)[-1] == "lend"
    assert levels(True, 30) == ["lend"] * 2 + ["suspend"] * 10 + ["vacate"] * 18
    stand = presence.stands[scope(source)]
    assert stand.causes == (source,) and stand.pressing and stand.why
    after = levels(False, 22)
    assert after[-1] == "lend" and set(after) <= {"vacate", "lend"}, "after vacate, no level but lend follows"


def test_processors_and_memory_each_count_as_load() -> None:
    for load, waits, level in (
        (0.5, 9.0, "lend"),
        (0.5, 10.0, "suspend"),
        (1.0, None, "suspend"),
        (None, 50.0, "suspend"),
    ):
        presence = Presence(policy(memory_wait=10.0), ())
        for now in range(4):
            stand = presence.step(Seen(load=load, memory_wait=waits), float(now))[MACHINE]
        assert stand.level == level, (load, waits)


def test_short_activity_does_not_count() -> None:
    presence = Presence(policy(), (GPU,))
    for now, active in enumerate([True, True, False, True, True, False, True, False]):
        assert presence.step(seen("gpu", active), float(now))[GPU].level == "lend"


def test_invisible_source_changes_nothing() -> None:
    presence = Presence(policy(), (GPU,))
    for now in range(5):
        presence.step(seen("gpu"), float(now))
    blind = Seen(foreign={}, typed_s=None, load=None)
    assert {presence.step(blind, 5.0 + step)[GPU].level for step in range(3)} == {"suspend"}
    assert presence.step(blind, 50.0)[MACHINE] == Stand()


def test_occasional_input_is_one_activity() -> None:
    clocks = Clocks(after=30.0, suspend=600.0, resume=60.0, idle=300.0)
    presence = Presence(policy(keyboard_clocks=clocks), ())
    typed = 0.0
    for now in range(40):
        typed = now if now % 8 == 0 else typed
        level = presence.step(Seen(typed_s=now - typed), float(now))[MACHINE].level
        assert level == ("lend" if now < 30 else "suspend")
    assert TYPING_S > 8.0, "shorter, and reports of the kernel every 8 s would show pauses"
    levels = {now: presence.step(Seen(typed_s=now - 30.0), float(now))[MACHINE].level for now in range(40, 400)}
    assert next(now for now in levels if levels[now] == "calm") == 90
    assert next(now for now in levels if levels[now] == "lend") == 330


def test_guest_has_worst_level_of_its_scopes() -> None:
    presence = Presence(policy(), (GPU, OTHER))
    for now in range(4):
        presence.step(msgspec.structs.replace(seen("gpu"), load=9.0), float(now))
    assert presence.stand(()).causes == ("load",) and presence.stand((OTHER,)).level == "suspend"
    both = presence.stand((GPU,))
    assert both.causes == ("load", "gpu") and "processors or memory and the owner's program" in both.why
    for now in range(4, 40):
        presence.step(seen("gpu"), float(now))
    assert (presence.stand(()).level, presence.stand((GPU,)).level) == ("lend", "vacate")
    assert presence.stand((GPU,)).causes == ("gpu",) and presence.stand(("GPU-unknown",)).level == "lend"


def test_guests_that_had_to_leave_stay_away_over_a_restart() -> None:
    presence = Presence(policy(), (GPU,))
    for now in range(30):
        presence.step(seen("gpu"), float(now))
    for now in range(30, 37):
        presence.step(seen("gpu", False), float(now))
    assert presence.stands[GPU].level == "vacate", "calm if they had only been suspended"
    again = Presence(presence.policy, (GPU,))
    again.remember(presence.memories())
    assert again.step(seen("gpu", False), 37.0)[GPU].level == "vacate"


def test_new_policy_applies_at_next_step() -> None:
    presence = Presence(policy(), (GPU,))
    for now in range(4):
        presence.step(msgspec.structs.replace(seen("gpu"), typed_s=0.0), float(now))
    assert presence.stands[MACHINE].level == presence.stands[GPU].level == "suspend"
    presence.take(policy(gpu=False, keyboard="off", hours=parse_hours("never")))
    assert {stand.level for stand in presence.step(seen("gpu"), 4.0).values()} == {"lend"}
    presence.take(policy())
    assert presence.step(seen("gpu"), 5.0)[GPU].level == "lend"
    assert presence.step_gpus({GPU: True, "GPU-unknown": True}, 7.0)[GPU].level == "suspend"


times = st.floats(0, 40, allow_nan=False)
clocks = st.builds(Clocks, times, times, times, times)
runs = st.lists(
    st.tuples(st.sampled_from([True, False, None]), st.floats(0.1, 30), st.booleans()), min_size=1, max_size=60
)


@given(clocks, st.sampled_from(SOURCES), runs)
def test_guests_run_only_at_lend_and_calm(
    clocks: Clocks, source: Source, looks: list[tuple[bool | None, float, bool]]
) -> None:
    """Compare with the definition of the clocks for a single cause. The daemon may restart before each observation."""
    presence = Presence(policy(**{f"{source}_clocks": clocks}), (GPU,))
    now = 1000.0
    began: float | None = None  # start of the present activity
    gone: float | None = None
    stood: float | None = None  # start of the suspension
    before = "lend"
    for told, wait, anew in looks:
        now += wait
        if anew:
            memories, presence = presence.memories(), Presence(presence.policy, (GPU,))
            presence.remember(memories)
        active = began is not None if told is None and source == "calendar" else told  # the calendar is always known
        stand = presence.step(Seen() if active is None else seen(source, active), now)[scope(source)]
        if active:
            began, gone = (now if began is None else began), None
        elif active is False:
            began, gone = None, (now if gone is None else gone)
        level = stand.level
        stood = None if level in {"lend", "calm"} else now if stood is None else stood
        if active and began is not None and now - began >= clocks.after:
            assert level in {"suspend", "vacate"}, "no guest runs while the owner is present"
            assert stand.pressing and stand.causes == (source,)
        if active and level == "lend":
            assert now - (began or now) < clocks.after
        if level == "suspend" and stood is not None:
            assert now - stood < clocks.suspend, "a suspension is shorter than `suspend`"
        if before != "lend" and level == "lend" and source != "keyboard":
            assert gone is not None and now - gone >= clocks.idle
        if before == "lend":
            assert level in {"lend", "suspend", "vacate"}
        if before == "vacate":
            assert level in {"vacate", "lend"}
        if gone is not None and active is False and now - gone >= clocks.idle:
            assert level == "lend", "the machine is lent after `idle`"
        before = level


@given(st.lists(st.tuples(st.sampled_from([*SOURCES, None]), st.floats(0.1, 10)), max_size=80))
def test_lends_only_when_no_cause_holds(looks: list[tuple[Source | None, float]]) -> None:
    together = Presence(policy(), (GPU,))
    apart = {source: Presence(policy(), (GPU,)) for source in SOURCES}
    now = 0.0
    for source, wait in looks:
        now += wait
        together.step(seen(source), now)
        for name, presence in apart.items():
            presence.step(seen(source if source == name else None), now)
        for where, mine in ((GPU, ["gpu"]), (MACHINE, ["keyboard", "load", "calendar"])):
            alone = [apart[name].stands[where] for name in SOURCES if name in mine]
            stand = together.stands[where]
            assert (stand.level == "lend") == all(one.level == "lend" for one in alone)
            assert stand.pressing == any(one.pressing for one in alone)
            if any(one.level == "vacate" and one.pressing for one in alone):
                assert stand.level == "vacate"
