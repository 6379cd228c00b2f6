"""The guest registry, which helpers read to end guests without the daemon: other boots, damaged or partial entries."""

import errno
import json
import subprocess
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mesh.execution.guest_registry import KILLED, LAPSED, BadEntry, GuestEntry, GuestRegistry, decode_entry
from mesh.execution.killswitch import open_switch
from mesh.util.isolated import isolated
from mesh.util.processes import Process, lives
from tests.execution.place import entry


def test_entry_of_earlier_boot_kills_no_process(tmp_path: Path, bystander: Process) -> None:
    register = GuestRegistry(tmp_path)
    register.keep("old", replace(entry(head=bystander), boot="another"))
    assert register.entries() == ({}, [])
    open_switch(register, tmp_path / "kill.sock").close()
    assert lives(bystander) and list(tmp_path.iterdir()) == []


def test_next_start_kills_leftover_guests(tmp_path: Path, bystander: Process) -> None:
    register = GuestRegistry(tmp_path / "guests")
    register.keep("left", entry(head=bystander))
    open_switch(register, tmp_path / "kill.sock").close()
    assert not lives(bystander) and register.entries() == ({}, [])


def test_registry_needs_only_standard_library() -> None:
    """Check the imports: helpers that outlive the daemon read the registry, and `mesh killall` must start at once."""
    command = isolated("mesh.execution", "process_killer", "print('msgspec' in sys.modules, 'asyncio' in sys.modules)")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


texts = some.text(max_size=20)
values = some.none() | some.booleans() | some.integers() | texts | some.lists(some.integers() | texts, max_size=3)
shaped = some.fixed_dictionaries({field.name: values for field in fields(GuestEntry)}).map(
    lambda value: json.dumps(value).encode()
)


@given(data=some.binary(max_size=200) | shaped)
def test_malformed_entry_is_refused(data: bytes) -> None:
    try:
        found = decode_entry(data)
    except BadEntry:
        return
    assert decode_entry(json.dumps(asdict(found)).encode()) == found
    assert all(process is None or process.pid > 1 for process in (found.head, found.watcher))


@pytest.mark.parametrize(
    "changed",
    [
        {"head": [1, 5]},
        {"head": [0, 5]},
        {"watcher": [-1, 5]},
        {"head": [2**40, 5]},
        {"groups": ["/sys/fs/cgroup/unified"]},
        {"groups": ["/sys/fs/cgroup/memory/docker"]},
        {"groups": ["/sys/fs/cgroup/docker/container"]},
        {"groups": ["/sys/fs/cgroup/docker-0123456789abcdef.scope/system.slice"]},
        {"groups": ["/sys/fs/cgroup/x/../guest-0123456789abcdef"]},
        {"groups": ["guest-0123456789abcdef"]},
        {"extra": 1},
        {"attempt": True},
    ],
)
def test_ambiguous_entry_is_refused(changed: dict[str, object]) -> None:
    plain = {**asdict(entry(groups=("/sys/fs/cgroup/unified/campus-mesh/guest-0123456789abcdef",))), **changed}
    with pytest.raises(BadEntry):
        decode_entry(json.dumps(plain).encode())


def test_crash_during_write_keeps_other_entries(tmp_path: Path, bystander: Process) -> None:
    register = GuestRegistry(tmp_path)
    register.keep("whole", entry(head=bystander))
    (tmp_path / ".half").write_bytes(b'{"boot": "')
    (tmp_path / "torn.json").write_bytes(b'{"boot": "')
    entries, problems = register.entries()
    assert list(entries) == ["whole"] and len(problems) == 1 and "torn.json: not an entry" in problems[0]
    register.mark("whole", KILLED)
    register.mark("whole", LAPSED)
    assert list(register.entries()[0]) == ["whole"] and register.drop("whole") == KILLED, "the first mark stays"
    assert register.drop("whole") == ""
    register.clear()
    assert list(tmp_path.iterdir()) == []


def test_only_the_owners_mark_is_a_kill_and_no_other_user_reads_an_entry(tmp_path: Path) -> None:
    register = GuestRegistry(tmp_path / "guests")
    for key in ("one", "two", "three"):
        register.keep(key, entry())
    assert register.directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in register.directory.iterdir()} == {0o600}
    register.mark("one", KILLED)
    register.mark("two", LAPSED)
    assert [register.is_killed(key) for key in ("one", "two", "three", "four")] == [True, False, False, False]
    assert [register.drop(key) for key in ("one", "two", "three")] == [KILLED, LAPSED, ""]


@pytest.mark.parametrize(
    ("field", "most", "beyond"),
    [
        ("attempt", 2**63 - 1, 2**63),
        ("attempt", 0, -1),
        ("head", [2**31 - 1, 2**63 - 1], [2**31, 5]),
        ("head", [2, 0], [1, 0]),
        ("watcher", [2, 0], [2, 2**63]),
        ("groups", ["/sys/fs/cgroup/campus-mesh/guest-0123456789abcdef"] * 64, ["/a/guest-0123456789abcdef"] * 65),
        ("job", "x" * 4096, "x" * 4097),
        ("job", "", 5),
        ("container", "", "a\0b"),
        ("head", None, 5),
        ("head", None, [2.5, 5]),
        ("head", None, [5]),
    ],
)
def test_bounds_of_an_entry(field: str, most: object, beyond: object) -> None:
    decode_entry(json.dumps({**asdict(entry()), field: most}).encode())
    with pytest.raises(BadEntry):
        decode_entry(json.dumps({**asdict(entry()), field: beyond}).encode())


def test_update_that_fails_keeps_the_earlier_entry(
    tmp_path: Path, bystander: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = GuestRegistry(tmp_path)
    register.keep("key", entry())

    def full(plain: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("mesh.execution.guest_registry.json.dumps", full)
        with pytest.raises(OSError, match="No space left"):
            register.keep("key", entry(head=bystander))
    assert register.entries() == ({"key": entry()}, [])


def test_entry_of_a_container_of_crun_is_read(tmp_path: Path) -> None:
    scope = f"/sys/fs/cgroup/user.slice/libpod-{'c5e4' * 16}.scope"
    kept = entry(engine="docker", container="c5e4" * 16, groups=(f"{scope}/container", scope))
    GuestRegistry(tmp_path).keep("key", kept)
    assert GuestRegistry(tmp_path).entries() == ({"key": kept}, [])
