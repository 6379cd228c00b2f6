"""The command of a batch, run by a real shell; which batches a job description may have."""

import subprocess
from collections.abc import Callable

import msgspec
import pytest

from mesh.jobs.array_batch import command_of
from mesh.model.spec import (
    MAX_ARRAY,
    MAX_BATCH,
    ArrayPlace,
    Checkpointing,
    JobSpec,
    SpecError,
    decode_spec,
    encode_spec,
)
from tests.consensus.worlds import make_spec

ARRAY = bytes(16)


def batch(first: int, size: int, *argv: str) -> JobSpec:
    return make_spec(argv=argv, checkpointing=None, array=ArrayPlace(ARRAY, first, 0, 1, batch=size))


def run(spec: JobSpec) -> "subprocess.CompletedProcess[str]":
    assert spec.array is not None
    env = {"PATH": "/usr/bin:/bin", "MESH_ARRAY_INDEX": str(spec.array.index)}
    return subprocess.run(command_of(spec), env=env, capture_output=True, text=True, timeout=60, check=False)


def test_batch_runs_each_index_with_the_words_of_the_command() -> None:
    ran = run(batch(8, 4, "sh", "-c", 'echo "$MESH_ARRAY_INDEX:$1"', "me", "a  b; $HOME '"))
    assert ran.stdout.splitlines() == [f"{index}:a  b; $HOME '" for index in (8, 9, 10, 11)]
    assert (ran.returncode, ran.stderr) == (0, "")


def test_failed_index_fails_the_job_and_lets_the_others_run() -> None:
    ran = run(batch(1, 3, "sh", "-c", 'echo "$MESH_ARRAY_INDEX"; exit $((MESH_ARRAY_INDEX == 2 ? 7 : 0))'))
    assert ran.stdout.split() == ["1", "2", "3"]
    assert (ran.returncode, ran.stderr) == (7, "mesh: index 2 ended with exit code 7\n")


def test_job_of_one_index_runs_its_command_itself() -> None:
    assert command_of(batch(3, 1, "true")) == command_of(make_spec(argv=("true",))) == ("true",)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda spec: msgspec.structs.replace(spec, checkpointing=Checkpointing()),
        lambda spec: msgspec.structs.replace(spec, least_nodes=2, most_nodes=2),
        lambda spec: placed(spec, batch=0),
        lambda spec: placed(spec, batch=MAX_BATCH + 1),
        lambda spec: placed(spec, count=-1),
        lambda spec: placed(spec, count=MAX_ARRAY * MAX_BATCH + 1),
    ],
)
def test_batch_that_could_not_be_kept_is_refused(spoilt: Callable[[JobSpec], JobSpec]) -> None:
    spec = batch(1, 2, "true")
    assert decode_spec(encode_spec(spec)) == spec
    with pytest.raises(SpecError):
        decode_spec(msgspec.msgpack.encode(spoilt(spec)))


def placed(spec: JobSpec, **fields: int) -> JobSpec:
    assert spec.array is not None
    return msgspec.structs.replace(spec, array=msgspec.structs.replace(spec.array, **fields))


def test_place_goes_by_each_of_its_indices() -> None:
    place = ArrayPlace(ARRAY, 9, 1, 3, batch=3)
    texts = ("8", "9", "10", "11", "12", "9-11", "1-100", "09", "9-10", "10-12", "")
    assert [text for text in texts if place.has(text)] == ["9", "10", "11", "9-11", "1-100", "09"]
    single = ArrayPlace(ARRAY, 9, 1, 3)
    assert single.label == "9" and single.has("9") and single.has("9-9") and not single.has("10-12")
