"""Strangers and holders of invites, over the wire against real nodes: who becomes a member, and under which name."""

import asyncio
import time
from collections import Counter

import pytest

from membership.admission import (
    MAX_PENDING_PER_ADDRESS,
    JoinAnswer,
    make_join_request,
    read_answer,
)
from membership.framing import read_frame, write_frame
from membership.identity import Identity
from membership.node import MembershipNode
from membership.trust import Invite, TrustStore, make_invite, parse_invite, prove_invite
from tests.membership.test_node import Mesh, mesh, until

__all__ = ["mesh"]  # a fixture


async def ask(
    node: MembershipNode,
    identity: Identity,
    user: str,
    invite: Invite | None = None,
    *,
    source: str = "127.0.0.1",
    proof: bytes | None = None,
) -> JoinAnswer | None:
    """Send one join request from this address; None if the node closes the connection."""
    grant = invite.grant if invite is not None else b""
    if proof is None:
        proof = prove_invite(invite, identity.node_id, user) if invite is not None else b""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port, local_addr=(source, 0))
    try:
        await write_frame(writer, make_join_request(identity, 7, "evil", user, grant, proof))
        return read_answer(await read_frame(reader), 7, time.time())[2]
    except asyncio.IncompleteReadError:
        return None
    finally:
        writer.close()


def invite_of(mesh: Mesh, node: MembershipNode, **options: object) -> Invite:
    identity, _ = mesh.identities["n0" if node is mesh.nodes[0] else "n1"]
    text = make_invite(identity, node.trust, node.credentials, (), 3600, time.time(), **options)  # type: ignore[arg-type]
    return parse_invite(text, time.time())


def user_of(mesh: Mesh, answer: JoinAnswer | None) -> tuple[str, bytes]:
    assert answer is not None and answer.state == "admitted", answer
    credentials = TrustStore(mesh.genesis).check_chain(answer.granted, time.time())
    return credentials.user, credentials.user_key


async def test_flood_of_join_requests_takes_only_its_own_places(mesh: Mesh) -> None:
    """Forty requests of one address within a second or two leave room for everybody else (finding 17)."""
    await mesh.start(1)
    (node,) = mesh.nodes
    early = await ask(node, Identity.generate(), "early", source="127.0.0.2")
    assert early is not None and early.state == "waiting"
    answers = [await ask(node, Identity.generate(), "flood") for _ in range(60)]
    seen = Counter(answer.state if answer is not None else "closed" for answer in answers)
    assert seen["waiting"] == MAX_PENDING_PER_ADDRESS and seen["closed"] > 0, (
        "the rest is refused before it is verified"
    )
    late = await ask(node, Identity.generate(), "late", source="127.0.0.3")
    assert late is not None and late.state == "waiting"
    await until(lambda: len(node.pending_joins()) == MAX_PENDING_PER_ADDRESS + 2, "the list to be published")
    assert {"early", "late"} <= {entry.user for entry in node.pending_joins().values()}


async def test_holder_of_an_invite_cannot_choose_a_name_or_use_it_twice(mesh: Mesh) -> None:
    """The issuer assigns the name; the second machine gets nothing, and nor does the name of somebody else (finding 1)."""
    await mesh.start(1)
    (node,) = mesh.nodes
    invite = invite_of(mesh, node, user="bob")
    first, second = Identity.generate(), Identity.generate()
    assert user_of(mesh, await ask(node, first, "ada", invite)) == ("bob", first.node_id)
    for name in ("bob", "ada"):
        refused = await ask(node, second, name, invite)
        assert refused is not None and refused.state == "refused" and not refused.granted
    assert user_of(mesh, await ask(node, first, "ada", invite))[0] == "bob", "an interrupted join goes on"
    stolen = await ask(node, second, "ada", invite, proof=prove_invite(invite, first.node_id, "ada"))
    assert stolen is not None and stolen.state == "refused"


async def test_used_invite_stays_used_over_a_restart_of_its_issuer(mesh: Mesh) -> None:
    """Its use is on disk before the answer (finding 2)."""
    await mesh.start(1)
    (node,) = mesh.nodes
    invite = invite_of(mesh, node, user="ml", uses=1)
    user_of(mesh, await ask(node, Identity.generate(), "x", invite))
    await node.stop()
    again = mesh.make("n0", port=node.port)
    await again.start()
    mesh.nodes = [again]
    refused = await ask(again, Identity.generate(), "y", invite)
    assert refused is not None and refused.state == "refused" and "used" in refused.problem


async def test_invite_that_ended_admits_nobody_by_the_issuers_clock(mesh: Mesh) -> None:
    """The request's own time plays no part: the issuer's clock decides (finding 2)."""
    await mesh.start(1)
    (node,) = mesh.nodes
    identity, _ = mesh.identities["n0"]
    then = time.time() - 7200
    text = make_invite(identity, node.trust, node.credentials, (), 3600, then, user="ghost")
    invite = parse_invite(text, then)
    refused = await ask(node, Identity.generate(), "ghost", invite)
    assert refused is not None and refused.state == "refused" and "expired" in refused.problem


@pytest.mark.parametrize("asked", [0, 1])
async def test_invite_of_a_member_adds_machines_to_its_own_user_only(mesh: Mesh, asked: int) -> None:
    """A member that may not admit endorses, the admitter admits, whichever node the newcomer asks."""
    await mesh.start(2)
    member = mesh.nodes[1]
    invite = invite_of(mesh, member, mine=True)
    newcomer = Identity.generate()
    found: list[JoinAnswer] = []

    async def poll() -> None:
        while True:
            answer = await ask(mesh.nodes[asked], newcomer, "root", invite)
            if answer is not None and answer.state == "admitted":
                found.append(answer)
                return
            assert answer is not None and answer.state == "waiting", answer
            await asyncio.sleep(0.5)

    await asyncio.wait_for(poll(), 30)
    assert user_of(mesh, found[0]) == (member.credentials.user, member.credentials.user_key)
