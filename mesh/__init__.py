"""campus-mesh: lend and borrow lab GPUs on a campus LAN. No server, no admin."""

TYPE_CHECKING = False  # as type checkers know it; `typing` itself would take two milliseconds
if TYPE_CHECKING:
    from mesh.sdk import aio as aio
    from mesh.sdk.futures import Client as Client
    from mesh.sdk.futures import Executor as Executor
    from mesh.sdk.futures import Job as Job
    from mesh.sdk.futures import JobFailed as JobFailed
    from mesh.sdk.futures import submit as submit
    from mesh.sdk.remote import Call as Call
    from mesh.sdk.remote import checkpoint as checkpoint

    __version__: str

# Imported on first use: each `mesh` command imports this module.
_PARTS = {
    "aio": ("mesh.sdk.aio", ""),
    **{name: ("mesh.sdk.futures", name) for name in ("Client", "Executor", "Job", "JobFailed", "submit")},
    **{name: ("mesh.sdk.remote", name) for name in ("Call", "checkpoint")},
    "__version__": ("mesh.util.version", "VERSION"),
}


def __getattr__(name: str) -> object:
    if name not in _PARTS:
        raise AttributeError(f"module 'mesh' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PARTS[name]
    loaded = import_module(module)
    found = globals()[name] = getattr(loaded, attribute) if attribute else loaded
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})
