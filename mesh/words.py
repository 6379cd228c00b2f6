"""What is said alike on the command line, on the web page and in `mesh top`."""

import time
from collections.abc import Mapping
from typing import Any

from mesh.amount import amount, part
from mesh.duration import lasting

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


def doing(detail: str, saving: Mapping[str, Any] | None) -> str:
    """What is to be said of a job beside its state."""
    return "; ".join(filter(None, [detail, saving_words(saving)]))


def saving_words(saving: Mapping[str, Any] | None) -> str:
    """How far it is with what a job has saved."""
    if saving is None:
        return ""
    what = f"{saving['kind']} {saving['seq']}" if saving["kind"] == "checkpoint" else str(saving["kind"])
    if not saving["bytes"]:
        return f"{what} is being stored"
    nodes = "1 node" if saving["nodes"] == 1 else f"{saving['nodes']} nodes"
    return f"{what}: {part(saving['sent'], saving['bytes'])} sent to {nodes}"


SOON_S = 6 * 86_400  # for which the day of the week is enough
COST = "Ran", "At risk", "Saving", "Shipping", "Size", "In time", "Goes to", "Loses"  # of a guest, if it had to leave


def cost_cells(guest: Mapping[str, Any]) -> list[str]:
    """Under `COST`."""
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
    """Of whole GPUs, and of slots."""
    return f"{gpu:.3g}" + (f" + {slot:.3g}" if slot >= 0.0005 else "")


def when(unix_s: float) -> str:
    """A moment to come, by this machine's clock."""
    form = "%a %H:%M" if unix_s - time.time() < SOON_S else "%Y-%m-%d %H:%M"
    return time.strftime(form, time.localtime(unix_s))


def lend_lines(answer: dict[str, Any]) -> list[str]:
    """For `mesh lend` and `mesh status`."""
    if answer["paused"]:
        end = answer["paused_until_unix"]
        lines = [f"paused{f' until {when(end)}' if end else ''} (`mesh resume`)"]
    elif not answer["lending"]:
        lines = ["not lending (`mesh lend on`)"]
    else:
        lines = ["lending" if answer["now"] else "not lent now"]
    lines[0] += _scope(answer["machine"], answer["guests"])
    if answer["hours"] != "always":
        change = answer["hours_change_unix"]
        at = "" if change is None else f", next change {when(change)}"
        lines.append(f"  hours: {answer['hours']}{at}")
    if answer["typed_s"] is not None:
        lines.append(f"  last typed {lasting(answer['typed_s'])} ago (seen by {', '.join(answer['typing_seen_by'])})")
    if answer["load"] is not None:
        lines.append(f"  {answer['load']:.1f} cores used by others than guests")
    for gpu in answer["gpus"]:
        programs = ", ".join(f"{one['name']} ({one['pid']})" for one in gpu["programs"])
        words = f": taken back (`mesh resume --gpu {gpu['index']}`)" if gpu["withheld"] else ""
        words += _scope(gpu, answer["guests"]) + (f" [{programs}]" if programs else "")
        if words:
            lines.append(f"  GPU {gpu['index']}{words}")
    return lines


def _scope(stand: dict[str, Any], guests: int) -> str:
    """Of the machine, or of a GPU."""
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
