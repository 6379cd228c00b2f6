"""Render what a job asks for as command-line options."""

import time
from collections.abc import Callable
from typing import Any

from mesh.util.duration import duration_words

LONGEST = 60  # characters of one value (own choice)
Words = Callable[[Any], str]


def _text(value: Any) -> str:
    """Return a value on one line and cut: a variable may hold a program (`mesh job jupyter`)."""
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _list(values: list[Any]) -> str:
    return ",".join(map(_text, values))


def _each(values: list[str]) -> str:
    return " ".join(map(_text, values))


def _version(parts: list[int]) -> str:
    return ".".join(map(str, parts))


def _env(variables: dict[str, str]) -> str:
    return _each([f"{name}={value}" for name, value in variables.items()])


def _data(sets: list[dict[str, Any]]) -> str:
    return _each([one["name"] + (f":{one['path']}" if "path" in one else "") for one in sets])


def _minute(unix_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M", time.localtime(unix_ms / 1000))


def _every(value: str | float) -> str:
    return value if isinstance(value, str) else duration_words(value)


def _mib(value: int) -> str:
    return f"{value // 1024}g" if value % 1024 == 0 else f"{value}m"


OPTIONS: dict[str, tuple[str, Words]] = {  # by the fields of `JobSpec`
    "least_nodes": ("--nodes", str),
    "most_nodes": ("at most", str),
    "gpu_model": ("--gpu-model", _text),
    "capability": ("--compute-capability", _version),
    "driver": ("--driver", _version),
    "memory_mib": ("--memory", _mib),
    "cpus": ("--cpus", "{:g}".format),
    "image": ("--image", _text),
    "engine": ("--engine", _text),
    "environment": ("environment of", _text),
    "data": ("--data", _data),
    "caches": ("--cache", _each),
    "env": ("--env", _env),
    "secrets": ("--secret", _each),
    "secret_nodes": ("--secret-nodes", _list),
    "network": ("--network", _each),
    "ckpt": ("--ckpt", _text),
    "ckpt_mode": ("--ckpt-mode", _text),
    "ckpt_every": ("--ckpt-every", _every),
    "ckpt_to": ("--ckpt-to", _list),
    "ckpt_replicas": ("--replicas", str),
    "grace_s": ("--grace", duration_words),
    "error_budget": ("--retries", str),
    "retry_codes": ("--retry-on", _list),
    "priority": ("--priority", str),
    "after": ("--after", _list),
    "deadline_unix_ms": ("--deadline", _minute),
    "max_time_s": ("--max-time", duration_words),
    "on_partition": ("--on-partition", _text),
    "home": ("--home", _text),
    "zone": ("--zone", _text),
    "on": ("--on", _list),
    "not_on": ("--not-on", _list),
}


def asked_words(asked: dict[str, Any]) -> str:
    """Return a request as `mesh describe --json` has it, without what is as it is by default or shown elsewhere."""
    rules = asked.get("checkpoints", {})
    flat = {**asked, "ckpt": rules.get("directory")} if rules else dict(asked)
    flat |= {f"ckpt_{name}": value for name, value in rules.items()}
    if flat.get("most_nodes") == flat.get("least_nodes"):
        flat.pop("most_nodes", None)
    given = [(name, flat[name]) for name in OPTIONS if flat.get(name) not in (None, [], {}, "")]
    return "; ".join(f"{OPTIONS[name][0]} {OPTIONS[name][1](value)}" for name, value in given) or "-"
