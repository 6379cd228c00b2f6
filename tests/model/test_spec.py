import contextlib
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.consensus.status import decode_status, encode_status, status_of
from mesh.model.environment import UvProject
from mesh.model.spec import (
    MAX_AFTER,
    MAX_ARRAY,
    MAX_NODES,
    MAX_TEXT_BYTES,
    ArrayPlace,
    Checkpointing,
    DataNeed,
    HomePolicy,
    JobSpec,
    SpecError,
    attempt_request,
    check_spec,
    decode_spec,
    encode_spec,
    format_job,
    job_id,
    parse_job,
    waiting_place,
)
from placement.queue import MAX_PRIORITY
from tests.consensus.worlds import JOB, A, B, make_spec, make_witness, voters

ARRAY = b"a" * 16
NUMBERS = {int, float, int | None, float | None}
ODD = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300, -(2**63), -1, 0, 2**31, 2**53, 2**63 - 1)


def test_spec_round_trips_and_its_id_is_its_content() -> None:
    spec = make_spec(env={"SEED": "7"}, gpus=2)
    assert decode_spec(encode_spec(spec)) == spec
    assert job_id(encode_spec(spec)) != job_id(encode_spec(make_spec(env={"SEED": "8"}, gpus=2)))
    text = format_job(job_id(encode_spec(spec)))
    assert len(text) == 26 and text == text.lower() and "=" not in text


def test_job_id_has_one_spelling() -> None:
    """Regression: its last character has two bits that no id uses."""
    text = format_job(JOB)
    assert parse_job(text) == JOB
    last = "abcdefghijklmnopqrstuvwxyz234567".index(text[-1])
    for other in (text.upper(), text + "======", text[:-1] + "abcdefghijklmnopqrstuvwxyz234567"[last + 1], text[:24]):
        with pytest.raises(ValueError):
            parse_job(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"least_nodes": MAX_NODES, "most_nodes": MAX_NODES},
        {"most_nodes": 2, "engine": "process"},
        {"after": (bytes(16),) * MAX_AFTER},
        {"priority": MAX_PRIORITY},
        {"retry_codes": tuple(range(1, 256))},
        {"created_unix_ms": 5, "deadline_unix_ms": 6},
        {"array": ArrayPlace(ARRAY, 2**31 - 1, MAX_ARRAY - 1, MAX_ARRAY, limit=MAX_ARRAY)},
        {"array": ArrayPlace(ARRAY, 0, 0, 1, batch=2), "checkpointing": None},
        {"image": "x", "image_id": bytes(32)},
        {"home": HomePolicy("first"), "checkpointing": Checkpointing()},
        {"gpus": 1, "gpu_share": 30, "vram_mib": 6144, "vram_limit_mib": 6144},
        {"data": (DataNeed("a", path="/data/a.b/c"),), "image": "x"},
    ],
)
def test_spec_may_reach_its_bounds(changes: dict[str, object]) -> None:
    spec = make_spec(**changes)
    assert decode_spec(encode_spec(spec)) == spec


@given(st.binary(max_size=400))
def test_malformed_bytes_raise_a_spec_error(data: bytes) -> None:
    with pytest.raises(SpecError):
        decode_spec(data)


@given(st.data())
def test_damaged_spec_raises_or_decodes_to_a_valid_spec(data: st.DataObject) -> None:
    payload = bytearray(encode_spec(make_spec()))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(SpecError):
        check_spec(decode_spec(bytes(payload)))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"argv": ()}, "command"),
        ({"argv": ("",)}, "command"),
        ({"argv": ("a\0b",)}, "NUL"),
        ({"argv": ("x",) * 5000}, "hold"),
        ({"env": {"": "x"}}, "variable"),
        ({"env": {"a=b": "x"}}, "variable"),
        ({"env": {"a": "y" * 300_000}}, "hold"),
        ({"submitter": b"short"}, "submitter"),
        ({"chain": b"x" * 20_000}, "chain"),
        ({"witnesses": ()}, "witnesses"),
        ({"witnesses": voters(A, A)}, "different"),
        ({"witnesses": voters(A, B, b"x")}, "witness"),
        ({"lease_s": 0.0}, "lease"),
        ({"checkpointing": Checkpointing(mode="system")}, "of a container: add --image"),
        ({"checkpointing": Checkpointing(mode="system"), "image": "a", "engine": "process"}, "of a container"),
        ({"network": ("A.example:443",)}, "one order and spelling"),
        ({"network": ("b.example:443", "a.example:443")}, "one order and spelling"),
        ({"network": ("pypi",)}, "one order and spelling"),
        ({"network": ("127.0.0.1:80",)}, "addresses and patterns"),
        ({"network": ("a.example:443",), "least_nodes": 2, "most_nodes": 2}, "leave out --network, or --nodes"),
        (
            {"network": ("a.example:443",), "image": "x", "checkpointing": Checkpointing(mode="system")},
            "hold connections",
        ),
        ({"network": ("a.example:443",), "env": {"no_proxy": "*"}}, "set by --network"),
        ({"lease_s": float("nan")}, "lease"),
        ({"gpus": -1}, "gpus"),
        ({"vram_mib": 2**40}, "vram"),
        ({"gpu_model": "H200"}, "a kind of GPU for a job without any: add --gpus 1"),
        ({"gpus": 1, "driver": (1,) * 5}, "versions of a driver"),
        ({"gpus": 1, "capability": (-1, 0)}, "versions of a driver"),
        ({"gpus": 1, "gpu_model": "x" * 101}, "up to 100 characters"),
        ({"gpus": 1, "gpu_share": 0}, "a share of a GPU is 1 to 100 per cent, not 0"),
        ({"gpus": 1, "gpu_share": 101, "gpu_share_limit": 101}, "a share of a GPU is 1 to 100 per cent, not 101"),
        (
            {"gpus": 1, "gpu_share": 30, "gpu_share_limit": 101, "vram_mib": 6144},
            "limit of a GPU's share is 1 to 100 per cent, not 101",
        ),
        (
            {"gpus": 1, "gpu_share": 30, "gpu_share_limit": 29, "vram_mib": 6144},
            "held to 29: choose a smaller --gpu-share",
        ),
        ({"gpus": 1, "gpu_share_limit": 90}, "guaranteed 100 per cent of a GPU and be held to 90"),
        (
            {"gpus": 1, "gpu_share": 30, "vram_mib": 6144, "vram_limit_mib": 6143},
            "held to 6143: choose a smaller --vram, or",
        ),
        ({"gpus": 1, "vram_limit_mib": 6144}, "has all of its memory: add --gpu-share"),
        ({"vram_limit_mib": -1}, "vram"),
        ({"gpu_share": 30, "vram_mib": 6144}, "a share of no GPU: add --gpus 1"),
        ({"gpus": 1, "gpu_share": 30}, "how much of the GPU's memory it needs: add --vram, as --vram 6g"),
        ({"error_budget": -1}, "error budget"),
        ({"memory_mib": -1}, "memory"),
        ({"memory_mib": 2**31}, "memory"),
        ({"cpus": 0.0}, "cpus"),
        ({"cpus": 4097.0}, "cpus"),
        ({"cpus": math.nan}, "cpus"),
        ({"created_unix_ms": -1}, "time of submission"),
        ({"created_unix_ms": 2**53}, "time of submission"),
        ({"name": "x" * 1001}, "a name of at most"),
        ({"grace_s": -1.0}, "grace"),
        ({"grace_s": float("inf")}, "grace"),
        ({"checkpointing": Checkpointing(directory="/etc")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(directory="../up")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(directory="")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(directory="a\0b")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(directory="a/" + "x" * 256)}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(directory="/".join(["x" * 250] * 5))}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(replicas=99)}, "replicas"),
        ({"checkpointing": Checkpointing(keep=0)}, "keep"),
        ({"checkpointing": Checkpointing(stable_s=0.0)}, "stable"),
        ({"checkpointing": Checkpointing(to=(b"x",))}, "destination"),
        ({"checkpointing": Checkpointing(directory="a//b")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(every=0.5)}, "every second to every 7 days"),
        ({"argv": ("x" * MAX_TEXT_BYTES,)}, "hold"),
        ({"name": "a\0b"}, "NUL"),
        ({"user_key": b"short"}, "the user's key"),
        ({"least_nodes": 0}, "1 to 64 nodes"),
        ({"least_nodes": 3, "most_nodes": 2}, "1 to 64 nodes"),
        ({"most_nodes": MAX_NODES + 1}, "1 to 64 nodes"),
        ({"most_nodes": 2, "image": "x"}, "runs as plain processes"),
        ({"most_nodes": 2, "engine": "docker"}, "runs as plain processes"),
        ({"image_id": bytes(32)}, "and has a name"),
        ({"image": "x", "image_id": bytes(31)}, "32 bytes of its hash"),
        ({"after": (bytes(16),) * (MAX_AFTER + 1)}, "after at most 4096"),
        ({"after": (bytes(15),)}, "after at most 4096"),
        ({"on": (bytes(32),) * 129, "not_on": (bytes(32),) * 128}, "at most 256 nodes"),
        ({"priority": -1}, "priority must be"),
        ({"priority": MAX_PRIORITY + 1}, "priority must be"),
        ({"max_time_s": 0.5}, "max time"),
        ({"max_time_s": float("nan")}, "max time"),
        ({"retry_codes": (0,)}, "exit code to retry"),
        ({"retry_codes": (1,) * 256}, "exit code to retry"),
        ({"created_unix_ms": 5, "deadline_unix_ms": 5}, "deadline"),
        ({"deadline_unix_ms": 2**53}, "deadline"),
        ({"array": ArrayPlace(b"x", 0, 0, 1)}, "1 to 1000 jobs"),
        ({"array": ArrayPlace(ARRAY, 0, 0, 0)}, "1 to 1000 jobs"),
        ({"array": ArrayPlace(ARRAY, 0, 0, MAX_ARRAY + 1)}, "1 to 1000 jobs"),
        ({"array": ArrayPlace(ARRAY, -1, 0, 1)}, "place in its array"),
        ({"array": ArrayPlace(ARRAY, 2**31, 0, 1)}, "place in its array"),
        ({"array": ArrayPlace(ARRAY, 0, 1, 1)}, "place in its array"),
        ({"array": ArrayPlace(ARRAY, 0, 0, 1, limit=MAX_ARRAY + 1)}, "place in its array"),
        ({"array": ArrayPlace(ARRAY, 0, 0, 1, batch=0)}, "1 to 100 indices"),
        ({"array": ArrayPlace(ARRAY, 0, 0, 1, count=-1)}, "number of indices"),
        ({"array": ArrayPlace(ARRAY, 0, 0, 1, batch=2), "checkpointing": Checkpointing()}, "leave out --ckpt"),
        (
            {"array": ArrayPlace(ARRAY, 0, 0, 1, batch=2), "most_nodes": 2, "checkpointing": None},
            "leave out --ckpt and --nodes",
        ),
        ({"uv": UvProject("../train.py")}, "inside the working directory"),
        ({"uv": UvProject("a\0b.py")}, "inside the working directory"),
        ({"uv": UvProject(), "image": "x", "checkpointing": Checkpointing(mode="system")}, "saves no environment"),
        ({"home": HomePolicy("first"), "checkpointing": None}, "start over at home"),
        ({"home": HomePolicy("first"), "checkpointing": Checkpointing(), "most_nodes": 2}, "has no home"),
        ({"home": HomePolicy("node")}, "found by a rule"),
        ({"home": HomePolicy(settle_s=0.0)}, "free for 1 to 3600"),
        ({"data": (DataNeed("a", path="/data/../etc"),), "image": "x"}, "plain path below /data"),
        ({"data": (DataNeed("a", path="/data/a", cache=True),), "image": "x"}, "one of the job's own user"),
        ({"data": (DataNeed("eve/a", b"d" * 32, cache=True),)}, "one of the job's own user"),
        ({"data": (DataNeed("eve/a", cache=True),)}, "one of the job's own user"),
        ({"data": (DataNeed("a", cache=True),), "most_nodes": 2}, "several copies of a cache"),
        ({"data": (DataNeed("pip", cache=True),), "env": {"PIP_CACHE_DIR": "/x"}}, "PIP_CACHE_DIR is set by --cache"),
        ({"data": (DataNeed("a.b", cache=True), DataNeed("a-b", cache=True))}, "the same variable"),
        ({"data": (DataNeed("ada/a", b"d" * 32, key=b"k" * 60),)}, "encrypted with the key of the job's secrets"),
        ({"data": (DataNeed("a", path="/etc/x"),), "image": "x"}, "plain path below /data"),
    ],
)
def test_spec_error_names_the_invalid_field(changes: dict[str, object], word: str) -> None:
    spec = make_spec(**changes)
    with pytest.raises(SpecError, match=word):
        encode_spec(spec)
    with pytest.raises(SpecError):
        decode_spec(msgspec.msgpack.encode(spec))


def test_spec_with_unknown_field_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode_spec(make_spec()))
    with pytest.raises(SpecError, match="sudo"):
        decode_spec(msgspec.msgpack.encode({**fields, "sudo": True}))


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("field", [one.name for one in msgspec.structs.fields(JobSpec) if one.type in NUMBERS])
def test_every_node_reads_what_a_witness_publishes_of_a_job_with_any_number(field: str, gpus: int) -> None:
    for number in ODD:
        spec = make_spec(**{"gpus": gpus, "vram_mib": 1, field: number})
        with contextlib.suppress(SpecError):
            spec = decode_spec(msgspec.msgpack.encode(spec))
            request = attempt_request(JOB, spec, 1, (), 1_000)
            assert request.shape
            waiting = waiting_place(spec, request)
            status = status_of(JOB, make_witness(spec=spec), None, "pending", "", None, waiting)
            assert decode_status(encode_status(status)) == status, number
