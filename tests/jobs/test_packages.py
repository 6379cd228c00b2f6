"""Packages of environments between nodes on real connections: some lie, break off or stand still, and the lock may be hostile."""

import asyncio
import os
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from membership.events import MemberView
from mesh.images import blobs as blobs_module
from mesh.images.blobs import PIECE_BYTES, FetchFailed
from mesh.images.messages import decode_pieces
from mesh.jobs.environments import Environments, NoEnvironment
from mesh.jobs.package_origins import PackageOrigins
from mesh.jobs.packages import (
    AT_ONCE,
    CONNECTIONS,
    HOST,
    MAX_HASHES,
    MAX_LENGTHS_BYTES,
    MAX_QUESTION_BYTES,
    MOST_ASKED,
    ROUTE,
    Build,
    Neighbours,
    Packages,
    decode_lengths,
    decode_question,
    encode,
    nearest,
)
from mesh.model.environment import EXPLICIT, CondaList, PackageFile, UvProject, conda_packages_of, files_of
from mesh.rpc import peer_credentials
from mesh.rpc.client import PeerError
from tests.conda_channel import channel
from tests.images.holders import Holder, Holders, hurry
from tests.rpc.nodes import node_named
from tests.wheels import Index, index, make_wheel

MOST = 1 << 30
WHEEL = os.urandom(2 * PIECE_BYTES + 1000)
FILE = PackageFile("tinypkg-1.0-py3-none-any.whl", sha256(WHEEL).digest(), "tinypkg")
NOBODY = Neighbours(b"m" * 32, cast(Any, None), lambda: [], lambda node, what: None)
A, B = (node_named(letter).node_id for letter in "ab")


class PackageHolder(Holder):
    """A node that gives packages, in its `manner`."""

    def __init__(self, packages: Packages, manner: str = "") -> None:
        super().__init__(manner, {ROUTE: self._lengths, f"{ROUTE}/{{digest}}": self._pieces})
        self.packages = packages

    async def _lengths(self, request: web.Request) -> web.Response:
        hashes = decode_question(await request.read())
        lengths = self.packages.lengths(hashes)
        if self.manner in {"says it has all", "sends without end"}:
            lengths = [PIECE_BYTES] * len(hashes)
        if self.manner == "says it has 100 GB":
            lengths = [100 << 30] * len(hashes)
        if self.manner == "says it is large":
            lengths = [MOST if length else 0 for length in lengths]
        if self.manner == "gives another length":
            lengths = [length + 1 for length in lengths]
        if self.manner == "answers for more":
            lengths += [1] * 5
        if self.manner == "answers nonsense":
            return web.Response(body=b"\xc1")
        if self.manner == "answers without end":
            return web.Response(body=bytes(MAX_LENGTHS_BYTES + 1))
        return web.Response(body=encode(lengths))

    async def _pieces(self, request: web.Request) -> web.StreamResponse:
        numbers = decode_pieces(await request.read())
        pieces = self.packages.given(bytes.fromhex(request.match_info["digest"]), numbers)
        if pieces is None and self.manner != "sends without end":
            raise web.HTTPNotFound
        response = web.StreamResponse()
        await response.prepare(request)
        while self.manner == "sends without end":
            await response.write(bytes(1 << 20))
            await asyncio.sleep(0)  # a write that need not wait lets nobody else run
        for piece in pieces or ():
            self.given += 1
            if self.manner == "breaks off" and len(piece) < PIECE_BYTES:
                break
            await response.write(piece[:-1] + bytes([piece[-1] ^ 1]) if self.manner == "lies" else piece)
            if self.manner == "stands still":
                await asyncio.Event().wait()
        await response.write_eof()
        return response


class World(Holders[PackageHolder]):
    """A node without packages, whose neighbours have them."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    async def neighbours(self, **manners: str) -> Neighbours:
        holders = {}
        for name, manner in manners.items():
            packages = Packages(self.directory / name, MOST, PackageOrigins("", ()), True, NOBODY)
            if manner != "says it has all":
                packages.store.keep(WHEEL)
            holders[name] = PackageHolder(packages, manner)
        peers, nodes = await self.serve(**holders)
        return Neighbours(b"m" * 32, peers, lambda: nodes, self.blame)

    async def packages(self, index: str = "", most: int = MOST, **manners: str) -> Packages:
        origins = PackageOrigins(index, ())
        return Packages(self.directory / "me", most, origins, True, await self.neighbours(**manners))


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    hurry(monkeypatch, 1.0)
    found = World(tmp_path)
    yield found
    await found.close()


async def got(packages: Packages, file: PackageFile = FILE) -> bytes:
    async with packages.serve([file]) as build:
        return (await build._path(file)).read_bytes()


async def test_package_comes_from_nodes_that_have_it_and_stays(world: World) -> None:
    packages = await world.packages(a="", b="")
    assert await got(packages) == WHEEL and all(holder.given for holder in world.holders.values())
    await world.close()
    assert await got(packages) == WHEEL and packages.lengths([FILE.sha256, bytes(32)]) == [len(WHEEL), 0]


@pytest.mark.parametrize(
    "manner",
    [
        "says it has all",
        "lies",
        "gives another length",
        "says it has 100 GB",
        "answers for more",
        "answers nonsense",
        "answers without end",
        "sends without end",
        "stands still",
    ],
)
async def test_hostile_node_keeps_no_package_away(world: World, manner: str) -> None:
    packages = await world.packages(a=manner, b="")
    assert await got(packages) == WHEEL
    assert B not in world.blamed and not list((world.directory / "me" / "blobs").glob("*.part"))


async def test_node_that_says_a_package_is_large_is_asked_last(world: World) -> None:
    """It could fill the quota with its bytes, and so end the build."""
    packages = await world.packages(**dict.fromkeys("abcdef", "says it is large"), z="")
    assert await got(packages) == WHEEL
    assert not sum(holder.given for node, holder in world.holders.items() if node != node_named("z").node_id)


async def test_nothing_of_a_package_that_did_not_come_stays(world: World) -> None:
    """A lock may name packages that nodes never give whole, each as long as the quota."""
    packages = await world.packages(a="breaks off")
    with pytest.raises(FetchFailed):
        await got(packages)
    assert world.holders[A].given and not list((world.directory / "me" / "blobs").iterdir())


async def test_nodes_that_say_they_have_it_keep_no_other_from_being_asked(world: World) -> None:
    liars = dict.fromkeys("abcdefgh"[:AT_ONCE], "says it has all")
    packages = await world.packages(**liars, z="")
    assert await got(packages) == WHEEL


async def test_node_that_lies_is_blamed_and_the_index_asked(world: World, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / FILE.name).write_bytes(WHEEL)
    packages = await world.packages(str(tmp_path / "wheels"), a="lies")
    assert await got(packages) == WHEEL
    alone = await world.packages(b="lies")
    alone.store.drop([FILE.sha256])
    with pytest.raises(FetchFailed, match="nobody has it now, but for those who gave it wrongly"):
        await got(alone)
    assert "not what its hash says" in world.blamed[B]


async def test_directory_of_wheels_gives_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
    packages = Packages(tmp_path / "me", MOST, PackageOrigins(str(tmp_path), ()), True, NOBODY)
    with pytest.raises(FetchFailed, match="the directory of its owner: it does not have it"):
        await got(packages)
    (tmp_path / FILE.name).write_bytes(WHEEL[::-1])
    with pytest.raises(FetchFailed, match="the directory of its owner: it has this name with another hash"):
        await got(packages)
    assert not list((tmp_path / "me" / "blobs").iterdir())
    (tmp_path / FILE.name).write_bytes(WHEEL)
    assert await got(packages) == WHEEL


async def test_package_beyond_the_quota_is_not_fetched(world: World, tmp_path: Path) -> None:
    packages = await world.packages(most=len(WHEEL) - 1, a="")
    with pytest.raises(FetchFailed, match="nobody has it now"):
        await got(packages)
    assert not world.holders[A].given
    (tmp_path / FILE.name).write_bytes(WHEEL)
    packages = await world.packages(str(tmp_path), most=len(WHEEL) - 1)
    with pytest.raises(FetchFailed, match=f"over {len(WHEEL) - 1} bytes"):
        await got(packages)
    assert not list((world.directory / "me" / "blobs").iterdir())


class Peers:
    """Fake nodes of which one has a package; they answer at once and all together."""

    def __init__(self, holder: bytes) -> None:
        self.holder, self.asked, self.questions = holder, list[bytes](), list[list[bytes]]()

    async def call(self, node: bytes, method: str, path: str, body: bytes, timeout_s: float, most: int) -> bytes:
        assert (method, path, most) == ("POST", ROUTE, MAX_LENGTHS_BYTES) and len(body) <= MAX_QUESTION_BYTES
        self.asked.append(node)
        self.questions.append(decode_question(body))
        if node != self.holder:
            raise PeerError("an older version", 404)
        return encode([1] * len(self.questions[-1]))


def build_of(tmp_path: Path, peers: Peers, files: Sequence[PackageFile], nodes: Sequence[bytes]) -> Build:
    neighbours = Neighbours(b"m" * 32, cast(Any, peers), lambda: nodes, lambda node, what: None)
    return Build(Packages(tmp_path, MOST, PackageOrigins("", ()), True, neighbours), files, lambda came: None)


async def test_nodes_are_asked_a_few_at_a_time_until_one_has_the_package(tmp_path: Path) -> None:
    nodes = [bytes([number]) * 32 for number in range(2 * MOST_ASKED)]
    for place, asked in ((3, AT_ONCE), (AT_ONCE + 1, 2 * AT_ONCE), (MOST_ASKED + 1, MOST_ASKED)):
        peers = Peers(nodes[place])
        build = build_of(tmp_path, peers, [FILE], nodes)
        more = await build._ask(FILE.sha256, False)
        assert peers.asked == nodes[:asked] and more == (asked < MOST_ASKED)
        await build._ask(FILE.sha256, False)
        found = nodes[place] in nodes[:asked]
        assert len(peers.asked) == asked and (build.origin(FILE.sha256).holders == {nodes[place]: 1}) == found


async def test_lock_with_many_files_is_asked_about_in_parts(tmp_path: Path) -> None:
    files = [
        PackageFile(f"a-{number}-py3-none-any.whl", number.to_bytes(32), "a") for number in range(2 * MAX_HASHES + 5)
    ]
    other = PackageFile("a-1-cp311-cp311-win_amd64.whl", b"w" * 32, "a")
    peers = Peers(A)
    build = build_of(tmp_path, peers, [*files, other], [A])
    for file in (files[0], files[-1], files[1]):
        await build._ask(file.sha256, False)
        assert build.origin(file.sha256).holders == {A: 1}
    assert list(map(len, peers.questions)) == [MAX_HASHES, 5], "those of which no file is wanted are not asked about"
    assert not await build._ask(other.sha256, False) and not build.origin(other.sha256).holders
    with pytest.raises(FetchFailed, match="its build is over"):
        build.origin(b"x" * 32)


async def test_longest_unused_packages_go_before_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
    made = Environments(tmp_path, "", 4 * PIECE_BYTES, (), NOBODY)
    kept = [made.packages.store.keep(os.urandom(PIECE_BYTES // 2)) for _ in range(4)]
    for age, digest in enumerate(kept):
        os.utime(made.packages.store.path(digest), (1000 - age, 1000 - age))
    await made._make_room()
    assert made.packages.lengths(kept) == [PIECE_BYTES // 2, PIECE_BYTES // 2, 0, 0], "a quarter of env_cache_gib stays"


async def test_packages_of_one_build_do_not_end_the_next(served: Index, world: World) -> None:
    """Those of a build that goes beyond the quota are no reason to end that of another user."""
    work = served.project(world.directory / "work")
    made = Environments(world.directory / "environments", served.address, 8 * PIECE_BYTES, (), NOBODY)
    for _ in range(9):
        made.packages.store.keep(os.urandom(PIECE_BYTES))
    assert (await made.ready(b"b" * 32, UvProject(), work, lambda text: None) / "bin" / "tiny").exists()


async def test_build_leaves_space_on_the_disk(served: Index, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    work = served.project(world.directory / "work")
    made = Environments(world.directory / "environments", served.address, MOST, (), NOBODY)
    (wheel,) = served.wheels.glob("*.whl")
    made.packages.store.keep(wheel.read_bytes())
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 1 << 60)
    with pytest.raises(NoEnvironment, match=r"or all but .* of the disk"):
        await made.ready(b"b" * 32, UvProject(), work, lambda text: None)


async def test_only_packages_are_given_and_only_where_they_may_be(tmp_path: Path) -> None:
    """A hash of an image's blob, or of a file beside the packages, names nothing."""
    packages = Packages(tmp_path / "packages", MOST, PackageOrigins("", ()), True, NOBODY)
    image = blobs_module.BlobStore(tmp_path / "images", MOST).keep(b"layer")
    package = packages.store.keep(WHEEL)
    assert packages.lengths([image, package]) == [0, len(WHEEL)] and packages.given(image, [0]) is None
    assert b"".join(packages.given(package, [0, 1, 2]) or ()) == WHEEL
    packages.store.path(package).write_bytes(WHEEL[::-1] + b"x")
    fresh = Packages(tmp_path / "packages", MOST, PackageOrigins("", ()), True, NOBODY)
    assert fresh.given(package, [0]) is None, "it is damaged"
    closed = Environments(tmp_path / "closed", "https://lab:password@host/simple", MOST, (), NOBODY).packages
    kept = closed.store.keep(WHEEL)
    assert closed.lengths([kept]) == [0] and closed.given(kept, [0]) is None, "its index wants a password"


async def test_port_of_a_build_is_for_the_build_alone(world: World) -> None:
    packages = await world.packages(a="")
    page, file = f"http://{HOST}/simple/tinypkg/", f"http://{HOST}/{FILE.sha256.hex()}/{FILE.name}"
    async with packages.serve([FILE]) as build, aiohttp.ClientSession() as session:
        proxy = build.variables["HTTP_PROXY"]
        assert proxy == build.variables["https_proxy"] and build.variables["no_proxy"] == ""
        bare = "http://" + proxy.partition("@")[2]
        wrong = {"Proxy-Authorization": "Basic " + b64encode(b"build:wrong").decode()}
        for url in (page, file, f"{bare}/simple/tinypkg/"):
            for headers in ({}, wrong, {"Proxy-Authorization": "\u00e9"}):
                answer = await session.get(url, proxy=None if url.startswith(bare) else bare, headers=headers)
                assert answer.status == 403 and HOST not in await answer.text()
        assert not world.holders[A].given
        names = [f"http://{HOST}/{text}/{FILE.name}" for text in ("ab" * 32, "zz" * 32, "..", "ab")]
        for url in (*names, f"http://{HOST}/simple/", f"http://{HOST}/", "http://localhost/"):
            assert (await session.get(url, proxy=proxy)).status == 404
        assert (await (await session.get(page, proxy=proxy)).text()).count("<a ") == 1
        assert "<a " not in await (await session.get(page.replace("tiny", "other"), proxy=proxy)).text()
        assert await (await session.get(file, proxy=proxy)).read() == WHEEL
        with pytest.raises(aiohttp.ClientError):  # TLS to another host does not go through it
            await session.get("https://127.0.0.1:9/", proxy=proxy)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(page, proxy=proxy)
    with pytest.raises(FetchFailed, match="its build is over"):
        packages._origin(FILE.sha256, "")


async def test_other_users_take_no_connection_of_a_build(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = await world.packages(a="")
    async with packages.serve([FILE]) as build, aiohttp.ClientSession() as session:
        page, proxy = f"http://{HOST}/simple/tinypkg/", build.variables["HTTP_PROXY"]
        with monkeypatch.context() as others:
            others.setattr(peer_credentials, "is_ours", lambda uid: False)
            for _ in range(2 * CONNECTIONS):
                with pytest.raises(aiohttp.ClientConnectionError):
                    await session.get(page, proxy=proxy)
        assert (await session.get(page, proxy=proxy)).status == 200


@pytest.fixture
def served(tmp_path: Path) -> Any:
    with index(tmp_path / "index") as made:
        yield made


async def test_node_without_an_index_builds_what_its_neighbour_has(world: World, served: Index) -> None:
    work = served.project(world.directory / "work")
    (wheel,) = served.wheels.glob("*.whl")
    neighbours = await world.neighbours(a="")
    world.holders[A].packages.store.keep(wheel.read_bytes())
    made = Environments(world.directory / "environments", "", MOST, (), neighbours)
    built = await made.ready(b"a" * 32, UvProject(), work, lambda text: None)
    assert (built / "bin" / "tiny").exists() and not served.paths and world.holders[A].given == 1
    # Another user's environment takes no package from outside, and no file of the first.
    again = await made.ready(b"b" * 32, UvProject(), work, lambda text: None)
    assert again != built and not served.paths and world.holders[A].given == 1


async def test_node_without_a_channel_builds_what_its_neighbour_has(world: World) -> None:
    with channel(world.directory / "channel") as conda:
        work, lock = world.directory / "work", CondaList("conda.lock")
        work.mkdir()
        (work / lock.lock).write_text("\n".join([EXPLICIT, *conda.lines]))
        neighbours = await world.neighbours(a="")
        for archive in conda_packages_of((work / lock.lock).read_text()):
            path = conda.root / archive.subdir / archive.file
            world.holders[A].packages.store.keep(path.read_bytes())
        made = Environments(world.directory / "environments", "", MOST, (), neighbours)
        built = await made.ready(b"a" * 32, lock, work, lambda text: None)
        assert (built / "bin" / "tiny").exists() and not conda.paths and world.holders[A].given == 3


async def test_conda_package_that_changes_after_it_was_verified_is_not_installed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with channel(world.directory / "channel") as conda:
        work, lock = world.directory / "work", CondaList("conda.lock")
        work.mkdir()
        (work / lock.lock).write_text("\n".join([EXPLICIT, *conda.lines]))
        (evil,) = conda.root.rglob("native-*")
        made = Environments(world.directory / "environments", "", MOST, [conda.address], NOBODY)
        monkeypatch.setattr(made.packages.store, "use", lambda digest: evil)
        with pytest.raises(NoEnvironment, match="has another hash than in the lock"):
            await made.ready(b"a" * 32, lock, work, lambda text: None)


async def test_package_that_changes_after_it_was_verified_is_not_installed(
    world: World, served: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain process of the same user may change the file in between."""
    work, other = served.project(world.directory / "work"), world.directory / "other"
    other.mkdir()
    evil = make_wheel(other, more={"tinypkg/evil.py": b""})
    made = Environments(world.directory / "environments", served.address, MOST, (), NOBODY)
    monkeypatch.setattr(made.packages.store, "use", lambda digest: evil)
    with pytest.raises(NoEnvironment, match=r"(?i)hash mismatch"):
        await made.ready(b"a" * 32, UvProject(), work, lambda text: None)
    assert not list((world.directory / "environments").rglob("evil.py"))


async def test_index_is_asked_by_hash_and_through_the_proxy_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has a proxy, and the index is known to it alone; links to hosts that are not public are not followed."""
    monkeypatch.setattr(blobs_module, "SPARE_BYTES", 0)
    asked, links = list[str](), list[str]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(f"{request.url} {request.headers.get('Authorization', '')}")
        page = "".join(f'<a href="{link}">x</a>' for link in links)
        return web.Response(body=WHEEL) if ".whl" in request.path else web.Response(text=page, content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    here = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        packages = Packages(tmp_path, MOST, PackageOrigins("http://lab:pass@index.lab/simple/", ()), True, NOBODY)
        monkeypatch.setenv("http_proxy", here)
        tag = f"#sha256={FILE.sha256.hex()}"
        basic = "Basic " + b64encode(b"lab:pass").decode()
        for link in (f"../../files/renamed.whl{tag}", FILE.name, f"/{FILE.name}#md5=00"):
            links[:] = [f"other.whl#sha256={'0' * 64}", link]
            packages.store.drop([FILE.sha256])
            assert await got(packages) == WHEEL
            assert asked[-2] == f"http://index.lab/simple/tinypkg/ {basic}" and asked[-1].endswith(f".whl {basic}")
        packages.store.drop([FILE.sha256])
        asked.clear()
        for link, reason in (
            (f"{FILE.name}#sha256={'0' * 64}", "with another hash than the lock"),
            (f"http://10.0.0.1/{FILE.name}{tag}", "an address without TLS"),
            ("other.whl", "the index of its owner: it does not have it"),
        ):
            links[:] = [link]
            with pytest.raises(FetchFailed, match=reason):
                await got(packages)
        monkeypatch.setenv("no_proxy", "*")
        links[:] = [f"https://127.0.0.1:9/{FILE.name}{tag}"]
        direct = Packages(tmp_path, MOST, PackageOrigins(f"{here}/simple", ()), True, NOBODY)
        with pytest.raises(FetchFailed, match="is not public"):
            await got(direct)
        assert not [one for one in asked if ".whl" in one]
    finally:
        await runner.cleanup()


def test_nearest_nodes_are_asked_first() -> None:
    def member(letter: str, host: str, state: str = "alive") -> MemberView:
        return MemberView(letter.encode() * 32, letter, "ada", (), state, 0.0, host=host)

    near, far = [member(one, "10.0.1.2") for one in "abc"], [member(one, "10.0.2.2") for one in "def"]
    gone = [member("g", "10.0.1.3", "unreachable"), member("h", "10.0.1.3", "dead"), member("m", "10.0.1.9")]
    found = nearest([*far, *gone, *near], b"m" * 32, "10.0.1.9")
    assert {*found[:3]} == {one.node_id for one in near} and {*found[3:]} == {one.node_id for one in far}


# --- hostile bytes


@given(
    st.binary(max_size=200)
    | st.lists(st.binary(max_size=40) | st.integers(-(2**63), 2**64 - 1), max_size=4).map(encode)
)
def test_hostile_messages_are_refused(data: bytes) -> None:
    for decode, fits in (
        (decode_question, lambda one: isinstance(one, bytes) and len(one) == 32),
        (decode_lengths, lambda one: isinstance(one, int) and 0 <= one <= 1 << 62),
    ):
        try:
            assert all(map(fits, decode(data)))
        except ValueError as error:
            assert "not understood" in str(error)


def test_messages_are_bounded() -> None:
    assert len(encode([bytes(32)] * MAX_HASHES)) <= MAX_QUESTION_BYTES
    assert len(encode([1 << 62] * MAX_HASHES)) <= MAX_LENGTHS_BYTES
    for decode, one in ((decode_question, bytes(32)), (decode_lengths, 1)):
        assert len(cast(Any, decode)(encode([one] * MAX_HASHES))) == MAX_HASHES
        with pytest.raises(ValueError, match="not understood"):
            decode(encode([one] * (MAX_HASHES + 1)))


HASH = "ab" * 32
LINE = f"Tiny.Pkg[x]==1.0 ; python_version > '3' --hash=sha256:{HASH}"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://h/x/tinypkg-1.0-py3-none-any.whl", "tinypkg-1.0-py3-none-any.whl"),
        ("torch-2.5.0%2Bcpu-1-cp311-cp311-linux_x86_64.whl#sha256=0", "torch-2.5.0+cpu-1-cp311-cp311-linux_x86_64.whl"),
        ("https://h/tinypkg-1.0.tar.gz", "tinypkg-1.0.tar.gz"),
        ("https://h/a%2F..%2Ftinypkg-1.0-py3-none-any.whl", None),
        ("https://h/..%2F..%2Fetc%2Fpasswd", None),
        ("https://h/tinypkg-1.0-py3-none-any.whl%0a", None),
        ("https://h/%00-1.0-py3-none-any.whl", None),
        ("https://h/<b>-1.0-py3-none-any.whl", None),
        (f"https://h/{'a' * 300}-1.0-py3-none-any.whl", None),
        ("https://h/", None),
    ],
)
def test_lock_gives_plain_names_of_files_and_no_addresses(address: str, name: str | None) -> None:
    lock = f'wheels = [\n    {{ url = "{address}", hash = "sha256:{HASH}", size = 1 }},\n]\n'
    expected = [PackageFile(name, bytes.fromhex(HASH), "tiny-pkg")] if name is not None else []
    assert files_of([LINE], lock) == expected
    assert files_of([LINE], lock.replace(HASH, "cd" * 32)) == [], "only files of the packages that uv names"


@given(st.text(max_size=300))
def test_any_lock_can_be_read(text: str) -> None:
    lock = f'{{ url = "{text}", hash = "sha256:{HASH}" }}'
    for file in files_of([LINE], lock):
        assert "/" not in file.name and file.name.isprintable() and file.name not in {".", ".."}
