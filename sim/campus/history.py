"""Worlds made from a mesh's history, as TOML: nodes, GPUs, how often owners reclaimed them, and jobs a day.

A daemon gives what every node publishes about itself; journals (journal.sqlite of nodes) give the recorded stays. What a history
does not contain, such as run times of jobs, comes from `DEFAULTS` and is marked.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

from mesh.forecast.tracefiles import files_of, read_traces
from placement.availability import TraceError
from sim.campus.traces import DAY_S, midnight
from sim.campus.world import WorldError

ASSUMED = "# assumed: not in the history"
DEFAULTS = f"""hours = {{ median = 1.5, sigma = 1.4, min = 0.1, max = 72 }}  {ASSUMED}
state_gib = {{ median = 4, sigma = 1, min = 0.5, max = 40 }}  {ASSUMED}
"""
FEW_H = 24.0  # a node lent for less has no usable rate of its own (own choice)
USUAL_PER_DAY, USUAL_ABSENT_H = 1.7, 3.0  # docs/reference/campus-worlds.md: a university cluster
USUAL_JOBS = 10.0  # a day (own choice)
SIGMA = 1.0  # of absences; only their mean is known
MIN_RATE = 0.02  # relative rate of an hour without departures; the mean is 1 (own choice)
MAX_DAYS = 28


def world_of_mesh(
    name: str, nodes: Sequence[Mapping[str, Any]], survival: Mapping[str, Mapping[str, Any]], jobs_per_day: float
) -> str:
    """Return the world of a mesh. `nodes` is from /v1/nodes; `survival` from /v1/survival/NODE, by node id."""
    lenders = [node for node in nodes if node["gpus"]]
    if not lenders:
        raise WorldError("no node of this mesh lends a GPU, so there is nothing to simulate")
    names = _unique([node["nick"] for node in lenders])
    sizes = [min(gpu["vram_mib"] for gpu in node["gpus"]) / 1024 for node in lenders]
    parts = [_head(name, f"{len(lenders)} nodes, from what they publish", MAX_DAYS)]
    for one, node, vram_gib in zip(names, lenders, sizes, strict=True):
        parts.append(_group(one, one, len(node["gpus"]), vram_gib, node["zone"] or "campus"))
    parts += [_owners(one, survival.get(node["node"])) for one, node in zip(names, lenders, strict=True)]
    return "\n".join([*parts, _jobs(jobs_per_day, min(sizes))])


def world_of_journals(path: Path) -> str:
    """Return the world of one journal, or of a directory with one journal for each node."""
    try:
        trace = read_traces(files_of([path]), "journal", 0.0)
    except (TraceError, OSError) as error:
        raise WorldError(str(error)) from error
    days = int((trace.last - midnight(trace.first, 0, 0.0)) // DAY_S)
    if days < 1:
        raise WorldError(
            f"{path}: no whole day from its first Monday on; run `mesh debug sim history` to ask the daemon"
        )
    parts = [_head(path.resolve().stem, f"{len(trace.nodes)} nodes by their journals", min(days, MAX_DAYS))]
    parts += [_group(one, "theirs", 1, 24.0, "campus", f"  {ASSUMED}") for one in _unique(sorted(trace.nodes))]
    parts.append(_owners("theirs", None))
    parts.append(f'[trace]\nfile = {_text(str(path.resolve()))}\nform = "journal"\n')
    return "\n".join([*parts, _jobs(USUAL_JOBS, 24.0)])


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names, with a number where one occurs twice."""
    counts = Counter(names)
    return [name[:30] if counts[name] < 2 else f"{name[:30]}-{number}" for number, name in enumerate(names)]


def _head(name: str, description: str, days: float) -> str:
    return f"name = {_text(name)}\ndescription = {_text(description)}\ndays = {days:g}\n"


def _group(name: str, owners: str, gpus: int, vram_gib: float, zone: str, assumed: str = "") -> str:
    room = _text(zone.replace("/", "-") + "/1")
    return (
        f"[[groups]]\nname = {_text(name)}\ncount = 1\nowners = {_text(owners)}\ngpus = {gpus}{assumed}\n"
        f"vram_gib = {vram_gib:.6g}{assumed}\nedge_gbps = 1  {ASSUMED}\nrooms = [{room}]\n"
    )


def _owners(nick: str, survival: Mapping[str, Any] | None) -> str:
    lines = [f"[owners.{_text(nick)}]"]
    week = [share for share in (survival or {}).get("week", []) if share is not None]
    lent_h = (survival or {}).get("lent_h", 0.0)
    if survival is None or lent_h < FEW_H or not week:
        lines += [
            f"reclaims_per_day = {USUAL_PER_DAY:g}  {ASSUMED} yet",
            f"absent_h = {_spread(USUAL_ABSENT_H)}  {ASSUMED} yet",
        ]
        return "\n".join([*lines, ""])
    per_day = survival["departures"] / lent_h * 24
    lent = min(0.99, max(0.01, sum(week) / len(week) / 100))
    absent_h = 24 / per_day * (1 - lent) / lent if per_day > 0 else USUAL_ABSENT_H
    lines += [
        f"reclaims_per_day = {min(1000.0, per_day):.4g}",
        f"absent_h = {_spread(min(2000.0, max(0.05, absent_h)))}",
    ]
    hours = by_hour(survival["week"])
    if hours:
        lines.append(f"by_hour = [{', '.join(f'{rate:.3g}' for rate in hours)}]")
    return "\n".join([*lines, ""])


def by_hour(week: Sequence[int | None]) -> list[float]:
    """Return relative departure rates by hour, Monday to Friday, from the falls of the lent share between hours."""
    means: list[float] = []
    for hour in range(24):
        seen = [share for day in range(5) if (share := week[24 * day + hour]) is not None]
        if not seen:
            return []
        means.append(sum(seen) / len(seen))
    falls = [max(0.0, means[hour - 1] - means[hour]) for hour in range(24)]
    total = sum(falls)
    return [MIN_RATE + 24 * fall / total for fall in falls] if total else []


def _spread(mean: float) -> str:
    median = mean * exp(-SIGMA * SIGMA / 2)
    least, most = min(0.02, median / 2), max(72.0, 4 * median)
    return f"{{ median = {median:.4g}, sigma = {SIGMA:g}, min = {least:.2g}, max = {most:.4g} }}"


def _jobs(per_day: float, vram_gib: float) -> str:
    return f"[jobs]\nper_day = {per_day:.4g}\nvram_gib = [{vram_gib:.6g}]\n{DEFAULTS}"


def _text(text: str) -> str:
    """Return a TOML string: JSON's escapes are valid TOML, except for surrogate pairs."""
    known = text.encode("utf-8", "replace").decode()
    return json.dumps(known, ensure_ascii=False).replace("\x7f", "\\u007F")
