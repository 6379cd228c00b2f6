"""Environments of conda packages: from the owner's channels, by hashes, with their own paths, and nothing outside of them."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from mesh.jobs import environments as module
from mesh.jobs.environments import MARK, Environments, NoEnvironment
from mesh.jobs.rattler_program import MOST_INFO_BYTES, BadPackage, Entry, check
from mesh.model.environment import EXPLICIT, MOST_PACKAGES, CondaList, EnvironmentRefused, UvProject, conda_packages_of
from mesh.model.spec import Checkpointing, SpecError, encode_spec
from tests.conda_channel import HERE, MINOR, PLACEHOLDER, Channel, File, HardLink, channel
from tests.consensus.worlds import make_spec
from tests.wheels import alone

ADA, BOB, GIB = b"a" * 32, b"b" * 32, 1 << 30
LOCK, HASH = CondaList("conda.lock"), "#sha256:" + "0" * 64
GOOD = f"http://h/c/noarch/a-1.0-0.conda{HASH}"


def say(text: str) -> None:
    assert " by conda" in text


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Channel]:
    with channel(tmp_path / "channel") as made:
        yield made


def project(place: Path, *lines: str) -> Path:
    place.mkdir(exist_ok=True)
    (place / LOCK.lock).write_text("\n".join(["# made by hand", EXPLICIT, *lines, ""]))
    return place


def environments(tmp_path: Path, *channels: str) -> Environments:
    return alone(tmp_path / "environments", "", GIB, channels)


def places(root: Path) -> list[Path]:
    return [place for place in root.glob("*/*-*") if place.is_dir()]


async def printed(*command: str | Path) -> str:
    ran = await asyncio.create_subprocess_exec(*map(str, command), stdout=asyncio.subprocess.PIPE)
    return (await ran.communicate())[0].decode().strip()


async def test_environment_is_built_once_and_used_again(tmp_path: Path, served: Channel) -> None:
    work, made = project(tmp_path / "work", *served.lines), environments(tmp_path, served.address + "/")
    first, again = await asyncio.gather(*(made.ready(ADA, LOCK, work, say) for _ in range(2)))
    assert first == again and len(served.paths) == 3
    assert await printed(first / "bin" / "tiny") == "1.0", "by its own python, and that of its packages"
    assert str(first) in await printed(first / "bin" / "python", "-c", "import tinypkg; print(tinypkg.__file__)")
    native = (first / "lib" / "native.so.1").read_bytes()
    assert (
        native.startswith(b"\x7fELF" + str(first).encode() + b"/share/native\0") and PLACEHOLDER.encode() not in native
    )
    assert not (first / "ran").exists(), "scripts of packages are not run"
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == ["env"]
    served.close()
    restarted = environments(tmp_path)
    restarted.clear()
    assert await restarted.ready(ADA, LOCK, work, say) == first, "it is here, whatever the owner allows now"
    (first.parent / MARK).unlink()
    cached = environments(tmp_path, served.address)
    assert await printed(await cached.ready(ADA, LOCK, work, say) / "bin" / "tiny") == "1.0", (
        "by the archives that are here"
    )


async def test_settings_of_the_owner_change_nothing(
    tmp_path: Path, served: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, home, root = project(tmp_path / "work", *served.lines), tmp_path / "home", tmp_path / "environments"
    elsewhere = "channels: [http://127.0.0.1:9]\nproxy_servers: {http: http://127.0.0.1:9}\noffline: true\n"
    home.mkdir()
    root.mkdir()
    for place in (tmp_path, root, home):
        (place / ".condarc").write_text(elsewhere)
        (place / ".mambarc").write_text(elsewhere)
    for name in (".netrc", ".rattler_auth.json"):
        (home / name).write_text("machine 127.0.0.1 login owner password of-the-owner\n")
        (home / name).chmod(0o600)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(home / ".netrc"))
    monkeypatch.setenv("RATTLER_AUTH_FILE", str(home / ".rattler_auth.json"))
    for name in ("CONDARC", "MAMBARC"):
        monkeypatch.setenv(name, str(home / ".condarc"))
    for name in ("CONDA_CHANNELS", "CONDA_CHANNEL_ALIAS", "CONDA_PKGS_DIRS", "RATTLER_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    before = {*home.iterdir(), *tmp_path.iterdir()}
    first = await environments(tmp_path, served.address).ready(ADA, LOCK, work, say)
    assert await printed(first / "bin" / "tiny") == "1.0"
    assert {*home.iterdir(), *tmp_path.iterdir()} == before and not list((root / "scratch").iterdir())


async def test_environment_for_a_container_has_the_path_that_it_sees(tmp_path: Path, served: Channel) -> None:
    work, made = project(tmp_path / "work", *served.lines), environments(tmp_path, served.address)
    before = os.umask(0o077)
    try:
        inside = await made.ready(ADA, LOCK, work, say, contained=True)
    finally:
        os.umask(before)
    assert (inside / "bin" / "tiny").read_text().startswith(f"#!/mesh/env/bin/python{MINOR}\n")
    assert b"/mesh/env/share/native\0" in (inside / "lib" / "native.so").read_bytes()
    modes = [path.lstat().st_mode for path in (inside, *inside.rglob("*")) if not path.is_symlink()]
    assert all(mode & 0o044 == 0o044 for mode in modes), "another user reads it"
    assert await made.ready(ADA, LOCK, work, say) != inside, "a plain process has another"


async def test_users_share_nothing(tmp_path: Path, served: Channel) -> None:
    work, made = project(tmp_path / "work", *served.lines), environments(tmp_path, served.address)
    ada, bob = [await made.ready(user, LOCK, work, say) for user in (ADA, BOB)]
    files = [{path.lstat().st_ino for path in place.parents[1].rglob("*")} for place in (ada, bob)]
    assert ada.parents[1] != bob.parents[1] and not files[0] & files[1], "not even by links"


async def test_no_channel_is_asked_unless_the_owner_allows_it(tmp_path: Path, served: Channel) -> None:
    work = project(tmp_path / "work", *served.lines)
    for channels in ((), (served.address + "/other",), ("http://127.0.0.1",)):
        with pytest.raises(NoEnvironment, match=r"and its owner allows .* here \(conda_channels in config.toml\)"):
            await environments(tmp_path, *channels).ready(ADA, LOCK, work, say)
    assert not served.paths and not places(tmp_path / "environments")


async def test_package_with_another_hash_is_refused(tmp_path: Path, served: Channel) -> None:
    work, made = project(tmp_path / "work", *served.lines), environments(tmp_path, served.address)
    lines = (work / LOCK.lock).read_text()
    served.offer("native", {"lib/other": b"other"}, subdir=HERE, suffix=".tar.bz2")
    with pytest.raises(NoEnvironment, match=r"native-1.0-0.tar.bz2: http.*: what it sends is not what its hash says"):
        await made.ready(ADA, LOCK, work, say)
    assert not places(tmp_path / "environments")
    # Nor is an archive that was changed here.
    project(work, *served.lines)
    await made.ready(ADA, LOCK, work, say)
    (digest,) = (line.rpartition(":")[2] for line in served.lines if "/native-" in line)
    kept = tmp_path / "environments" / "packages" / "blobs" / digest
    kept.write_bytes(b"changed")
    served.paths.clear()
    await made.ready(BOB, LOCK, work, say)
    await made.ready(ADA, LOCK, work, say, contained=True)
    assert lines != (work / LOCK.lock).read_text() and kept.read_bytes() != b"changed"


async def test_stop_in_the_middle_leaves_no_half_environment(tmp_path: Path, served: Channel) -> None:
    work, made = project(tmp_path / "work", *served.lines), environments(tmp_path, served.address)
    served.going.clear()
    building = asyncio.create_task(made.ready(ADA, LOCK, work, say))
    await asyncio.to_thread(served.asked.wait, 60)
    assert len(places(tmp_path / "environments")) == 1
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert not places(tmp_path / "environments") and not made._used


async def test_quota_bounds_a_build(tmp_path: Path, served: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    line = served.offer("large", {"share/large": bytes(256 << 20)})  # its archive is small
    work = project(tmp_path / "work", line)
    small = alone(tmp_path / "environments", "", 1 << 20, [served.address])
    with pytest.raises(NoEnvironment, match="env_cache_gib"):
        await small.ready(ADA, LOCK, work, say)
    assert not places(tmp_path / "environments")


async def test_node_without_the_tool_or_of_another_kind_says_so(
    tmp_path: Path, served: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = environments(tmp_path, served.address)
    other = {"linux-64": "linux-aarch64", "linux-aarch64": "linux-64"}[HERE]
    work = project(tmp_path / "work", GOOD.replace("noarch", other))
    with pytest.raises(NoEnvironment, match=f"its lock is for {other}, and this node is {HERE}"):
        await made.ready(ADA, LOCK, work, say)
    monkeypatch.setattr(module, "has_conda", lambda: False)
    with pytest.raises(NoEnvironment, match="pip install py-rattler"):
        await made.ready(ADA, LOCK, work, say)


# --- hostile locks and packages


@pytest.mark.parametrize(
    "line",
    [
        GOOD.removesuffix(HASH),
        GOOD.replace(HASH, "#" + "0" * 32),
        GOOD.replace("http:", "file:"),
        GOOD.replace("h/", "user@h/"),
        GOOD.replace("/a-", "/../a-").replace("noarch", "noarch/x"),
        GOOD.replace("a-1.0", "..-1.0"),
        GOOD.replace("a-1.0", "a%2f..-1.0"),
        GOOD.replace("1.0", ".."),
        GOOD.replace("-0.", "-...")[:-1],
        GOOD.replace(".conda", ".zip"),
        GOOD.replace("a-", "a" * 300 + "-"),
        GOOD + " --more",
        "-r other",
    ],
)
def test_lock_names_packages_of_channels_with_hashes_only(line: str) -> None:
    with pytest.raises(EnvironmentRefused, match="must be an address of a channel with its SHA-256"):
        conda_packages_of(f"{EXPLICIT}\n{line}\n")


def test_lock_is_a_list_of_different_packages_with_a_bound() -> None:
    (package,) = conda_packages_of(f"# platform: linux-64\n{EXPLICIT}\n\n{GOOD.replace('sha256:', '')}\n")
    assert str(package) == GOOD and package.channel == "http://h/c" and package.name == "a"
    with pytest.raises(EnvironmentRefused, match="it has no line @EXPLICIT"):
        conda_packages_of(GOOD)
    with pytest.raises(EnvironmentRefused, match="its lock has no packages"):
        conda_packages_of(f"{EXPLICIT}\n# none\n")
    with pytest.raises(EnvironmentRefused, match="its lock has a twice"):
        conda_packages_of(f"{EXPLICIT}\n{GOOD}\n{GOOD}")
    with pytest.raises(EnvironmentRefused, match="at most"):
        conda_packages_of(f"{EXPLICIT}\n" + "\n".join(GOOD.replace("a-", f"a{n}-") for n in range(MOST_PACKAGES + 1)))


def test_job_has_one_environment_inside_its_directory() -> None:
    assert encode_spec(make_spec(conda=LOCK))
    for lock in ("/etc/x.lock", "../x.lock", "a//b", "", "x" * 1001):
        with pytest.raises(SpecError, match="plain path inside"):
            encode_spec(make_spec(conda=CondaList(lock)))
    with pytest.raises(SpecError, match="one environment"):
        encode_spec(make_spec(conda=LOCK, uv=UvProject()))
    with pytest.raises(SpecError, match="leave out --conda"):
        encode_spec(make_spec(conda=LOCK, image="train", checkpointing=Checkpointing(mode="system")))


FILE = {"path_type": "hardlink", "prefix_placeholder": PLACEHOLDER, "file_mode": "text", "size_in_bytes": 0}
OUT = "has a path that leads out of the environment"
LINK = "has a link that leads out of the environment"
ABOVE = "hostile-1.0-0.*: invalid package-relative archive path"
NOT_OWN = "lists a path that is not its own"
# A file that is listed as such, and is not: rattler reads what the link leads to, to write the prefix into a copy.
READ_THROUGH = {"instead": {"paths.json": json.dumps({"paths": [{**FILE, "_path": "x"}], "paths_version": 1}).encode()}}
HOSTILE: list[tuple[dict[str, File], dict[str, Any], str]] = [
    ({"../outside/mine": b"x"}, {}, ABOVE),
    ({"../outside/mine": b"x", "share/x": b"x"}, {"listed": ["share/x"]}, ABOVE),
    ({"info/../../../outside/mine": b"x", "share/x": b"x"}, {"listed": ["share/x"]}, ABOVE),
    ({"{outside}/mine": b"x", "share/x": b"x"}, {"listed": ["share/x"]}, ABOVE),
    ({"share/x": b"x"}, {"listed": ["share/x", "../../../outside/mine"]}, NOT_OWN),
    ({"share/x": b"x"}, {"listed": ["share/x", "{outside}/mine"]}, NOT_OWN),
    ({"share/x": "{outside}"}, {}, LINK),
    ({"share/x": "../../outside"}, {}, LINK),
    ({"share/x": "here/../../../outside"}, {}, LINK),
    ({"x": ".."}, {}, LINK),
    ({"share/x": "{outside}", "share/x/mine": b"x"}, {}, "failed to unpack `share/x/mine`"),
    ({"share/x": "{outside}"}, {"listed": ["share/x/mine"]}, LINK),
    ({"u": "{outside}", "x": "u/mine"}, READ_THROUGH, LINK),
    ({"u": "../../../outside", "x": "u/mine"}, READ_THROUGH, LINK),
    ({"site-packages/x": "../../../../outside/mine"}, {"noarch": "python"}, LINK),
    ({"site-packages": "."}, {"noarch": "python"}, "beyond a link of hostile-1.0-0"),
    ({"share/x": HardLink("{outside}/mine")}, {}, "failed to unpack `share/x`"),
    ({"share/x": HardLink("../outside/mine")}, {}, "failed to unpack `share/x`"),
    ({"share/x": b"x"}, {"listed": ["share/x", "share/y"]}, NOT_OWN),
    ({"lib/z": b"z", "share/x": "../lib", "share/x/y": b"y"}, {}, NOT_OWN),
    ({"lib/native.so.1/x": b"x"}, {}, "beyond a link of native-1.0-0"),
    ({"bin/x": b"x"}, {"instead": {"index.json": "{outside}/mine"}}, "describes itself by a link"),
    ({"bin/x": b"x"}, {"instead": {"paths.json": b" " * (MOST_INFO_BYTES + 1)}}, "more than 64 MiB"),
    ({"bin/x": b"x"}, {"called": "native"}, "says that it is 'native-1.0-0'"),
    ({"bin/x": b"x"}, {"called": "../../outside"}, "not a valid package name"),
    (
        {"bin/x": b"x"},
        {"noarch": "python", "entry_points": ["../../../outside/mine = a:b"]},
        "must not contain path separators",
    ),
]


@pytest.mark.parametrize("suffix", [".conda", ".tar.bz2"])
@pytest.mark.parametrize(("files", "options", "reason"), HOSTILE)
async def test_package_that_would_lead_out_is_refused(
    tmp_path: Path,
    served: Channel,
    files: dict[str, File],
    options: dict[str, Any],
    reason: str,
    suffix: str,
) -> None:
    outside = tmp_path / "environments" / "outside"
    outside.mkdir(parents=True)
    (outside / "mine").write_text("mine")

    def placed(value: Any) -> Any:
        if isinstance(value, HardLink):
            return HardLink(placed(value.target))
        return value.format(outside=outside) if isinstance(value, str) else value

    files = {placed(path): placed(content) for path, content in files.items()}
    options = {**options, "listed": list(map(placed, options.get("listed", files)))}
    line = served.offer("hostile", files, suffix=suffix, **options)
    work, made = project(tmp_path / "work", *served.lines, line), environments(tmp_path, served.address)
    with pytest.raises(NoEnvironment, match=reason):
        await made.ready(ADA, LOCK, work, say)
    assert [path.name for path in outside.iterdir()] == ["mine"] and (outside / "mine").read_text() == "mine"
    assert not places(tmp_path / "environments") and len(list(tmp_path.iterdir())) == 3


async def test_python_with_modules_elsewhere_is_refused(tmp_path: Path, served: Channel) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    python = served.offer("python", {"bin/python": b"#!/bin/sh\n"}, subdir=HERE, python_site_packages_path=elsewhere)
    lines = [line for line in served.lines if "/python-" not in line]
    work = project(tmp_path / "work", python, *lines)
    with pytest.raises(NoEnvironment, match=f"python {OUT}"):
        await environments(tmp_path, served.address).ready(ADA, LOCK, work, say)
    assert not (tmp_path / "elsewhere").exists()


def test_links_stay_inside_whichever_others_they_pass() -> None:
    def entry(path: str, target: str | None = None) -> Entry:
        return Entry("p", PurePosixPath(path), target)

    check([entry("lib/a.so"), entry("lib/b.so", "a.so"), entry("a/b/c", "../../lib"), entry("bin", "./lib")])
    for target in ("", "a/..", "../..", "/", "../../x", "./../.."):
        if target:
            with pytest.raises(BadPackage, match="link"):
                check([entry("a/b", target)])
    with pytest.raises(BadPackage, match="beyond a link of p"):
        check([entry("a", "."), entry("a/b/c", "../..")])
    for path in ("", ".", "/a", "a/../b"):
        with pytest.raises(BadPackage, match="leads out"):
            check([entry(path)])
