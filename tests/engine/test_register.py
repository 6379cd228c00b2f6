"""The register of guests, by which they are ended without their daemon: of another boot, damaged, half written."""

import json
import subprocess
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mesh.engine.alone import alone
from mesh.engine.descent import Process, lives
from mesh.engine.killswitch import open_switch
from mesh.engine.register import Damaged, Entry, Register, decode_entry
from tests.engine.place import entry


def test_nobody_is_ended_by_an_entry_of_another_boot(tmp_path: Path, bystander: Process) -> None:
    register = Register(tmp_path)
    register.keep("old", replace(entry(head=bystander), boot="another"))
    assert register.entries() == ({}, [])
    open_switch(register, tmp_path / "kill.sock").close()
    assert lives(bystander) and list(tmp_path.iterdir()) == []


def test_what_an_earlier_run_left_is_ended_at_the_next_start(tmp_path: Path, bystander: Process) -> None:
    register = Register(tmp_path / "guests")
    register.keep("left", entry(head=bystander))
    open_switch(register, tmp_path / "kill.sock").close()
    assert not lives(bystander) and register.entries() == ({}, [])


def test_the_register_needs_only_the_standard_library() -> None:
    """So that whoever must outlast the daemon's troubles can read it, and `mesh killall` starts at once."""
    command = alone("hunt", "print('msgspec' in sys.modules, 'asyncio' in sys.modules)")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


texts = some.text(max_size=20)
values = some.none() | some.booleans() | some.integers() | texts | some.lists(some.integers() | texts, max_size=3)
shaped = some.fixed_dictionaries({field.name: values for field in fields(Entry)}).map(
    lambda value: json.dumps(value).encode()
)


@given(data=some.binary(max_size=200) | shaped)
def test_what_is_no_entry_is_refused_whole(data: bytes) -> None:
    try:
        found = decode_entry(data)
    except Damaged:
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
        {"groups": ["/sys/fs/cgroup/x/../guest-0123456789abcdef"]},
        {"groups": ["guest-0123456789abcdef"]},
        {"extra": 1},
        {"attempt": True},
    ],
)
def test_an_entry_that_could_mean_others_is_refused(changed: dict[str, object]) -> None:
    plain = {**asdict(entry(groups=("/sys/fs/cgroup/unified/campus-mesh/guest-0123456789abcdef",))), **changed}
    with pytest.raises(Damaged):
        decode_entry(json.dumps(plain).encode())


def test_a_crash_while_an_entry_is_written_leaves_the_others(tmp_path: Path, bystander: Process) -> None:
    register = Register(tmp_path)
    register.keep("whole", entry(head=bystander))
    (tmp_path / ".half").write_bytes(b'{"boot": "')
    (tmp_path / "torn.json").write_bytes(b'{"boot": "')
    entries, problems = register.entries()
    assert list(entries) == ["whole"] and len(problems) == 1 and "torn.json: not an entry" in problems[0]
    register.strike("whole")
    assert list(register.entries()[0]) == ["whole"] and register.drop("whole") and not register.drop("whole")
    register.clear()
    assert list(tmp_path.iterdir()) == []
