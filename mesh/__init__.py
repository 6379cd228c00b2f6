"""campus-mesh: lend and borrow lab GPUs on a campus LAN. No server, no admin."""

TYPE_CHECKING = False  # as type checkers know it; `typing` itself would take two milliseconds
if TYPE_CHECKING:
    from mesh import aio as aio
    from mesh.futures import Client as Client
    from mesh.futures import Executor as Executor
    from mesh.futures import Job as Job
    from mesh.futures import JobFailed as JobFailed
    from mesh.futures import submit as submit
    from mesh.remote import Call as Call
    from mesh.remote import checkpoint as checkpoint

__version__ = "0.1.0"

# Imported when they are asked for: each command of `mesh` begins with this module.
_PARTS = {
    "aio": "mesh.aio",
    **dict.fromkeys(("Client", "Executor", "Job", "JobFailed", "submit"), "mesh.futures"),
    **dict.fromkeys(("Call", "checkpoint"), "mesh.remote"),
}


def __getattr__(name: str) -> object:
    if name not in _PARTS:
        raise AttributeError(f"module 'mesh' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(_PARTS[name])
    found = globals()[name] = module if module.__name__ == f"mesh.{name}" else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PARTS})
