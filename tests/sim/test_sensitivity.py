"""Sensitivity: each input is changed alone."""

import json

import pytest
from click.testing import CliRunner

from mesh.cli.main import cli
from sim.campus.churn import absences, machines
from sim.campus.sensitivity import INPUTS, inputs_of, tornado, variants
from sim.campus.study import Sample, perform, replications
from sim.campus.world import World
from sim.campus.world_files import find_world, parse_world, presets
from sim.kernel import Streams


@pytest.mark.parametrize("name", presets())
def test_both_ends_of_every_input_are_valid_worlds(name: str) -> None:
    import msgspec

    world = find_world(name)
    base, *ends = variants(world)
    assert base == world and len(ends) == 2 * len(INPUTS)
    for end in ends:
        written = msgspec.to_builtins(end)
        assert msgspec.convert(written, World) == end  # passes all bounds


def departures(world: World, seeds: range) -> tuple[float, float]:
    """Return the departures of all machines for each seed, and the noticed share."""
    there = machines(world)
    found = [one for seed in seeds for gone in absences(world, there, Streams(seed)) for one in gone]
    return len(found) / len(seeds), sum(one.kind == "noticed" for one in found) / len(found)


def test_input_changes_only_the_quantity_it_names() -> None:
    world = find_world("reclaimnet-54", ["days=10"])
    input_ = {one.name: one for one in INPUTS}
    count, noticed = departures(world, range(3))
    fewer, more = (
        departures(change(world), range(3)) for change in (input_["notice share"].low, input_["notice share"].high)
    )
    assert fewer[0] == pytest.approx(count, rel=0.1) and more[0] == pytest.approx(count, rel=0.1)
    assert fewer[1] < 0.7 * noticed and more[1] > 1.2 * noticed
    together, alone = (
        departures(change(world), range(3)) for change in (input_["correlation"].high, input_["correlation"].low)
    )
    # The same number and kinds. Departures of rooms also happen at night, when more machines are lent.
    assert together[0] == pytest.approx(count, rel=0.25) and alone[0] == pytest.approx(count, rel=0.1)
    assert together[1] == pytest.approx(noticed, abs=0.05)
    assert input_["uplink bandwidth"].low(world).network.uplink_gbps == 2.5


def test_trace_excludes_the_inputs_of_owners() -> None:
    text = b'name = "t"\ndays = 1\ntrace = { file = "x.csv" }\n[[groups]]\nname = "m"\ncount = 1\nowners = "o"\n'
    text += (
        b"[owners.o]\nreclaims_per_day = 0\nabsent_h = { median = 1 }\n[jobs]\nper_day = 1\nhours = { median = 1 }\n"
    )
    assert {one.name for one in inputs_of(parse_world(text, "t"))} == {
        "notice length",
        "state size",
        "uplink bandwidth",
    }


def test_widest_swing_comes_first() -> None:
    world = find_world("gpunion-11", ["days=2"])
    ends = variants(world)
    samples = {one.digest: Sample("mesh") for one in ends}
    for replication, result, _ in perform(replications(ends, ["mesh"], range(2))):
        samples[replication.world.digest].by_seed[replication.seed] = result
    found = tornado(world, "mesh", "work_loss", samples)
    swings = [max(abs(bar.change.value) for bar in found.bars if bar.name == one.name) for one in found.bars]
    assert swings == sorted(swings, reverse=True) and len(found.bars) == 10
    assert all(bar.change.low <= bar.change.value <= bar.change.high and bar.change.n == 2 for bar in found.bars)
    by_end = {(bar.name, bar.end): bar for bar in found.bars}
    assert by_end["state size", "high"].change.value > 0 > by_end["state size", "low"].change.value
    with pytest.raises(ValueError, match="no seed has finished"):
        tornado(world, "mesh", "work_loss", {digest: Sample("mesh") for digest in samples})


def test_command_prints_a_row_for_each_end() -> None:
    words = ["debug", "sim", "sensitivity", "gpunion-11", "--days", "1", "--seeds", "1", "--executor", "serial"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0 and "notice length" in done.stdout and "a quarter" in done.stdout
    told = json.loads(CliRunner().invoke(cli, [*words, "--json", "--metric", "overhead"]).stdout)
    assert told["schema"] == 1 and told["complete"] and told["metric"] == "overhead" and len(told["bars"]) == 10
    wrong = CliRunner().invoke(cli, [*words, "--metric", "luck"])
    assert wrong.exit_code == 2 and "unknown metric 'luck'" in wrong.stderr
