"""Study files: a TOML grid of worlds, settings, policies and seeds. This module lists all keys.

```toml
name = "notices"
seeds = 30
policies = ["mesh", "slurm-s60"]
worlds = ["lab-building", "ours.toml"]  # presets, or files beside the study

[set]  # in every world
days = 14

[grid]  # every combination of these values
"owners.students.noticed" = [0, 0.3, 0.6]
```
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec

from sim.campus.document import Change, flat, strict
from sim.campus.metrics import METRICS, Result
from sim.campus.policies import find_policy
from sim.campus.statistics import Interval, mean_of
from sim.campus.study import Replication
from sim.campus.world import World, WorldError
from sim.campus.world_files import find_world, presets

MAX_REPLICATIONS = 200_000  # a larger grid is a mistake

Wrong = Callable[..., "StudyError"]


class StudyError(ValueError):
    """An invalid study file; the text names the file, the line and the mistake."""


class Study(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a study file. The keys of `set` and `grid` are paths of world values, as in `--set`."""

    worlds: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    name: str = ""
    description: str = ""
    policies: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("mesh",)
    seeds: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 10
    first_seed: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 1
    set: dict[str, Any] = {}
    grid: dict[str, Any] = {}

    @property
    def seed_range(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


class Point(msgspec.Struct, frozen=True):
    """One world under one policy. `world_name` is the name in the study file; `settings` are the values from the grid."""

    world_name: str
    world: World
    settings: dict[str, Any]
    policy: str

    def replication(self, seed: int) -> Replication:
        return Replication(self.world, self.policy, seed)

    def summarize(self, results: Sequence[Result]) -> dict[str, Interval]:
        return {name: mean_of([result.metrics[name] for result in results]) for name in METRICS} if results else {}


def read_study(path: Path) -> tuple[Study, list[Point]]:
    """Return the study and its points in grid order; StudyError if the file is invalid."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StudyError(f"{path}: {error.strerror or error}") from error
    return parse_study(data, str(path), path.parent)


def parse_study(data: bytes, source: str, beside: Path) -> tuple[Study, list[Point]]:
    study, positions = strict(data, source, Study, StudyError)

    def wrong(text: str, *place: str | int) -> StudyError:
        return StudyError(f"{source}: line {positions.line(place)}: {text}")

    for policy in study.policies:
        try:
            find_policy(policy)
        except ValueError as error:
            raise wrong(str(error), "policies") from error
    axes = flat(study.grid)
    for place, values in axes:
        if not isinstance(values, list) or not values:
            raise wrong(f"{place} must be a list of values", "grid", *place.split("."))
    count = len(study.worlds) * len(study.policies) * study.seeds
    for _, values in axes:
        count *= len(values)
    if count > MAX_REPLICATIONS:
        raise wrong(f"the grid has {count} replications; the limit is {MAX_REPLICATIONS}", "grid")
    for field in (study.worlds, study.policies):
        if len(set(field)) < len(field):
            raise wrong("a name occurs twice", "worlds" if field is study.worlds else "policies")
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
