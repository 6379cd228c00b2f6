"""A study as a TOML file: a grid of worlds, settings, policies and seeds. This is the list of all its keys.

```toml
name = "notices"
seeds = 30
policies = ["mesh", "slurm-s60"]
worlds = ["lab-building", "ours.toml"]  # presets, or files beside the study

[set]  # in all of them
days = 14

[grid]  # every combination
"owners.students.noticed" = [0, 0.3, 0.6]
```
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sim.campus.document import Change, flat, strict
from sim.campus.policies import find_policy
from sim.campus.statistics import Interval, mean_of
from sim.campus.study import Cell
from sim.campus.tally import FIGURES, Result
from sim.campus.world import World, WorldError, find_world, presets

MOST_CELLS = 200_000  # replications; more is a mistake

Wrong = Callable[..., "StudyError"]


class StudyError(ValueError):
    """A file that is no study; the text names the file, the line and what is wrong with it."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`set` and `grid` name places in a world, as `--set` does."""

    worlds: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    name: str = ""
    says: str = ""
    policies: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("mesh",)
    seeds: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10
    first_seed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 1
    set: dict[str, Any] = {}
    grid: dict[str, Any] = {}

    @property
    def numbers(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


class Point(msgspec.Struct, frozen=True):
    """One world under one policy. `named`: as the study names the world; `settings`: its place in the grid."""

    named: str
    world: World
    settings: dict[str, Any]
    policy: str

    def cell(self, seed: int) -> Cell:
        return Cell(self.world, self.policy, seed)

    def summed(self, results: Sequence[Result]) -> dict[str, Interval]:
        return {name: mean_of([result.figures[name] for result in results]) for name in FIGURES} if results else {}


def read_study(path: Path) -> tuple[Study, list[Point]]:
    """The study, and its points in their order; StudyError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StudyError(f"{path}: {error.strerror or error}") from error
    return parse_study(data, str(path), path.parent)


def parse_study(data: bytes, source: str, beside: Path) -> tuple[Study, list[Point]]:
    study, places = strict(data, source, Study, StudyError)

    def wrong(words: str, *place: str | int) -> StudyError:
        return StudyError(f"{source}: line {places.line(place)}: {words}")

    for policy in study.policies:
        try:
            find_policy(policy)
        except ValueError as error:
            raise wrong(str(error), "policies") from error
    axes = flat(study.grid)
    for place, values in axes:
        if not isinstance(values, list) or not values:
            raise wrong(f"{place} needs a list of values to try", "grid", *place.split("."))
    count = len(study.worlds) * len(study.policies) * study.seeds
    for _, values in axes:
        count *= len(values)
    if count > MOST_CELLS:
        raise wrong(f"{count} replications; at most {MOST_CELLS}", "grid")
    for field in (study.worlds, study.policies):
        if len(set(field)) < len(field):
            raise wrong("something is named twice", "worlds" if field is study.worlds else "policies")
    return study, list(_points(study, axes, beside, wrong))


def _points(study: Study, axes: Sequence[Change], beside: Path, wrong: Wrong) -> Iterator[Point]:
    common = flat(study.set)
    for number, name in enumerate(study.worlds):
        file = name if name in presets() else str(beside / name)
        try:
            find_world(file)
        except WorldError as error:
            raise wrong(str(error), "worlds", number) from error
        try:
            find_world(file, common)
        except WorldError as error:
            raise wrong(str(error), "set") from error
        for values in product(*(values for _, values in axes)):
            settings = {place: value for (place, _), value in zip(axes, values, strict=True)}
            try:
                world = find_world(file, [*common, *settings.items()])
            except WorldError as error:
                shown = ", ".join(f"{place} = {value!r}" for place, value in settings.items())
                raise wrong(f"with {shown}: {error}", "grid", *axes[0][0].split(".")) from error
            for policy in study.policies:
                yield Point(name, world, settings, policy)
