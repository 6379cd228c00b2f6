"""`mesh describe` shows a request as the options that make it, without defaults and internals."""

from mesh.cli.asked import OPTIONS, asked_words
from mesh.cli.terminal import Deadline
from mesh.model.spec import Checkpointing, JobSpec

ELSEWHERE = {  # in other lines, or not the user's choice
    *("submitter", "chain", "user", "user_key", "created_unix_ms", "nonce", "argv", "witnesses", "name", "workdir"),
    *("workdir_holders", "image_id", "gpus", "gpu_share", "gpu_share_limit", "vram_mib", "vram_limit_mib", "lease_s"),
    *("on_exit_0", "array", "lock", "interactive", "checkpointing", "after_any", "uv", "conda"),
}


def test_each_field_of_a_request_is_shown_or_known_as_shown_elsewhere() -> None:
    shown = {name for name in OPTIONS if not name.startswith("ckpt")} - {"environment", "secret_nodes", "caches"}
    assert shown | ELSEWHERE == set(JobSpec.__struct_fields__)
    rules = {"ckpt" if name == "directory" else f"ckpt_{name}" for name in Checkpointing.__struct_fields__}
    assert rules - set(OPTIONS) == {"ckpt_stable_s", "ckpt_keep"}, "no option sets these"


def test_request_reads_as_its_options() -> None:
    deadline = int(1000 * Deadline().convert("2026-12-01T08:00", None, None))
    asked = {
        "user_key": "4Oe",
        "lease_s": 4.0,
        "least_nodes": 2,
        "most_nodes": 4,
        "memory_mib": 6144,
        "cpus": 2.5,
        "env": {"SEED": "7", "PROGRAM": "x" * 100},
        "data": [{"name": "ada/words", "mib": 3}, {"name": "ada/sounds", "path": "/data/s"}],
        "caches": ["pip", "torch"],
        "checkpoints": {"directory": "ckpts", "every": 90.0, "to": ["desk", "lab"]},
        "error_budget": 2,
        "retry_codes": [3, 4],
        "deadline_unix_ms": deadline,
        "max_time_s": 5400.0,
    }
    assert asked_words(asked) == (
        "--nodes 2; at most 4; --memory 6g; --cpus 2.5; --data ada/words ada/sounds:/data/s; --cache pip torch; "
        f"--env SEED=7 PROGRAM={'x' * 51}…; --ckpt ckpts; --ckpt-every 1m30s; --ckpt-to desk,lab; --retries 2; "
        "--retry-on 3,4; --deadline 2026-12-01T08:00; --max-time 1h30m"
    )
    assert asked_words({"argv": ["true"], "least_nodes": 2, "most_nodes": 2}) == "--nodes 2"
    assert asked_words({"argv": ["true"]}) == "-"
