"""Sweeps: the study's file, who computes it, and going on where it was."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.cli.main import cli
from sim.campus.study import Cell, Kept, code_digest, compute, perform
from sim.campus.sweep import Study, StudyError, parse_study
from sim.campus.world import find_world

TEXT = """name = "notices"
seeds = 2
policies = ["mesh", "slurm-s60"]
worlds = ["gpunion-11"]

[set]
days = 0.5

[grid]
"owners.volunteers.noticed" = [0.0, 0.6]
wire.uplink_gbps = [1, 10]
"""
HERE = Path(__file__).parent


def sweep(path: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["sim", "sweep", str(path), *words])


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(TEXT)
    return path


def test_a_grid_is_every_combination_and_seeds_come_first() -> None:
    found, points = parse_study(TEXT.encode(), "s.toml", HERE)
    assert len(points) == 8 and list(found.numbers) == [1, 2]
    assert [point.settings for point in points[::2]] == [
        {"owners.volunteers.noticed": noticed, "wire.uplink_gbps": speed} for noticed in (0.0, 0.6) for speed in (1, 10)
    ]
    assert {point.world.owners["volunteers"].noticed for point in points} == {0.0, 0.6}
    assert {point.world.days for point in points} == {0.5}


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("seeds = 2", "sedes = 2", 2, "unknown field `sedes`"),
        ("seeds = 2", "seeds = 0", 2, "expected `int` >= 1"),
        ('"slurm-s60"', '"slrum"', 3, "there is no policy 'slrum'"),
        ('"slurm-s60"', '"mesh"', 3, "named twice"),
        ('"gpunion-11"', '"gpunion-12"', 4, "there is no world"),
        ('"gpunion-11"', '"none.toml"', 4, "No such file"),
        ("days = 0.5", "dyas = 1", 6, "unknown field `dyas`"),
        ("[1, 10]", "10", 11, "needs a list of values"),
        ("[1, 10]", "[]", 11, "needs a list of values"),
        ("[0.0, 0.6]", "[0.0, 6]", 10, "with owners.volunteers.noticed = 6, wire.uplink_gbps = 1: "),
        ("[1, 10]", f"{list(range(1, 60_000))}", 9, "replications; at most"),
        ("[1, 10]", "[1, 10] x", 11, ""),
    ],
)
def test_a_mistake_is_named_with_its_line(before: str, after: str, line: int, words: str) -> None:
    text = TEXT.replace(before, after, 1)
    with pytest.raises(StudyError) as caught:
        parse_study(text.encode(), "s.toml", HERE)
    told = str(caught.value)
    assert told.startswith("s.toml: ") and f"line {line}" in told and words in told


@settings(max_examples=60)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=60).map(lambda text: (TEXT + text).encode())))
def test_no_bytes_do_worse_than_being_refused(data: bytes) -> None:
    try:
        found, points = parse_study(data, "s.toml", HERE)
    except StudyError as error:
        assert str(error).startswith("s.toml: ")
    else:
        assert isinstance(found, Study) and points


def test_every_executor_gives_the_same_bytes_and_a_sweep_goes_on(study: Path) -> None:
    kept = study.with_suffix(".results.jsonl")
    alone = sweep(study, "--executor", "serial", "--json")
    assert alone.exit_code == 0 and json.loads(alone.stdout)["complete"]
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) == 16
    kept.write_bytes(b"".join(lines[:9]) + lines[9][:40])  # as a power cut leaves it
    again = sweep(study, "--executor", "process", "--workers", "2", "--json")
    assert again.stdout == alone.stdout
    assert kept.read_bytes().splitlines(keepends=True)[:9] == lines[:9]
    assert len(kept.read_bytes().splitlines()) == 17  # the torn one, and only those that were missing
    study.write_text(TEXT.replace("[1, 10]", "[1, 10, 40]"))
    wider = sweep(study, "--executor", "serial")
    assert "uplink" in wider.stdout.lower() and len(kept.read_bytes().splitlines()) == 17 + 8
    fresh = sweep(study, "--executor", "process", "--workers", "2", "--keep", str(study.parent / "other"), "--json")
    assert [p for p in json.loads(fresh.stdout)["points"] if p["settings"]["wire.uplink_gbps"] != 40] == json.loads(
        alone.stdout
    )["points"]


@pytest.mark.dask
def test_a_dask_cluster_gives_the_same_bytes(study: Path) -> None:
    from distributed import LocalCluster

    alone = sweep(study, "--executor", "serial", "--json")
    study.with_suffix(".results.jsonl").unlink()
    with LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=False,
        protocol="tcp://",
        host="127.0.0.1",
        dashboard_address=None,
    ) as cluster:
        address = cluster.scheduler_address
        there = sweep(study, "--executor", "dask", "--dask", address, "--json")
    assert there.exit_code == 0, there.stderr
    assert address.startswith("tcp://127.0.0.1:") and there.stdout == alone.stdout
    assert len(study.with_suffix(".results.jsonl").read_bytes().splitlines()) == 16


def test_executors_that_are_not_there_are_told(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = sweep(study, "--dask", "tcp://127.0.0.1:1")
    assert refused.exit_code == 2 and "add --executor dask" in refused.stderr
    monkeypatch.setitem(sys.modules, "distributed", None)
    absent = sweep(study, "--executor", "dask")
    assert absent.exit_code == 2 and "pip install 'campus-mesh[dask]'" in absent.stderr
    assert sweep(study.parent / "none.toml").exit_code == 2


def test_a_machine_with_other_code_computes_nothing() -> None:
    cell = Cell(find_world("gpunion-11", ["days=0.1"]), "mesh", 1)
    with pytest.raises(ValueError, match="another version of campus-mesh"):
        compute(cell, "of yesterday")
    assert compute(cell, code_digest()).seed == 1


def test_what_was_kept_is_not_computed_again(tmp_path: Path) -> None:
    cell = Cell(find_world("gpunion-11", ["days=0.1"]), "mesh", 1)
    store = Kept(tmp_path / "kept")
    assert [kept for _, _, kept in perform([cell], None, store)] == [False]
    assert [kept for _, _, kept in perform([cell], None, Kept(tmp_path / "kept"))] == [True]
