"""Our programs at the hooks of one interface (clsact, tc-bpf(8)): attach, check, remove.

Other programs at the same hooks stay, and so does a clsact that existed before or that others use.
"""

from pathlib import Path

from mesh.network import tc
from mesh.network.program import NAMES
from mesh.network.shaping import Command, Filter, Qdisc, attach, detach, hooked
from mesh.network.tc import EdgeError


class Hooks:
    """The hooks of one interface."""

    def __init__(self, device: str, pinned: Path, at: tuple[str, ...], tag: int) -> None:
        self.device = device
        self._pinned = pinned
        self._at = at
        self._tag = tag
        self._own = False  # we added the clsact

    def put(self, qdiscs: list[Qdisc]) -> None:
        match hooked(qdiscs, self.device):
            case "clsact":
                pass
            case "":
                tc.do([Command(("qdisc", "add", "dev", self.device, "clsact"))])
                self._own = True
            case other:
                raise EdgeError(f"{self.device} has another program's qdisc `{other}` in the place of the hooks")
        tc.do(attach(self.device, hook, str(self._pinned), self._tag) for hook in self._at)

    def there(self, qdiscs: list[Qdisc]) -> bool:
        """Return whether our programs are still attached."""
        if hooked(qdiscs, self.device) != "clsact":
            return False
        return {found.hook for found in ours(self.device, self._tag) if found.name == self._pinned.name} >= {*self._at}

    def remove(self) -> None:
        if hooked(tc.qdiscs(), self.device) != "clsact":
            return
        tc.do(detach(self.device, found) for found in ours(self.device, self._tag))
        if self._own:
            remove_if_unused(self.device)
            self._own = False


def ours(device: str, tag: int) -> list[Filter]:
    return [found for found in tc.filters(device) if found.handle == tag and found.name in NAMES.values()]


def clear(device: str, tag: int) -> None:
    """Remove what an earlier run left at the hooks of a device."""
    found = ours(device, tag)
    if found:
        tc.do(detach(device, one) for one in found)
        remove_if_unused(device)


def remove_if_unused(device: str) -> None:
    if not tc.any_filter(device):
        tc.do([Command(("qdisc", "del", "dev", device, "clsact"))])
