"""The time of the last keyboard or mouse input at this machine, as far as an ordinary user may see it.

Sources (HTCondor's `condor_kbdd` also asks an X server, which another user's daemon may not do under Wayland):

- a PS/2 keyboard or mouse, as in laptops: its interrupts (`i8042` in /proc/interrupts);
- a USB keyboard or mouse: its number of transfers (`urbnum` of its HID interface in /sys); an idle one sends nothing;
- text consoles (/dev/tty1, ...) and, for `all`, terminals (/dev/pts: SSH, terminal windows): their access time, which the kernel
  sets when input is read, to 8 s. Guests' terminals do not count.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

from mesh.provider.policy import Watch
from mesh.util.processes import stat_of

KEYBOARD, MOUSE = "01", "02"  # bInterfaceProtocol of the boot interface subclass (USB HID 1.11, 4.3)
HID = "03"  # bInterfaceClass


class Console:
    """Observes input devices. `sources`: the kinds of devices seen at the last check."""

    def __init__(self, proc: Path = Path("/proc"), sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> None:
        self.sources: tuple[str, ...] = ()
        self._proc, self._sys, self._dev = proc, sys, dev
        self._known: dict[str, float] = {}
        self._typed_at: float | None = None

    def look(self, watch: Watch, now: float, unix_s: float, ours: Collection[int] = ()) -> float | None:
        """Return the seconds since the last input; None if no source is visible. A counter counts only once it has changed.

        `ours`: the processes of this daemon's helpers and guests.
        """
        counters = {**self._interrupts(), **self._usb()}
        times = self._terminals(watch, ours)
        for name, count in counters.items():
            if self._known.setdefault(name, count) != count:
                self._saw(now)
        for name, accessed in times.items():
            if name not in self._known:
                self._saw(now - max(0.0, unix_s - accessed))
            elif self._known[name] != accessed:
                self._saw(now)
        self._known = {**counters, **times}
        kinds = [("PS/2", "i8042"), ("USB", "usb "), ("consoles", "/dev/tty"), ("terminals", "/dev/pts")]
        self.sources = tuple(word for word, start in kinds if any(name.startswith(start) for name in self._known))
        if not self.sources:
            return None
        return max(0.0, now - self._typed_at) if self._typed_at is not None else now

    def _saw(self, at: float) -> None:
        self._typed_at = at if self._typed_at is None else max(at, self._typed_at)

    def _interrupts(self) -> dict[str, float]:
        try:
            lines = (self._proc / "interrupts").read_text().splitlines()
        except OSError:
            return {}
        found = [line.split() for line in lines if "i8042" in line]
        return {f"i8042 {words[0]}": float(sum(int(word) for word in words[1:] if word.isdecimal())) for words in found}

    def _usb(self) -> dict[str, float]:
        """Return the transfer counts by device; a keyboard with a built-in mouse is one device."""
        found: dict[str, float] = {}
        for interface in (self._sys / "bus/usb/devices").glob("*:*"):
            try:
                if (interface / "bInterfaceClass").read_text().strip() != HID:
                    continue
                if (interface / "bInterfaceProtocol").read_text().strip() not in {KEYBOARD, MOUSE}:
                    continue
                device = interface.resolve().parent
                found[f"usb {device.name}"] = float((device / "urbnum").read_text())
            except (OSError, ValueError):
                continue  # it was unplugged
        return found

    def _terminals(self, watch: Watch, ours: Collection[int]) -> dict[str, float]:
        paths = [path for path in self._dev.glob("tty*") if re.fullmatch(r"tty[1-9]\d?", path.name)]
        guests: set[int] = set()
        if watch == "all":
            terminals = [path for path in (self._dev / "pts").glob("*") if path.name.isdecimal()]
            guests = self._of_guests(ours) if terminals else set()
            paths += terminals
        found: dict[str, float] = {}
        for path in paths:
            try:
                seen = path.stat()
            except OSError:
                continue
            if seen.st_rdev not in guests:
                place = path.relative_to(self._dev)
                found[f"/dev/{place}"] = seen.st_atime
        return found

    def _of_guests(self, ours: Collection[int]) -> set[int]:
        """Return the terminals of these processes: guests' sessions, not the one that this daemon was started from."""
        return {self._terminal(pid) for pid in ours} - {self._terminal(os.getpid()), 0}

    def _terminal(self, pid: int) -> int:
        """Return the device number of a process's controlling terminal; 0 if it has none."""
        state = stat_of(pid, str(self._proc))
        number = state.terminal if state is not None else 0
        return os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00) if number else 0
