import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.model.spec import Checkpointing, SpecError, check_spec, decode_spec, encode_spec, format_job, job_id
from tests.consensus.worlds import A, B, make_spec, voters


def test_spec_round_trips_and_its_id_is_its_content() -> None:
    spec = make_spec(env={"SEED": "7"}, gpus=2)
    assert decode_spec(encode_spec(spec)) == spec
    assert job_id(encode_spec(spec)) != job_id(encode_spec(make_spec(env={"SEED": "8"}, gpus=2)))
    text = format_job(job_id(encode_spec(spec)))
    assert len(text) == 26 and text == text.lower() and "=" not in text


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
        ({"grace_s": -1.0}, "grace"),
        ({"grace_s": float("inf")}, "grace"),
        ({"checkpointing": Checkpointing(directory="/etc")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(directory="../up")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(directory="")}, "checkpoint directory"),
        ({"checkpointing": Checkpointing(replicas=99)}, "replicas"),
        ({"checkpointing": Checkpointing(keep=0)}, "keep"),
        ({"checkpointing": Checkpointing(stable_s=0.0)}, "stable"),
        ({"checkpointing": Checkpointing(to=(b"x",))}, "destination"),
    ],
)
def test_spec_error_names_the_invalid_field(changes: dict[str, object], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        encode_spec(make_spec(**changes))


def test_spec_with_unknown_field_is_refused() -> None:
    fields = msgspec.msgpack.decode(encode_spec(make_spec()))
    with pytest.raises(SpecError, match="sudo"):
        decode_spec(msgspec.msgpack.encode({**fields, "sudo": True}))
