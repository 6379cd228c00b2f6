"""Sweeps: study files, executors, and resuming."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.cli.main import cli
from sim.campus.study import Replication, ResultStore, code_digest, compute, perform
from sim.campus.sweep import Study, StudyError, parse_study
from sim.campus.world_files import find_world

TEXT = """name = "notices"
seeds = 2
policies = ["mesh", "slurm-s60"]
worlds = ["gpunion-11"]

[set]
days = 0.5

[grid]
"owners.volunteers.noticed" = [0.0, 0.6]
network.uplink_gbps = [1, 10]
"""
HERE = Path(__file__).parent


def sweep(path: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["debug", "sim", "sweep", str(path), *words])


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(TEXT)
    return path


def test_grid_is_every_combination_ordered_by_seed() -> None:
    found, points = parse_study(TEXT.encode(), "s.toml", HERE)
    assert len(points) == 8 and list(found.seed_range) == [1, 2]
    assert [point.settings for point in points[::2]] == [
        {"owners.volunteers.noticed": noticed, "network.uplink_gbps": speed}
        for noticed in (0.0, 0.6)
        for speed in (1, 10)
    ]
    assert {point.world.owners["volunteers"].noticed for point in points} == {0.0, 0.6}
    assert {point.world.days for point in points} == {0.5}


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ("seeds = 2", "sedes = 2", 2, "unknown field `sedes`"),
        ("seeds = 2", "seeds = 0", 2, "expected `int` >= 1"),
        ('"slurm-s60"', '"slrum"', 3, "unknown policy 'slrum'"),
        ('"slurm-s60"', '"mesh"', 3, "a name occurs twice"),
        ('"gpunion-11"', '"gpunion-12"', 4, "unknown world"),
        ('"gpunion-11"', '"none.toml"', 4, "No such file"),
        ("days = 0.5", "dyas = 1", 6, "unknown field `dyas`"),
        ("[1, 10]", "10", 11, "must be a list of values"),
        ("[1, 10]", "[]", 11, "must be a list of values"),
        ("[0.0, 0.6]", "[0.0, 6]", 10, "with owners.volunteers.noticed = 6, network.uplink_gbps = 1: "),
        ("[1, 10]", f"{list(range(1, 60_000))}", 9, "replications; the limit is"),
        ("[1, 10]", "[1, 10] x", 11, ""),
    ],
)
def test_mistake_is_reported_with_its_line(before: str, after: str, line: int, words: str) -> None:
    text = TEXT.replace(before, after, 1)
    with pytest.raises(StudyError) as caught:
        parse_study(text.encode(), "s.toml", HERE)
    told = str(caught.value)
    assert told.startswith("s.toml: ") and f"line {line}" in told and words in told


@settings(max_examples=60)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=60).map(lambda text: (TEXT + text).encode())))
def test_arbitrary_bytes_are_rejected_without_other_errors(data: bytes) -> None:
    try:
        found, points = parse_study(data, "s.toml", HERE)
    except StudyError as error:
        assert str(error).startswith("s.toml: ")
    else:
        assert isinstance(found, Study) and points


def test_executors_give_the_same_bytes_and_sweeps_resume(study: Path) -> None:
    kept = study.with_suffix(".results.jsonl")
    alone = sweep(study, "--executor", "serial", "--json")
    assert alone.exit_code == 0 and json.loads(alone.stdout)["complete"]
    lines = kept.read_bytes().splitlines(keepends=True)
    assert len(lines) == 16
    kept.write_bytes(b"".join(lines[:9]) + lines[9][:40])  # as after a power cut
    again = sweep(study, "--executor", "process", "--workers", "2", "--json")
    assert again.stdout == alone.stdout
    assert kept.read_bytes().splitlines(keepends=True)[:9] == lines[:9]
    assert len(kept.read_bytes().splitlines()) == 17  # the torn line, and only the missing results
    study.write_text(TEXT.replace("[1, 10]", "[1, 10, 40]"))
    wider = sweep(study, "--executor", "serial")
    assert "uplink" in wider.stdout.lower() and len(kept.read_bytes().splitlines()) == 17 + 8
    fresh = sweep(study, "--executor", "process", "--workers", "2", "--keep", str(study.parent / "other"), "--json")
    assert [p for p in json.loads(fresh.stdout)["points"] if p["settings"]["network.uplink_gbps"] != 40] == json.loads(
        alone.stdout
    )["points"]


@pytest.mark.dask
def test_dask_cluster_gives_the_same_bytes(study: Path) -> None:
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


def test_missing_executors_are_reported(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = sweep(study, "--dask", "tcp://127.0.0.1:1")
    assert refused.exit_code == 2 and "add --executor dask" in refused.stderr
    monkeypatch.setitem(sys.modules, "distributed", None)
    absent = sweep(study, "--executor", "dask")
    assert absent.exit_code == 2 and "pip install distributed" in absent.stderr
    assert sweep(study.parent / "none.toml").exit_code == 2


def test_worker_with_other_code_refuses() -> None:
    replication = Replication(find_world("gpunion-11", ["days=0.1"]), "mesh", 1)
    with pytest.raises(ValueError, match="another version of campus-mesh"):
        compute(replication, "of yesterday")
    assert compute(replication, code_digest()).seed == 1


def test_stored_results_are_not_computed_again(tmp_path: Path) -> None:
    replication = Replication(find_world("gpunion-11", ["days=0.1"]), "mesh", 1)
    store = ResultStore(tmp_path / "kept")
    assert [kept for _, _, kept in perform([replication], None, store)] == [False]
    assert [kept for _, _, kept in perform([replication], None, ResultStore(tmp_path / "kept"))] == [True]
