"""The catalogue of faults: `tests/mutants/*.toml`, one file for each area.

Each entry replaces a text of one source file, so that one rule of safety no longer holds. The tests that it names must then fail.
"""

import random
import tomllib
from datetime import date
from functools import cache
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAMPLE = 10  # faults that `make test` applies each day: half a minute


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault. `old` occurs once in `file`.

    `sim`: the test of the simulator that finds it, if no other does, within 300 seeds. `hangs`: a test that does not end in time
    has found it. `slow`: its tests take more than about five seconds, or need a tier, so the sample of `make test` leaves it out.
    """

    name: str
    kind: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    sim: str = ""
    hangs: bool = False
    slow: bool = False
    area: str = ""

    @property
    def quick(self) -> bool:
        return not (self.slow or self.sim or self.hangs)

    def apply(self, tree: Path) -> None:
        """Break the file of this tree; ValueError if its text is not found exactly once."""
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the text occurs {text.count(self.old)} times in {self.file}, not once")
        path.write_text(text.replace(self.old, self.new))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: list[Mutant]


@cache
def catalogue() -> tuple[Mutant, ...]:
    """Return all entries, by area and in the order of the files."""
    found = []
    for path in sorted(HERE.glob("*.toml")):
        entries = msgspec.convert(tomllib.loads(path.read_text()), _File).mutant
        found += [msgspec.structs.replace(mutant, area=path.stem) for mutant in entries]
    return tuple(found)


def chosen(only: str) -> list[Mutant]:
    """Return the entries of these areas or names, separated by commas; all for an empty text. ValueError for unknown ones."""
    everything, words = catalogue(), [word for word in only.split(",") if word]
    known = {word for mutant in everything for word in (mutant.area, mutant.name)}
    if unknown := set(words) - known:
        raise ValueError(f"no area or fault is named {', '.join(sorted(unknown))}")
    return [mutant for mutant in everything if not words or mutant.area in words or mutant.name in words]


def sample(day: date) -> list[Mutant]:
    """Return the faults that `make test` applies on this day."""
    return random.Random(day.toordinal()).sample([mutant for mutant in catalogue() if mutant.quick], SAMPLE)
