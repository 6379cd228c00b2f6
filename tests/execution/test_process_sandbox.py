"""A guest of the process engine sees its programs, but not the owner's home, the daemon's keys or other jobs."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.execution.engine import EngineError
from mesh.execution.process.engine import Kernel, ProcessEngine
from mesh.execution.process.sandbox import Sandbox, around, prefixes, tools
from tests.execution.bench import WAIT_S, Bench

NOBODY = 65_534
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable  # a Python that another user may run
ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine() -> Iterator[Path]:
    """A home with a key, data and a program in an environment; a daemon's state with a key and two jobs."""
    root = Path(tempfile.mkdtemp(prefix="mesh-sandbox-"))
    for path, text in {
        "home/.ssh/id_ed25519": "secret",
        "home/data/numbers": "lent",
        "home/env/bin/tool": "#!/bin/sh\necho tool runs with $(cat ${0%/bin/tool}/lib/part)\n",
        "home/env/lib/part": "its part",
        "home/env/bin/python3": "",
        "state/node.key": "secret",
        "engine.sock": "secret",
        "state/jobs/other/1/work/file": "secret",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "home/env/bin/tool").chmod(0o755)
    (root / "state/jobs/own").mkdir()
    yield root
    shutil.rmtree(root)


def sandboxed(root: Path) -> Sandbox:
    hidden = [root / "state", root / "engine.sock", root / "not there"]
    return Sandbox(root / "home", hidden, {"PATH": path_of(root)}, [root / "home/data"])


def path_of(root: Path) -> str:
    return f"{root}/home/env/bin:/usr/sbin:/usr/bin:/sbin:/bin"


SCRIPT = """
cat {root}/home/.ssh/id_ed25519 || echo no key of the owner
cat {root}/state/node.key || echo no key of the daemon
cat {root}/state/jobs/other/1/work/file || echo no other job
ls {root}/state/jobs; cat {root}/engine.sock
cat {root}/home/data/numbers; echo; tool
echo mine > {root}/home/mine && cat {root}/home/mine
echo bad > {root}/home/env/bin/tool || echo programs are read-only
umount {root}/home || echo what covers the home stays
"""


def seen(text: str) -> None:
    assert "secret" not in text
    for words in (
        "no key of the owner",
        "no key of the daemon",
        "no other job",
        "lent",
        "tool runs with its part",
        "mine",
    ):
        assert words in text, words
    assert "other\n" not in text and "own\n" in text and "programs are read-only" in text
    assert "what covers the home stays" in text


async def test_guest_sees_own_directories_and_programs(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_of(machine))
    monkeypatch.setenv("HOME", f"{machine}/home")
    engine = ProcessEngine(sandbox=sandboxed(machine))
    isolation = (await engine.availability()).isolation
    if "namespaces" not in isolation:
        assert "but for" not in isolation, "without namespaces, no isolation is promised"
        return
    assert "except their home, /tmp and /run, the daemon's keys and other jobs" in isolation
    assert ("as root it could undo all that" in isolation) == (os.getuid() == 0)
    bench = Bench(engine, machine / "state/jobs/own", None)
    text = await bench.output(SCRIPT.format(root=machine) + "cd ~; pwd; echo kept > $MESH_OUT_DIR/file")
    seen(text)
    assert (bench.root / "out/file").read_text() == "kept\n" and (bench.root / "home/mine").exists()
    assert not (machine / "home/mine").exists() and f"{machine}/home\n" in text
    guest = await bench.shell("while :; do sleep 0.05; done")
    async with asyncio.timeout(WAIT_S):
        await guest.kill()
    await engine.close()


def test_unprivileged_guest_cannot_undo_sandbox(machine: Path) -> None:
    (machine / "state/jobs/own/work").mkdir()
    if os.getuid() == 0:
        for path in (machine, *machine.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    env = {"PATH": path_of(machine)}
    order = sandboxed(machine).plain(machine / "state/jobs/own", [machine / "state/jobs/own/work"], 64)
    if os.getuid() == 0:
        for name in ("home", "tmp"):
            os.chown(machine / "state/jobs/own" / name, NOBODY, NOBODY)
    again = "unshare --user --map-root-user --mount umount {root}/home || echo and from a namespace of its own too\n"
    run = (
        f"import json, os, sys; sys.path.insert(0, {str(ROOT)!r}); from mesh.execution.process import guest_init, sandbox\n"
        "assert guest_init.enter_namespaces(True) == 'namespaces', 'no namespaces'\n"
        "if os.fork() == 0:  # the first process of the namespace\n"
        "    sandbox.enter(**json.loads(sys.argv[1])); os.execvp('sh', ['sh', '-c', sys.argv[2]])\n"
        "os.wait()"
    )
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
    script = (SCRIPT + again).format(root=machine)
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-c", run, json.dumps(order), script],
        capture_output=True,
        text=True,
        env=env,
        cwd="/",
        check=False,
        **user,  # type: ignore[call-overload]
    )
    if "no namespaces" in done.stderr:
        pytest.skip("this kernel gives users no namespaces")
    seen(done.stdout)
    assert "and from a namespace of its own too" in done.stdout, done


def test_prefixes_of_program(tmp_path: Path) -> None:
    home = tmp_path.resolve()
    for made in ("venv/bin", "pythons/3.11/bin", "bin", ".local/bin"):
        (home / made).mkdir(parents=True)
    (home / "pythons/3.11/bin/python3.11").touch()
    (home / "pythons/3.11/bin/python3").symlink_to("python3.11")
    (home / "venv/bin/python3").symlink_to(home / "pythons/3.11/bin/python3")
    assert set(prefixes(home / "venv/bin/python3", home)) == {home / "venv", home / "pythons/3.11"}
    assert home / "pythons/3.11" in set(tools({"PATH": f"/usr/bin:{home}/venv/bin"}, home))
    assert around(home / "bin", home) == (home / "bin",) and around(home, home) == (home,)
    assert around(home / ".local/bin", home) == (home / ".local/bin", home / ".local/lib")
    (home / "round").symlink_to(home / "round")
    assert set(prefixes(home / "round", home)) == {home}


UNSEARCHABLE = """
import os, tempfile
from pathlib import Path
from mesh.execution.process.sandbox import Sandbox
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
with tempfile.TemporaryDirectory() as made:
    root = Path(made).resolve()
    for name in ("open/bin", "closed/env/bin", "attempt"):
        (root / name).mkdir(parents=True)
        (root / name / "python3").touch()
    (root / "closed").chmod(0)
    sandbox = Sandbox(root / "home", [root], {"PATH": f"{root}/closed/env/bin:{root}/open/bin"})
    kept = sandbox.plain(root / "attempt", [], 64)["kept"]
    print(*(str(Path(path).relative_to(root)) for path in kept if Path(path).exists() and path.startswith(made)))
    (root / "closed").chmod(0o700)
"""


def test_unsearchable_directory_on_path_is_left_out() -> None:
    done = subprocess.run([sys.executable, "-c", UNSEARCHABLE], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout == "open\n", done.stderr


async def test_guest_whose_files_cannot_be_prepared_does_not_start(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*asked: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Sandbox, "plain", full)
    engine = ProcessEngine(sandbox=sandboxed(machine))
    with pytest.raises(EngineError, match="its files cannot be prepared: No space left"):
        await Bench(engine, machine / "state/jobs/own", None).shell("true")
    await engine.close()


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_path_exposes_hidden_files(path: str, libraries: str) -> None:
    env = {"PATH": f"{path}:/home/ada:/home/ada/bin:/:/home", "LD_LIBRARY_PATH": libraries.replace("\0", "")}
    env["PATH"] = env["PATH"].replace("\0", "")
    sandbox = Sandbox(Path("/home/ada"), [Path("/home/ada/state"), Path("/run/user/7")], env)
    with tempfile.TemporaryDirectory() as attempt:
        kept = sandbox.plain(Path(attempt), [], 64)["kept"]
    assert isinstance(kept, dict)
    for place in ("/", "/home", "/home/ada", "/home/ada/state", "/run/user/7", "/run", "/tmp"):
        assert place not in kept


@pytest.mark.parametrize(
    ("kernel", "missing"),
    [
        (Kernel(True, 7, True), ""),
        (Kernel(True, 4, True), "Landlock of Linux 6.12, so abstract sockets (X, D-Bus) are in reach"),
        (Kernel(False, 7, True), "namespaces, so the owner's sockets and processes are in reach"),
        (Kernel(False, 1, True), "namespaces, so the owner's files, sockets and processes are in reach"),
        (Kernel(True, 7, False), "a filter of system calls for this kind of processor"),
    ],
)
async def test_status_names_what_the_kernel_lacks(
    machine: Path, monkeypatch: pytest.MonkeyPatch, kernel: Kernel, missing: str
) -> None:
    monkeypatch.setattr("mesh.execution.process.engine._probe_kernel", lambda: kernel)
    engine = ProcessEngine(sandbox=sandboxed(machine))
    isolation = (await engine.availability()).isolation
    assert missing in isolation and ("missing here" in isolation) == bool(missing)
    assert ("except their home" in isolation) == (kernel.namespaces or kernel.landlock > 1)
    await engine.close()
