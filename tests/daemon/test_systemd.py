"""The unit: what it grants, that systemd understands it, and that a real manager starts, restarts and stops a node by it."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mesh.cli.main import cli
from mesh.daemon.systemd import (
    CAPABILITIES,
    EXTRAS,
    LEAVING_S,
    MAX_FILES,
    Service,
    _word,
    notify,
    raise_file_limit,
    template,
    unit,
)
from tests.e2e.commands import until


def values(text: str) -> dict[str, str]:
    pairs = [line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return {key: value for key, _, value in pairs}


def test_unit_grants_only_the_chosen_privileges() -> None:
    service = Service("/usr/bin/python3", "/var/lib/mesh", 30.0, "alice")
    plain = values(unit(service))
    assert plain["User"] == "alice" and plain["NoNewPrivileges"] == "yes"
    assert plain["CapabilityBoundingSet"] == plain["AmbientCapabilities"] == "" and "SupplementaryGroups" not in plain
    more = values(unit(Service("/usr/bin/python3", "/var/lib/mesh", 30.0, "alice", ("edge", "kill", "docker"))))
    assert more["CapabilityBoundingSet"].split() == ["CAP_NET_ADMIN", "CAP_BPF", "CAP_KILL"]
    assert more["SupplementaryGroups"] == "docker" and set(EXTRAS) == set(CAPABILITIES)
    edge = unit(Service("python3", "/s", 30.0, "alice", ("edge",), "/run/campus-mesh/edge-1"))
    assert 'ExecStartPre=+/bin/mount -t bpf bpf "/run/campus-mesh/edge-1"' in edge and "+/bin" not in unit(service)
    own = values(unit(Service("/usr/bin/python3", "/home/a/.local/state/campus-mesh", 30.0)))
    assert own["LimitNOFILE"] == "65536"
    assert "User" not in own and "AmbientCapabilities" not in own and own["WantedBy"] == "default.target"


def test_stop_timeout_covers_the_grace() -> None:
    assert float(values(unit(Service("python", "/s", 120.0)))["TimeoutStopSec"]) > 120 + 30


@given(st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"), max_size=40))
def test_any_path_is_one_argument(text: str) -> None:
    word = _word(text)
    assert word[0] == word[-1] == '"'
    inner = word[1:-1].replace("%%", "%").replace("$$", "$")
    unescaped, escaped = "", False
    for character in inner:
        if escaped or character != "\\":
            assert escaped or character != '"'
            unescaped, escaped = unescaped + character, False
        else:
            escaped = True
    assert unescaped == text and not escaped


@pytest.mark.parametrize("path", ["/a\n[Service]\nUser=root", "/a\0b", "/a\rb"])
def test_path_cannot_add_lines(path: str) -> None:
    with pytest.raises(ValueError, match="unit file"):
        unit(Service("python", path, 30.0))


def test_printed_unit_in_json_is_the_printed_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)  # `daemon` on every Linux
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    command = ["--state", str(tmp_path), "install-service", "--print"]
    answer = json.loads(CliRunner().invoke(cli, [*command, "--json"]).stdout)
    assert answer["unit"] == CliRunner().invoke(cli, command).stdout != ""
    assert answer["path"] == str(tmp_path / "systemd" / "user" / "campus-mesh.service") and answer["user"] == "daemon"
    assert answer["allow"] == []


def test_service_of_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def said(*words: str) -> str:
        return CliRunner().invoke(cli, ["--state", str(tmp_path), "install-service", *words]).output

    assert "--as USER" in said("--print")
    assert "does not run as root" in said("--print", "--as", "root")
    assert "useradd" in said("--print", "--as", "nobody-of-that-name")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "sudo" in said("--allow", "kill") and "sudo" in said("--as", "alice")


@pytest.mark.systemd
@pytest.mark.parametrize("user", [None, "daemon"])
def test_systemd_accepts_the_unit(tmp_path: Path, user: str | None) -> None:
    path = tmp_path / "campus-mesh.service"
    path.write_text(
        unit(
            Service(
                sys.executable,
                f"{tmp_path}/a dir 100%",
                30.0,
                user,
                ("edge", "kill") if user else (),
                "/run/campus-mesh/edge-1",
            )
        )
    )
    verify(path)


@pytest.mark.systemd
def test_systemd_accepts_the_packaged_unit(tmp_path: Path) -> None:
    path = tmp_path / "campus-mesh.service"
    path.write_text(template())
    assert values(template())["ExecStart"] == "/usr/bin/env mesh up --foreground" and "daemon.log" not in template()
    verify(path)


def verify(path: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and str(path.name) not in done.stderr, done.stderr


SESSION = """
    # A manager of systemd of its own, in namespaces of its own: its /run says that systemd is booted.
    set -eu
    base=$1 python=$2 cgroup=$3
    if [ "$(id -u)" = 0 ]; then
      if [ "$4" = out ]; then
        echo 0 >"$cgroup/cgroup.procs"
        exec unshare --cgroup bash "$0" "$1" "$2" "$3" in
      fi
      mount -t tmpfs tmpfs /run
      mkdir -p /run/systemd/system /run/user
      mount -t tmpfs tmpfs /sys/fs/cgroup
      mount -t cgroup2 cgroup2 /sys/fs/cgroup
      exec unshare --user --map-user=1 --map-group=1 bash "$0" "$@"
    fi
    export XDG_RUNTIME_DIR=/run/user XDG_CONFIG_HOME="$base/config" MESH_STATE="$base/state"
    mesh() { "$python" -m mesh.cli "$@"; }
    /lib/systemd/systemd --user --unit=basic.target --log-target=console >"$base/manager.log" 2>&1 &
    manager=$!
    for _ in $(seq 200); do systemctl --user is-system-running >/dev/null 2>&1 && break; sleep 0.1; done
    echo "state $(systemctl --user is-active campus-mesh.service || true)"
    mesh init lab >/dev/null
    mesh install-service --json >"$base/installed.json" || { systemctl --user status campus-mesh.service --no-pager; exit 1; }
    echo "state $(systemctl --user is-active campus-mesh.service)"
    systemctl --user show -p StatusText campus-mesh.service
    pid=$(systemctl --user show -p MainPID --value campus-mesh.service)
    mesh run --no-workdir -- echo "a guest ran"
    kill -9 "$pid"
    for _ in $(seq 300); do
      again=$(systemctl --user show -p MainPID --value campus-mesh.service)
      if [ "$again" != 0 ] && [ "$again" != "$pid" ] && mesh status >/dev/null 2>&1; then break; fi
      sleep 0.1
    done
    [ "$again" != "$pid" ] && echo "restarted"
    mesh install-service --remove --json >"$base/removed.json"
    echo "state $(systemctl --user is-active campus-mesh.service || true)"
    tail -n 3 "$MESH_STATE/daemon.log" 2>/dev/null || true
    kill "$manager"
    wait "$manager" || true
"""


def cgroup2() -> Path:
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next(Path(words[1]) for words in lines if words[2] == "cgroup2")


def remove(cgroup: Path) -> None:
    """A cgroup and those in it, once their processes have gone."""
    until(lambda: "populated 0" in (cgroup / "cgroup.events").read_text(), "all of the session's processes to end")
    for path in sorted(cgroup.glob("**/"), key=lambda path: len(path.parts), reverse=True):
        path.rmdir()


def test_service_opens_its_log_itself_and_follows_no_link(tmp_path: Path) -> None:
    """As root, systemd would open whatever file the service's user puts there."""
    assert "Standard" not in unit(Service(sys.executable, str(tmp_path), 30.0, "alice"))
    (tmp_path / "other").write_text("")
    (tmp_path / "daemon.log").symlink_to("other")
    command = [sys.executable, "-m", "mesh.daemon.entry", "--log", "--state", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "daemon.log" in done.stderr
    assert (tmp_path / "other").read_text() == ""


@pytest.mark.systemd
def test_a_real_manager_starts_restarts_and_stops_a_node(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = tmp_path / "state" / "config.toml"
    config.parent.mkdir(mode=0o700)
    config.write_text(
        'bind = "127.0.0.1"\nport = 0\napi_port = 0\nmdns = false\nlend = true\nengines = ["process"]\nprofile = "local"\n'
    )
    script = tmp_path / "session"
    script.write_text(textwrap.dedent(SESSION))
    unshare = shutil.which("unshare")
    assert unshare is not None
    cgroup = cgroup2() / f"mesh-test-{os.getpid()}"
    cgroup.mkdir()
    request.addfinalizer(lambda: remove(cgroup))
    done = subprocess.run(
        [
            unshare,
            "--mount",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child",
            "bash",
            str(script),
            str(tmp_path),
            sys.executable,
            str(cgroup),
            "out",
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    text = done.stdout + done.stderr + (tmp_path / "manager.log").read_text()
    assert done.returncode == 0, text
    said = [line for line in done.stdout.splitlines() if line.startswith(("state", "Status", "a guest", "restarted"))]
    assert said == ["state inactive", "state active", said[2], "a guest ran", "restarted", "state inactive"], text
    assert "in mesh lab" in said[2]
    path = tmp_path / "config" / "systemd" / "user" / "campus-mesh.service"
    installed, removed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("installed", "removed"))
    assert (installed["path"], installed["runs"], installed["removed"]) == (str(path), True, False)
    assert (removed["path"], removed["runs"], removed["removed"]) == (str(path), False, True)
    assert not path.exists()
    assert (tmp_path / "state" / "node.key").exists()
    log = tmp_path / "state" / "daemon.log"
    assert log.stat().st_mode & 0o777 == 0o600 and "mesh" in log.read_text()


AMBIENT = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
from mesh.util import capabilities
def effective(text): return int(next(line for line in text.splitlines() if line.startswith("CapEff")).split()[1], 16)
child = lambda: effective(subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout)
before = child()
capabilities.keep()
kept = child()
with capabilities.lent(5):
    lent = child()
print(before, kept, lent, child(), effective(open("/proc/self/status").read()))
"""


@pytest.mark.systemd
def test_guests_do_not_inherit_privileges() -> None:
    granted = "+kill,+dac_read_search"  # the latter to read this checkout, wherever it is
    bits = str(1 << 5 | 1 << 2)
    privileges = ["--reuid=1", "--regid=1", "--clear-groups", f"--inh-caps={granted}", f"--ambient-caps={granted}"]
    command = ["setpriv", *privileges, sys.executable, "-c", AMBIENT, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.stdout.split() == [bits, "0", str(1 << 5), "0", bits], done.stderr


def test_unit_keeps_what_a_node_needs_to_leave_in_order() -> None:
    """Only the daemon gets the SIGTERM, has time to ship what guests saved, and comes back if it fails."""
    told = values(unit(Service("/usr/bin/python3", "/s", 40.0, config="/c d")))
    assert (told["Type"], told["KillMode"], told["Restart"], told["Delegate"]) == (
        "notify",
        "mixed",
        "on-failure",
        "yes",
    )
    assert told["TimeoutStopSec"] == f"{40 + LEAVING_S:.0f}" and told["UMask"] == "0077"
    assert told["ExecStart"] == '"/usr/bin/python3" -m mesh.daemon.entry --log --state "/s" --config "/c d"'
    assert values(unit(Service("python", "/s", 40.0, "alice")))["ProtectSystem"] == "full"
    assert "50$$ 100%%" in unit(Service("python", "/50$ 100%", 40.0))
    edge = unit(Service("python3", "/s", 30.0, "alice", ("edge",), "/run/campus-mesh/edge-1")).splitlines()
    assert 'ExecStartPre=+/bin/chown alice "/run/campus-mesh/edge-1"' in edge, "the daemon writes there"
    assert 'ExecStopPost=-+/bin/umount "/run/campus-mesh/edge-1"' in edge and "RuntimeDirectory=campus-mesh" in edge


@pytest.mark.parametrize("abstract", [False, True])
def test_manager_is_told_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    name = f"@mesh-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        notify("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify("READY=1")  # nobody listens: no error
    monkeypatch.setenv("NOTIFY_SOCKET", "vsock:2:1")
    notify("READY=1")


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, (4096, 4096)),
        (1024, resource.RLIM_INFINITY, (MAX_FILES, resource.RLIM_INFINITY)),
        (1024, 2 * MAX_FILES, (MAX_FILES, 2 * MAX_FILES)),
        (2 * MAX_FILES, 2 * MAX_FILES, None),
    ],
)
def test_limit_of_open_files_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, wanted: tuple[int, int] | None
) -> None:
    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: chosen.append(limits))
    raise_file_limit()
    assert chosen == ([wanted] if wanted else [])
