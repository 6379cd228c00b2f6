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
