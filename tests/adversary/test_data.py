"""A private data set among several users: its content is for its readers, and for runners of their jobs while they run."""

from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from ckptstore.cipher import StateCipher
from ckptstore.messages import ChunkRequest, encode_chunk_request
from membership.envelope import OVERHEAD
from membership.identity import Identity
from mesh.data.keys import KeptKey
from mesh.data.manifest import decode_manifest
from mesh.model.spec import parse_job
from mesh.rpc.client import PeerError
from tests.adversary.town import PEOPLE, Actor, Town
from tests.e2e.commands import finished, job_state, mesh, ok, read, until

pytestmark = pytest.mark.e2e


async def test_private_data_set_is_given_to_readers_and_runners_only(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "file").write_text("canary of ada\n")
    with Town() as town:
        town.start_all()
        ada, bob = town.node("ada1"), town.node("bob")
        added = read(ada, "data", "add", "secret", str(secret))
        other = read(ada, "data", "add", "other", str(Path(__file__)), "--everybody")
        until(lambda: len(read(bob, "data", "ls")["data"]) == 2, "the data sets to be known")
        for arguments in (("run", "--no-workdir", "--data", "ada/secret", "--", "true"), ("data", "pin", "ada/secret")):
            refused = mesh(bob, *arguments)
            assert refused.returncode in {5, 125} and "is not for" in refused.stderr, refused
        # Another user's set of the same name is another one.
        mine = tmp_path / "mine"
        mine.write_text("bob's own")
        read(bob, "data", "add", "secret", str(mine))
        until(lambda: len(read(ada, "data", "ls")["data"]) == 3, "both names")
        assert read(ada, "data", "show", "secret")["id"] == added["id"]
        assert read(ada, "data", "show", "bob/secret")["id"] != added["id"]
        for name in ("ada/secret", "ada/other"):
            assert mesh(bob, "data", "rm", name).returncode == 5, "only its owner removes it"

        # A job of ada's, on a node of somebody else, reads it; that node is asked for nothing before and after.
        path, addresses = f"/v1/data/{added['id']}", town.addresses()
        async with AsyncExitStack() as stack:
            actors = {nick: await stack.enter_async_context(Actor(town, nick, addresses)) for nick in (*PEOPLE, "x")}
            assert decode_manifest((await actors["bob"].call("ada1", "GET", path))[OVERHEAD:]).name == "secret"
            (file,) = (ada.where.data / "keys").iterdir()
            kept = msgspec.msgpack.decode(Identity.load(ada.where.key).decrypt(file.read_bytes()), type=KeptKey)
            cipher = StateCipher(kept.key)
            body = encode_chunk_request(ChunkRequest((cipher.name(b"canary of ada\n").id,)))
            got = await given(actors["ada2"], f"{path}/chunks", body)
            assert cipher.realm in got and b"canary" not in got, "the chunk, encrypted"
            assert await actors["ada2"].call("ada1", "GET", f"{path}/key") == kept.key
            for nick, actor in actors.items():
                may = nick in {"ada1", "ada2"}
                if nick != "ada1":
                    for what in ("chunks", f"chunks?job={'00' * 16}", "missing", f"missing?job={'00' * 16}"):
                        assert await actor.admitted("ada1", "POST", f"{path}/{what}", body) is may, (nick, what)
                    assert await actor.admitted("ada1", "GET", f"{path}/key") is may, nick
                if nick in PEOPLE and nick != "ada1":
                    # Neither the call for checkpoints nor another data set gives out its chunks.
                    for way in ("/v1/chunks/frames", f"/v1/data/{other['id']}/chunks"):
                        assert cipher.realm not in await given(actor, way, body)
            # A node may have another one fetch what that one's user may read.
            assert not await actors["ada1"].admitted("bob", "POST", f"{path}/fetch")
            assert await actors["ada1"].call("bob", "POST", f"/v1/data/{other['id']}/fetch") == b"fetching"
            until(
                lambda: [r["here"] for r in read(bob, "data", "ls")["data"] if r["id"] == other["id"]] == [True],
                "its copy",
            )
            script = 'cat "$MESH_DATA_SECRET/file"; while [ ! -e stop ]; do sleep 0.1; done'
            job = ok(ada, "submit", "--no-workdir", "--data", "secret", "--", "sh", "-c", script).strip()
            host = until(lambda: (s := job_state(ada, job))["state"] == "running" and s["node"], "the job to run")
            assert PEOPLE[host][0] != "ada"
            until(lambda: "canary of ada" in ok(ada, "logs", job), "it to read the data set")
            mine_path = f"{path}/chunks?job={parse_job(job).hex()}"
            for nick in ("bob", "carol", "dan", "mal", "eve"):
                assert await actors[nick].admitted("ada1", "POST", mine_path, body) is (nick == host), nick
                assert not await actors[nick].admitted("ada1", "GET", f"{path}/key"), "the job has brought it"
            ok(ada, "cancel", job)
            finished(ada, job)


async def given(actor: Actor, path: str, body: bytes) -> bytes:
    async with AsyncExitStack() as stack:
        try:
            response = await stack.enter_async_context(actor.peers.stream(actor.town.id("ada1"), "POST", path, body))
        except PeerError as error:
            return str(error).encode()
        return await response.read()
