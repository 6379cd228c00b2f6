"""Commands on secrets, checkpoints, data sets and images: what they ask the daemon, what they print and exit with."""

import json
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mesh.cli import ckpt, data, image, output, secret
from mesh.cli.main import cli
from mesh.util.errors import ExitCode, MeshError

MIB = 2**20
Run = Callable[..., Result]


class Daemon:
    """Gives its answers in turn, and keeps what was asked."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[tuple[Any, ...]] = []

    def get(self, path: str, **how: Any) -> Any:
        return self._answer((path,))

    def post(self, path: str, body: Any = None, **how: Any) -> Any:
        return self._answer((path, body))

    def _answer(self, asked: tuple[Any, ...]) -> Any:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return json.loads(json.dumps(answer))


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    made = Daemon()
    for module in (ckpt, data, image, secret):
        monkeypatch.setattr(module, "client", lambda ctx: made)
    for module in (data, image):
        monkeypatch.setattr(module, "time", SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None}))
    return made


def run(daemon: Daemon, words: str, *answers: Any, input: str | bytes | None = None) -> Result:
    daemon.answers, daemon.asked = list(answers), []
    done = CliRunner().invoke(cli, words.split(), input=input, prog_name="mesh")
    assert not daemon.answers, "an answer was not asked for"
    return done


# --- secrets


@pytest.mark.parametrize(
    ("typed", "value"), [(b"abc\n", b"abc"), (b"abc\r\n", b"abc"), (b"a\n\n", b"a\n"), (b" ", b" ")]
)
def test_secret_is_read_less_its_line_break(daemon: Daemon, typed: bytes, value: bytes) -> None:
    done = run(daemon, "secret set KEY", {"replaced": False}, input=typed)
    ((path, order),) = daemon.asked
    assert path == "/v1/secrets" and order["name"] == "KEY" and b64decode(order["value"]) == value
    assert done.stdout == "KEY is set: `mesh run --secret KEY -- COMMAND`\n"


def test_secret_of_a_file_is_its_bytes_and_its_value_is_not_printed(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"hunter2\n")
    done = run(daemon, f"secret set KEY --file {tmp_path / 'key'}", {"replaced": True})
    assert b64decode(daemon.asked[0][1]["value"]) == b"hunter2\n" and "is replaced" in done.stdout
    assert "hunter2" not in done.output
    assert run(daemon, f"secret set KEY --file {tmp_path / 'no'}").exit_code == ExitCode.USAGE
    (tmp_path / "key").write_bytes(b"x" * (secret.MOST_READ + 1))
    long = run(daemon, f"secret set KEY --file {tmp_path / 'key'}")
    assert long.exit_code == ExitCode.USAGE and "longer than a secret may be" in long.stderr and not daemon.asked


def test_removed_secrets_are_named(daemon: Daemon) -> None:
    done = run(daemon, "secret rm A B", {"removed": ["A"]})
    assert done.stdout == "A is removed\n" and daemon.asked == [("/v1/secrets/remove", {"names": ["A", "B"]})]
    rows = {"secrets": [{"name": "A", "changed_unix": time.time() - 65}]}
    assert run(daemon, "secret ls", rows).stdout.split() == ["NAME", "SET", "A", "1m5s", "ago"]
    assert run(daemon, "secret ls -q", rows).stdout == "A\n"


# --- checkpoints


def stored(**changes: Any) -> dict[str, Any]:
    row = {"id": "i" * 40, "job": "j" * 26, "name": "", "kind": "checkpoint", "seq": 3, "bytes": MIB, "files": 2}
    row |= {"created_unix": time.time() - 60, "use": "job", "holders": []}
    of = {"quota_bytes": None, "foreign_bytes": 0, "foreign_quota_bytes": None, "stored_bytes": MIB}
    return {"checkpoints": [row], **of, **changes}


def test_list_of_checkpoints_says_what_the_store_may_hold(daemon: Daemon) -> None:
    done = run(daemon, "ckpt ls bert", stored())
    assert daemon.asked == [("/v1/checkpoints?job=bert",)] and "jjjjjjjj" in done.stdout
    assert done.stdout.endswith("\n1.0 MiB on this disk, compressed and deduplicated\n")
    full = stored(quota_bytes=4 * MIB, foreign_bytes=MIB, foreign_quota_bytes=2 * MIB)
    words = "1.0 MiB of 4.0 MiB on this disk, 1.0 MiB of them of other users (at most 2.0 MiB), compressed"
    assert words in run(daemon, "ckpt ls", full).stdout
    shared = stored()
    shared["checkpoints"][0] |= {"job": "a" * 26, "holders": ["den", "lab"]}
    row = run(daemon, "ckpt ls", shared).stdout.splitlines()[1].split()
    assert row[1] == "-" and row[-2:] == ["den,", "lab"], "jobs share a working directory"


@pytest.mark.parametrize("form", ["", " --json"])
def test_checkpoint_that_cannot_be_restored_fails_the_verification(daemon: Daemon, form: str) -> None:
    good = {"chunks": 5, "bad_chunks": 1, "quarantined": ["c1"], "quarantine": "/q", "repaired": ["i" * 40], "lost": {}}
    done = run(daemon, f"ckpt verify{form}", good)
    assert done.exit_code == 0
    if not form:
        assert done.stdout.splitlines() == [
            "5 chunks read, 1 damaged",
            "moved to /q: c1",
            "checkpoint iiiiiiiiiiii: repaired from other nodes",
        ]
    bad = run(daemon, f"ckpt verify{form}", good | {"lost": {"l" * 40: "no copy"}})
    assert bad.exit_code == ExitCode.ERROR
    assert form or "checkpoint llllllllllll: cannot be restored: no copy" in bad.stderr


def test_orders_about_checkpoints(daemon: Daemon, tmp_path: Path) -> None:
    told = {"seq": 3, "files": 2, "bytes": MIB, "destination": "/x"}
    done = run(daemon, f"ckpt extract bert {tmp_path}/new --seq 3", told)
    assert daemon.asked == [("/v1/checkpoints/pull", {"job": "bert", "destination": f"{tmp_path}/new", "seq": 3})]
    assert done.stdout == "checkpoint 3: 2 files, 1.0 MiB in /x\n"
    done = run(daemon, "ckpt rm ab --force", {"removed": ["ab" * 20]})
    assert (
        daemon.asked == [("/v1/checkpoints/remove", {"ids": ["ab"], "force": True})] and done.stdout == "ab" * 6 + "\n"
    )
    run(daemon, "ckpt rm ab", {"removed": []})
    assert daemon.asked[0][1]["force"] is False
    run(daemon, "ckpt gc", {"bytes": 1, "stored_bytes": 2})
    assert daemon.asked == [("/v1/checkpoints/collect", {"min_age_s": 900.0})]


# --- data sets


def test_added_data_set_is_awaited_and_says_who_may_read_it(daemon: Daemon, tmp_path: Path) -> None:
    begun = {"over": False, "words": "", "problem": "", "kind": "add", "name": "books"}
    over = begun | {"over": True, "files": 1, "bytes": MIB, "read_bytes": MIB, "new_bytes": 0, "seconds": 1.0}
    for options, order, who in (
        ("", {}, "only your own jobs can read it"),
        (" --reader bob --reader eve", {"readers": ["bob", "eve"]}, "your jobs and those of bob, eve can read it"),
        (" --reader group:vision", {"readers": ["group:vision"]}, "your jobs and those of group:vision can read it"),
        (" --everybody", {"everybody": True}, "jobs of everybody in the mesh can read it"),
        (" --rehash", {"rehash": True}, "only your own jobs"),
    ):
        done = run(daemon, f"data add books {tmp_path}{options}", begun, begun, over)
        given = {"name": "books", "path": str(tmp_path), "readers": [], "everybody": False, "rehash": False} | order
        assert daemon.asked == [("/v1/data/add", given), *[("/v1/data/work?kind=add&name=books",)] * 2]
        assert done.stdout.startswith("books has 1 entry with 1.0 MiB; read 1.0 MiB, stored 0 bytes in 1.0 s")
        assert who in done.stderr
    failed = run(daemon, f"data add books {tmp_path}", begun, over | {"problem": "no room"})
    assert failed.exit_code == ExitCode.ERROR and "no room" in failed.stderr and not failed.stdout
    assert run(daemon, "data add books /no/such/place").exit_code == ExitCode.USAGE


def test_stopped_wait_says_that_the_daemon_goes_on(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "STOP_S", 0.0)
    for words, told in (
        (f"data add books {tmp_path}", "goes on adding it"),
        ("data pin books", "goes on fetching it"),
        ("image pull torch", "the transfer continues"),
    ):
        begun = {"over": False, "here": False, "words": "", "kind": "add", "name": "books", "id": "x"}
        done = run(daemon, words, begun, KeyboardInterrupt())
        assert done.exit_code == ExitCode.INTERRUPTED and told in done.stderr, words


def test_second_interrupt_stops_what_the_daemon_does(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = {"over": False, "words": "", "kind": "fetch", "name": "ab"}
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(data.time, "sleep", sleep)
    monkeypatch.setattr(output, "time", data.time)
    done = run(daemon, "data pin books", begun, begun | {"over": True})
    assert done.exit_code == ExitCode.INTERRUPTED and waits == [data.POLL_S, output.STOP_S]
    assert daemon.asked[1:] == [("/v1/data/stop", {"kind": "fetch", "name": "ab"})]
    assert "Press Ctrl-C once more to stop it" in done.stderr and "it is stopped" in done.stderr


def data_set(**changes: Any) -> dict[str, Any]:
    row = {"name": "books", "bytes": MIB, "files": 1, "readers": [], "everybody": False, "cache": False, "here": True}
    row |= {"fetching": "", "pinned": False, "path": "", "nodes": ["den"]}
    return row | changes


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({}, ["owner", "yes", "den"]),
        ({"readers": ["bob", "eve"], "pinned": True}, ["bob, eve", "yes, pinned", "den"]),
        ({"everybody": True, "here": False, "nodes": []}, ["everybody", "no", "-"]),
        ({"here": False, "fetching": "40 %", "pinned": True}, ["owner", "40 %, pinned", "den"]),
        ({"path": "/srv/books"}, ["owner", "/srv/books", "den"]),
        ({"cache": True, "everybody": True}, ["owner (cache)", "yes", "den"]),
    ],
)
def test_row_of_a_data_set(changes: dict[str, Any], cells: list[str]) -> None:
    assert data._row(data_set(**changes)) == ["books", "1.0 MiB", "1", *cells]


def test_list_of_data_sets_says_how_much_they_may_use(daemon: Daemon) -> None:
    answer = {"data": [data_set()], "paths": {"old": "/srv/old"}, "quota_bytes": 2 * MIB, "used_bytes": MIB}
    done = run(daemon, "data ls", answer)
    assert "this node offers /srv/old to jobs as old" in done.stderr
    assert "data sets use 1.0 MiB of 2.0 MiB (data_quota_gib) of this node's disk" in done.stderr
    assert "use 1.0 MiB of this node's disk" in run(daemon, "data ls", answer | {"quota_bytes": None}).stderr


def test_files_of_a_data_set_are_listed_where_they_are(daemon: Daemon) -> None:
    base = data_set(id="i" * 40, created_unix=0, encrypted=False, entries=None, more=False)
    done = run(daemon, "data show books sub/a", base | {"here": False})
    assert daemon.asked == [("/v1/data/show?name=books&path=sub%2Fa",)]
    assert "it is not on this node: `mesh data pin books`" in done.stderr
    assert "does not have its key" in run(daemon, "data show books", base).stderr
    entries = [
        {"name": "d", "kind": "directory", "files": 2, "bytes": MIB, "target": None},
        {"name": "l", "kind": "link", "files": 0, "bytes": 0, "target": "d"},
        {"name": "f", "kind": "file", "files": 1, "bytes": 3, "target": None},
    ]
    done = run(daemon, "data show books", base | {"entries": entries, "more": True, "nodes": [], "encrypted": True})
    assert "nodes: none is there" in done.stdout and "encrypted on the disks" in done.stdout
    assert [line.split()[-1] for line in done.stdout.splitlines()[-3:]] == ["entries", "d", "bytes"]
    assert "-> d" in done.stdout and "these are the first 3" in done.stderr


def test_groups_of_readers(daemon: Daemon) -> None:
    row: dict[str, Any] = {"name": "ada/vision", "members": ["bob", "eve"], "mine": True, "data": []}
    row |= {"changed_unix": 0, "changed_on": "desk"}
    answer = {"groups": [row]}
    done = run(daemon, "data group set vision bob eve", answer)
    assert daemon.asked == [("/v1/data/groups", {"name": "vision", "members": ["bob", "eve"]})]
    assert done.stdout == "ada/vision has 2 members: bob, eve\n"
    assert run(daemon, "data group set vision").exit_code == ExitCode.USAGE
    assert json.loads(run(daemon, "data group set vision bob eve --json", answer).stdout)["groups"] == [row]
    lines = run(daemon, "data group ls", {"groups": [row, row | {"data": ["eve/x"]}]}).stdout.splitlines()
    assert [line.split() for line in lines[1:]] == [["ada/vision", "bob,", "eve", end] for end in ("-", "eve/x")]
    assert run(daemon, "data group ls -q", answer).stdout == "ada/vision\n"
    assert json.loads(run(daemon, "data group ls --json", answer).stdout)["groups"] == [row]
    done = run(daemon, "data group show bob/vision", answer)
    assert daemon.asked == [("/v1/data/groups?name=bob%2Fvision",)]
    assert "set on desk" in done.stdout and "members: bob, eve" in done.stdout and "data sets: none" in done.stdout
    assert json.loads(run(daemon, "data group show vision --json", answer).stdout)["members"] == ["bob", "eve"]
    done = run(daemon, "data group rm vision", {"groups": []})
    assert daemon.asked == [("/v1/data/groups", {"name": "vision", "members": []})]
    assert done.stdout == "vision is removed\n"


def test_orders_about_data_sets(daemon: Daemon) -> None:
    over = {"over": True, "words": "", "problem": "", "kind": "pin", "name": "books"}
    for option, off, words in (("", False, "books is here and stays"), (" --off", True, "books may go when")):
        done = run(daemon, f"data pin books{option}", over)
        assert daemon.asked == [("/v1/data/pin", {"name": "books", "off": off})] and done.stdout.startswith(words)
    verified = over | {"chunks": 3, "damaged": 0, "fetched_again": 0}
    assert run(daemon, "data verify books", verified).stdout == "3 chunks verified; all are good\n"
    done = run(daemon, "data verify books", verified | {"damaged": 2, "fetched_again": 1})
    assert done.stdout == "3 chunks verified; 2 damaged chunks, 1 of books fetched again\n"
    for options, here, force, words in (
        ("", False, False, "from the mesh; nodes drop it"),
        (" --here --force", True, True, "from this node"),
    ):
        done = run(daemon, f"data rm books{options}", {"name": "ada/books", "here": here})
        assert daemon.asked[0][1] == {"name": "books", "here": here, "force": force}
        assert done.stdout.startswith(f"ada/books is removed {words}")


# --- images


def test_allowed_image_says_where_and_what_follows(daemon: Daemon) -> None:
    told = {"by_list": False, "id": f"sha256:{'a' * 64}", "manifest": "", "first": False, "listed": True}
    told |= {"on_engine": True, "denied_here": False}
    done = run(daemon, "image allow torch --from t:1 --id sha256:aa", told)
    order = {"alias": "torch", "source": "t:1", "id": "sha256:aa", "here": False}
    assert daemon.asked == [("/v1/images/allow", order)]
    assert done.stdout == f"torch is {'a' * 12}, on the mesh's list\n" and not done.stderr
    changed = {"first": True, "on_engine": False, "denied_here": True, "manifest": f"sha256:{'b' * 64}"}
    done = run(daemon, "image allow torch", told | changed)
    assert f"in registries sha256:{'b' * 12}" in done.stdout
    for words in ("from now on nodes run only images on the list", "does not have it", "owner denies it here"):
        assert words in done.stderr
    done = run(daemon, "image allow torch --here", told | {"listed": False})
    assert "on this node" in done.stdout and "has no list yet" in done.stderr
    assert "no longer denied here" in run(daemon, "image allow torch --here", told | {"by_list": True}).stdout
    assert "every image" in run(daemon, "image allow *", told).stdout


def test_pulled_image_is_awaited_and_its_failure_told(daemon: Daemon) -> None:
    begun = {"here": False, "words": "", "id": "sha256:a"}
    row = {"id": "sha256:a", "here": False, "fetching": "10 %", "problem": ""}
    done = run(daemon, "image pull torch", begun, {"images": [row]}, {"images": [row | {"here": True}]})
    assert done.exit_code == 0 and done.stdout == "torch is here (a)\n"
    failed = run(daemon, "image pull torch", begun, {"images": [row | {"problem": "no node has it"}]})
    assert failed.exit_code == ExitCode.ERROR and "torch: no node has it" in failed.stderr
    gone = run(daemon, "image pull torch", begun, {"images": [row | {"id": "sha256:b"}]})
    assert "it is no longer on the mesh's list" in gone.stderr and gone.exit_code == ExitCode.ERROR


def test_pushed_image_is_awaited_on_every_node(daemon: Daemon) -> None:
    def rows(*states: tuple[str, bool, bool, str]) -> dict[str, Any]:
        return {"nodes": [dict(zip(("node", "here", "failed", "words"), state, strict=True)) for state in states]}

    waits, has = ("den", False, False, "10 %"), ("lab", True, False, "")
    done = run(daemon, "image push torch den lab", rows(waits, has), rows(("den", True, False, ""), has))
    assert done.exit_code == 0 and done.stdout == "den has it\nlab has it\n"
    assert daemon.asked[1] == ("/v1/images/push", {"alias": "torch", "nodes": ["den", "lab"], "look": True})
    done = run(
        daemon, "image push torch den lab", rows(waits, has), rows(("den", False, False, ""), ("lab", False, False, ""))
    )
    assert done.exit_code == ExitCode.ERROR and "lab has it" in done.stdout
    assert "den does not have it: it no longer fetches the image: push it again" in done.stdout
    done = run(daemon, "image push torch", {"manifest": "sha256:c"})
    assert "torch is sha256:c in this node's registry" in done.stdout and daemon.asked[0][1]["nodes"] == []


def test_denied_image_and_removed_ones(daemon: Daemon) -> None:
    done = run(daemon, "image deny torch", {"still_allowed_here": False})
    assert (
        daemon.asked == [("/v1/images/deny", {"alias": "torch", "mesh": False})]
        and "denied on this node" in done.stdout
    )
    done = run(daemon, "image deny torch --mesh", {"still_allowed_here": True})
    assert "removed from the list" in done.stdout and "still allows it here" in done.stderr
    row = {"alias": "torch", "id": "sha256:a", "bytes": 0, "unused_s": 65, "words": "old", "gone": True}
    done = run(daemon, "image prune --dry-run", {"images": [row, row | {"gone": False}]})
    assert daemon.asked == [("/v1/images/prune", {"unused_s": None, "dry_run": True})]
    assert done.stdout.splitlines() == [
        "torch (a, ?) would be removed; unused for 1m5s: old",
        "torch (a, ?) stays; unused for 1m5s: old",
    ]
    done = run(daemon, "image prune --unused 1h", {"images": [row]})
    assert "torch (a, ?) removed" in done.stdout and daemon.asked[0][1] == {"unused_s": 3600.0, "dry_run": False}
    assert "nothing to remove" in run(daemon, "image prune", {"images": []}).stderr


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({}, ["yes", "den"]),
        ({"here": False, "nodes": []}, ["no", "-"]),
        ({"here": False, "fetching": "10 %"}, ["10 %", "den"]),
        ({"denied_here": True}, ["denied", "den"]),
    ],
)
def test_row_of_an_image(changes: dict[str, Any], cells: list[str]) -> None:
    row = {"alias": "torch", "id": f"sha256:{'a' * 64}", "bytes": MIB, "by": "desk", "allowed": True, "here": True}
    row |= {"fetching": "", "denied_here": False, "nodes": ["den"]}
    assert image._row(row | changes) == ["torch", "a" * 12, "1.0 MiB", "desk", *cells]
    assert image._row(row | {"allowed": False}) == ["torch", "denied", "-", "desk", "-", "-"]


def test_error_of_the_daemon_is_the_command_s(daemon: Daemon) -> None:
    done = run(daemon, "image ls", MeshError("no daemon", ExitCode.NO_DAEMON))
    assert done.exit_code == ExitCode.NO_DAEMON and "no daemon" in done.stderr
