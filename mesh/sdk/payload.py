"""Payload of a Python function: the request for its job, and the directory that carries it."""

import json
import os
import re
import shutil
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, TypedDict, runtime_checkable

from mesh.sdk.remote import CALL, HEADER, Call
from mesh.sdk.resource_history import code_hash
from mesh.util.duration import parse_duration
from mesh.util.errors import MeshError
from mesh.util.size import parse_size

CARRIED = ".mesh-call"  # inside the job's working directory
CKPT = "mesh-checkpoints"
PACKAGES = {"site-packages", "dist-packages"}  # of any Python, including the base of a virtual environment
_packing = threading.Lock()  # pickling by value is a setting of the process

_LAUNCH = f"""import os, sys
here = os.path.join(os.getcwd(), {CARRIED!r})
sys.path[0:1] = [here, os.getcwd()]
from pathlib import Path
from mesh.sdk.remote import main
sys.exit(main(Path(here)))
"""
# The carried part of this package precedes an installed one, which provides the rest.
_PACKAGE = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"


@runtime_checkable
class Named(Protocol):
    """A job."""

    id: str


class Terms(TypedDict, total=False):
    """Terms of a job, all by keyword; by default it needs no GPU. Sizes are MiB or as `"6g"`, times seconds or as `"1h30m"`.

    `python`: the remote interpreter, of the same minor version (default: this interpreter's path, in an image `python3`).
    `workdir`: a directory to copy, importable. `results="json"`: accept only JSON, so that the remote node cannot
    run code here. `checkpoint_every`: of an object with `checkpoint`, seconds, or `"auto"` (the default) for the mesh's rule.
    `gpus="auto"`: one GPU with as much memory as earlier runs of the same code needed. The others are those of `mesh submit`.
    """

    gpus: int | Literal["auto"]
    gpu_share: int
    gpu_share_limit: int
    gpu_model: str
    vram: int | str
    vram_limit: int | str
    memory: int | str
    cpus: float
    image: str
    engine: Literal["process", "docker", "apptainer"]
    name: str
    env: dict[str, str]
    zone: str
    on: "Sequence[str]"
    not_on: "Sequence[str]"
    grace: float | str
    retries: int
    priority: int
    after: "Sequence[Named | str]"
    max_time: float | str
    home: str
    replicas: int
    checkpoint_every: float | str
    python: str
    workdir: str | Path
    results: Literal["pickle", "json"]


def order_of(call: Call, terms: Terms) -> dict[str, Any]:
    """Return the body of a submission."""
    unknown = set(terms) - Terms.__annotations__.keys()
    if unknown:
        from difflib import get_close_matches

        near = [match for term in sorted(unknown) for match in get_close_matches(term, Terms.__annotations__, 1)]
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise TypeError(
            f"no such term: {', '.join(sorted(unknown))}{meant}. What a job may be given is in mesh.sdk.payload.Terms; "
            "arguments of the function by keyword go by functools.partial"
        )
    given: dict[str, Any] = dict(terms)
    for name in ("workdir", "results"):
        given.pop(name, None)
    every = given.pop("checkpoint_every", "auto")
    name = getattr(call.function, "__name__", type(call.function).__name__)
    order: dict[str, Any] = {"name": re.sub(r"[^A-Za-z0-9_]", "", name)[:64]}  # `<lambda>`, and names beyond ASCII
    given.pop("python", None)
    order["argv"] = [_python(terms), f"{CARRIED}/launch.py"]
    for name in ("vram", "vram_limit", "memory"):
        if name in given:
            size = given.pop(name)
            order[f"{name}_mib"] = size if isinstance(size, int) else parse_size(size)
    for name in ("grace", "max_time"):
        if name in given:
            order[f"{name}_s"] = _seconds(given.pop(name))
    if "after" in given:
        given["after"] = [one.id if isinstance(one, Named) else one for one in given["after"]]
    if "gpu_share" in given:
        given.setdefault("gpus", 1)
    if hasattr(call.function, "checkpoint"):
        timing = every if every == "auto" else _seconds(every)
        order |= {"ckpt": CKPT, "ckpt_mode": "rename", "ckpt_every": timing}
    return order | given


def code_of(call: Call, terms: Terms) -> str:
    return code_hash(call.function, terms.get("image", ""), _python(terms))


def _python(terms: Terms) -> str:
    # Without `..`, which a guest's private directories lack; resolve() would leave the virtual environment.
    return terms.get("python") or ("python3" if "image" in terms else os.path.abspath(sys.executable))  # noqa: PTH100


def _seconds(time_: float | str) -> float:
    return parse_duration(time_) if isinstance(time_, str) else float(time_)


def pack(call: Call, where: Path, workdir: str | Path | None, results: str) -> None:
    """Write the user's files, the call and its launcher into a new directory."""
    cloudpickle = _cloudpickle()
    if workdir is not None:
        from mesh.jobs.workdir import collect_files

        for name, source in collect_files(Path(workdir), (CKPT,)).items():
            target = where / name.removeprefix("work/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir() and not source.is_symlink():
                target.mkdir()
            else:
                _link(source, target)
    carried = where / CARRIED
    (carried / "mesh").mkdir(parents=True)
    package = Path(__file__).parents[1]
    (carried / "mesh" / "__init__.py").write_text(_PACKAGE + (package / "__init__.py").read_text())
    for name in ("sdk", "util"):
        (carried / "mesh" / name).mkdir()
        (carried / "mesh" / name / "__init__.py").write_text(_PACKAGE)
    for name in ("job.py", "sdk/remote.py", "util/version.py"):
        shutil.copy(package / name, carried / "mesh" / name)
    shutil.copytree(
        Path(cloudpickle.__file__).parent, carried / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__")
    )
    (carried / "launch.py").write_text(_LAUNCH)
    (carried / HEADER).write_text(json.dumps({"python": sys.version_info[:2], "results": results}))
    with _packing:
        known = cloudpickle.list_registry_pickle_by_value()
        modules = [module for module in _own_modules(call, workdir) if module.__name__ not in known]
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
        try:
            (carried / CALL).write_bytes(cloudpickle.dumps(call))
        finally:
            for module in modules:
                cloudpickle.unregister_pickle_by_value(module)


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise MeshError("Python functions are packed by cloudpickle: pip install cloudpickle") from error
    return cloudpickle


def _own_modules(call: Call, workdir: str | Path | None) -> list[ModuleType]:
    """Return the user's own modules that the remote machine lacks: they are pickled by value."""
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [Path(__file__).parents[1].resolve(), *([] if workdir is None else [Path(workdir).resolve()])]
    function = getattr(call.function, "func", call.function)  # of functools.partial
    found = {}
    for thing in (function, *call.args, *call.kwargs.values()):
        module = sys.modules.get(getattr(thing, "__module__", None) or type(thing).__module__)
        file = getattr(module, "__file__", None)
        if module is None or file is None or module.__name__ == "__main__":
            continue
        path = Path(file).resolve()
        if not PACKAGES & set(path.parts) and not any(path.is_relative_to(place) for place in installed):
            found[module.__name__] = module
    return list(found.values())


def _link(source: Path, target: Path) -> None:
    if source.is_symlink():
        target.symlink_to(os.readlink(source))  # noqa: PTH115
        return
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
