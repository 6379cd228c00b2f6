"""The edge against a real kernel: what is cut, what passes, what is put back, and that nothing of anybody else's is touched."""

import fcntl
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh.network import bpf, tc
from mesh.network import edge as module
from mesh.network.device import Device, DeviceLock
from mesh.network.edge import Edge, lacking_privileges, left_at
from mesh.network.hooks import Hooks
from mesh.network.program import BuildError, Programs
from mesh.network.shaping import BULK, GUEST, HOST, URGENT
from mesh.network.switch import GUESTS, MIGRATION, Switch
from mesh.network.tc import EdgeError
from tests.network.wires import MACHINE, NEIGHBOUR, UP, Talk, Wires

pytestmark = pytest.mark.bpf

Make = Callable[..., Edge]
ROOT = Path(__file__).parents[2]


def out_of(wires: Wires, number: int = 0) -> Talk:
    """From a guest, through the machine, to its neighbour."""
    return Talk(wires.guests[number], wires.neighbour, NEIGHBOUR)


def into(wires: Wires, number: int = 0) -> Talk:
    return Talk(wires.neighbour, wires.guests[number], wires.guest(number))


def own(wires: Wires, priority: int = 0) -> Talk:
    """From the machine itself."""
    return Talk(wires.machine, wires.neighbour, NEIGHBOUR, priority)


def test_cut_drops_guest_packets_only(wires: Wires, edges: Make) -> None:
    edge = edges()
    with out_of(wires) as out, into(wires) as back, own(wires) as mine, out_of(wires, 1) as other:
        edge.attach("g0")
        assert out.passes() and back.passes() and edge.state().attached == ("g0",)
        assert edge.cut()
        assert edge.state().cut == ("guests", "checkpoints")
        dropped = [talk.say(20) for talk in (out, back)]
        assert mine.passes() and other.passes(), "the machine's own, and who is not attached"
        edge.restore()
        for talk, lost in zip((out, back), dropped, strict=True):
            (after,) = talk.say()
            assert talk.heard(after) == [after], f"none of {lost}"


def test_cut_of_one_guest_spares_another(wires: Wires, edges: Make) -> None:
    edge = edges()
    edge.attach("g0")
    edge.attach("g1")
    with out_of(wires, 0) as first, out_of(wires, 1) as second:
        assert first.passes()
        assert edge.cut(interface="g0")
        first.say(5)
        assert second.passes()
        assert edge.restore(interface="g0")
        (after,) = first.say()
        assert first.heard(after) == [after]
    assert not edge.cut(interface="g7")


def test_guest_attached_during_cut_is_cut(wires: Wires, edges: Make) -> None:
    edge = edges()
    edge.cut(GUESTS)
    with out_of(wires) as out:
        assert out.passes()
        edge.attach("g0")
        out.say(5)
        edge.restore(GUESTS)
        (after,) = out.say()
        assert out.heard(after) == [after]


def test_guest_that_cannot_be_attached_is_not_half_attached(
    wires: Wires, edges: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(hooks: Hooks, qdiscs: object) -> None:
        raise EdgeError("no hooks")

    edge = edges()
    monkeypatch.setattr(Hooks, "put", fail)
    with pytest.raises(EdgeError, match="no hooks"):
        edge.attach("g0")
    assert edge.state().attached == ()


def fails(error: Exception) -> Callable[..., Any]:
    def fail(*words: object) -> None:
        raise error

    return fail


def test_guest_that_has_no_place_in_the_map_is_not_attached(
    wires: Wires, edges: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = edges()
    monkeypatch.setattr(bpf.Map, "put", fails(OSError("the map is full")))
    with pytest.raises(EdgeError, match="the map is full"):
        edge.attach("g0")
    assert edge.state().attached == () and "clsact" not in wires.tc("qdisc", "show", "dev", "g0")


def test_guest_that_is_attached_again_stays_cut_off(wires: Wires, edges: Make) -> None:
    edge = edges()
    edge.attach("g0")
    index, programs = socket.if_nametoindex("g0"), edge._programs
    assert edge.cut(interface="g0") and programs is not None
    wires.tc("qdisc", "del", "dev", "g0", "clsact")
    edge.attach("g0")
    assert programs.guests.get(index) == 1 and "mesh_guest" in wires.queues()
    edge.detach("g0")
    assert programs.guests.get(index) is None, "the next interface may get the number"


def test_interface_of_the_same_name_is_another_guest(wires: Wires, edges: Make) -> None:
    edge = edges()
    for guest in ("g0", "g1"):
        edge.attach(guest)
    index, programs = socket.if_nametoindex("g1"), edge._programs
    assert edge.cut(interface="g1") and programs is not None
    for guest in ("g0", "g1"):
        subprocess.run(["ip", "link", "del", guest], check=True)
        subprocess.run(["ip", "link", "add", guest, "type", "bridge"], check=True)
        wires.tc("qdisc", "add", "dev", guest, "clsact")
    edge.attach("g1")
    assert "mesh_guest" in wires.tc("filter", "show", "dev", "g1", "ingress")
    assert programs.guests.get(index) is None and programs.guests.get(socket.if_nametoindex("g1")) == 0
    edge.detach("g0")
    assert "clsact" in wires.tc("qdisc", "show", "dev", "g0"), "it is another program's"


def test_cut_says_whether_it_reaches_anything(wires: Wires, edges: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a reclaim would rely on it."""
    edge = edges()
    assert not edge.cut() and edge.state().guests
    edge.attach("g0")
    assert edge.cut() and edges("device", device=UP, mbps=100).cut()
    monkeypatch.setattr(bpf.Map, "get", fails(OSError("it is being closed")))
    assert edge.state().cut == ()
    assert not edge.cut(MIGRATION) and not edge.restore()
    edge.close()
    assert not edge.cut() and not edge.state().guests


@pytest.mark.parametrize(
    ("error", "words", "then"),
    [
        (bpf.Rejected(22, "invalid argument", "the log"), "invalid argument", "Linux 5.11"),
        (BuildError("no clang"), "no clang", "apt install clang"),
        (OSError("no memory"), "no memory", ""),
        (None, "lacks CAP_NET_ADMIN", "edge-limits.md"),
        (FileNotFoundError(), "tc is not installed", "apt install iproute2"),
    ],
)
def test_edge_that_cannot_start_says_why(
    edges: Make, monkeypatch: pytest.MonkeyPatch, error: Exception | None, words: str, then: str
) -> None:
    match error:
        case None:
            monkeypatch.setattr(module, "lacking_privileges", lambda status, mounted: ["CAP_NET_ADMIN"])
        case FileNotFoundError():
            monkeypatch.setattr(tc, "is_installed", lambda: False)
        case _:
            monkeypatch.setattr(Programs, "load", fails(error))
    edge = edges(device=UP, mbps=100)
    state = edge.state()
    assert words in state.problem and "paced by their sockets alone" in state.problem and then in state.next
    assert not state.guests and not state.device and not edge.cut() and edge.look() == []
    with pytest.raises(EdgeError, match=words):
        edge.attach("g0")


ALL, ADMIN, NET, OWN = "000001ffffffffff", "0000000000201000", "0000000000001000", "0000008000001000"


@pytest.mark.parametrize(
    ("status", "mounted", "lacking"),
    [
        (f"CapEff:\t{ALL}", False, []),
        (f"CapEff:\t{ADMIN}", False, []),
        (f"CapEff:\t{OWN}", True, []),
        (f"CapEff:\t{OWN}", False, ["CAP_SYS_ADMIN"]),
        (f"CapEff:\t{NET}", True, ["CAP_BPF"]),
        (f"CapPrm:\t{ALL}\nCapEff:\t0000000000000000", True, ["CAP_NET_ADMIN", "CAP_BPF"]),
        ("Name:\tx", True, ["CAP_NET_ADMIN", "CAP_BPF"]),
    ],
)
def test_capabilities_that_are_lacking(status: str, mounted: bool, lacking: list[str]) -> None:
    assert lacking_privileges(status, mounted) == lacking


def test_pin_that_failed_is_tried_again(wires: Wires, edges: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    edge, pin, mkdir, pinned = edges(), bpf.pin, Path.mkdir, list[Path]()

    def fail_late(descriptor: int, path: Path) -> None:
        pinned.append(path)
        if len(pinned) == 2:
            raise OSError("no memory")
        pin(descriptor, path)

    def fail_first(path: Path, *words: Any, **more: Any) -> None:
        monkeypatch.setattr(Path, "mkdir", mkdir)
        raise FileNotFoundError("another daemon has just removed the parent")

    monkeypatch.setattr(bpf, "pin", fail_late)
    monkeypatch.setattr(Path, "mkdir", fail_first)
    with pytest.raises(EdgeError, match="no memory"):
        edge.attach("g0")
    edge.attach("g0")
    assert "mesh_guest" in wires.queues()


def test_edge_without_its_place_is_not_shaped(
    edges: Make, wires: Wires, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = wires.queues()
    monkeypatch.setattr(bpf, "mount", fails(PermissionError("mounting is not permitted")))
    state = edges(device=UP, mbps=100).state()
    assert "mounting is not permitted" in state.problem and not state.device and wires.queues() == before


@pytest.mark.parametrize("what", ["hooks", "map", "device"])
def test_close_removes_the_rest_if_a_part_fails(
    wires: Wires, edges: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    edge, remove = edges(device=UP, mbps=100), Hooks.remove
    edge.attach("g0")
    edge.attach("g1")
    programs = edge._programs
    assert programs is not None

    def fail(hooks: Hooks) -> None:
        if hooks.device == "g0":
            raise EdgeError("tc failed")
        remove(hooks)

    match what:
        case "hooks":
            monkeypatch.setattr(Hooks, "remove", fail)
        case "map":
            monkeypatch.setattr(bpf.Map, "drop", fails(OSError("no such element")))
        case _:
            monkeypatch.setattr(Device, "release", fails(EdgeError("tc failed")))
    edge.close()
    left = wires.queues()
    assert what == "map" or "mesh_guest" not in wires.tc("filter", "show", "dev", "g1", "ingress")
    assert what == "device" or "htb 6d65:" not in left
    assert not (tmp_path / "run" / "node").exists() and programs.descriptors == {}


def test_place_of_another_user_is_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert left_at(tmp_path) and not left_at(tmp_path / "none")
    monkeypatch.setattr(Path, "exists", fails(PermissionError("not permitted")))
    assert not left_at(tmp_path)


def test_interface_that_is_not_there_is_refused(edges: Make) -> None:
    with pytest.raises(EdgeError, match="no interface nowhere"):
        edges().attach("nowhere")


def test_checkpoint_packets_are_cut_at_egress(wires: Wires, edges: Make) -> None:
    edge = edges(device=UP, mbps=100)
    state = edge.state()
    assert (state.device, state.shaped_mbps, state.problem) == (UP, 100, "")
    bands = (URGENT, BULK, HOST)
    talks = [own(wires, band.priority) for band in bands]
    for talk, band in zip(talks, bands, strict=True):
        before = wires.sent(band.minor)
        assert talk.passes() and wires.sent(band.minor) > before, "in its class"
    edge.cut(MIGRATION)
    with own(wires) as mine:
        for talk in talks:
            talk.say(5)
        assert mine.passes()
    edge.restore(MIGRATION)
    for talk in talks:
        (after,) = talk.say()
        assert talk.heard(after) == [after]
        talk.__exit__()


def test_guest_traffic_has_own_class(wires: Wires, edges: Make) -> None:
    edge = edges(device=UP, mbps=100)
    with out_of(wires) as out:
        assert out.passes() and not wires.sent(GUEST.minor), "not attached yet: nobody knows that it is a guest's"
        edge.attach("g0")
        assert out.passes() and wires.sent(GUEST.minor)
        wires.tc("filter", "del", "dev", "g0", "ingress")
        edge.cut(GUESTS)
        out.say(5)
        edge.restore(GUESTS)
        (after,) = out.say()
        assert out.heard(after) == [after]


def test_bridge_is_attached_whole(wires: Wires, edges: Make) -> None:
    for words in (
        "link add job0 type bridge",
        "address flush dev g1",
        "link set g1 master job0",
        "link set job0 up",
        "address add 10.92.1.1/24 dev job0",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    edge = edges(device=UP, mbps=100)
    edge.attach("job0")
    with out_of(wires, 1) as out, into(wires, 1) as back, out_of(wires, 0) as other:
        assert out.passes() and back.passes() and wires.sent(GUEST.minor)
        seen = wires.sent(GUEST.minor)
        assert other.passes() and wires.sent(GUEST.minor) == seen, "another's"
        edge.cut(interface="job0")
        for talk in (out, back):
            talk.say(5)
        assert other.passes()
        edge.restore(interface="job0")
        for talk in (out, back):
            (after,) = talk.say()
            assert talk.heard(after) == [after]


def test_guest_cannot_use_checkpoint_class(wires: Wires, edges: Make) -> None:
    """Not even root of its own namespace, who may set any priority there."""
    edge = edges(device=UP, mbps=100)
    edge.attach("g0")
    with Talk(wires.guests[0], wires.neighbour, NEIGHBOUR, URGENT.priority) as out:
        before = wires.sent(URGENT.minor), wires.sent(GUEST.minor)
        assert out.passes()
        assert wires.sent(URGENT.minor) == before[0] and wires.sent(GUEST.minor) > before[1]


def test_only_net_admin_can_use_checkpoint_class() -> None:
    code = (
        "import os, socket\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket()\n"
        f"s.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, {URGENT.priority})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "PermissionError" in done.stderr


def test_deadline_gets_at_most_half_of_link(wires: Wires, edges: Make) -> None:
    edge = edges(device=UP, mbps=100)
    assert not edge.needs(0) and edge.needs(2.5e6)
    edge.give(2.5e6)
    assert not edge.needs(2.6e6) and edge.needs(0) and edge.needs(5e6)
    assert f"class htb {URGENT.classid} parent 6d65:1 prio 1 rate 21200Kbit" in wires.tc("class", "show", "dev", UP)
    edge.give(float("inf"))
    assert edge.state().reserved_mbps == 49
    assert not edge.needs(1e9)


def test_close_removes_everything(wires: Wires, edges: Make, tmp_path: Path) -> None:
    before = wires.queues()
    edge = edges(device=UP, mbps=100)
    edge.attach("g0")
    edge.attach("g1")
    assert wires.queues() != before
    edge.detach("g1")
    edge.detach("g1")
    assert "g1" not in wires.tc("qdisc", "show").replace("dev g1 root", "")
    edge.close()
    assert wires.queues() == before
    assert not (tmp_path / "run").exists()
    edge.close()


def test_foreign_queue_is_kept_and_reported(wires: Wires, edges: Make) -> None:
    wires.tc("qdisc", "add", "dev", UP, "root", "handle", "1:", "tbf", "rate", "50mbit", "burst", "32k", "limit", "1m")
    before = wires.queues()
    edge = edges(device=UP, mbps=100)
    state = edge.state()
    assert state.device == UP and not state.shaped_mbps and "another program's queue (tbf 1:)" in state.problem
    assert not edge.needs(1e9) and edge.look() == []
    edge.give(1e6)
    with own(wires, URGENT.priority) as copy:
        assert copy.passes()
        edge.cut()
        copy.say(5)
        edge.restore()
        (after,) = copy.say()
        assert copy.heard(after) == [after], "it is cut all the same"
    edge.close()
    assert wires.queues() == before


@pytest.mark.parametrize("theirs", ["clsact", "ingress"])
def test_foreign_hooks_are_kept(wires: Wires, edges: Make, theirs: str) -> None:
    wires.tc("qdisc", "add", "dev", "g0", theirs)
    any_packet = ("protocol", "ip", "pref", "7", "u32", "match", "u32", "0", "0", "flowid", "1:1")
    wires.tc("filter", "add", "dev", "g0", "ingress" if theirs == "clsact" else "root", *any_packet)
    before = wires.tc("qdisc", "show"), wires.tc("filter", "show", "dev", "g0", "ingress")
    edge = edges()
    if theirs == "clsact":
        edge.attach("g0")
        assert edge.state().attached == ("g0",)
    else:
        with pytest.raises(EdgeError, match="another program's qdisc `ingress`"):
            edge.attach("g0")
    edge.close()
    assert (wires.tc("qdisc", "show"), wires.tc("filter", "show", "dev", "g0", "ingress")) == before


def test_clsact_in_use_by_others_stays(wires: Wires, edges: Make) -> None:
    edge = edges()
    edge.attach("g0")
    any_packet = ("protocol", "ip", "pref", "7", "u32", "match", "u32", "0", "0", "flowid", "1:1")
    wires.tc("filter", "add", "dev", "g0", "egress", *any_packet)
    edge.close()
    assert "clsact ffff: dev g0" in wires.tc("qdisc", "show")
    assert "mesh" not in wires.queues() and "u32" in wires.queues()


HOLD = """
import sys, time
from pathlib import Path
from mesh.network.edge import Edge
edge = Edge(Path(sys.argv[1]), device=sys.argv[2], mbps=100)
edge.open()
edge.attach("g0")
edge.cut()
print(edge.state().problem or "ready", flush=True)
time.sleep(600)
"""


def hold(directory: Path) -> "subprocess.Popen[str]":
    """Another daemon of this machine."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), UP], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_next_start_repairs_killed_edge(wires: Wires, edges: Make, tmp_path: Path) -> None:
    before = wires.queues()
    with out_of(wires) as out:
        assert out.passes()
        process = hold(tmp_path / "run" / "node")
        process.send_signal(signal.SIGKILL)
        process.wait()
        out.say(5)
        assert wires.queues() != before and bpf.is_mounted(tmp_path / "run" / "node")
        edge = edges("node", wanted=False)
        assert wires.queues() == before, "also by one that is told to leave the edge alone"
        assert not edge.state().guests and not (tmp_path / "run").exists()
        (after,) = out.say()
        assert out.heard(after) == [after], "the cut went with it"


def test_next_start_goes_on_if_a_part_cannot_be_repaired(
    wires: Wires, edges: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = wires.queues()
    process = hold(tmp_path / "run" / "node")
    process.send_signal(signal.SIGKILL)
    process.wait()
    with monkeypatch.context() as patched:
        patched.setattr(module, "clear", fails(EdgeError("tc failed")))
        edges("node", wanted=False)
        assert "htb 6d65:" not in wires.queues() and not (tmp_path / "run").exists()
    (tmp_path / "run" / "node").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(tc, "qdiscs", fails(EdgeError("tc failed")))
        edges("node", wanted=False)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "node").mkdir(parents=True)
    edges("node", wanted=False)
    assert wires.queues() == before


def test_lock_of_a_file_that_its_holder_has_just_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = fcntl.flock

    def late(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", really)
        next(tmp_path.glob("*.lock")).unlink()
        really(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = DeviceLock(tmp_path, UP)
    with pytest.raises(EdgeError, match="another daemon"):
        DeviceLock(tmp_path, UP)
    lock.release()
    DeviceLock(tmp_path, UP).release()


def test_queue_that_is_gone_is_not_asked_again_before_it_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None
    edge = Edge(tmp_path / "run" / "node")
    edge._device = Device(UP, 0.0, tmp_path, nothing)
    edge._device.link_bps = 1e9
    monkeypatch.setattr(tc, "do", fails(EdgeError("no such class")))
    assert edge.needs(1e6)
    with pytest.raises(EdgeError, match="no such class"):
        edge.give(1e6)
    assert not edge.needs(1e6) and edge.state().reserved_mbps == 0


def test_two_edges_on_one_machine_are_independent(wires: Wires, edges: Make, tmp_path: Path) -> None:
    before = wires.queues()
    process = hold(tmp_path / "run" / "other")
    try:
        (tmp_path / "run" / "node").mkdir()  # left by an earlier run, of which no more is left
        others = wires.queues()
        edge = edges("node", device=UP, mbps=100)
        assert wires.queues() == others
        assert f"another daemon on this machine uses {UP}" in edge.state().problem
        edge.attach("g0")
        edge.attach("g1")
        held = wires.sent(HOST.minor)
        edge.close()
        assert "mesh_guest" in wires.queues() and "htb 6d65:" in wires.queues() and held <= wires.sent(HOST.minor)
    finally:
        process.kill()
        process.wait()
    edge = edges("node", device=UP, mbps=100)
    assert edge.state().problem == "", "its lock went with it"
    edge.close()
    edges("other").close()
    assert wires.queues() == before


def test_edge_restores_removed_parts(wires: Wires, edges: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = edges(device=UP, mbps=100)
    edge.attach("g0")
    edge.attach("g1")
    assert edge.look() == []
    for device in ("g0", "g1", UP):
        wires.tc("qdisc", "del", "dev", device, "clsact")
    said = edge.look()
    assert all(any(device in text for text in said) for device in ("g0", "g1", UP)) and edge.look() == []
    with monkeypatch.context() as patched:
        patched.setattr(tc, "qdiscs", fails(EdgeError("tc failed")))
        assert edge.look() == ["tc failed"] * 2
    wires.tc("qdisc", "del", "dev", UP, "root")
    assert "it is restored" in edge.look()[0] and edge.link_bps
    wires.tc(
        "qdisc", "replace", "dev", UP, "root", "handle", "1:", "tbf", "rate", "9mbit", "burst", "9k", "limit", "1m"
    )
    with pytest.raises(EdgeError):
        edge.give(1e6)
    assert "another program's queue" in edge.look()[0] and not edge.link_bps and edge.look() == []
    wires.tc("qdisc", "del", "dev", UP, "root")
    assert "is shaped for 100 Mbit/s" in edge.look()[0]
    wires.tc("qdisc", "del", "dev", "g1", "clsact")
    subprocess.run(["ip", "link", "del", "g1"], check=True)
    assert edge.look() == [] and edge.state().attached == ("g0",)
    subprocess.run(["ip", "link", "del", UP], check=True)
    assert f"no interface {UP}" in edge.look()[0] and edge.look() == []
    edge.close()


def test_stuck_daemon_is_cut_by_pinned_switch(wires: Wires, edges: Make, tmp_path: Path) -> None:
    edge = edges()
    with pytest.raises(FileNotFoundError):
        Switch.pinned(tmp_path / "run" / "node")
    edge.attach("g0")
    switch = Switch.pinned(tmp_path / "run" / "node")
    with out_of(wires) as out:
        assert out.passes()
        switch.cut(MIGRATION)
        edge.cut(GUESTS)
        assert switch.value == GUESTS | MIGRATION and edge.state().cut == ("guests", "checkpoints")
        out.say(5)
        switch.restore()
        assert edge.state().cut == ()
        (after,) = out.say()
        assert out.heard(after) == [after]
    switch.close()


FEW = """
import sys
from pathlib import Path
from mesh.network.edge import Edge
edge = Edge(Path(sys.argv[1]), device=sys.argv[2], mbps=100)
edge.open()
print(edge.state().next)
edge.attach("g0")
print(edge.cut(), edge.state())
edge.give(1e6)
edge.close()
import subprocess
held = subprocess.run(["grep", "CapAmb", "/proc/self/status"], capture_output=True, text=True).stdout.split()
print("handed on:", held[1].strip("0"))
"""


def test_two_capabilities_suffice_with_mounted_bpf(wires: Wires, tmp_path: Path) -> None:
    before, place = wires.queues(), tmp_path / "run" / "node"
    some = "-all,+net_admin,+bpf"
    limited = ["setpriv", f"--bounding-set={some}", f"--inh-caps={some}", sys.executable, "-c", FEW, str(place), UP]

    def run() -> str:
        done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    said = run()
    assert "lacks CAP_SYS_ADMIN" in said and not place.exists()
    subprocess.run(["sh", "-c", said.split("`")[1]], check=True)
    try:
        said = run()
        assert said.startswith("\nTrue EdgeState(") and "shaped_mbps=100.0" in said and "problem=''" in said
        assert said.endswith("handed on: \n"), "guests that are started later get none of it"
        assert wires.queues() == before and not (place / "cut").exists()
    finally:
        bpf.unmount(place)


def test_unknown_link_speed_is_reported(wires: Wires, edges: Make) -> None:
    subprocess.run(["ip", "link", "add", "idle0", "type", "bridge"], check=True)
    edge = edges(device="idle0")
    assert "edge_mbps" in edge.state().problem and edge.state().device == "idle0" and edge.look() == []
    state = edges("second", device="none0").state()
    assert "no interface none0" in state.problem and not state.device


def test_cut_keeps_machine_reachable(wires: Wires, edges: Make) -> None:
    """Its owner works on it, perhaps from afar."""
    edge = edges(device=UP, mbps=100)
    edge.cut()
    with (
        socket.create_server((MACHINE, 0)) as server,
        Talk(wires.neighbour, wires.machine, MACHINE) as talk,
    ):
        assert talk.passes() and server.getsockname()[0] == MACHINE
