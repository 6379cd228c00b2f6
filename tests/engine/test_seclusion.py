"""A guest of the process engine sees neither its owner's home nor the daemon's keys nor other jobs, and has its programs."""

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

from mesh.engine.process import ProcessEngine
from mesh.engine.seclusion import Seclusion, around, prefixes, tools
from tests.engine.bench import WAIT_S, Bench

NOBODY = 65_534
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable  # that another user may run
ROOT = Path(__file__).parents[2]


@pytest.fixture
def machine() -> Iterator[Path]:
    """A home with a key, data and a program in an environment; a daemon's state with a key and two jobs."""
    root = Path(tempfile.mkdtemp(prefix="mesh-seclusion-"))
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


def secluded(root: Path) -> Seclusion:
    hidden = [root / "state", root / "engine.sock", root / "not there"]
    return Seclusion(root / "home", hidden, [root / "home/data"])


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


def seen(text: str, *, contained: bool) -> None:
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
    assert not contained or "what covers the home stays" in text


async def test_a_guest_sees_its_own_directories_and_its_programs(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{machine}/home/env/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setenv("HOME", f"{machine}/home")
    engine = ProcessEngine(seclusion=secluded(machine))
    isolation = (await engine.availability()).isolation
    if "namespaces" not in isolation:
        assert "but for" not in isolation, "nothing is promised"
        return
    assert "but for its home, the daemon's keys and other jobs" in isolation
    assert ("as root it could undo all that" in isolation) == (os.getuid() == 0)
    bench = Bench(engine, machine / "state/jobs/own", None)
    text = await bench.output(SCRIPT.format(root=machine) + "cd ~; pwd; echo kept > $MESH_OUT_DIR/file")
    seen(text, contained=False)
    assert (bench.root / "out/file").read_text() == "kept\n" and (bench.root / "home/mine").exists()
    assert not (machine / "home/mine").exists() and f"{machine}/home\n" in text
    guest = await bench.shell("while :; do sleep 0.05; done")
    async with asyncio.timeout(WAIT_S):
        await guest.kill()
    await engine.close()


def test_one_that_is_not_root_cannot_undo_it(machine: Path) -> None:
    if os.getuid() == 0:
        for path in (machine, *machine.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
    private = machine / "state/jobs/own/home"
    private.mkdir()
    env = {"PATH": f"{machine}/home/env/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    order = secluded(machine).plain(private, [machine / "state/jobs/own"], [], env)
    if os.getuid() == 0:
        os.chown(private, NOBODY, NOBODY)
    again = "unshare --user --map-root-user --mount umount {root}/home || echo and from a namespace of its own too\n"
    run = (
        f"import json, os, sys; sys.path.insert(0, {str(ROOT)!r}); from mesh.engine import guest_init, seclusion\n"
        "assert guest_init.enter_namespaces(True) == 'namespaces', 'no namespaces'\n"
        "if os.fork() == 0:  # the first process of the namespace\n"
        "    seclusion.enter(**json.loads(sys.argv[1])); os.execvp('sh', ['sh', '-c', sys.argv[2]])\n"
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
    seen(done.stdout, contained=True)
    assert "and from a namespace of its own too" in done.stdout, done


def test_what_belongs_to_a_program(tmp_path: Path) -> None:
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


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_path_keeps_what_is_hidden(path: str, libraries: str) -> None:
    seclusion = Seclusion(Path("/home/ada"), [Path("/home/ada/state"), Path("/run/user/7")])
    env = {"PATH": f"{path}:/home/ada:/home/ada/bin:/:/home", "LD_LIBRARY_PATH": libraries.replace("\0", "")}
    env["PATH"] = env["PATH"].replace("\0", "")
    kept = seclusion.plain(Path("/tmp/p"), [], [], env)["kept"]
    assert isinstance(kept, dict)
    for place in ("/", "/home", "/home/ada", "/home/ada/state", "/run/user/7"):
        assert place not in kept
