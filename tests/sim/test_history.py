"""Worlds from a mesh's history: from what its nodes publish, and from their journals."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.main import cli
from mesh.journal import Journal, OwnStay
from sim.campus.churn import absences, machines
from sim.campus.history import by_hour, world_of_journals, world_of_mesh
from sim.campus.world import World, WorldError
from sim.campus.world_files import find_world, parse_world
from sim.kernel import Streams

DAY_S, MONDAY_S = 86_400, 4 * 86_400 + 52 * 7 * 86_400
WEEK = ([100] * 10 + [20] * 8 + [100] * 6) * 5 + [100] * 48


def node(nick: str, gpus: int = 1, zone: str = "lab") -> dict[str, Any]:
    return {"node": nick.encode().hex(), "nick": nick, "zone": zone, "gpus": [{"vram_mib": 24_576}] * gpus}


def survival(departures: float, lent_h: float, week: list[int | None]) -> dict[str, Any]:
    return {"departures": departures, "lent_h": lent_h, "week": week}


def world_of(text: str) -> World:
    return parse_world(text.encode(), "history")


def test_nodes_become_groups_and_their_survival_becomes_owners() -> None:
    nodes = [node("ws1"), node("big", 4, "b/2"), node("ws1"), node("phone", 0)]
    told = {nodes[0]["node"]: survival(20.0, 240.0, WEEK)}
    world = world_of(world_of_mesh("lab", nodes, told, 12.0))
    assert [(group.name, group.gpus) for group in world.groups] == [("ws1-0", 1), ("big", 4), ("ws1-2", 1)]
    assert world.groups[1].rooms == ("b-2/1",) and world.jobs.per_day == 12
    owners = world.owners["ws1-0"]
    assert owners.reclaims_per_day == 2 and owners.by_hour.index(max(owners.by_hour)) == 10
    assert world.owners["big"].reclaims_per_day == 1.7  # it has published nothing, so the rate is assumed and marked
    assert sum(len(each) for each in absences(world, machines(world), Streams(1))) > 20
    with pytest.raises(WorldError, match="no node of this mesh lends a GPU"):
        world_of_mesh("lab", [node("phone", 0)], {}, 1.0)


def test_hourly_rates_follow_falls_of_the_lent_share() -> None:
    rates = by_hour(WEEK)
    assert rates[10] == pytest.approx(24.02) and rates[11] == 0.02
    assert by_hour([None] * 168) == [] == by_hour([50] * 168)


@given(
    st.text(max_size=50),
    st.text(max_size=10),
    st.floats(0, 1e9),
    st.floats(0, 1e6),
    st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=168, max_size=168),
)
def test_any_survival_answer_gives_a_valid_world(
    nick: str, zone: str, departures: float, lent_h: float, week: list[int]
) -> None:
    one = node(nick, 2, zone)
    try:
        world = world_of(world_of_mesh(nick, [one], {one["node"]: survival(departures, lent_h, week)}, 3.0))
    except WorldError as error:
        assert not nick, error  # a group has a name
    else:
        assert world.machines == 1


def journal(path: Path, stays: list[tuple[float, float]]) -> None:
    """Write a journal as a node does."""

    async def write() -> None:
        kept = Journal(path)
        await kept.open()
        for start, end in stays:
            kept.note_stay(OwnStay(int((MONDAY_S + start) * 1000), int((MONDAY_S + end) * 1000), "reclaimed"))
        await kept.close()

    asyncio.run(write())


def test_world_runs_on_journals_and_accepts_another_lab(tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    journal(tmp_path / "nodes" / "a.sqlite", [(0, 2 * DAY_S), (3 * DAY_S, 9 * DAY_S)])
    journal(tmp_path / "nodes" / "b.sqlite", [(0, DAY_S), (1.5 * DAY_S, 9 * DAY_S)])
    done = CliRunner().invoke(cli, ["debug", "sim", "history", str(tmp_path / "nodes")])
    assert done.exit_code == 0, done.stderr
    (tmp_path / "ours.toml").write_text(done.stdout)
    world = find_world(str(tmp_path / "ours.toml"))
    found = absences(world, machines(world), Streams(1))
    assert world.days == 9
    assert [[(one.start / DAY_S, one.end / DAY_S) for one in each] for each in found] == [[(2, 3)], [(1, 1.5)]]
    lab = '[[groups]]\nname = "lab4"\ncount = 5\nowners = "lab4"\n\n'
    lab += "[owners.lab4]\nreclaims_per_day = 1\nabsent_h = { median = 2 }\n"
    joined = done.stdout.replace("[trace]\n", f'{lab}\n[trace]\nowners = ["theirs"]\n')
    (tmp_path / "joined.toml").write_text(joined)
    world = find_world(str(tmp_path / "joined.toml"))
    found = absences(world, machines(world), Streams(1))
    assert world.machines == 7 and [(one.start / DAY_S, one.end / DAY_S) for one in found[0]] == [(2, 3)]
    assert any(found[2:])


def test_invalid_journal_is_reported(tmp_path: Path) -> None:
    for name, words in (("none.sqlite", "No such file"), ("text.sqlite", "not a node's journal")):
        if name.startswith("text"):
            (tmp_path / name).write_text("x" * 4096)
        done = CliRunner().invoke(cli, ["debug", "sim", "history", str(tmp_path / name)])
        assert done.exit_code == 2 and words in done.stderr
    journal(tmp_path / "short.sqlite", [(0, 3600)])
    with pytest.raises(WorldError, match="no whole day"):
        world_of_journals(tmp_path / "short.sqlite")
