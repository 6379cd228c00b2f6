"""Texts shared by the command line, the web page and `mesh top`."""

import time
from collections.abc import Mapping
from typing import Any

from mesh.util.byte_text import amount, part
from mesh.util.duration import lasting

OVER = frozenset({"done", "failed", "cancelled"})  # states of a job that has ended
HEEDS = {
    None: "-",
    True: "it catches SIGTERM, or reads its notices: it can save before it goes",
    False: "it does not catch SIGTERM: it is killed at a notice, and loses what is at risk",
}
WHY = {  # a checkpoint is due
    "hazard": "by how likely this node is to leave",
    "least": "no oftener, whatever the risk",
    "most": "the longest time between two",
    "upload": "once the one before is there",
    "asked": "as its user asks",
}


def plural(count: int, one: str, many: str = "") -> str:
    """Return `1 guest`, `2 guests`; `many` is a plural that does not end in "s" alone."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def short_id(job: Mapping[str, Any]) -> str:
    """Return the id of a job as lists show it: the beginning of its own, or ARRAY_INDEX."""
    array = job["array"]
    return str(job["job"][:8]) if array is None else f"{array['array'][:8]}_{array['label']}"


def state_text(job: Mapping[str, Any]) -> str:
    """Return a job's state with its details, which may begin with it: `failed (exit 1)`."""
    state, detail = str(job["state"]), str(job["detail"])
    return detail if detail.startswith(f"{state} (") else f"{state}: {detail}" if detail else state


def waiting_text(job: Mapping[str, Any]) -> str:
    """Return the state of a job that waits, and why its last attempt could not start."""
    reason = str(job["attempts"][-1]["reason"]) if job["attempts"] else ""
    return state_text(job) + (f"; its last attempt {reason}" if reason.startswith("could not start") else "")


def job_text(job: Mapping[str, Any]) -> str:
    """Return a job's state, node and details as a sentence."""
    name, state = short_id(job), state_text(job)
    if job["state"] in OVER:
        return f"job {name} {'is ' if job['state'] == 'done' else 'was ' if job['state'] == 'cancelled' else ''}{state}"
    where = f" on {job['node']}" if job["node"] else ""
    return f"job {name} is {job['state']}{where}" + (f": {job['detail']}" if job["detail"] else "")


def doing(detail: str, saving: Mapping[str, Any] | None) -> str:
    """Return the details of a job's state."""
    return "; ".join(filter(None, [detail, saving_words(saving)]))


def saving_words(saving: Mapping[str, Any] | None) -> str:
    """Return the progress of a job's save."""
    if saving is None:
        return ""
    what = f"{saving['kind']} {saving['seq']}" if saving["kind"] == "checkpoint" else str(saving["kind"])
    if not saving["bytes"]:
        return f"{what} is being stored"
    return f"{what}: {part(saving['sent'], saving['bytes'])} sent to {plural(saving['nodes'], 'node')}"


def standby_text(standby: str, warm: bool) -> str:
    """Return what a job's standby is for; `warm`: it has the last checkpoint."""
    return f"{standby} would take over if its node were lost" + (", and has its last checkpoint" if warm else "")


SOON_S = 6 * 86_400  # within which the day of the week is enough
COST = (
    "Ran",
    "At risk",
    "Saving",
    "Shipping",
    "Size",
    "In time",
    "Goes to",
    "Loses",
)  # of a guest that would have to leave


def cost_cells(guest: Mapping[str, Any]) -> list[str]:
    """Return the row of a guest under the columns `COST`."""
    return [
        lasting(guest["ran_s"]),
        lasting(guest["at_risk_s"]) if guest["leads"] else "-",
        _seconds(guest["save_s"]),
        _seconds(guest["ship_s"]),
        "?" if guest["ship_bytes"] is None else amount(guest["ship_bytes"]),
        "?" if guest["chance"] is None else f"{guest['chance']:.0%}",
        guest["goes_to"] or "-",
        guest["loses"] or "nothing",
    ]


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f} s"


def hours(gpu: float, slot: float) -> str:
    """Format hours of whole GPUs and of slots."""
    return f"{gpu:.3g}" + (f" + {slot:.3g}" if slot >= 0.0005 else "")


def when(unix_s: float) -> str:
    """Format a future moment in local time."""
    form = "%a %H:%M" if unix_s - time.time() < SOON_S else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(unix_s))


def lend_lines(answer: dict[str, Any]) -> list[str]:
    """Return the lines of `mesh lend` and `mesh status` about lending."""
    if answer["barred"]:
        return [f"not lending: {answer['barred']}"]
    if answer["paused"]:
        end = answer["paused_until_unix"]
        lines = [f"lending paused{f' until {when(end)}' if end else ''} (`mesh lend` ends that)"]
    elif not answer["lending"]:
        lines = ["not lending (`mesh lend`)"]
    else:
        lines = ["lending" if answer["now"] else "not lent now"]
    scope = _scope(answer["machine"], answer["guests"])
    if lines[0] == "not lent now" and not scope:
        change = answer["hours_change_unix"]
        scope = ": outside its hours" + (f", lent again {when(change)}" if change else "")
    lines[0] += scope
    if answer["hours"] != "always":
        change = answer["hours_change_unix"]
        at = "" if change is None else f", next change {when(change)}"
        lines.append(f"  hours: {answer['hours']}{at}")
    if answer["typed_s"] is not None:
        lines.append(f"  last typed {lasting(answer['typed_s'])} ago (seen by {', '.join(answer['typing_seen_by'])})")
    if answer["load"] is not None:
        lines.append(f"  {answer['load']:.1f} cores used by others than guests")
    if answer.get("memory_wait") is not None:
        lines.append(f"  others than guests wait for memory {answer['memory_wait']:.0f} % of the time")
    for gpu in answer["gpus"]:
        programs = ", ".join(f"{one['name']} ({one['pid']})" for one in gpu["programs"])
        words = f": taken back (`mesh lend --gpu {gpu['index']}`)" if gpu["withheld"] else ""
        words += _scope(gpu, answer["guests"]) + (f" [{programs}]" if programs else "")
        if words:
            lines.append(f"  GPU {gpu['index']}{words}")
    return lines


def _scope(stand: dict[str, Any], guests: int) -> str:
    """Return the presence state of the machine or of a GPU as text."""
    left = "" if stand["next_s"] is None else f" in {lasting(stand['next_s'])}"
    match stand["level"]:
        case "suspend":
            return f": {stand['why']}" + (f"; guests stand still, and are asked to leave{left}" if guests else "")
        case "vacate":
            asked = "; guests are asked to leave" if guests else ""
            return f": {stand['why']}{asked}" + (f"; lent again{left} if it stays quiet" if left else "")
        case "calm":
            return f": guests go on, new ones come{left or ' later'}; before: {stand['why']}"
    return ""
