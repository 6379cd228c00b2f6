"""Statistics over replications, stored results, and the commands of `mesh debug sim`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from math import sqrt
from pathlib import Path
from random import Random
from statistics import NormalDist

import pytest
from click.testing import CliRunner

from mesh.cli.main import cli
from sim.campus import claims
from sim.campus.claims import CLAIMS, Claim, verdict
from sim.campus.metrics import SCHEMA, Result
from sim.campus.policies import POLICIES
from sim.campus.statistics import Interval, bootstrap, difference, holm, mean_of, p_value, reduction
from sim.campus.study import ResultStore, Sample, common_seeds, is_precise, perform, replications
from sim.campus.world_files import find_world, presets

ROOT = Path(__file__).parents[2]
QUICK = ("gpunion-11", "--days", "2", "--workers", "1")


# --- intervals


def test_intervals_cover_the_true_value_at_their_level() -> None:
    rng = Random(4)
    hits = 0
    for _ in range(100):
        sample = [NormalDist(5.0, 2.0).inv_cdf(rng.random()) for _ in range(30)]
        interval = bootstrap(30, lambda places, s=sample: sum(s[p] for p in places) / len(places), 300)  # type: ignore[misc]
        hits += interval.low <= 5.0 <= interval.high
    assert 85 <= hits <= 100  # 95 of 100, less for few resamples


def test_interval_of_a_mean_matches_the_normal_interval() -> None:
    rng = Random(9)
    sample = [rng.random() for _ in range(200)]
    interval = mean_of(sample)
    assert interval.half == pytest.approx(1.96 * sqrt(1 / 12 / 200), rel=0.15)
    assert mean_of([3.0]) == Interval(3.0, 3.0, 3.0, 1)
    assert mean_of(sample) == interval  # the same replications give the same interval


def test_pairing_removes_variance_shared_by_policies() -> None:
    rng = Random(2)
    luck = [10 * rng.random() for _ in range(30)]
    first, second = luck, [value - 1 + 0.1 * rng.random() for value in luck]
    paired = difference(first, second)
    assert paired.high < -0.9 and paired.half < 0.05
    assert mean_of(second).half > 10 * paired.half
    assert reduction(first, first).value == 0 and reduction([0.0], [1.0]).value == 0
    assert reduction([4.0, 4.0], [1.0, 1.0]).value == 0.75


def test_p_values_match_all_sign_permutations() -> None:
    assert p_value([1.0, 1.0, 1.0]) == 2 / 8
    assert p_value([1.0, -1.0]) == 1.0 and p_value([0.0, 0.0]) == 1.0
    assert p_value([1.0] * 20) < 0.001
    rng = Random(1)
    assert p_value([rng.random() - 0.5 for _ in range(40)]) > 0.05


def test_holm_matches_the_published_procedure() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_claim_is_met_only_if_the_whole_interval_agrees() -> None:
    more = Claim("p", "c", "w", "f", at_least=0.5)
    less = Claim("p", "c", "w", "f", at_most=0.5)
    for low, high, words in ((0.6, 0.7, "met"), (0.4, 0.6, "undecided"), (0.1, 0.2, "not met")):
        assert verdict(more, Interval(0.5, low, high, 5)) == words
    for low, high, words in ((0.6, 0.7, "not met"), (0.4, 0.6, "undecided"), (0.1, 0.2, "met")):
        assert verdict(less, Interval(0.5, low, high, 5)) == words
    assert verdict(more, Interval(0.9, 0.9, 0.9, 1)) == "undecided"  # one run has no interval
    assert all(claim.world in presets() and (claim.baseline in POLICIES or not claim.baseline) for claim in CLAIMS)
    assert all((claim.at_least is None) != (claim.at_most is None) for claim in CLAIMS)


# --- studies


def result(seed: int, loss: float) -> Result:
    return Result(SCHEMA, "w", "p", seed, {"work_loss": loss}, 1, "")


def test_stopping_rule_waits_for_a_narrow_interval() -> None:
    one, other = Sample("a"), Sample("b")
    for seed in range(4):
        one.by_seed[seed], other.by_seed[seed] = result(seed, 10.0), result(seed, 2.0 + seed / 100)
    assert not is_precise(one, other, "work_loss")  # too few seeds
    one.by_seed[9] = result(9, 10.0)
    assert common_seeds(one, other) == [0, 1, 2, 3]
    other.by_seed[9] = result(9, 2.0)
    assert is_precise(one, other, "work_loss")
    one.by_seed[10], other.by_seed[10] = result(10, 10.0), result(10, 9.0)
    assert not is_precise(one, other, "work_loss")


def test_results_are_stored_and_do_not_depend_on_the_executor(tmp_path: Path) -> None:
    wanted = replications([find_world("gpunion-11", ["days=1"])], ["mesh", "slurm-s0"], range(3))
    assert [replication.seed for replication in wanted] == [0, 0, 1, 1, 2, 2]  # complete pairs first
    alone = {replication.key: result for replication, result, _ in perform(wanted)}
    file = tmp_path / "kept.jsonl"
    with ThreadPoolExecutor(2) as executor:
        beside = {replication.key: result for replication, result, _ in perform(wanted, executor, ResultStore(file))}
    assert alone == beside and len(alone) == 6
    file.write_bytes(file.read_bytes() + b'{"key": "torn')  # a run killed while writing
    again = ResultStore(file)
    assert [again.get(replication) for replication in wanted] == [alone[replication.key] for replication in wanted]
    again.add(wanted[0], alone[wanted[0].key])
    assert [line for line in file.read_bytes().splitlines() if line.startswith(b'{"key": "torn')] == [b'{"key": "torn']
    assert all(ResultStore(file).get(replication) for replication in wanted)
    changed = replications([find_world("gpunion-11", ["days=1", "jobs.per_day=6"])], ["mesh"], [0])
    assert again.get(changed[0]) is None
    with pytest.raises(ValueError, match="unknown policy 'mehs'"):
        replications([], ["mehs"], [1])


# --- commands


def mesh(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(cli, ["debug", "sim", *words])
    return done.exit_code, done.stdout, done.stderr


def test_worlds_and_policies_are_listed_and_worlds_can_be_saved() -> None:
    assert all(name in mesh("worlds")[1] for name in presets())
    listed = json.loads(mesh("worlds", "--json")[1])
    assert listed["schema"] == 1 and {row["name"] for row in listed["worlds"]} == set(presets())
    assert {row["name"] for row in json.loads(mesh("policies", "--json")[1])["policies"]} == set(POLICIES)
    assert mesh("show", "lab-building")[1] == (ROOT / "sim/campus/worlds/lab-building.toml").read_text()


def test_run_prints_metrics_with_intervals() -> None:
    code, out, _ = mesh("run", *QUICK, "--seeds", "2", "--policy", "mesh", "--policy", "slurm-s60")
    assert code == 0 and "2 replications" in out and "work_loss" in out and "slurm-s60" in out
    found = json.loads(mesh("run", *QUICK, "--seeds", "2", "--json")[1])
    assert (found["schema"], found["complete"], found["days"]) == (1, True, 2.0)
    one = found["policies"][0]
    assert one["n"] == 2 and len(one["replications"]) == 2
    metric = one["metrics"]["utilisation"]
    assert metric["low"] <= metric["value"] <= metric["high"]
    assert "WORK LOSS" in mesh("run", *QUICK, "--seeds", "1", "--policy", "all")[1]


def test_compare_compares_policies_or_worlds(tmp_path: Path) -> None:
    quick = ("--world", "gpunion-11", "--days", "2", "--workers", "1", "--seeds", "3")
    code, out, _ = mesh("compare", "slurm-s0", "mesh", *quick)
    assert code == 0 and "mesh against slurm-s0, 3 paired replications" in out
    rows = {row["metric"]: row for row in json.loads(mesh("compare", "slurm-s0", "mesh", *quick, "--json")[1])["rows"]}
    assert rows["work_loss"]["less_by"]["value"] > 0.9 and rows["work_loss"]["p_holm"] <= 1
    more = tmp_path / "more.toml"
    more.write_text(mesh("show", "gpunion-11")[1].replace("count = 6", "count = 12"))
    code, out, _ = mesh("compare", "gpunion-11", str(more), "--days", "2", "--workers", "1", "--seeds", "2", "--json")
    assert code == 0 and json.loads(out)["n"] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("run", "nowhere"), "unknown world 'nowhere'"),
        (("run", "gpunion-11", "--policy", "best"), "unknown policy 'best'"),
        (("run", "gpunion-11", "--set", "jobs.per_day"), "is not a change"),
        (("run", "gpunion-11", "--set", "jobs.hours=1"), "expected `object"),
        (("compare", "mesh", "gpunion-11"), "two policies or two worlds"),
        (("compare", "mesh", "mesh"), "both sides are the same"),
        (("run", "gpunion-11", "--keep", "/proc/none/x", "--days", "0.1", "--workers", "1"), "No such file"),
    ],
)
def test_usage_errors_take_one_line(words: tuple[str, ...], told: str) -> None:
    code, out, err = mesh(*words)
    assert code != 0 and told in err and not out and "Traceback" not in err


def test_claims_command_gives_a_verdict_for_each_claim() -> None:
    words = ("--days", "1", "--seeds", "1", "--workers", "1", "--set", "jobs.per_day=20")
    code, out, _ = mesh("claims", *words, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == len(CLAIMS)
    assert {row["verdict"] for row in rows} <= {"met", "not met", "undecided"}
    assert {row["source"] for row in rows} >= {"ReclaimNet", "GPUnion"}
    assert claims.policies_of(("reclaimnet-54", ()))[0] == "mesh"


@contextmanager
def under_way(file: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a long study with two workers and wait until some results are stored."""
    words = ["run", "gpunion-11", "--seeds", "5000", "--workers", "2", "--keep", str(file), "--json"]
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-m", "mesh.cli", "debug", "sim", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (file.exists() and file.read_bytes().count(b"\n") >= 3):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr
            time.sleep(0.05)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they do outlive it")
def test_workers_end_when_the_study_is_killed(tmp_path: Path) -> None:
    with under_way(tmp_path / "kept.jsonl") as process:
        process.kill()
        deadline = time.monotonic() + 60
        while session_of(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def session_of(leader: int) -> list[str]:
    """Return the processes of a session."""
    done = subprocess.run(["ps", "-eo", "sid,stat,args"], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()[1:]]
    return [command for sid, state, command in rows if int(sid) == leader and state[0] != "Z"]


def test_interrupt_keeps_finished_results(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    with under_way(file) as process:
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "replications finished" in err and "Traceback" not in err
    found = json.loads(out)
    assert not found["complete"] and found["policies"][0]["n"] >= 3
    assert len(ResultStore(file)._results) >= found["policies"][0]["n"]
