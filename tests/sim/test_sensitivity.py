"""What an answer hangs on: each input is moved, and nothing else is."""

import json

import pytest
from click.testing import CliRunner

from mesh.cli.main import cli
from sim.campus.churn import absences, machines
from sim.campus.sensitivity import KNOBS, knobs, tornado, variants
from sim.campus.study import Side, cells, perform
from sim.campus.world import World, find_world, parse_world, presets
from sim.streams import Streams


@pytest.mark.parametrize("name", presets())
def test_every_end_of_every_input_is_a_world(name: str) -> None:
    import msgspec

    world = find_world(name)
    base, *ends = variants(world)
    assert base == world and len(ends) == 2 * len(KNOBS)
    for end in ends:
        written = msgspec.to_builtins(end)
        assert msgspec.convert(written, World) == end  # within all bounds


def departures(world: World, seeds: range) -> tuple[float, float]:
    """Of all machines: how many a seed, and the part of them that are noticed."""
    there = machines(world)
    found = [one for seed in seeds for gone in absences(world, there, Streams(seed)) for one in gone]
    return len(found) / len(seeds), sum(one.kind == "noticed" for one in found) / len(found)


def test_inputs_move_what_they_say_and_no_more() -> None:
    world = find_world("reclaimnet-54", ["days=10"])
    knob = {one.name: one for one in KNOBS}
    count, noticed = departures(world, range(3))
    fewer, more = (
        departures(change(world), range(3)) for change in (knob["notice share"].low, knob["notice share"].high)
    )
    assert fewer[0] == pytest.approx(count, rel=0.1) and more[0] == pytest.approx(count, rel=0.1)
    assert fewer[1] < 0.7 * noticed and more[1] > 1.2 * noticed
    together, alone = (
        departures(change(world), range(3)) for change in (knob["correlation"].high, knob["correlation"].low)
    )
    # As many, and of the same kinds; rooms' departures come at night too, when more machines are lent.
    assert together[0] == pytest.approx(count, rel=0.25) and alone[0] == pytest.approx(count, rel=0.1)
    assert together[1] == pytest.approx(noticed, abs=0.05)
    assert knob["uplink bandwidth"].low(world).wire.uplink_gbps == 2.5


def test_a_trace_says_of_its_owners_what_it_says() -> None:
    text = b'name = "t"\ndays = 1\ntrace = { file = "x.csv" }\n[[groups]]\nname = "m"\ncount = 1\nowners = "o"\n'
    text += (
        b"[owners.o]\nreclaims_per_day = 0\nabsent_h = { median = 1 }\n[jobs]\nper_day = 1\nhours = { median = 1 }\n"
    )
    assert {one.name for one in knobs(parse_world(text, "t"))} == {"notice length", "state size", "uplink bandwidth"}


def test_the_widest_swing_comes_first() -> None:
    world = find_world("gpunion-11", ["days=2"])
    ends = variants(world)
    sides = {one.digest: Side("mesh") for one in ends}
    for cell, result, _ in perform(cells(ends, ["mesh"], range(2))):
        sides[cell.world.digest].by_seed[cell.seed] = result
    found = tornado(world, "mesh", "work_loss", sides)
    swings = [max(abs(bar.more.value) for bar in found.bars if bar.knob == one.knob) for one in found.bars]
    assert swings == sorted(swings, reverse=True) and len(found.bars) == 10
    assert all(bar.more.low <= bar.more.value <= bar.more.high and bar.more.n == 2 for bar in found.bars)
    by_end = {(bar.knob, bar.end): bar for bar in found.bars}
    assert by_end["state size", "high"].more.value > 0 > by_end["state size", "low"].more.value
    with pytest.raises(ValueError, match="no seed is finished"):
        tornado(world, "mesh", "work_loss", {digest: Side("mesh") for digest in sides})


def test_the_command_prints_a_row_for_each_end() -> None:
    words = ["sim", "sensitivity", "gpunion-11", "--days", "1", "--seeds", "1", "--executor", "serial"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0 and "notice length" in done.stdout and "a quarter" in done.stdout
    told = json.loads(CliRunner().invoke(cli, [*words, "--json", "--figure", "overhead"]).stdout)
    assert told["schema"] == 1 and told["complete"] and told["figure"] == "overhead" and len(told["bars"]) == 10
    wrong = CliRunner().invoke(cli, [*words, "--figure", "luck"])
    assert wrong.exit_code == 2 and "there is no figure 'luck'" in wrong.stderr
