"""Environments by uv: built once, whole or not at all, within a quota, by hashes, and from the owner's index only."""

import asyncio
import hashlib
import os
import re
import sys
import time
import tracemalloc
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mesh.jobs import environments as module
from mesh.jobs.environments import MARK, NoEnvironment, find_uv
from mesh.jobs.image_python import ImagePython
from mesh.model.environment import MOST_PACKAGES, EnvironmentRefused, UvProject, packages_of, python_of
from mesh.model.spec import Checkpointing, SpecError, encode_spec
from mesh.util.trees import DEEPEST
from tests.consensus.worlds import make_spec
from tests.wheels import Index, alone, index, make_wheel

ADA, BOB, GIB = b"a" * 32, b"b" * 32, 1 << 30
HASH = f"--hash=sha256:{'0' * 64}"
PROJECT, SCRIPT = UvProject(), UvProject("alone.py")


def say(text: str) -> None:
    assert " by uv" in text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Index]:
    with index(tmp_path / "index") as made:
        yield made


async def version_in(environment: Path) -> str:
    python = await asyncio.create_subprocess_exec(
        str(environment / "bin" / "python"),
        "-c",
        "import tinypkg; print(tinypkg.VERSION)",
        stdout=asyncio.subprocess.PIPE,
    )
    return (await python.communicate())[0].decode().strip()


def places(root: Path) -> list[Path]:
    return [place for place in root.glob("*/*-*") if place.is_dir()]


async def test_environment_is_built_once_and_used_again(tmp_path: Path, served: Index) -> None:
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    made = alone(root, served.address, GIB)
    first, again = await asyncio.gather(*(made.ready(ADA, PROJECT, work, say) for _ in range(2)))
    assert first == again and await version_in(first) == "1.0"
    assert sum(".whl" in path and "metadata" not in path for path in served.paths) == 1
    served.close()
    begun = time.monotonic()
    assert await made.ready(ADA, PROJECT, work, say) == first
    print(f"second start: {time.monotonic() - begun:.3f} s")
    restarted = alone(root, served.address, GIB)
    restarted.clear()
    assert await restarted.ready(ADA, PROJECT, work, say) == first
    # A script with the same packages has the same environment.
    assert await restarted.ready(ADA, SCRIPT, work, say) == first


async def test_job_hears_what_its_environment_waits_for(tmp_path: Path, served: Index) -> None:
    work, made = served.project(tmp_path / "work"), alone(tmp_path / "environments", served.address, GIB)
    told: dict[bytes, list[str]] = {ADA: [], BOB: []}
    served.going.clear()
    building = asyncio.create_task(made.ready(ADA, PROJECT, work, told[ADA].append))
    assert await asyncio.to_thread(served.asked.wait, 60)
    waiting = asyncio.create_task(made.ready(BOB, PROJECT, work, told[BOB].append))
    while not told[BOB]:
        await asyncio.sleep(0.01)
    assert told[BOB] == ["1 package by uv, once another environment is made"]
    served.going.set()
    await asyncio.gather(building, waiting)
    assert told[ADA] == ["1 package by uv", "1 package by uv, of which 1 came"]


async def test_users_share_nothing(tmp_path: Path, served: Index) -> None:
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    made = alone(root, served.address, GIB)
    ada, bob = [await made.ready(user, PROJECT, work, say) for user in (ADA, BOB)]
    files = [{path.lstat().st_ino for path in place.parents[1].rglob("*")} for place in (ada, bob)]
    assert ada.parents[1] != bob.parents[1] and not files[0] & files[1], "not even by links"


async def test_no_index_is_asked_unless_the_owner_allows_it(tmp_path: Path, served: Index) -> None:
    """The lock names the index: that alone has a node ask nobody."""
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    with pytest.raises(NoEnvironment, match="its owner allows no index here"):
        await alone(root, "", GIB).ready(ADA, PROJECT, work, say)
    assert not served.paths and not places(root)
    allowed = await alone(root, served.address, GIB).ready(ADA, PROJECT, work, say)
    (allowed.parent / MARK).unlink()
    served.paths.clear()
    cached = await alone(root, "", GIB).ready(ADA, PROJECT, work, say)
    assert not served.paths and await version_in(cached) == "1.0", "from uv's cache"
    wheels = alone(tmp_path / "others", str(served.wheels), GIB)
    assert await version_in(await wheels.ready(ADA, PROJECT, work, say)) == "1.0", "from a directory"
    assert not served.paths


async def test_password_of_an_index_is_shown_to_nobody(
    tmp_path: Path, served: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    served.going.clear()
    named = served.address.replace("http://", "http://lab:s3cr3t@")
    building = asyncio.create_task(alone(root, named, GIB).ready(ADA, PROJECT, work, say))
    await asyncio.to_thread(served.asked.wait, 60)
    commands = [place for place in Path("/proc").glob("[0-9]*/cmdline") if str(root).encode() in read(place)]
    variables = [place.with_name("environ") for place in commands]
    assert commands and not [place for place in (*commands, *variables) if b"s3cr3t" in read(place)], (
        "uv has no use for it"
    )
    assert {place.stat().st_mode & 0o777 for place in variables} == {0o400}, "they have the password of the packages"
    served.going.set()
    assert await version_in(await building) == "1.0"
    assert served.named == {"Basic " + b64encode(b"lab:s3cr3t").decode()}
    for wrong in ("lab:s3cr3t@127.0.0.1:999999", "s3cr3t@127.0.0.1:999999", "lab:s3c@r3t@127.0.0.1:999999"):
        with pytest.raises(NoEnvironment, match="uv_index is no valid address") as raised:
            await alone(tmp_path / "others", f"http://{wrong}/simple", GIB).ready(ADA, PROJECT, work, say)
        assert "r3t" not in str(raised.value)
    program = tmp_path / "uv"
    program.write_text('#!/bin/sh\necho "error: http://build:s3cr3t@host/ does not answer" >&2\nexit 1\n')
    program.chmod(0o700)
    monkeypatch.setattr(module, "find_uv", lambda: str(program))
    with pytest.raises(NoEnvironment, match=r"removed.*does not answer"):
        await alone(tmp_path / "others", "", GIB)._own_python(">=3.11")


async def test_lock_takes_no_more_memory_than_one_program_may(
    tmp_path: Path, served: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_MEMORY", 1 << 27)
    work = served.project(tmp_path / "work")
    either = " or ".join(f"(extra == 'a{one:02d}' and extra == 'b{one:02d}')" for one in range(21))
    lock = (work / "uv.lock").read_text()
    hostile = lock.replace('name = "tinypkg" }', f'name = "tinypkg", marker = "{either}" }}', 1)
    assert len(hostile) - len(lock) < 1500
    made = alone(tmp_path / "environments", served.address, GIB)
    (work / "uv.lock").write_text(hostile)
    with pytest.raises(NoEnvironment, match="memory allocation"):
        await made.ready(ADA, PROJECT, work, say)
    (work / "uv.lock").write_text(lock)
    # One lock is read at a time.
    uv, program = find_uv(), tmp_path / "uv"
    program.write_text(f'#!/bin/sh\nmkdir "$0.runs" || touch "$0.twice"\n{uv} "$@"\nrmdir "$0.runs"\n')
    program.chmod(0o700)
    monkeypatch.setattr(module, "find_uv", lambda: str(program))
    source = (work / "pyproject.toml").read_text()
    assert len(await asyncio.gather(*(made._packages_of(False, source + "#" * one, lock) for one in range(3)))) == 3
    assert not (tmp_path / "uv.twice").exists()


def read(place: Path) -> bytes:
    with suppress(OSError):
        return place.read_bytes()
    return b""


async def test_package_with_another_hash_is_refused(tmp_path: Path, served: Index) -> None:
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    make_wheel(served.wheels, filler=64)
    (served.wheels / "index.html").write_text('<a href="tinypkg-1.0-py3-none-any.whl">tinypkg-1.0-py3-none-any.whl</a>')
    with pytest.raises(NoEnvironment, match=r"(?i)hash"):
        await alone(root, served.address, GIB).ready(ADA, PROJECT, work, say)
    assert not places(root)


async def test_stop_in_the_middle_leaves_no_half_environment(tmp_path: Path, served: Index) -> None:
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    served.going.clear()
    made = alone(root, served.address, GIB)
    building = asyncio.create_task(made.ready(ADA, PROJECT, work, say))
    await asyncio.to_thread(served.asked.wait, 60)
    (half,) = places(root)
    assert (half / "env").exists() and not (half / MARK).exists()
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert not places(root) and not made._used
    (half / "env").mkdir(parents=True)  # as a crash leaves it
    served.going.set()
    restarted = alone(root, served.address, GIB)
    whole = await restarted.ready(ADA, PROJECT, work, say)
    assert whole.parent != half and await version_in(whole) == "1.0"
    restarted.clear()
    assert places(root) == [whole.parent]


async def test_quota_bounds_a_build_and_removes_the_longest_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    with index(tmp_path / "index", filler=8 << 20) as served:
        work, root = served.project(tmp_path / "work"), tmp_path / "environments"
        served.going.clear()
        small = alone(root, served.address, 1 << 14)
        with pytest.raises(NoEnvironment, match="env_cache_gib"):
            await small.ready(ADA, PROJECT, work, say)
        assert not places(root)
        served.going.set()
        made = alone(root, served.address, 30 << 20)
        ada, bob = [await made.ready(user, PROJECT, work, say) for user in (ADA, BOB)]
        os.utime(ada.parent / MARK, (1, 1))
        made.release(bob)
        await made.ready(b"c" * 32, PROJECT, work, say)
        assert ada.exists(), "it is in use"
        assert not bob.exists(), "it is not, and half of the quota was taken"


@pytest.mark.parametrize("manner", ["many empty files", "many directories", "too deep to count"])
async def test_quota_counts_files_of_any_size_and_place(tmp_path: Path, served: Index, manner: str) -> None:
    files = {
        "many empty files": {f"tinypkg/{number}": b"" for number in range(2000)},
        "many directories": {f"tinypkg/{number}/x": b"" for number in range(1000)},
        "too deep to count": {f"tinypkg/{'x/' * (DEEPEST + 1)}x": b""},
    }
    served.offer(make_wheel(served.wheels, more=files[manner]))
    work = served.project(tmp_path / "work")
    most = GIB if manner == "too deep to count" else 4 << 20
    made = alone(tmp_path / "environments", served.address, most)
    with pytest.raises(NoEnvironment, match="env_cache_gib"):
        await made.ready(ADA, PROJECT, work, say)
    assert not places(tmp_path / "environments")


@pytest.mark.parametrize("project", [PROJECT, SCRIPT])
async def test_nothing_but_the_two_files_says_what_is_installed(
    tmp_path: Path, served: Index, monkeypatch: pytest.MonkeyPatch, project: UvProject
) -> None:
    """Not the directories above, of which /tmp is anybody's, nor the home and the variables of the daemon's user."""
    work, home, root = served.project(tmp_path / "work"), tmp_path / "home", tmp_path / "environments"
    elsewhere = "http://127.0.0.1:9/simple"
    for above in (tmp_path, root, root / "scratch"):
        above.mkdir(exist_ok=True)
        inside = "/".join(["environments", "scratch", "*", "project"][len(above.relative_to(tmp_path).parts) :])
        (above / "pyproject.toml").write_text(f'[tool.uv.workspace]\nmembers = ["{inside}"]\n')
        evil = (
            (work / "uv.lock").read_text().replace("tinypkg", "evil").replace('virtual = "."', f'virtual = "{inside}"')
        )
        (above / "uv.lock").write_text(evil)
        (above / "uv.toml").write_text(f'index-url = "{elsewhere}"\n')
        (above / ".python-version").write_text("3.1\n")
    (home / ".config" / "uv").mkdir(parents=True)
    for name, text in {
        ".netrc": "machine 127.0.0.1 login owner password of-the-owner\n",
        ".config/uv/uv.toml": f'index-url = "{elsewhere}"\n[pip]\nno-binary = [":all:"]\n',
        ".config/uv/.python-version": "3.1\n",
    }.items():
        (home / name).write_text(text)
        (home / name).chmod(0o600)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))
    monkeypatch.setenv("NETRC", str(home / ".netrc"))
    for name in (
        "UV_INDEX_URL",
        "UV_DEFAULT_INDEX",
        "UV_INDEX",
        "UV_FIND_LINKS",
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
    ):
        monkeypatch.setenv(name, elsewhere)
    made = alone(root, served.address, GIB)
    assert await version_in(await made.ready(ADA, project, work, say)) == "1.0"
    with pytest.raises(NoEnvironment, match="it answers 401"):
        closed = alone(tmp_path / "others", served.address.replace("simple", "closed"), GIB)
        await closed.ready(ADA, project, work, say)
    assert served.paths and not served.named, "the owner's passwords are for the owner"
    assert {path.name for path in home.rglob("*")} == {".netrc", ".config", "uv", "uv.toml", ".python-version"}
    assert not [path for path in (root / "scratch").iterdir() if path.is_dir()], "each is removed after its use"
    left = root / "scratch" / "left"
    left.mkdir()
    made.clear()
    assert not left.exists(), "and what a crash leaves, at the next start"


@pytest.mark.parametrize("name", ["uv.lock", "pyproject.toml"])
async def test_files_of_the_owner_are_not_read(tmp_path: Path, served: Index, name: str) -> None:
    work = served.project(tmp_path / "work")
    (tmp_path / "secret").write_text((work / name).read_text())
    (work / name).unlink()
    made = alone(tmp_path / "environments", served.address, GIB)
    with pytest.raises(EnvironmentRefused, match=f"has no {name}: `uv lock`"):
        await made.ready(ADA, PROJECT, work, say)
    (work / name).symlink_to(tmp_path / "secret")
    with pytest.raises(EnvironmentRefused, match="not inside the working directory"):
        await made.ready(ADA, PROJECT, work, say)


async def test_source_packages_and_addresses_are_refused(tmp_path: Path, served: Index) -> None:
    work = served.project(tmp_path / "work")
    made = alone(tmp_path / "environments", served.address, GIB)
    lock = (work / "uv.lock").read_text()
    wheel = "tinypkg-1.0-py3-none-any.whl"
    (work / "uv.lock").write_text(
        lock.replace(f'registry = "{served.address}"', f'url = "{served.address}/tinypkg/{wheel}"')
    )
    with pytest.raises((EnvironmentRefused, NoEnvironment)):
        await made.ready(ADA, PROJECT, work, say)
    assert not served.paths


async def test_source_package_is_not_built(tmp_path: Path, served: Index) -> None:
    """Its build would run its code beside the daemon."""
    work, canary = served.project(tmp_path / "work"), tmp_path / "ran"
    source = served.offer_source(f"open({str(canary)!r}, 'w')\n")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    lock = (work / "uv.lock").read_text()
    address = f"{served.address}/tinypkg/{source.name}"
    sdist = f'sdist = {{ url = "{address}", hash = "sha256:{digest}" }}'
    (work / "uv.lock").write_text(re.sub(r"wheels = \[.*?\n\]", sdist, lock, flags=re.S))
    made = alone(tmp_path / "environments", served.address, GIB)
    for inside in (None, as_image()):
        with pytest.raises(NoEnvironment, match="no usable wheels"):
            await made.ready(ADA, PROJECT, work, say, inside)
    assert not canary.exists() and not places(tmp_path / "environments")


def test_lock_names_packages_of_an_index_with_hashes_only() -> None:
    marked = "torch==2.5.0+cpu ; sys_platform == 'linux' and python_full_version < '3.13'"
    assert packages_of(f"# made by uv\n{marked} \\\n    {HASH} \\\n    {HASH}\n") == [f"{marked} {HASH} {HASH}"]
    assert packages_of(f"a[b,c]==1 {HASH}\n\n") == [f"a[b,c]==1 {HASH}"]
    for wrong in (
        "tinypkg==1.0",
        f"tinypkg {HASH}",
        f"tinypkg>=1 {HASH}",
        f"tinypkg @ http://x/y.whl {HASH}",
        f"-e . {HASH}",
        f"./here {HASH}",
        f"--index-url http://x {HASH}",
        f"a==1 ; --index-url=http://x {HASH}",
        f"a==1 {HASH} --index-url http://x",
        f"a==1 --hash=md5:{'0' * 32}",
    ):
        with pytest.raises(EnvironmentRefused, match="must come from an index"):
            packages_of(wrong)
    with pytest.raises(EnvironmentRefused, match="at most"):
        packages_of(f"a==1 {HASH}\n" * (MOST_PACKAGES + 1))
    assert python_of('version = 1\nrequires-python = ">=3.11, <4"\n') == ">=3.11, <4"
    for lock in ("version = 1\n", 'requires-python = "/tmp/python"\n'):
        with pytest.raises(EnvironmentRefused, match="requires-python"):
            python_of(lock)


def test_script_is_inside_the_working_directory() -> None:
    assert encode_spec(make_spec(uv=UvProject("a/b.py")))
    for script in ("/etc/x.py", "../x.py", "a//b.py", "x" * 1001):
        with pytest.raises(SpecError, match="plain path inside"):
            encode_spec(make_spec(uv=UvProject(script)))
    assert encode_spec(make_spec(uv=UvProject(), image="train"))
    with pytest.raises(SpecError, match="leave out --uv"):
        encode_spec(make_spec(uv=UvProject(), image="train", checkpointing=Checkpointing(mode="system")))


async def test_error_says_how_to_get_uv(tmp_path: Path, served: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    work = served.project(tmp_path / "work")
    monkeypatch.setattr(module, "find_uv", lambda: None)
    with pytest.raises(NoEnvironment, match="pip install uv"):
        await alone(tmp_path / "e", served.address, GIB).ready(ADA, PROJECT, work, say)
    assert find_uv() is not None


# --- for the Python of an image

HERE = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]


def as_image(version: str = "", platform: str = "x86_64-manylinux_2_28") -> ImagePython:
    """Return the Python of this machine as if an image had it."""
    return ImagePython(HERE, version or ".".join(map(str, sys.version_info[:3])), platform)


async def test_environment_for_an_image_is_laid_out_for_its_python(tmp_path: Path, served: Index) -> None:
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    made = alone(root, served.address, GIB)
    inside = await made.ready(ADA, PROJECT, work, say, as_image())
    assert await version_in(inside) == "1.0", "by the image's own program, which is at its path here too"
    assert (inside / "bin" / "tiny").read_text().startswith("#!/mesh/env/bin/python\n")
    assert str((inside / "bin" / "python3").readlink()) == HERE and not list(inside.glob("lib/*/site-packages/bin"))
    assert await made.ready(ADA, PROJECT, work, say, as_image()) == inside
    own = await made.ready(ADA, PROJECT, work, say)
    musl = await made.ready(ADA, PROJECT, work, say, as_image(platform="x86_64-unknown-linux-musl"))
    assert len({own, inside, musl}) == 3, "another Python or C library has an environment of its own"


async def test_environment_for_an_image_is_read_by_another_user(tmp_path: Path, served: Index) -> None:
    """A service has the umask 077, and the containers of root's daemon a user of their own."""
    work, made = served.project(tmp_path / "work"), alone(tmp_path / "environments", served.address, GIB)
    before = os.umask(0o077)
    try:
        inside = await made.ready(ADA, PROJECT, work, say, as_image())
    finally:
        os.umask(before)
    modes = {path: path.lstat().st_mode & 0o777 for path in (inside, *inside.rglob("*")) if not path.is_symlink()}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o755}
    assert all(mode & 0o044 == 0o044 for mode in modes.values()) and modes[inside / "bin" / "tiny"] == 0o755
    assert inside.parent.stat().st_mode & 0o077 == 0, "nobody else of this machine comes to it"


async def test_program_of_a_package_is_not_held_in_memory(tmp_path: Path) -> None:
    site = module._lay_out(tmp_path / "env", as_image())
    (site / "bin").mkdir()
    for name, head in (("script", b"#!/bin/sh\n"), ("binary", b"\x7fELF")):
        with (site / "bin" / name).open("wb") as file:
            file.write(head)
            file.truncate(64 << 20)
        (site / "bin" / name).chmod(0o755)
    tracemalloc.start()
    try:
        module._place_scripts(tmp_path / "env", site)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sizes = {(tmp_path / "env" / "bin" / name).stat().st_size for name in ("script", "binary")}
    assert sizes == {64 << 20} and peak < 4 << 20


async def test_program_of_a_package_replaces_no_python(tmp_path: Path) -> None:
    site = module._lay_out(tmp_path / "env", as_image())
    (site / "bin" / "package").mkdir(parents=True)
    for name, text in (("python", "#!/bin/sh\n"), ("tool", f"#!{sys.executable}\nrun"), ("binary", "\x7fELF")):
        (site / "bin" / name).write_text(text)
        (site / "bin" / name).chmod(0o755)
    (site / "bin" / "notes").write_text("no program")
    (site / "bin" / "link").symlink_to(tmp_path)
    module._place_scripts(tmp_path / "env", site)
    bin_ = tmp_path / "env" / "bin"
    assert str((bin_ / "python").readlink()) == HERE
    assert (bin_ / "tool").read_text() == "#!/mesh/env/bin/python\nrun" and (bin_ / "binary").read_text() == "\x7fELF"
    assert {path.name for path in (site / "bin").iterdir()} == {"package", "python", "notes", "link"}


async def test_wheels_of_another_system_are_not_taken(tmp_path: Path, served: Index) -> None:
    (wheel,) = served.wheels.glob("*.whl")
    served.offer(wheel.rename(wheel.with_name("tinypkg-1.0-py3-none-manylinux_2_34_x86_64.whl")))
    work = served.project(tmp_path / "work")
    made = alone(tmp_path / "environments", served.address, GIB)
    for platform in ("x86_64-manylinux_2_28", "x86_64-unknown-linux-musl"):
        with pytest.raises(NoEnvironment, match="cannot be made on this node"):
            await made.ready(ADA, PROJECT, work, say, as_image(platform=platform))
    assert (
        await version_in(await made.ready(ADA, PROJECT, work, say, as_image(platform="x86_64-manylinux_2_36"))) == "1.0"
    )


async def test_lock_for_another_python_than_the_image_has_is_refused(tmp_path: Path, served: Index) -> None:
    work, root = served.project(tmp_path / "work"), tmp_path / "environments"
    with pytest.raises(EnvironmentRefused, match=r"its lock is for Python >=3.11, and its image has 3.9.2"):
        await alone(root, served.address, GIB).ready(ADA, PROJECT, work, say, as_image("3.9.2"))
    assert not served.paths and not places(root)


async def test_image_is_asked_once_and_what_is_remembered_is_bounded(tmp_path: Path) -> None:
    made, asked = alone(tmp_path, "", GIB), list[str]()

    async def ask() -> ImagePython:
        asked.append("")
        return as_image()

    for number in (0, 0, *range(1, module.REMEMBERED + 1), 0):
        assert await made.python_of(f"sha256:{number}", ask) == as_image()
    assert len(asked) == module.REMEMBERED + 2
    for _ in range(2):
        await made.python_of(None, ask)
    assert len(asked) == module.REMEMBERED + 4, "an image without an id may be another one"
