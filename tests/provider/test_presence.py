"""The owner's presence: whatever is seen, and whenever, guests feel what the policy's clocks say."""

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
    """A look in which only this says that the owner is there."""
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
def test_one_cause_through_all_levels(source: Source) -> None:
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
    assert levels(True, 2) == ["lend"] * 2, "not yet for long enough"
    assert levels(True, 3) == ["suspend"] * 3
    late = 0 if source == "keyboard" else 1  # of the keyboard it is known when it was touched last
    assert levels(False, 4) == ["suspend"] * 4 if late else ["calm"] * 4
    assert set(levels(False, 15 if late else 1)) <= {"calm", "lend"}
    assert levels(False, 10)[-1] == "lend"
    assert levels(True, 30) == ["lend"] * 2 + ["suspend"] * 10 + ["vacate"] * 18
    stand = presence.stands[scope(source)]
    assert stand.causes == (source,) and stand.pressing and stand.why
    after = levels(False, 22)
    assert after[-1] == "lend" and set(after) <= {"vacate", "lend"}, (
        "who was asked to leave is not asked back before it lends"
    )


def test_a_short_run_changes_nothing_and_a_pause_in_it_begins_it_anew() -> None:
    presence = Presence(policy(), (GPU,))
    for now, active in enumerate([True, True, False, True, True, False, True, False]):
        assert presence.step(seen("gpu", active), float(now))[GPU].level == "lend"


def test_what_cannot_be_seen_changes_nothing() -> None:
    presence = Presence(policy(), (GPU,))
    for now in range(5):
        presence.step(seen("gpu"), float(now))
    blind = Seen(foreign={}, typed_s=None, load=None)
    assert {presence.step(blind, 5.0 + step)[GPU].level for step in range(3)} == {"suspend"}
    assert presence.step(blind, 50.0)[MACHINE] == Stand()


def test_typing_now_and_then_is_one_activity_and_idleness_counts_from_the_last_key() -> None:
    clocks = Clocks(after=30.0, suspend=600.0, resume=60.0, idle=300.0)
    presence = Presence(policy(keyboard_clocks=clocks), ())
    typed = 0.0
    for now in range(40):
        typed = now if now % 8 == 0 else typed
        level = presence.step(Seen(typed_s=now - typed), float(now))[MACHINE].level
        assert level == ("lend" if now < 30 else "suspend")
    assert TYPING_S > 8.0, "or there are pauses between what the kernel tells"
    levels = {now: presence.step(Seen(typed_s=now - 30.0), float(now))[MACHINE].level for now in range(40, 400)}
    assert next(now for now in levels if levels[now] == "calm") == 90
    assert next(now for now in levels if levels[now] == "lend") == 330


def test_a_guest_feels_the_worst_of_where_it_is() -> None:
    presence = Presence(policy(), (GPU, OTHER))
    for now in range(4):
        presence.step(msgspec.structs.replace(seen("gpu"), load=9.0), float(now))
    assert presence.stand(()).causes == ("load",) and presence.stand((OTHER,)).level == "suspend"
    both = presence.stand((GPU,))
    assert both.causes == ("load", "gpu") and "processors and a program" in both.why
    for now in range(4, 40):
        presence.step(seen("gpu"), float(now))
    assert (presence.stand(()).level, presence.stand((GPU,)).level) == ("lend", "vacate")
    assert presence.stand((GPU,)).causes == ("gpu",) and presence.stand(("GPU-unknown",)).level == "lend"


def test_another_policy_counts_from_the_next_look() -> None:
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
def test_guests_run_when_they_may_and_never_else(
    clocks: Clocks, source: Source, looks: list[tuple[bool | None, float, bool]]
) -> None:
    """Against what the clocks mean, written down for one cause whose looks are all there is. The daemon may be started anew
    before each of them."""
    presence = Presence(policy(**{f"{source}_clocks": clocks}), (GPU,))
    now = 1000.0
    began: float | None = None  # of what is going on
    gone: float | None = None
    stood: float | None = None  # since when it stands still
    before = "lend"
    for told, wait, anew in looks:
        now += wait
        if anew:
            memories, presence = presence.memories(), Presence(presence.policy, (GPU,))
            presence.remember(memories)
        active = began is not None if told is None and source == "calendar" else told  # the clock can always be seen
        stand = presence.step(Seen() if active is None else seen(source, active), now)[scope(source)]
        if active:
            began, gone = (now if began is None else began), None
        elif active is False:
            began, gone = None, (now if gone is None else gone)
        level = stand.level
        stood = None if level in {"lend", "calm"} else now if stood is None else stood
        if active and began is not None and now - began >= clocks.after:
            assert level in {"suspend", "vacate"}, "the owner is there, and guests run"
            assert stand.pressing and stand.causes == (source,)
        if active and level == "lend":
            assert now - (began or now) < clocks.after
        if level == "suspend" and stood is not None:
            assert now - stood < clocks.suspend, "it stands still for longer than it may"
        if before != "lend" and level == "lend" and source != "keyboard":
            assert gone is not None and now - gone >= clocks.idle
        if before == "lend":
            assert level in {"lend", "suspend", "vacate"}
        if before == "vacate":
            assert level in {"vacate", "lend"}
        if gone is not None and active is False and now - gone >= clocks.idle:
            assert level == "lend", "the owner is gone, and it is not lent"
        before = level


@given(st.lists(st.tuples(st.sampled_from([*SOURCES, None]), st.floats(0.1, 10)), max_size=80))
def test_with_many_causes_it_lends_only_when_none_holds_it(looks: list[tuple[Source | None, float]]) -> None:
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
