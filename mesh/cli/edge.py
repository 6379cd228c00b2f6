"""What a node's network edge does, in words."""

from typing import Any


def edge_words(edge: dict[str, Any]) -> str:
    """Of a `mesh.edge.edge.Standing`, as the daemon tells it."""
    if edge["off"]:
        return "off (`edge` in config.toml)"
    if not edge["guests"]:
        return str(edge["problem"])
    parts = ["guests with a network of their own can be cut off" + _count(len(edge["attached"]))]
    if edge["shaped_mbps"]:
        given = f", {edge['reserved_mbps']:g} of them for checkpoints with a deadline" if edge["reserved_mbps"] else ""
        parts.append(f"{edge['device']} is shaped for {edge['shaped_mbps']:g} Mbit/s{given}")
    elif edge["device"]:
        parts.append(f"checkpoints that leave by {edge['device']} can be cut off")
    elif not edge["problem"]:
        parts.append("this machine's own interfaces are left alone (`edge_device` in config.toml names one to shape)")
    if edge["problem"]:
        parts.append(edge["problem"])
    if edge["cut"]:
        parts.append(f"CUT OFF NOW: {' and '.join(edge['cut'])}")
    return "; ".join(parts)


def _count(attached: int) -> str:
    return f" ({attached} interfaces now)" if attached else ""
